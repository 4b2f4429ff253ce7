"""Failures 1 and 2: an optimizer that holds the wrong tensors.

Here and in the other test_failures_*.py each failure is shown first as plain PyTorch has it, the negative control, and
then what fastamp does. The numbers are the rows of the table of failures, in its order.
"""

import copy

import pytest
import tiny
import torch
from loops import (
    ALL,
    autocast,
    grad_norm,
    make_batch,
    make_net,
    plain_scaler,
    plain_step,
    same,
    sgd,
    train,
    values,
)
from torch import nn

from fastamp.amp import OptimizationStep
from fastamp.amp.checks import check_optimizers
from fastamp.engine import DefaultTrainer
from fastamp.utils.errors import TrainingError

NO_INF_CHECKS = "No inf checks were recorded for this optimizer"


def plain_losses(model, optimizer, dtype, steps=5):
    """Return losses and gradient norms of PyTorch's loop without a scaler, on one batch."""
    losses, norms = [], []
    for _ in range(steps):
        losses.append(plain_step(model, optimizer, make_batch(), dtype))
        norms.append(grad_norm(model))
    return losses, norms


# 1. The optimizer holds tensors that are not the model's.


def flat_buffers(model):
    """Let the parameters be views of one flat tensor, as FastReID's optimizers hold it."""
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    flat.grad = torch.zeros_like(flat)
    sizes = [p.numel() for p in model.parameters()]
    for p, value, gradient in zip(model.parameters(), flat.data.split(sizes), flat.grad.split(sizes), strict=True):
        p.data, p.grad = value.view_as(p), gradient.view_as(p)
    return model, torch.optim.SGD([flat], lr=0.1)


def copied_model(model):
    return model, sgd(copy.deepcopy(model))


def rebuilt_model(model):
    return make_net(), sgd(model)


def assigned_state(model):
    optimizer = sgd(model)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    return model, optimizer


def replaced_layers(model):
    optimizer = sgd(model)
    for name, layer in model.named_children():
        setattr(model, name, copy.deepcopy(layer))
    return model, optimizer


STRANGERS = [flat_buffers, copied_model, rebuilt_model, assigned_state, replaced_layers]


def test_1_flat_buffers_did_work_once():
    """While ``zero_grad`` filled gradients with zeros; that is what the others below are told apart from."""
    model, optimizer = flat_buffers(make_net())
    optimizer.zero_grad = lambda: torch.optim.SGD.zero_grad(optimizer, set_to_none=False)
    losses, _ = plain_losses(model, optimizer, torch.float32)
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("strange", STRANGERS)
def test_1_strange_tensors(strange, dtype):
    model, optimizer = strange(make_net())
    losses, norms = plain_losses(model, optimizer, dtype)
    assert len(set(losses)) == 1 and norms[4] > 4 * norms[0]  # nothing is learned, nothing said, and gradients grow
    with pytest.raises(AssertionError, match=NO_INF_CHECKS):
        plain_step(*strange(make_net()), make_batch(), dtype, plain_scaler())

    model, optimizer = strange(make_net())
    with pytest.raises(TrainingError, match="tensors that are not the model's parameters") as error:
        train(model, [optimizer], dtype)
    held = 1 if strange is flat_buffers else 4
    assert f"parameters of the model: 4   tensors held by the optimizers: {held}   of both: 0" in str(error.value)
    assert "assign=True after the optimizer was built" in str(error.value)
    assert "fix:   build the optimizer last" in str(error.value)


@pytest.mark.parametrize("dtype", ALL)
def test_1_the_step_alone_names_it_too(dtype):
    """Where a user's own loop calls the step, and no trainer has checked the optimizer."""
    model, optimizer = copied_model(make_net())
    step = OptimizationStep(model, [optimizer])
    with autocast(dtype):
        losses = model(make_batch())
    step.scale(losses).backward()
    with pytest.raises(TrainingError, match="optimizer holds tensors that are not the model's parameters") as error:
        step.finish()
    assert NO_INF_CHECKS in str(error.value)  # the words that users search for
    assert "need a gradient: 4   held by the optimizer: 0   reached from the loss: 4" in str(error.value)


@pytest.mark.parametrize("precision", ["off", "bf16", "fp16"])
def test_1_the_default_trainer(demo, tmp_path, precision):
    class Copied(DefaultTrainer):
        @classmethod
        def build_optimizer(cls, cfg, model):
            return super().build_optimizer(cfg, copy.deepcopy(model))

    with pytest.raises(TrainingError, match="not the model's parameters"):
        Copied(tiny.tiny_config(tmp_path, "SOLVER.AMP", precision)).train()


def test_1_after_loading(demo, tmp_path):
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path, "SOLVER.MAX_EPOCH", "1"))
    path = trainer.checkpointer.save("weights", tag=False)
    for resume in (False, True):  # fastamp's own loading fills the tensors that the optimizer holds
        trainer = DefaultTrainer(tiny.tiny_config(tmp_path, "MODEL.WEIGHTS", str(path)))
        (tmp_path / "last_checkpoint").write_text("weights.pth")
        trainer.resume_or_load(resume=resume)
        check_optimizers(trainer.model, [trainer.optimizer])
    trainer.model.load_state_dict(tiny.weights(path), assign=True)
    with pytest.raises(TrainingError, match=r"loaded with assign=True"):
        trainer.train()


# 2. Only the head was replaced after the optimizer was built.


def replaced_head(model):
    optimizer = sgd(model)
    model.head = nn.Linear(16, 4)
    return model, optimizer


def head_left_out(model):
    return model, sgd(model.body)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("change", [replaced_head, head_left_out])
def test_2_the_head_never_moves(change, dtype):
    for scaler in (None, plain_scaler()):
        model, optimizer = change(make_net())
        head, body = values(model.head), values(model.body)
        for _ in range(5):
            plain_step(model, optimizer, make_batch(), dtype, scaler)
        assert same(head, values(model.head)) and not same(body, values(model.body))  # and nothing is said

    model, optimizer = change(make_net())
    with pytest.raises(TrainingError, match="held by no optimizer" if change is head_left_out else "not the model's"):
        train(model, [optimizer], dtype)


def test_2_what_is_left_out_is_named():
    model, optimizer = head_left_out(make_net())
    with pytest.raises(TrainingError, match="2 trainable parameters are held by no optimizer") as error:
        check_optimizers(model, [optimizer])
    assert "head.weight, head.bias" in str(error.value) and "its head, was replaced" in str(error.value)
    model.head.requires_grad_(False)
    check_optimizers(model, [optimizer])  # on purpose, then


def test_2_the_new_head_is_named():
    model, optimizer = replaced_head(make_net())
    with pytest.raises(TrainingError) as error:
        check_optimizers(model, [optimizer])
    assert "head.weight" in str(error.value)
