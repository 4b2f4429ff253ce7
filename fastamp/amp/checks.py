"""Checks of a model and its optimizers that tell, in words, why a step could not work."""

import itertools
import logging
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from fastamp.utils.errors import TrainingError
from fastamp.utils.moved import moved_names

logger = logging.getLogger(__name__)

__getattr__ = moved_names(
    __name__,
    {
        "FirstSteps": "fastamp.amp.checks.ParameterUpdateMonitor",
        "zero_share": "fastamp.amp.checks.zero_fraction",
    },
)

FIRST_STEPS = 3
"""In so many steps at the start of a run it is looked at whether it can learn anything at all."""

SMALLEST_CHANGE = 1e-10
"""Parameters whose largest change is smaller than this, relative to the largest parameter, stand still: only those near
zero change at all in float32, and no other value of the model would be moved by it in a whole training."""


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
    names = f"{', '.join(left_out[:5])}{', ...' if len(left_out) > 5 else ''}"
    if strangers:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
        cause = "the model was copied, rebuilt, flattened, or loaded with assign=True after the optimizer was built."
        if left_out and len(left_out) < len(trainable):
            cause = "a part of the model, e.g. its head, was replaced after the optimizer was built."
        raise TrainingError(
            f"the optimizers hold {len(strangers)} tensors that are not the model's parameters (shapes {shapes}): "
            "stepping them changes nothing in the model.\n"
            f"{found}"
            f"  held by no optimizer: {names or 'none'}\n"
            f"  cause: {cause}\n"
            "  fix:   build the optimizer last, from the parameters of the model that is trained"
        )
    raise TrainingError(
        f"{len(left_out)} trainable parameters are held by no optimizer and would never move: {names}.\n"
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
            "(SOLVER.AMP.RESTORE_BUFFERS_ON_SKIP off, or buffers of a layer that it does not know).\n"
            "  fix:   go on from the last checkpoint with a lower SOLVER.BASE_LR, with SOLVER.CLIP_GRADIENTS, or with "
            "SOLVER.AMP.RESTORE_BUFFERS_ON_SKIP on"
        )


def explain_no_gradient(model: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """Return the message for a step in which no optimizer has a gradient: what was found, the cause, the fix."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    reached = [p for p in trainable if p.grad is not None]
    held = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    held_ids = {id(p) for p in held}
    shared = [p for p in trainable if id(p) in held_ids]
    frozen = [name for name, p in model.named_parameters() if id(p) in held_ids and not p.requires_grad]
    names = ", ".join(f"{type(optimizer).__name__}" for optimizer in optimizers)
    if not trainable:
        cause = "every parameter of the model is frozen."
        fix = "leave something to train: check requires_grad"
    elif frozen and not shared:
        cause = f"everything that the optimizer holds is frozen, e.g. {', '.join(frozen[:3])}."
        fix = "freeze less (MODEL.FREEZE_LAYERS), or build the optimizer from what is to be trained"
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


def check_losses(
    losses: dict[str, torch.Tensor], *, frozen: Sequence[str] = (), model: nn.Module | None = None
) -> None:
    """Check that there is a loss and that gradients can flow from each, or from one where modules are ``frozen``.

    Args:
        losses: what the model returned in training mode.
        frozen: modules that are frozen on purpose (``MODEL.FREEZE_LAYERS``).
        model: follow each loss back to this model's parameters; None looks at the loss alone, which costs nothing.

    Raises:
        TrainingError: no loss, a loss that is no float32 scalar, or one that no parameter can learn from.
    """
    if not isinstance(losses, dict):
        raise TrainingError(
            f"in training mode the model returned a {type(losses).__name__}; it must return a dict of loss name -> "
            "scalar.\n  fix: return such a dict when self.training is True"
        )
    if not losses:
        raise TrainingError(
            "the model returned no losses: in training mode it must return a dict of loss name -> scalar.\n"
            "  fix: name at least one loss in MODEL.LOSSES.NAME"
        )
    own = {id(p) for p in model.parameters()} if model is not None else None
    for name, loss in losses.items():
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            fix = "reduce it to its mean" if isinstance(loss, torch.Tensor) else "return the tensor, without .item()"
            raise TrainingError(f"loss {name!r} is {shape}, not a scalar tensor.\n  fix: {fix}")
        if loss.dtype not in (torch.float32, torch.float64):
            raise TrainingError(
                f"loss {name!r} is {loss.dtype}: losses are computed in float32 under any precision policy.\n"
                "  fix: decorate the loss with fastamp.amp.force_fp32"
            )
        connected = loss.requires_grad and (own is None or _reaches(loss, own))
        if not connected and (loss.requires_grad or not frozen):
            raise TrainingError(
                f"loss {name!r} is not connected to any parameter of the model: no gradient flows from it.\n"
                f"  found: {_graph_of(loss)}\n"
                "  cause: it was detached or wrapped in a new tensor, or everything before it is frozen.\n"
                "  fix:   compute it from the model's outputs without .detach(), .item() or torch.tensor()"
            )
    if not any(loss.requires_grad for loss in losses.values()):
        raise TrainingError(
            f"no loss ({', '.join(losses)}) is connected to a parameter that is trained.\n"
            f"  cause: what MODEL.FREEZE_LAYERS names ({', '.join(frozen)}) is all that they are computed from.\n"
            "  fix:   freeze less"
        )


def _graph_of(loss: torch.Tensor) -> str:
    if not loss.requires_grad:
        return "it has no graph (requires_grad is False)"
    return "its graph does not lead to them" if loss.grad_fn else "it is a tensor of its own (requires_grad, no graph)"


def _reaches(loss: torch.Tensor, parameters: set[int]) -> bool:
    """Return whether the graph of ``loss`` leads to one of the tensors with these ids."""
    if loss.grad_fn is None:
        return id(loss) in parameters
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        # A function written in Python may hold parameters that its graph does not show, e.g. a checkpoint's.
        if (
            isinstance(node, torch.autograd.function.BackwardCFunction)
            or id(getattr(node, "variable", None)) in parameters
        ):
            return True
        following = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(following)
        nodes += following
    return False


def check_communication(parallel_model: nn.Module, *, scaled: bool) -> None:
    """Check that the gradients of several processes do not travel in float16 while they are multiplied by a loss scale.

    Args:
        parallel_model: DistributedDataParallel, or any other model, of which nothing is asked.
        scaled: whether the loss is scaled.

    Raises:
        TrainingError: they do.
    """
    hooks = [hook for module in parallel_model.modules() for hook, _ in getattr(module, "_comm_hooks", ())]
    for hook in hooks:
        name = getattr(getattr(hook, "func", hook), "__qualname__", "")
        if scaled and "fp16_compress" in name:
            raise TrainingError(
                "the gradients are sent in float16 (fp16_compress_hook) while the loss is scaled: scaled gradients "
                "overflow on the way, and most steps would be skipped.\n"
                "  fix: bf16_compress_hook, which has float32's range, or SOLVER.AMP.DTYPE bfloat16, which needs no "
                "loss scale"
            )


def zero_fraction(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return (), the share in 0..1 of the elements that are exactly zero, on the device."""
    nonzero = torch.stack([torch.count_nonzero(gradient) for gradient in gradients]).sum()
    return 1 - nonzero / sum(gradient.numel() for gradient in gradients)


class ParameterUpdateMonitor:
    """Looks whether the first steps move the parameters, without waiting for the device.

    It is a part of ``OptimizationStep``, so that every loop has it. How far a step moved them is known on the device
    when it is done, and is read with the verdict of the next one.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        self.taken = 0
        self.change = 0.0
        self.pending: list[torch.Tensor] = []
        self._norms: list[float] = []
        self._rates: list[float] = []
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def finished(self) -> bool:
        """Whether there is nothing to look at any more."""
        return self.taken >= FIRST_STEPS and not self.pending

    @torch.no_grad()
    def before_step(self) -> None:
        """Be called before a step that is taken."""
        if self.taken < FIRST_STEPS and self.change < SMALLEST_CHANGE:
            groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
            self._rates += [float(group["lr"]) for group in groups]
            moving = [p for group in groups if group["lr"] for p in group["params"] if p.grad is not None and p.numel()]
            self._kept = [(p, p.clone()) for p in moving]

    @torch.no_grad()
    def after_step(self, grad_norm: float) -> None:
        """Be called after it.

        Args:
            grad_norm: total L2 norm of its gradients.
        """
        if self.taken >= FIRST_STEPS:
            return
        self.taken += 1
        self._norms.append(grad_norm)
        if self._kept:
            changes = torch._foreach_norm([p - before for p, before in self._kept], float("inf"))
            sizes = torch._foreach_norm([before for _, before in self._kept], float("inf"))
            self.pending = [torch.stack(changes).max() / torch.stack(sizes).max().clamp_min(SMALLEST_CHANGE)]
        elif self.taken == FIRST_STEPS:
            self._report()
        self._kept = []

    def check(self, *change: float) -> None:
        """Take the values of ``pending``: one, the largest change over the largest parameter, or none.

        Raises:
            TrainingError: no parameter moved in any of the first steps, although there were gradients and a learning
                rate.
        """
        if not change:
            return
        self.pending = []
        self.change = max(self.change, *change)
        if self.taken == FIRST_STEPS:
            self._report()

    def _report(self) -> None:
        """Say what the first steps have shown, where nothing can be learned."""
        if not any(self._rates):
            logger.warning("the learning rate was 0 in the first %d steps: nothing is learned so far", FIRST_STEPS)
        elif not any(self._norms):
            logger.warning(
                "the first %d steps had no gradient, every element is exactly zero: nothing is learned so far.\n"
                "  cause: the losses do not depend on the parameters, e.g. dead activations, a margin that all samples "
                "meet, or a loss weight of 0; or the gradients are below 6e-8 times the loss scale, which float16 "
                "rounds to 0",
                FIRST_STEPS,
            )
        elif self.change < SMALLEST_CHANGE:
            raise TrainingError(
                f"{FIRST_STEPS} optimizer steps were taken, and not one parameter moved.\n"
                f"  found: gradient norms {', '.join(f'{norm:.3g}' for norm in self._norms)}; learning rates "
                f"{min(self._rates):.3g} to {max(self._rates):.3g}; largest change {self.change:.2g} of the largest "
                "parameter\n"
                "  cause: the updates are smaller than float32 can resolve, the optimizer does not step, or something "
                "gives the parameters back.\n"
                "  fix:   a higher SOLVER.BASE_LR, or another SOLVER.OPT"
            )
