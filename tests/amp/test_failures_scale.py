"""Failures caused by loss scaling and skipped steps: clipping, learning rate schedules, the loss scale, parameters."""

import math
from functools import partial

import loops
import pytest
import tiny
import torch
from torch import nn

from fastamp.amp import LossScaler, OptimizationStep, PrecisionFailure
from fastamp.amp.policy import DTYPES
from fastamp.engine.hooks import HookBase, LRScheduler
from fastamp.solver import build_lr_schedule
from fastamp.solver.clip import clip_gradients

BAD, GOOD = loops.spoil(loops.make_batch()), loops.make_batch()
clip_norm = partial(clip_gradients, clip_type="global_norm", clip_value=0.5)


class Losses(HookBase):
    """Hook that records the total loss of each step."""

    def __init__(self):
        self.losses = []

    def after_step(self):
        self.losses.append(self.trainer.metrics.flush().get("total_loss"))


# Clipping scaled gradients.


def plain_clipping(dtype, *, unscale):
    """Train for 30 steps in plain PyTorch with gradients clipped to norm 0.5; return the model and the losses.

    Args:
        dtype: dtype of autocast.
        unscale: whether to unscale the gradients before clipping.
    """
    model, scaler, losses = loops.make_net(), loops.plain_scaler(), []
    optimizer = loops.sgd(model)
    for _ in range(30):
        optimizer.zero_grad()
        with loops.autocast(dtype):
            loss = model(GOOD)["loss_cls"]
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return model, losses


@pytest.mark.failure("clipping of scaled gradients")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_clipping_applies_to_unscaled_gradients(dtype):
    _, wrong = plain_clipping(dtype, unscale=False)
    plain, right = plain_clipping(dtype, unscale=True)
    assert wrong[0] - wrong[-1] < 1e-3 and right[0] - right[-1] > 0.3

    model, record = loops.make_net(), Losses()
    trainer = loops.make_trainer(model, [loops.sgd(model)], [GOOD] * 30, dtype, clip=clip_norm)
    trainer.register_hooks([record])
    trainer.train(0, 1, 30)
    assert record.losses == pytest.approx(right, rel=1e-3)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


@pytest.mark.failure("clipping of scaled gradients")
def test_clip_coefficient_does_not_depend_on_the_loss_scale():
    coefficients = []
    for scaler in (None, LossScaler(init_scale=1024.0)):
        model = loops.make_net()
        step = OptimizationStep(model, [loops.sgd(model)], clip=clip_norm, scaler=scaler)
        step.scale(model(GOOD)).backward()
        verdict = step.finish()
        assert verdict.grad_norm > 0.5
        assert verdict.clip_coefficient.item() == pytest.approx(0.5 / verdict.grad_norm, rel=1e-4)
        coefficients.append(verdict.clip_coefficient.item())
    assert coefficients[0] == pytest.approx(coefficients[1], rel=1e-5)


# A learning rate schedule that advances on skipped steps.


@pytest.mark.failure("schedule that advances on skipped steps")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_plain_pytorch_warmup_ends_although_all_steps_are_skipped(dtype):
    model, scaler = loops.make_net(), loops.plain_scaler()
    optimizer, before = loops.sgd(model), loops.values(model)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=10)
    for _ in range(10):
        loops.plain_step(model, optimizer, BAD, dtype, scaler)
        warm_up.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1) and loops.same(before, loops.values(model))


@pytest.mark.failure("schedule that advances on skipped steps")
@pytest.mark.parametrize("dtype", loops.ALL)
def test_learning_rate_schedule_advances_only_on_applied_steps(tmp_path, dtype):
    class Rates(HookBase):
        def after_step(self):
            rates.append(optimizer.param_groups[0]["lr"])

    rates, model = [], loops.make_net()
    optimizer = loops.sgd(model)
    schedule = build_lr_schedule(tiny.tiny_config(tmp_path, "SOLVER.WARMUP_ITERS", "10"), 100)
    trainer = loops.make_trainer(model, [optimizer], [BAD] * 10 + [GOOD] * 10 + [BAD, GOOD], dtype)
    trainer.register_hooks([LRScheduler(schedule), Rates()])
    trainer.train(0, 1, 22)
    first = schedule.learning_rate(0.1, epoch=0, steps_taken=0)
    assert rates[:11] == [first] * 11 and first < 0.02
    assert rates[10:20] == sorted(set(rates[10:20])) and rates[19] < rates[20] == rates[21] == pytest.approx(0.1)
    assert trainer.steps_taken == 11 and trainer.step.skipped_total == 11


# Collapse of the loss scale.


@pytest.mark.failure("collapse of the loss scale")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_plain_pytorch_loss_scale_falls_below_1e_7_after_40_overflows(dtype):
    model, scaler = loops.make_net(), loops.plain_scaler()
    optimizer = loops.sgd(model)
    for _ in range(40):
        loops.plain_step(model, optimizer, BAD, dtype, scaler)
    assert scaler.get_scale() < 1e-7
    before = loops.values(model)
    loops.plain_step(model, optimizer, GOOD, dtype, scaler)
    zeros = [not p.grad.any() for p in model.parameters()]
    # In float16 all gradients underflow without an error; bfloat16 has the range of float32.
    assert zeros == [dtype == torch.float16] * 4 and loops.same(before, loops.values(model)) == (dtype == torch.float16)
    regrowing = math.log2(65536 / scaler.get_scale()) * scaler.get_growth_interval()
    assert regrowing == 80_000


@pytest.mark.failure("collapse of the loss scale")
@pytest.mark.parametrize("dtype", loops.ALL)
def test_loss_scale_does_not_fall_below_default_min_scale(dtype):
    model = loops.make_net()
    trainer = loops.make_trainer(model, [loops.sgd(model)], [BAD] * 40 + [GOOD], dtype, max_consecutive_skips=40)
    before = loops.values(model)
    trainer.train(0, 1, 41)
    assert trainer.metrics.flush()["loss_scale"] == 1.0 and trainer.step.skipped_total == 40
    assert not any(torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.failure("collapse of the loss scale")
def test_loss_scale_does_not_fall_below_custom_min_scale():
    scaler = LossScaler(init_scale=65536.0, min_scale=128.0)
    for _ in range(40):
        scaler.update(False)
    assert scaler.scale == 128.0


AT_MINIMUM = "SOLVER.AMP.MIN_SCALE"
NO_SCALE = "Inf or NaN"


@pytest.mark.failure("collapse of the loss scale")
@pytest.mark.parametrize("dtype, on_failure, cause", [
    (torch.float16, "error", AT_MINIMUM),
    (torch.bfloat16, "error", NO_SCALE),
    (torch.bfloat16, "bfloat16", NO_SCALE),
    (torch.float32, "error", NO_SCALE),
    (torch.float32, "float32", NO_SCALE),
])  # fmt: skip
def test_too_many_skipped_steps_raise_precision_failure(dtype, on_failure, cause):
    """A fallback dtype that equals the current dtype counts as no fallback."""
    model = loops.make_net()
    before = loops.values(model)
    trainer = loops.make_trainer(model, [loops.sgd(model)], [BAD] * 40, dtype, on_failure=on_failure)
    with pytest.raises(PrecisionFailure, match=r"^26 .*SOLVER.AMP.MAX_CONSECUTIVE_SKIPS \(25\)") as error:
        trainer.train(0, 1, 40)
    message = str(error.value)
    assert cause in message and "body.0.weight, body.0.bias, head.weight" in message
    assert "SOLVER.BASE_LR" in message and "SOLVER.CLIP_GRADIENTS" in message
    assert loops.same(before, loops.values(model))


@pytest.mark.failure("collapse of the loss scale")
@pytest.mark.parametrize("dtype", [
    torch.bfloat16,
    torch.float32,
])  # fmt: skip
def test_precision_failure_does_not_suggest_the_current_dtype(dtype):
    model = loops.make_net()
    trainer = loops.make_trainer(model, [loops.sgd(model)], [BAD] * 40, dtype)
    with pytest.raises(PrecisionFailure) as error:
        trainer.train(0, 1, 40)
    assert "DTYPE bfloat16" not in str(error.value)
    assert dtype == torch.bfloat16 or "SOLVER.AMP to False" not in str(error.value)


@pytest.mark.failure("collapse of the loss scale")
@pytest.mark.parametrize("on_failure", ["bfloat16", "float32"])
def test_on_failure_switches_dtype_after_repeated_float16_overflows(on_failure, caplog):
    """Images with values beyond the range of float16 make all float16 steps overflow."""
    model, large = loops.make_net(), loops.spoil(GOOD, 1e6)
    trainer = loops.make_trainer(model, [loops.sgd(model, lr=1e-9)], [large] * 30, torch.float16, on_failure=on_failure)
    before = loops.values(model)
    trainer.train(0, 1, 30)
    assert trainer.policy.dtype == DTYPES[on_failure] and trainer.step.scaler is None
    assert trainer.steps_taken == 4 and trainer.step.skipped_total == 26
    assert loops.finite(model.parameters()) and not loops.same(before, loops.values(model))
    assert "SOLVER.AMP.ON_FAILURE" in caplog.text and on_failure in caplog.text


# 145 consecutive skips, then a finite batch.


@pytest.mark.failure("145 skipped steps in a row")
@pytest.mark.parametrize("dtype", loops.LOW)
def test_plain_pytorch_parameters_become_non_finite_after_145_skipped_steps(dtype):
    model, scaler = loops.make_net(), loops.plain_scaler()
    optimizer = loops.sgd(model)
    for _ in range(145):
        loops.plain_step(model, optimizer, BAD, dtype, scaler)
    assert torch.isinf(1 / torch.tensor(scaler.get_scale())) and loops.finite(model.parameters())
    loss = loops.plain_step(model, optimizer, GOOD, dtype, scaler)
    assert math.isfinite(loss) and not any(loops.finite([p]) for p in model.parameters())


@pytest.mark.failure("145 skipped steps in a row")
@pytest.mark.parametrize("dtype", loops.ALL)
@pytest.mark.parametrize("min_scale", [1.0, 2.0**-149])
def test_parameters_stay_finite_after_145_skipped_steps(dtype, min_scale):
    """A subnormal ``min_scale``, whose inverse is infinite, must not corrupt them: the step is skipped instead."""
    model = loops.make_net()
    trainer = loops.make_trainer(model, [loops.sgd(model)], [BAD] * 145 + [GOOD], dtype, max_consecutive_skips=1000)
    if trainer.step.scaler:
        trainer.step.scaler.min_scale = min_scale
    before = loops.values(model)
    trainer.train(0, 1, 146)
    assert loops.finite(model.parameters())
    taken = dtype != torch.float16 or min_scale == 1.0
    assert trainer.step.skipped_in_a_row == (0 if taken else 146) and loops.same(before, loops.values(model)) != taken
