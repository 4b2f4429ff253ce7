"""Corrupted state: running statistics and metrics after a skipped step, checkpoints, weight averages, accumulation."""

import math
import re

import loops
import pytest
import tiny
import torch
import train_net
from torch import nn

from fastamp.amp import LossScaler, OptimizationStep
from fastamp.amp.checks import check_finite
from fastamp.engine import DefaultTrainer, defaults
from fastamp.engine.hooks import HookBase
from fastamp.engine.hooks.averaging import EMA
from fastamp.solver import WeightAverage
from fastamp.utils.errors import TrainingError

BAD, GOOD = loops.spoil(loops.make_batch()), loops.make_batch()


class Record(HookBase):
    """Hook that records the model's state dict after each step."""

    def __init__(self):
        self.steps = []

    def after_step(self):
        self.steps.append(loops.values(self.trainer.model))


# One overflowing batch. With several processes: test_failures_ranks.py.


def evaluate(model, dtype):
    model.eval()
    with torch.no_grad(), loops.autocast(dtype):
        return model(GOOD)


@pytest.mark.failure("overflow in one batch: statistics")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_plain_pytorch_evaluation_stays_nan_after_one_overflowing_batch(dtype):
    model, scaler = loops.make_net(normalize=True), loops.plain_scaler()
    optimizer = loops.sgd(model)
    for batch in (GOOD, BAD, *[GOOD] * 50):
        loops.plain_step(model, optimizer, batch, dtype, scaler)
    assert loops.finite(model.parameters()) and not any(loops.finite([buffer]) for buffer in list(model.buffers())[:2])
    assert evaluate(model, dtype).isnan().all()


@pytest.mark.failure("overflow in one batch: statistics")
@pytest.mark.parametrize("dtype", loops.ALL)
@pytest.mark.parametrize("accum_steps", [1, 2])
def test_skipped_step_restores_batch_norm_statistics(dtype, accum_steps):
    model, record = loops.make_net(normalize=True), Record()
    batches = [GOOD] * accum_steps + [GOOD] * (accum_steps - 1) + [BAD] + [GOOD] * accum_steps
    trainer = loops.make_trainer(model, [loops.sgd(model)], batches, dtype, init_scale=8.0, accum_steps=accum_steps)
    trainer.register_hooks([record])
    trainer.train(0, 1, 3)
    assert trainer.step.skipped_total == 1
    first, second, third = record.steps
    assert loops.same(first, second) and not loops.same(second, third)
    assert first["body.1.num_batches_tracked"] == accum_steps and third["body.1.num_batches_tracked"] == 2 * accum_steps
    check_finite(model)
    assert loops.finite([evaluate(model, dtype)])


@pytest.mark.failure("overflow in one batch: statistics")
@pytest.mark.parametrize("dtype", loops.ALL)
def test_check_finite_names_non_finite_statistics_if_buffers_are_not_restored(dtype):
    model = loops.make_net(normalize=True)
    trainer = loops.make_trainer(
        model, [loops.sgd(model)], [GOOD, BAD, GOOD], dtype, init_scale=8.0, guard_buffers=False
    )
    trainer.train(0, 1, 3)
    assert trainer.step.skipped_total == 1 and loops.finite(model.parameters())
    assert evaluate(model, dtype).isnan().all()
    with pytest.raises(TrainingError, match=r"2 .*body.1.running_mean"):
        check_finite(model)


@pytest.mark.failure("NaN in the model at evaluation")
def test_plain_pytorch_evaluates_and_saves_a_non_finite_model(tmp_path):
    model = loops.make_net()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    assert evaluate(model, torch.float32)[:, 0].isnan().all()
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    assert not loops.finite(torch.load(tmp_path / "weights.pth", weights_only=True).values())


class Poison(HookBase):
    """Hook that sets a weight to infinity after the last step of epoch number ``epoch``, counted from 1."""

    def __init__(self, epoch):
        self.epoch = epoch

    def after_step(self):
        if self.trainer.iter + 1 == self.epoch * self.trainer.iters_per_epoch:
            with torch.no_grad():
                self.trainer.model.heads.weight[0, 0] = float("inf")


@pytest.mark.integration
@pytest.mark.failure("NaN in the model at evaluation")
@pytest.mark.parametrize("period, evaluations", [("1", 1), ("4", 0)])
def test_non_finite_model_is_not_evaluated_or_saved(demo, tmp_path, monkeypatch, period, evaluations):
    evaluated, evaluate = [], defaults.evaluate_sets
    monkeypatch.setattr(defaults, "evaluate_sets", lambda *args: evaluated.append(1) or evaluate(*args))
    options = ("SOLVER.MAX_EPOCH", "4", "TEST.EVAL_PERIOD", period, "SOLVER.CHECKPOINT_PERIOD", "1")
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path, *options))
    trainer.register_hooks([Poison(epoch=2)])
    with pytest.raises(TrainingError, match=r"heads.weight"):
        trainer.train()
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000.pth"
    assert loops.finite(tiny.weights(tmp_path / "model_0000.pth").values())
    assert len(evaluated) == evaluations


@pytest.mark.integration
@pytest.mark.failure("overflow in one batch: statistics")
def test_restore_buffers_on_skip_prevents_non_finite_running_statistics(demo, tmp_path, monkeypatch, capfd):
    """Train with one infinite batch: the run succeeds with the key on, and fails with the key off."""
    original = DefaultTrainer.build_train_loader.__func__

    def with_a_bad_batch(cls, cfg):
        loader = original(cls, cfg)
        fetch, calls = type(loader).__iter__, []

        class Loader(type(loader)):
            def __iter__(self):
                for batch in fetch(self):
                    calls.append(1)
                    if len(calls) == 3:
                        batch["images"] = batch["images"].float() * float("inf")
                    yield batch

        loader.__class__ = Loader
        return loader

    monkeypatch.setattr(DefaultTrainer, "build_train_loader", classmethod(with_a_bad_batch))
    options = ("SOLVER.MAX_EPOCH", "1", "SOLVER.AMP", "bf16")
    assert train_net.cli(tiny.tiny_options(tmp_path / "on", *options)) == 0
    assert loops.finite(tiny.weights(tmp_path / "on/model_final.pth").values())
    assert (
        train_net.cli(tiny.tiny_options(tmp_path / "off", *options, "SOLVER.AMP.RESTORE_BUFFERS_ON_SKIP", "off")) == 2
    )
    assert "SOLVER.AMP.RESTORE_BUFFERS_ON_SKIP" in capfd.readouterr().err
    assert not (tmp_path / "off/last_checkpoint").exists()


# The gradient norm of a skipped step in the average.


def plain_norms(dtype, batches):
    """Train in plain PyTorch, one step for each batch; return the unscaled gradient norms."""
    model, scaler, norms = loops.make_net(normalize=True), loops.plain_scaler(init_scale=8.0), []
    optimizer = loops.sgd(model)
    for batch in batches:
        optimizer.zero_grad()
        with loops.autocast(dtype):
            loss = model(batch)["loss_cls"]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), math.inf).item())
        scaler.step(optimizer)
        scaler.update()
    return norms


@pytest.mark.failure("gradient norm of a skipped step")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_averaged_metrics_exclude_skipped_steps(dtype):
    meter = plain_norms(dtype, [GOOD, BAD, *[GOOD] * 20])
    assert not math.isfinite(sum(meter) / len(meter))

    model = loops.make_net(normalize=True)
    trainer = loops.make_trainer(model, [loops.sgd(model)], [GOOD, BAD, *[GOOD] * 20], dtype, init_scale=8.0)
    trainer.train(0, 1, 22)
    metrics = trainer.metrics.flush()
    # The average equals that of a run without the overflowing batch.
    assert metrics["grad_norm"] == pytest.approx(sum(plain_norms(dtype, [GOOD] * 21)) / 21, rel=0.01)
    assert metrics["skipped_total"] == 1 and metrics["skipped_in_a_row"] == 0
    assert all(math.isfinite(value) for value in metrics.values())


# A checkpoint without the loss scale.


class Steep(loops.Net):
    """Net whose float16 gradients overflow if the loss scale exceeds about 500."""

    def losses(self, logits, batch):
        return {"loss_cls": super().losses(logits, batch)["loss_cls"] * 1000}


def steep_trainer(dtype, batches=60):
    model = loops.make_net(Steep)
    trainer = loops.make_trainer(model, [loops.sgd(model, lr=1e-6)], [GOOD] * batches, dtype)
    trainer.iters_per_epoch = 30
    return trainer


def plain_skips(model, scaler):
    """Train for 30 steps with a plain PyTorch loop; return the number of skipped steps."""
    skipped, optimizer = 0, loops.sgd(model, lr=1e-6)
    for _ in range(30):
        before = loops.values(model)
        loops.plain_step(model, optimizer, GOOD, torch.float16, scaler)
        skipped += loops.same(before, loops.values(model))
    return skipped


@pytest.mark.failure("checkpoint without the loss scale")
def test_plain_pytorch_resume_without_scaler_state_skips_steps_again():
    model, scaler = loops.make_net(Steep), loops.plain_scaler()
    first = plain_skips(model, scaler)
    kept = scaler.state_dict()
    assert first == plain_skips(model, loops.plain_scaler()) >= 5
    scaler = loops.plain_scaler()
    scaler.load_state_dict(kept)
    assert plain_skips(model, scaler) == 0


@pytest.mark.failure("checkpoint without the loss scale")
def test_trainer_state_dict_restores_the_loss_scale(tmp_path):
    trainer = steep_trainer(torch.float16)
    trainer.train(0, 1, 30)
    skipped = trainer.step.skipped_total
    assert skipped >= 5
    torch.save(trainer.state_dict(), tmp_path / "state.pth")
    resumed = steep_trainer(torch.float16)
    resumed.load_state_dict(torch.load(tmp_path / "state.pth", weights_only=True))
    assert resumed.step.scaler.state_dict() == trainer.step.scaler.state_dict()
    assert resumed.step.scaler.scale < 1024 and resumed.start_iter == 30
    resumed.train(30, 2, 30)
    assert resumed.step.skipped_total == skipped and resumed.steps_taken == 60 - skipped
    fresh = steep_trainer(torch.float16)  # the negative control
    fresh.train(0, 1, 30)
    assert fresh.step.skipped_total == skipped


@pytest.mark.integration
@pytest.mark.failure("checkpoint without the loss scale")
def test_resume_restores_the_loss_scale_from_the_checkpoint(demo, tmp_path):
    options = ("SOLVER.AMP", "fp16", "SOLVER.MAX_EPOCH", "1", "SOLVER.AMP.GROWTH_INTERVAL", "2")
    options += ("SOLVER.AMP.INIT_SCALE", "64", "SOLVER.AMP.PREFLIGHT", "off")
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path, *options))
    trainer.train()
    state = trainer.trainer.step.scaler.state_dict()
    assert state["scale"] > 64
    resumed = DefaultTrainer(tiny.tiny_config(tmp_path, *options))
    resumed.resume_or_load(resume=True)
    assert resumed.trainer.step.scaler.state_dict() == state


@pytest.mark.failure("checkpoint without the loss scale")
@pytest.mark.parametrize("before, now, message", [
    (torch.bfloat16, torch.float16, "65536"),
    (torch.float32, torch.float16, "65536"),
    (torch.float16, torch.bfloat16, "(128)"),
    (torch.float16, torch.float32, "(128)"),
])  # fmt: skip
def test_resume_in_another_dtype_logs_the_difference(caplog, before, now, message):
    trainer, resumed = steep_trainer(before), steep_trainer(now)
    if trainer.step.scaler:
        trainer.step.scaler.scale = 128.0
    trainer.step.skipped_total, trainer.step.skipped_in_a_row = 5, 2
    resumed.load_state_dict(trainer.state_dict())
    assert message in caplog.text
    assert (resumed.step.skipped_total, resumed.step.skipped_in_a_row) == (5, 2)
    assert resumed.step.scaler is None if now != torch.float16 else resumed.step.scaler.scale == 65536.0
    resumed.policy.load_state_dict(trainer.policy.state_dict())
    assert re.search(rf"\b{str(before)[6:]}\b.*\b{str(now)[6:]}\b", caplog.text)


# A weight average in low precision.


UPDATES, DECAY = 5000, 0.9999
EXPECTED = 1 - DECAY**UPDATES  # average of weight 1, starting from 0


@pytest.mark.failure("weight average in 16 bits")
@pytest.mark.parametrize("dtype, last", [(torch.float16, 0.25), (torch.bfloat16, 0.03125)])
def test_plain_pytorch_low_precision_weight_average_ignores_small_updates(dtype, last):
    average, weight = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype)
    for _ in range(UPDATES):
        average.mul_(DECAY).add_(weight, alpha=1 - DECAY)
    assert average.item() == last and EXPECTED > 0.39


@pytest.mark.failure("weight average in 16 bits")
def test_float32_weight_average_accumulates_small_updates():
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(0.0)
        average = WeightAverage(model, "ema")
        model.weight.fill_(1.0)
    for _ in range(UPDATES):
        average.update(1 - DECAY)
    assert average.tensors()["weight"].item() == pytest.approx(EXPECTED, rel=1e-3)


@pytest.mark.failure("weight average in 16 bits")
@pytest.mark.parametrize("dtype", loops.ALL)
def test_weight_average_after_training_matches_float64_reference(dtype):
    """The reference is a float64 average over the applied steps only."""
    model, record = loops.make_net(normalize=True), Record()
    average = WeightAverage(model, "ema")
    start = {name: tensor.double() for name, tensor in loops.values(model).items()}
    trainer = loops.make_trainer(model, [loops.sgd(model)], [GOOD, BAD, *[GOOD] * 20], dtype, init_scale=8.0)
    trainer.register_hooks([EMA(average, DECAY, warmup=False), record])
    trainer.train(0, 1, 22)
    assert average.updates == 21
    for name, parameter in model.named_parameters():
        expected = start[name]
        for step in [record.steps[0], *record.steps[2:]]:
            expected = expected * DECAY + step[name].double() * (1 - DECAY)
        ours = average.tensors()[name]
        assert ours.dtype == parameter.dtype == torch.float32
        torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-7)
    moved = (average.tensors()["head.weight"] - start["head.weight"]).abs().max()
    assert 1e-5 < moved < 1e-3  # well above the tolerance of the comparison


# Accumulation with unscale, step or update inside the window.


WINDOW = [loops.make_batch(seed) for seed in range(4)]


def plain_window(dtype, *, inside):
    """Accumulate gradients over four batches in plain PyTorch, then step; some options do this incorrectly.

    Args:
        dtype: dtype of autocast.
        inside: scaler method that is called too early, after each backward pass, followed by ``update``:
            ``"unscale"`` or ``"step"``; ``"update"`` calls only ``update``. None is the correct loop.

    Returns:
        Model, gradient norm before the last step, and number of steps while accumulating.
    """
    model, scaler, steps = loops.make_net(), loops.plain_scaler(), []
    optimizer = loops.sgd(model)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for batch in WINDOW:
        with loops.autocast(dtype):
            loss = model(batch)["loss_cls"] / len(WINDOW)
        scaler.scale(loss).backward()
        if inside == "unscale":
            scaler.unscale_(optimizer)
        if inside == "step":
            scaler.step(optimizer)
        if inside:
            scaler.update()
    if not inside:
        scaler.unscale_(optimizer)
    norm = loops.grad_norm(model)
    if inside != "step":
        optimizer.step()
    return model, norm, len(steps)


@pytest.mark.failure("scaler calls during accumulation")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_plain_pytorch_scaler_calls_during_accumulation_corrupt_gradients(dtype):
    right, norm, steps = plain_window(dtype, inside=None)
    assert steps == 1
    for inside in ("unscale", "step"):
        wrong, wrong_norm, steps = plain_window(dtype, inside=inside)
        assert wrong_norm < 0.5 * norm and steps == (4 if inside == "step" else 1)
        if inside == "unscale":
            assert (wrong.head.weight - right.head.weight).abs().max() > 1e-3
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        plain_window(dtype, inside="update")


@pytest.mark.failure("scaler calls during accumulation")
@pytest.mark.parametrize("dtype", loops.ALL)
def test_accumulation_over_four_batches_applies_one_optimizer_step(dtype):
    model = loops.make_net()
    trainer = loops.make_trainer(model, [loops.sgd(model)], WINDOW, dtype, accum_steps=4)
    trainer.train(0, 1, 1)
    assert trainer.steps_taken == 1
    plain, norm, _ = plain_window(dtype, inside=None)
    assert trainer.metrics.flush()["grad_norm"] == pytest.approx(norm, rel=1e-3)
    whole = loops.make_net()
    loops.plain_step(
        whole, loops.sgd(whole), {key: torch.cat([b[key] for b in WINDOW]) for key in WINDOW[0]}, torch.float32
    )
    for ours, accumulated, together in zip(model.parameters(), plain.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, accumulated, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours, together, rtol=1e-2, atol=1e-3)


@pytest.mark.failure("scaler calls during accumulation")
def test_step_accumulates_gradients_of_weighted_micro_batches():
    model, step_scaler = loops.make_net(), LossScaler(init_scale=65536.0)
    step = OptimizationStep(model, [loops.sgd(model)], scaler=step_scaler)
    for batch in WINDOW:
        step.scale(model(batch), weight=1 / 4).backward()
    assert step.finish().grad_norm == pytest.approx(plain_window(torch.float32, inside=None)[1], rel=1e-5)
    with pytest.raises(RuntimeError, match="backward"):
        step.finish()
