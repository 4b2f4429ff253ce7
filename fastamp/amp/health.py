"""Checks of a model and its optimizers that tell, in words, why a step could not work."""

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from fastamp.utils.errors import TrainingError


def check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Check that the optimizers hold the model's trainable parameters, these very tensors and no others.

    PyTorch steps whatever tensors an optimizer was given: with copies of the parameters, or flat buffers that they no
    longer share memory with, a run goes on for hours and learns nothing.

    Raises:
        TrainingError: an optimizer holds tensors that are not the model's, or a trainable parameter is held by none.
    """
    own = {id(p) for p in model.parameters()}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    strangers = [p for p in held if id(p) not in own]
    held_ids = {id(p) for p in held}
    left_out = [name for name, p in trainable.items() if id(p) not in held_ids]
    if not strangers and not left_out:
        return
    found = (
        f"  trainable parameters of the model: {len(trainable)}   tensors held by the optimizers: {len(held)}   "
        f"of both: {len(held_ids & {id(p) for p in trainable.values()})}\n"
    )
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
        raise TrainingError(
            f"the optimizers hold {len(strangers)} tensors that are not the model's parameters (shapes {shapes}): "
            "stepping them changes nothing in the model.\n"
            f"{found}"
            "  cause: the model was copied, rebuilt, flattened, or loaded with assign=True after the optimizer was "
            "built.\n"
            "  fix:   build the optimizer last, from the parameters of the model that is trained"
        )
    raise TrainingError(
        f"{len(left_out)} trainable parameters are held by no optimizer and would never move: {', '.join(left_out[:5])}"
        f"{', ...' if len(left_out) > 5 else ''}.\n"
        f"{found}"
        "  cause: a part of the model, e.g. its head, was replaced after the optimizer was built.\n"
        "  fix:   build the optimizer after that, or turn requires_grad off for what is not to be trained"
    )


def check_finite(model: nn.Module) -> None:
    """Check that every parameter and buffer is finite; reads the device once.

    Raises:
        TrainingError: with the names of those that are not.
    """
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    tensors = {name: t.detach() for name, t in named if t.is_floating_point() and t.numel()}
    if not tensors:
        return
    largest = torch.stack([norm.float() for norm in torch._foreach_norm(list(tensors.values()), float("inf"))])
    bad = [name for name, good in zip(tensors, torch.isfinite(largest).tolist(), strict=True) if not good]
    if bad:
        raise TrainingError(
            f"{len(bad)} of the model's tensors are not finite, e.g. {', '.join(bad[:3])}: it is neither evaluated nor "
            "saved.\n"
            "  cause: the weights themselves have diverged, or running statistics took in an overflow "
            "(SOLVER.AMP.BN_GUARD off).\n"
            "  fix:   go on from the last checkpoint with a lower SOLVER.BASE_LR, with SOLVER.CLIP_GRADIENTS, or with "
            "SOLVER.AMP.BN_GUARD on"
        )


def explain_no_gradient(model: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """Return the message for a step in which no optimizer has a gradient: what was found, the cause, the fix."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    reached = [p for p in trainable if p.grad is not None]
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    held_ids = {id(p) for p in held}
    shared = [p for p in trainable if id(p) in held_ids]
    names = ", ".join(f"{type(optimizer).__name__}" for optimizer in optimizers)
    if not trainable:
        cause = "every parameter of the model is frozen."
        fix = "leave something to train: check requires_grad"
    elif not shared:
        cause = "the optimizer holds tensors that are not the model's parameters."
        fix = "build the optimizer after the model is final (device, head, load_state_dict(assign=True))"
    elif reached:
        cause = "the loss reaches parameters, but none that an optimizer holds."
        fix = "build the optimizer from the parameters that are to be trained"
    else:
        cause = "the gradients were cleared before the step, or the loss comes from another model than this one."
        fix = "call zero_grad() only after the step, and compute the loss with the model that is being trained"
    return (
        f"the optimizer ({names}, {len(held)} tensors) received no gradient, so no step is possible\n"
        '(PyTorch\'s own words under AMP: "No inf checks were recorded for this optimizer").\n'
        f"  model parameters that need a gradient: {len(trainable)}   held by the optimizer: {len(shared)}   "
        f"reached from the loss: {len(reached)}\n"
        f"  cause: {cause}\n"
        f"  fix:   {fix}"
    )
