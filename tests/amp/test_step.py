"""The step: scale, unscale, verdict, clip, step or skip, against plain loops."""

import pytest
import torch
from torch import nn

from fastamp.amp import LossScaler, OptimizationStep
from fastamp.solver.clip import clip_gradients
from fastamp.utils.errors import TrainingError


def make(lr=0.1, **kwargs):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, OptimizationStep(model, [optimizer], **kwargs)


def loss_of(model, factor=1.0):
    x = torch.arange(8.0).view(2, 4)
    return {"loss": (model(x) * factor).square().mean()}


@pytest.mark.parametrize("scale", [None, 1024.0])
def test_step_equals_plain_pytorch(scale):
    model, step = make(scaler=LossScaler(init_scale=scale) if scale else None)
    plain, _ = make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        step.backward(loss_of(model))
        verdict = step.finish()
        optimizer.zero_grad()
        loss_of(plain)["loss"].backward()
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in plain.parameters()]))
        optimizer.step()
        assert verdict.ok and verdict.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_accumulated_shares_equal_the_whole_batch():
    whole, whole_step = make()
    parts, parts_step = make()
    x = torch.randn(8, 4)
    whole_step.backward({"loss": whole(x).square().mean()})
    for chunk in x.chunk(4):
        parts_step.backward({"loss": parts(chunk).square().mean()}, share=1 / 4)
    assert whole_step.finish().grad_norm == pytest.approx(parts_step.finish().grad_norm, rel=1e-6)
    torch.testing.assert_close(whole.weight, parts.weight)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("scaled", [False, True])
def test_bad_step_is_skipped_as_a_whole_and_named(factor, scaled):
    model, step = make(scaler=LossScaler(init_scale=64.0) if scaled else None)
    before = [p.detach().clone() for p in model.parameters()]
    step.backward(loss_of(model, factor))
    verdict = step.finish()
    assert not verdict.ok
    assert verdict.bad_parameters == ["weight", "bias"]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert step.skipped_total == step.skipped_in_a_row == 1
    if scaled:
        assert step.scaler.scale == 32.0
    step.backward(loss_of(model))
    assert step.finish().ok and step.skipped_in_a_row == 0 and step.skipped_total == 1


def test_infinite_loss_with_finite_gradients_is_bad():
    model, step = make()
    loss = model.weight.sum()
    step.backward({"loss": loss + torch.tensor(float("inf"))})
    assert not step.finish().ok


def test_two_optimizers_are_all_or_nothing_and_idle_ones_are_left_out():
    a, b, c = (nn.Parameter(torch.ones(1)) for _ in range(3))
    model = nn.ParameterDict({"a": a, "b": b, "c": c})
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in (a, b, c)]
    step = OptimizationStep(model, optimizers)
    step.backward({"loss": (a * 2 + b * float("inf")).sum()})
    assert not step.finish().ok
    assert a.item() == b.item() == 1.0
    step.backward({"loss": (a * 2 + b).sum()})
    assert step.finish().ok
    assert a.item() == pytest.approx(0.8) and b.item() == pytest.approx(0.9) and c.item() == 1.0


def test_scale_has_a_floor_and_a_ceiling():
    """The negative control: halving 40 times without a floor leaves 6e-8."""
    assert 65536.0 * 0.5**40 < 1e-7
    scaler = LossScaler(init_scale=65536.0, min_scale=1.0, max_scale=2.0**24, growth_interval=2)
    for _ in range(40):
        scaler.update(False)
    assert scaler.scale == 1.0
    for _ in range(100):
        scaler.update(True)
    assert scaler.scale == 2.0**24


def test_scale_grows_after_good_steps_in_a_row_and_a_growth_step_is_no_skip():
    scaler = LossScaler(init_scale=8.0, growth_interval=3)
    history = []
    for ok in (True, True, False, True, True, True):
        scaler.update(ok)
        history.append(scaler.scale)
    assert history == [8, 8, 4, 4, 4, 8]
    restored = LossScaler()
    restored.load_state_dict(scaler.state_dict())
    assert restored.state_dict() == scaler.state_dict()


def test_clipping_sees_unscaled_gradients():
    """The negative control: clipping scaled gradients makes the step vanish."""
    clip = lambda gradients, norm: clip_gradients(gradients, norm, clip_type="global_norm", clip_value=1.0)  # noqa: E731
    model, step = make(clip=clip, scaler=LossScaler(init_scale=1024.0))
    before = model.weight.detach().clone()
    step.backward(loss_of(model))
    verdict = step.finish()
    moved = torch.linalg.vector_norm(torch.cat([(model.weight - before).flatten()])).item()
    assert verdict.grad_norm > 1
    assert verdict.clip_coefficient.item() == pytest.approx(1 / verdict.grad_norm, rel=1e-4)
    assert 0.05 < moved < 0.1  # lr 0.1 times a gradient of norm 1, less the bias's share
    wrong, _ = make()
    (loss_of(wrong)["loss"] * 1024).backward()
    torch.nn.utils.clip_grad_norm_(wrong.parameters(), 1.0)
    assert wrong.weight.grad.norm() / 1024 * 0.1 < 1e-3


def test_too_many_skips_in_a_row_end_the_training():
    model, step = make(max_consecutive_skips=3)
    for _ in range(3):
        step.backward(loss_of(model, float("nan")))
        step.finish()
    step.backward(loss_of(model, float("nan")))
    with pytest.raises(TrainingError, match=r"4 optimizer steps in a row.*MAX_CONSECUTIVE_SKIPS \(3\)"):
        step.finish()


@pytest.mark.parametrize(
    "losses, message",
    [
        ({}, "returned no losses"),
        ({"loss_cls": torch.ones(2, requires_grad=True)}, r"'loss_cls' is \(2,\), not a scalar"),
        ({"loss_cls": torch.tensor(1.0)}, "'loss_cls' is not connected"),
        ({"loss_cls": torch.tensor(1.0, dtype=torch.float16, requires_grad=True)}, "'loss_cls' is torch.float16"),
    ],
)
def test_losses_that_cannot_train_are_refused(losses, message):
    _, step = make()
    with pytest.raises(TrainingError, match=message):
        step.backward(losses)


def test_optimizer_of_another_model_is_explained():
    """The negative control: PyTorch's own scaler asserts, and without a scaler nothing happens at all."""
    model, other = nn.Linear(4, 1), nn.Linear(4, 1)
    optimizer = torch.optim.Adam(other.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model)["loss"]).backward()
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizer)
    step = OptimizationStep(model, [optimizer])
    step.backward(loss_of(model))
    with pytest.raises(TrainingError, match="not the model's parameters") as error:
        step.finish()
    assert "need a gradient: 2   held by the optimizer: 0   reached from the loss: 2" in str(error.value)


def test_cleared_gradients_are_explained():
    model, step = make()
    step.backward(loss_of(model))
    step.optimizers[0].zero_grad()
    with pytest.raises(TrainingError, match="cleared before the step"):
        step.finish()


def test_state_goes_over_and_a_new_scaler_is_fresh(caplog):
    _, step = make(scaler=LossScaler(init_scale=64.0))
    step.skipped_total, step.skipped_in_a_row = 5, 2
    _, other = make(scaler=LossScaler(init_scale=8.0))
    other.load_state_dict(step.state_dict())
    assert (other.scaler.scale, other.skipped_total, other.skipped_in_a_row) == (64.0, 5, 2)
    _, unscaled = make()
    unscaled.load_state_dict(step.state_dict())
    assert unscaled.scaler is None
    _, fresh = make(scaler=LossScaler(init_scale=16.0))
    fresh.load_state_dict(unscaled.state_dict())
    assert fresh.scaler.scale == 16.0


def test_a_good_step_reads_the_device_once(monkeypatch):
    """Every read of a tensor's value on the host goes through one of these methods."""
    model, step = make(scaler=LossScaler(init_scale=64.0))
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy", "nonzero"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, _o=original, _n=name, **k: (reads.append(_n), _o(self, *a, **k))[1]
        )
    step.backward(loss_of(model))
    verdict = step.finish()
    assert verdict.ok
    assert reads == ["tolist"]
