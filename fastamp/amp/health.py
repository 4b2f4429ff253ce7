"""Checks of a model and its optimizers that tell, in words, why a step could not work."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer


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
