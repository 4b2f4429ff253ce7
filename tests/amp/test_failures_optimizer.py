"""Optimizers that hold tensors which are not the model's parameters, or that lack trainable parameters.

Each test in test_failures_*.py first reproduces a failure in plain PyTorch, as the negative control, and then checks
that fastamp reports or prevents it.
"""

import copy
import itertools

import loops
import pytest
import tiny
import torch
from torch import nn

from fastamp.amp import OptimizationStep
from fastamp.amp.checks import check_optimizers
from fastamp.engine import DefaultTrainer
from fastamp.utils.errors import TrainingError

NO_INF_CHECKS = "No inf checks were recorded for this optimizer"


def plain_losses(model, optimizer, dtype, steps=5):
    """Train on one batch with a plain PyTorch loop; return the losses and gradient norms of all steps."""
    losses, norms = [], []
    for _ in range(steps):
        losses.append(loops.plain_step(model, optimizer, loops.make_batch(), dtype))
        norms.append(loops.grad_norm(model))
    return losses, norms


# The optimizer holds tensors that are not parameters of the model.


def flat_buffers(model):
    """Turn the parameters into views of one flat tensor; only this tensor is in the optimizer, as in FastReID."""
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    flat.grad = torch.zeros_like(flat)
    sizes = [p.numel() for p in model.parameters()]
    for p, value, gradient in zip(model.parameters(), flat.data.split(sizes), flat.grad.split(sizes), strict=True):
        p.data, p.grad = value.view_as(p), gradient.view_as(p)
    return model, torch.optim.SGD([flat], lr=0.1)


def copied_model(model):
    return model, loops.sgd(copy.deepcopy(model))


def rebuilt_model(model):
    return loops.make_net(), loops.sgd(model)


def assigned_state(model):
    optimizer = loops.sgd(model)
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    return model, optimizer


def replaced_layers(model):
    optimizer = loops.sgd(model)
    for name, layer in model.named_children():
        setattr(model, name, copy.deepcopy(layer))
    return model, optimizer


FOREIGN = [flat_buffers, copied_model, rebuilt_model, assigned_state, replaced_layers]


@pytest.mark.failure("optimizer with tensors that are not the model's")
def test_plain_pytorch_trains_flat_buffers_if_gradients_are_zeroed_in_place():
    """The negative control: with flat buffers, training fails only if ``zero_grad`` sets the gradients to None."""
    model, optimizer = flat_buffers(loops.make_net())
    optimizer.zero_grad = lambda: torch.optim.SGD.zero_grad(optimizer, set_to_none=False)
    losses, _ = plain_losses(model, optimizer, torch.float32)
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.failure("optimizer with tensors that are not the model's")
def test_trainer_rejects_optimizer_with_foreign_tensors_before_the_first_step(subtests):
    for dtype, build in itertools.product(loops.ALL, FOREIGN):
        with subtests.test(dtype=dtype, build=build):
            model, optimizer = build(loops.make_net())
            losses, norms = plain_losses(model, optimizer, dtype)
            assert len(set(losses)) == 1 and norms[4] > 4 * norms[0]  # constant loss, growing gradients, no error
            with pytest.raises(AssertionError, match=NO_INF_CHECKS):
                loops.plain_step(*build(loops.make_net()), loops.make_batch(), dtype, loops.plain_scaler())

            model, optimizer = build(loops.make_net())
            with pytest.raises(TrainingError, match=r"assign=True") as error:
                loops.train(model, [optimizer], dtype)
            held = 1 if build is flat_buffers else 4
            assert f"4 trainable parameters in the model, {held} tensors in the optimizers, 0 in both" in str(
                error.value
            )


@pytest.mark.failure("optimizer with tensors that are not the model's")
@pytest.mark.parametrize("dtype", loops.ALL)
def test_step_raises_if_optimizer_holds_foreign_tensors(dtype):
    """A custom training loop has no trainer that checks the optimizer before the first step."""
    model, optimizer = copied_model(loops.make_net())
    step = OptimizationStep(model, [optimizer])
    with loops.autocast(dtype):
        losses = model(loops.make_batch())
    step.scale(losses).backward()
    with pytest.raises(TrainingError, match=NO_INF_CHECKS) as error:  # users search for PyTorch's message
        step.finish()
    assert "4 trainable parameters in the model, 0 of them in the optimizer, 4 with a gradient" in str(error.value)


@pytest.mark.integration
@pytest.mark.failure("optimizer with tensors that are not the model's")
@pytest.mark.parametrize("precision", ["off", "bf16", "fp16"])
def test_default_trainer_rejects_optimizer_with_foreign_tensors(demo, tmp_path, precision):
    class Copied(DefaultTrainer):
        @classmethod
        def build_optimizer(cls, cfg, model):
            return super().build_optimizer(cfg, copy.deepcopy(model))

    with pytest.raises(TrainingError, match="0 in both"):
        Copied(tiny.tiny_config(tmp_path, "SOLVER.AMP", precision)).train()


@pytest.mark.integration
@pytest.mark.failure("optimizer with tensors that are not the model's")
def test_loading_weights_does_not_replace_parameters_held_by_the_optimizer(demo, tmp_path):
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path, "SOLVER.MAX_EPOCH", "1"))
    path = trainer.checkpointer.save("weights", tag=False)
    for resume in (False, True):  # loading copies into the tensors that the optimizer holds
        trainer = DefaultTrainer(tiny.tiny_config(tmp_path, "MODEL.WEIGHTS", str(path)))
        (tmp_path / "last_checkpoint").write_text("weights.pth")
        trainer.resume_or_load(resume=resume)
        check_optimizers(trainer.model, [trainer.optimizer])
    trainer.model.load_state_dict(tiny.weights(path), assign=True)
    with pytest.raises(TrainingError, match=r"assign=True"):
        trainer.train()


# The head was replaced after the optimizer was built.


def replaced_head(model):
    optimizer = loops.sgd(model)
    model.head = nn.Linear(16, 4)
    return model, optimizer


def head_missing(model):
    return model, loops.sgd(model.body)


@pytest.mark.failure("parameters missing from the optimizer")
@pytest.mark.parametrize("dtype", loops.ALL)
@pytest.mark.parametrize("change", [replaced_head, head_missing])
def test_head_missing_from_the_optimizer_raises(change, dtype):
    for scaler in (None, loops.plain_scaler()):
        model, optimizer = change(loops.make_net())
        head, body = loops.values(model.head), loops.values(model.body)
        for _ in range(5):
            loops.plain_step(model, optimizer, loops.make_batch(), dtype, scaler)
        assert loops.same(head, loops.values(model.head)) and not loops.same(
            body, loops.values(model.body)
        )  # without an error

    model, optimizer = change(loops.make_net())
    with pytest.raises(TrainingError, match=r"head.weight"):
        loops.train(model, [optimizer], dtype)


@pytest.mark.failure("parameters missing from the optimizer")
def test_check_optimizers_lists_missing_parameters_unless_frozen():
    model, optimizer = head_missing(loops.make_net())
    with pytest.raises(TrainingError, match=r"head.weight, head.bias"):
        check_optimizers(model, [optimizer])
    model.head.requires_grad_(False)
    check_optimizers(model, [optimizer])


@pytest.mark.failure("parameters missing from the optimizer")
def test_check_optimizers_names_head_replaced_after_optimizer_was_built():
    model, optimizer = replaced_head(loops.make_net())
    with pytest.raises(TrainingError) as error:
        check_optimizers(model, [optimizer])
    assert "head.weight" in str(error.value)
