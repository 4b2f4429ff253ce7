"""Learning-rate schedules compared with those of FastReID and PyTorch."""

import json
import math
from pathlib import Path

import pytest
import torch

from fastamp.config import get_cfg, read_config
from fastamp.solver import build_lr_schedule, build_optimizer
from fastamp.utils.errors import ConfigError

REFERENCE = Path(__file__).parents[1] / "reference"
CURVES = json.loads((REFERENCE / "fastreid_lr.json").read_text())
RECIPES = json.loads((REFERENCE / "fastreid_config_values.json").read_text())["resolved"]


def config(**solver):
    cfg = get_cfg()
    for key, value in solver.items():
        cfg.SOLVER[key] = value
    return cfg


@pytest.mark.parametrize("name", CURVES)
def test_schedule_matches_recorded_fastreid_learning_rates(name):
    recipe, _, rest = name.partition(" @ ")
    iters_per_epoch = int(rest.split(" ")[0])
    solver = {k.removeprefix("SOLVER."): v for k, v in RECIPES[recipe].items() if k.count(".") == 1 and "SOLVER" in k}
    cfg = config(**{key: value for key, value in solver.items() if key != "AMP"})
    schedule = build_lr_schedule(cfg, iters_per_epoch)

    def rate(iteration):
        return schedule.learning_rate(cfg.SOLVER.BASE_LR, epoch=iteration // iters_per_epoch, steps_taken=iteration)

    curve = CURVES[name]
    rates = [rate(epoch * iters_per_epoch) for epoch in range(len(curve["first_iter_of_epoch"]))]
    assert rates == pytest.approx(curve["first_iter_of_epoch"], rel=1e-9)
    assert {i: rate(int(i)) for i in curve["iters"]} == pytest.approx(curve["iters"], rel=1e-9)


def test_multi_step_schedule_counts_all_epochs_if_epoch_schedule_is_absolute():
    cfg = config(EPOCH_SCHEDULE="absolute", STEPS=[4, 9], MAX_EPOCH=12, WARMUP_ITERS=300, BASE_LR=1.0)
    schedule = build_lr_schedule(cfg, 100)
    rates = [schedule.learning_rate(1.0, epoch=epoch, steps_taken=10**6) for epoch in range(12)]
    assert rates == pytest.approx([1.0] * 4 + [0.1] * 5 + [0.01] * 3)


def test_cosine_schedule_ends_at_eta_min_if_epoch_schedule_is_absolute():
    cfg = config(EPOCH_SCHEDULE="absolute", SCHED="CosineAnnealingLR", MAX_EPOCH=10, WARMUP_ITERS=0, ETA_MIN_LR=1e-3)
    schedule = build_lr_schedule(cfg, 5)
    assert schedule.learning_rate(1.0, epoch=0, steps_taken=0) == pytest.approx(1.0)
    assert schedule.learning_rate(1.0, epoch=5, steps_taken=0) == pytest.approx((1 + 1e-3) / 2)
    assert schedule.learning_rate(1.0, epoch=10, steps_taken=0) == pytest.approx(1e-3)


@pytest.mark.parametrize("method, middle", [("linear", 0.55), ("constant", 0.1), ("exp", 0.1**0.5)])
def test_warmup_factor_depends_on_the_number_of_optimizer_steps(method, middle):
    schedule = build_lr_schedule(config(WARMUP_METHOD=method, WARMUP_ITERS=10, WARMUP_FACTOR=0.1), 100)
    assert schedule.learning_rate(1.0, epoch=0, steps_taken=0) == pytest.approx(0.1)
    assert schedule.learning_rate(1.0, epoch=0, steps_taken=5) == pytest.approx(middle)
    assert schedule.learning_rate(1.0, epoch=0, steps_taken=10) == 1.0


def test_unknown_schedule_and_warmup_method_raise():
    with pytest.raises(ConfigError, match="SOLVER.WARMUP_METHOD.*'linaer'.*'linear'"):
        build_lr_schedule(config(WARMUP_METHOD="linaer"), 1)
    with pytest.raises(ConfigError, match=r"SOLVER.SCHED.*'CosineLR'"):
        build_lr_schedule(config(SCHED="CosineLR"), 1)


@pytest.mark.parametrize("epochs, iters, rise", [(4, 25, 0.3), (1, 10, 0.5), (3, 7, 0.1), (1, 1, 0.3), (2, 1, 0.3)])
def test_one_cycle_schedule_matches_pytorch(epochs, iters, rise):
    cfg = config(SCHED="OneCycleLR", MAX_EPOCH=epochs)
    cfg.SOLVER.ONE_CYCLE.PCT_START = rise
    schedule = build_lr_schedule(cfg, iters)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    total = epochs * iters
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.4, total_steps=max(total, 2), pct_start=rise)
    for step in range(total):
        if total > 1:
            assert schedule.learning_rate(0.4, epoch=0, steps_taken=step) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step() if step + 1 < total else None
    assert 0 < schedule.learning_rate(0.4, epoch=0, steps_taken=total + 5) <= 0.4


def test_cosine_schedule_keeps_base_rates_below_eta_min():
    cfg = config(EPOCH_SCHEDULE="absolute", SCHED="CosineAnnealingLR", MAX_EPOCH=10, WARMUP_ITERS=0, ETA_MIN_LR=1e-3)
    schedule = build_lr_schedule(cfg, 5)
    for base_lr in (0.0, 1e-4):  # e.g. by SOLVER.LR_FACTORS
        assert {schedule.learning_rate(base_lr, epoch=epoch, steps_taken=0) for epoch in range(11)} == {base_lr}


def test_constant_schedule_keeps_the_base_rate_after_warmup():
    schedule = build_lr_schedule(config(SCHED="ConstantLR", WARMUP_ITERS=10, WARMUP_FACTOR=0.1), 5)
    rates = [schedule.learning_rate(2.0, epoch=step // 5, steps_taken=step) for step in (0, 5, 10, 1000)]
    assert rates == pytest.approx([0.2, 1.1, 2.0, 2.0])


def test_learning_rate_is_constant_during_stochastic_weight_averaging():
    cfg = config(STEPS=[1], WARMUP_ITERS=0, MAX_EPOCH=8)
    cfg.SOLVER.SWA = {"ENABLED": True, "LR_FACTOR": 0.5}
    schedule = build_lr_schedule(cfg, 5)
    rates = [schedule.learning_rate(1.0, epoch=epoch, steps_taken=0) for epoch in range(8)]
    assert rates == pytest.approx([1.0] + [0.1] * 5 + [0.5] * 2)  # from three quarters on
    cfg.SOLVER.SWA.START_EPOCH = 8
    with pytest.raises(ConfigError, match="SWA.START_EPOCH.* 8"):
        build_lr_schedule(cfg, 5)


@pytest.mark.parametrize("rule, batch, accumulated, factor", [
    ("none", 256, 2, 1.0), ("linear", 256, 2, 8.0), ("sqrt", 256, 1, 2.0), ("linear", 32, 1, 0.5), ("sqrt", 64, 1, 1.0),
])  # fmt: skip
def test_lr_scaling_multiplies_all_learning_rates_of_the_schedule(rule, batch, accumulated, factor, caplog):
    asked = {"SCHED": "CosineAnnealingLR", "BASE_LR": 0.01, "ETA_MIN_LR": 1e-4, "MAX_EPOCH": 6, "WARMUP_ITERS": 15}
    curves = []
    for options in ({}, {"LR_SCALING": rule, "IMS_PER_BATCH": batch, "ACCUM_STEPS": accumulated}):
        cfg = config(**asked, **options)
        model = torch.nn.Linear(2, 2)
        groups = build_optimizer(cfg, model).param_groups
        schedule = build_lr_schedule(cfg, 10)
        assert all(group["lr"] == group["base_lr"] for group in groups)
        curves.append(
            [schedule.learning_rate(groups[0]["base_lr"], epoch=step // 10, steps_taken=step) for step in range(60)]
        )
    assert curves[1] == pytest.approx([factor * rate for rate in curves[0]], rel=1e-12)
    line = f"to {0.01 * factor:g} for {batch} x {accumulated} images"
    assert (line in caplog.text) == (rule != "none")


def test_lr_scaling_uses_reference_batch_and_keeps_bias_lr_factor():
    cfg = config(LR_SCALING="linear", REFERENCE_BATCH=32, BASE_LR=0.01, BIAS_LR_FACTOR=2.0)
    rates = sorted(group["lr"] for group in build_optimizer(cfg, torch.nn.Linear(2, 2)).param_groups)
    assert rates == pytest.approx([0.02, 0.04])


def rates_of(cfg, iters_per_epoch, base_lr=1.0):
    schedule = build_lr_schedule(cfg, iters_per_epoch)
    return [
        schedule.learning_rate(base_lr, epoch=iteration // iters_per_epoch, steps_taken=iteration)
        for iteration in range(cfg.SOLVER.MAX_EPOCH * iters_per_epoch)
    ]


def test_warmup_epochs_override_warmup_iters():
    in_iterations = rates_of(config(WARMUP_ITERS=21, STEPS=[4], MAX_EPOCH=9), 7)
    assert rates_of(config(WARMUP_EPOCHS=3, WARMUP_ITERS=5, STEPS=[4], MAX_EPOCH=9), 7) == in_iterations
    assert rates_of(config(WARMUP_ITERS=5, STEPS=[4], MAX_EPOCH=9), 7) != in_iterations


def release_0_1_1(schedule, *, epochs, warmup, factor, delay, steps, gamma, eta_min, iters_per_epoch):
    """Compute the learning rate of each iteration as in FastReID v0.1.1, which converts epochs to iterations."""
    rates = []
    for iteration in range(epochs * iters_per_epoch):
        rate, start, end = 1.0, delay * iters_per_epoch, epochs * iters_per_epoch
        if schedule == "MultiStepLR":
            for step in steps:
                if iteration >= step * iters_per_epoch:
                    rate *= gamma
        elif iteration > start:
            rate = eta_min + (1 - eta_min) * (1 + math.cos(math.pi * (iteration - start) / (end - start))) / 2
        if iteration < warmup * iters_per_epoch:
            rate *= factor + (1 - factor) * iteration / (warmup * iters_per_epoch)
        rates.append(rate)
    return rates


def release_1_0_0(schedule, *, epochs, warmup, factor, delay, steps, gamma, eta_min, iters_per_epoch):
    """Compute the learning rate of each iteration as in FastReID v1.0.0, which updates it per epoch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    length = epochs - max(warmup + 1, delay)
    scheduler = {
        "MultiStepLR": lambda: torch.optim.lr_scheduler.MultiStepLR(optimizer, steps, gamma),
        "CosineAnnealingLR": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length, eta_min),
    }[schedule]()
    group, rates = optimizer.param_groups[0], []
    group["lr"] = factor if warmup else 1.0
    optimizer.step()
    for epoch in range(epochs):
        rates += [group["lr"]] * iters_per_epoch
        if epoch + 1 <= warmup:
            group["lr"] = factor + (1 - factor) * (epoch + 1) / warmup
        elif epoch + 1 >= delay:
            scheduler.step()
    return rates


RELEASES = [(release_0_1_1, "iteration", "absolute"), (release_1_0_0, "epoch", "after_warmup")]


@pytest.mark.parametrize("release, update, counting, schedule, warmup, delay", [
    (release, update, counting, schedule, warmup, delay)
    for release, update, counting in RELEASES
    for schedule in ("MultiStepLR", "CosineAnnealingLR")
    for warmup, delay in [(3, 0), (3, 4), (3, 8), (2, 3), (0, 0), (0, 5), (1, 1)]
    # v0.1.1 rejects a cosine that starts before the end of the warm-up.
    if delay >= warmup or release is release_1_0_0 or schedule == "MultiStepLR"
])  # fmt: skip
def test_schedule_matches_fastreid_v0_1_1_and_v1_0_0(release, update, counting, schedule, warmup, delay):
    """v0.1.1 and v1.0.0 count epochs differently from the default; the expected rates are computed iteratively."""
    expected = release(
        schedule, epochs=16, warmup=warmup, factor=0.01, delay=delay, steps=[5, 9], gamma=0.1, eta_min=1e-3,
        iters_per_epoch=7,
    )  # fmt: skip
    solver = {"SCHED": schedule, "MAX_EPOCH": 16, "WARMUP_EPOCHS": warmup, "WARMUP_ITERS": 0, "WARMUP_FACTOR": 0.01}
    solver |= {"DELAY_EPOCHS": delay, "STEPS": [5, 9], "ETA_MIN_LR": 1e-3, "EPOCH_SCHEDULE": counting}
    assert rates_of(config(**solver, LR_UPDATE=update), 7) == pytest.approx(expected, rel=1e-9)
    if warmup:  # without warm-up and delay some of the rules coincide
        assert rates_of(config(**solver | {"EPOCH_SCHEDULE": "after_warmup"}), 7) != pytest.approx(expected, rel=1e-6)


def ramped(*options):
    cfg = read_config("", [
        "SOLVER.SCHED", "RampedExponentialLR", "SOLVER.WARMUP_EPOCHS", "15", *options, "SOLVER.WARMUP_FACTOR", "0.01",
        "SOLVER.GAMMA", "0.8", "SOLVER.ETA_MIN_LR", "9e-6",
    ])  # fmt: skip
    schedule = build_lr_schedule(cfg, 10)
    return [schedule.learning_rate(1e-3, epoch=epoch, steps_taken=10 * epoch) for epoch in range(30)]


def test_ramped_exponential_schedule_is_that_of_miewids_config():
    rates = ramped()
    assert rates[:3] == pytest.approx([1e-5, 7.6e-5, 1.42e-4])
    assert rates[15:18] == pytest.approx([1e-3, 9e-6 + 9.91e-4 * 0.8, 9e-6 + 9.91e-4 * 0.64])
    assert max(rates) == rates[15] and rates[-1] > 9e-6


def test_stride_2_gives_the_rates_of_miewids_program():
    rates = ramped("SOLVER.SCHEDULE_STRIDE", "2")
    assert rates[:3] == pytest.approx([1e-5, 1.42e-4, 2.74e-4])
    assert rates[7:10] == pytest.approx([9.34e-4, 8.018e-4, 5.164e-4], rel=1e-3)
    assert max(rates) == rates[7]
