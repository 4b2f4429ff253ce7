"""Optimizer step compared with plain PyTorch loops; test_failures_*.py covers its failures."""

import pytest
import torch
from torch import nn

from fastamp.amp import LossScaler, OptimizationStep
from fastamp.amp import step as amp_step
from fastamp.amp.checks import check_optimizers
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
def test_optimization_step_matches_plain_pytorch_step(scale):
    model, step = make(scaler=LossScaler(init_scale=scale) if scale else None)
    plain, _ = make()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        step.scale(loss_of(model)).backward()
        verdict = step.finish()
        optimizer.zero_grad()
        loss_of(plain)["loss"].backward()
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in plain.parameters()]))
        optimizer.step()
        assert verdict.ok and verdict.grad_norm == pytest.approx(norm.item(), rel=1e-6)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("scaled", [False, True])
def test_step_with_non_finite_gradients_is_skipped_and_names_the_parameters(factor, scaled):
    model, step = make(scaler=LossScaler(init_scale=64.0) if scaled else None)
    before = [p.detach().clone() for p in model.parameters()]
    step.scale(loss_of(model, factor)).backward()
    verdict = step.finish()
    assert not verdict.ok
    assert verdict.bad_parameters == ["weight", "bias"]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert step.skipped_total == step.skipped_in_a_row == 1
    if scaled:
        assert step.scaler.scale == 32.0
    step.scale(loss_of(model)).backward()
    assert step.finish().ok and step.skipped_in_a_row == 0 and step.skipped_total == 1


def test_infinite_loss_with_finite_gradients_skips_the_step():
    model, step = make()
    loss = model.weight.sum()
    step.scale({"loss": loss + torch.tensor(float("inf"))}).backward()
    assert not step.finish().ok


def test_loss_scale_stops_at_max_scale():
    scaler = LossScaler(init_scale=65536.0, max_scale=2.0**24, growth_interval=2)
    for _ in range(100):
        scaler.update(True)
    assert scaler.scale == 2.0**24


def test_loss_scale_grows_after_consecutive_finite_steps():
    scaler = LossScaler(init_scale=8.0, growth_interval=3)
    history = []
    for ok in (True, True, False, True, True, True):
        scaler.update(ok)
        history.append(scaler.scale)
    assert history == [8, 8, 4, 4, 4, 8]
    restored = LossScaler()
    restored.load_state_dict(scaler.state_dict())
    assert restored.state_dict() == scaler.state_dict()


@pytest.mark.parametrize(
    "losses, message",
    [
        ({}, "MODEL.LOSSES.NAME"),
        ({"loss_cls": torch.ones(2, requires_grad=True)}, r"'loss_cls' .*\(2,\)"),
        ({"loss_cls": torch.tensor(1.0, dtype=torch.float16, requires_grad=True)}, "'loss_cls' .*torch.float16"),
    ],
)
def test_step_rejects_empty_non_scalar_and_float16_losses(losses, message):
    _, step = make()
    with pytest.raises(TrainingError, match=message):
        step.scale(losses).backward()


def test_parameter_in_two_optimizers_is_unscaled_once():
    """``torch.amp.GradScaler`` would unscale its gradient twice."""
    norms = []
    for scaler in (None, LossScaler(init_scale=1024.0)):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([model.weight], lr=0.1)]
        try:
            check_optimizers(model, optimizers)
        except TrainingError:
            return
        step = OptimizationStep(model, optimizers, scaler=scaler)
        step.scale(loss_of(model)).backward()
        norms.append(step.finish().grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_parameters_added_after_the_first_step_are_unscaled():
    """Adding a parameter group invalidates the cached parameter order."""
    model, step = make(scaler=LossScaler(init_scale=1024.0))
    model.bias.requires_grad_(False)
    step.optimizers[0].param_groups[0]["params"] = [model.weight]
    norms = []
    for _ in range(2):
        step.scale(loss_of(model)).backward()
        norms.append(step.finish().grad_norm)
        if len(norms) == 1:
            model.bias.requires_grad_(True)
            step.optimizers[0].add_param_group({"params": [model.bias]})
            before = [p.detach().clone() for p in model.parameters()]
    changes = torch.cat([(b - p.detach()).flatten() / 0.1 for b, p in zip(before, model.parameters(), strict=True)])
    assert changes[-1] != 0 and norms[1] == pytest.approx(changes.norm().item(), rel=1e-5)


def test_step_computes_the_parameter_order_only_once(monkeypatch):
    calls = []
    sort = amp_step.norm_order
    monkeypatch.setattr(amp_step, "norm_order", lambda *given: calls.append(1) or sort(*given))
    model, step = make()
    for _ in range(3):
        step.scale(loss_of(model)).backward()
        step.finish()
    assert len(calls) == 1


def test_weight_scales_the_gradients_but_not_the_total_loss():
    model, step = make()
    step.scale(loss_of(model), weight=0.5).backward()
    assert step.total_loss.item() == loss_of(model)["loss"].item() and not step.total_loss.requires_grad
    half = step.finish().grad_norm
    model, step = make()
    step.scale(loss_of(model)).backward()
    assert half == pytest.approx(step.finish().grad_norm / 2)
