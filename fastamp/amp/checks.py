"""Checks of losses, gradients, parameters and optimizers, with messages that name the cause and the fix."""

import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from fastamp.utils import comm
from fastamp.utils.errors import TrainingError
from fastamp.utils.plural import plural
from fastamp.utils.sharding import row_shards

logger = logging.getLogger(__name__)


FIRST_STEPS = 3
"""Number of optimizer steps at the start of a run in which parameter updates are monitored."""

SMALLEST_CHANGE = 1e-10
"""Smallest relative update that counts as training: largest absolute change divided by largest absolute parameter.

Float32 rounding absorbs smaller updates, except for parameters near zero.
"""


def check_optimizers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Check that the optimizers hold exactly the model's trainable parameters.

    PyTorch does not check this. If the optimizer holds copies of the parameters, or flat buffers that no longer share
    memory with them, training runs without an error and learns nothing.

    Raises:
        TrainingError: if an optimizer holds a tensor that is not a parameter of the model, or if a trainable parameter
            is missing from all optimizers.
    """
    model_ids = {id(p) for p in model.parameters()}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer_params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    foreign = [p for p in optimizer_params if id(p) not in model_ids]
    optimizer_ids = {id(p) for p in optimizer_params}
    missing = [name for name, p in trainable.items() if id(p) not in optimizer_ids]
    if not foreign and not missing:
        return
    counts = (
        f"  found: {len(trainable)} trainable parameters in the model, {len(optimizer_params)} tensors in the "
        f"optimizers, {len(optimizer_ids & {id(p) for p in trainable.values()})} in both\n"
    )
    names = f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}"
    if foreign:
        shapes = ", ".join(str(tuple(p.shape)) for p in foreign[:3])
        held = plural(
            len(foreign),
            "tensor that is not a parameter of the model",
            "tensors that are not parameters of the model",
        )
        cause = "the model was copied, rebuilt, flattened, or loaded with assign=True after the optimizer was built."
        if missing and len(missing) < len(trainable):
            cause = "a part of the model, e.g. its head, was replaced after the optimizer was built."
        raise TrainingError(
            f"the optimizers hold {held} (shapes {shapes}): "
            "their updates do not change the model.\n"
            f"{counts}"
            f"  trainable parameters that are not in any optimizer: {names or 'none'}\n"
            f"  cause: {cause}\n"
            "  fix:   build the optimizer last, from the parameters of the final model"
        )
    raise TrainingError(
        f"{len(missing)} trainable parameters are not in any optimizer: {names}.\n"
        f"{counts}"
        "  cause: a part of the model, e.g. its head, was replaced after the optimizer was built.\n"
        "  fix:   build the optimizer from the final model, or set requires_grad to False for these parameters"
    )


class NonFiniteParameters(TrainingError):
    """Raised if parameters or buffers are not finite, or so large that the forward pass overflows."""


LARGEST_PARAMETER = 1e15
"""Absolute value above which a parameter counts as diverged. Trained weights are below 1e4; after two layers with such
weights, products overflow float32."""


def check_finite(model: nn.Module) -> None:
    """Check that all parameters and buffers are finite, with one device-to-host copy.

    Raises:
        NonFiniteParameters: if a parameter or buffer contains NaN or Inf; the message lists the names.
    """
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    tensors = {name: tensor for name, tensor in named if tensor.is_floating_point()}
    if not tensors:
        return
    finite = torch.isfinite(magnitudes(tensors.values())).tolist()
    if bad := [name for name, ok in zip(tensors, finite, strict=True) if not ok]:
        raise NonFiniteParameters(
            f"{plural(len(bad), 'parameter or buffer is', 'parameters or buffers are')} not finite, e.g. "
            f"{', '.join(bad[:3])}: the model is not evaluated "
            "or saved.\n"
            "  cause: the weights diverged, or an overflow reached the running statistics "
            "(SOLVER.AMP.RESTORE_BUFFERS_ON_SKIP is off, or does not cover the buffers of a custom layer).\n"
            "  fix:   resume from the last checkpoint with a lower SOLVER.BASE_LR, with SOLVER.CLIP_GRADIENTS, or with "
            "SOLVER.AMP.RESTORE_BUFFERS_ON_SKIP on"
        )


def explain_diverged(names: Sequence[str]) -> str:
    """Build the error message for parameters that are not finite or exceed ``LARGEST_PARAMETER``."""
    return (
        f"the weights diverged: {plural(len(names), 'parameter')} with values that are not finite or exceed "
        f"{LARGEST_PARAMETER:g}, e.g. "
        f"{', '.join(names[:3])}. Another precision does not help.\n"
        "  cause: an update with a learning rate that is too high or not finite, or weights that were not finite "
        "when they were loaded.\n"
        "  fix:   resume from the last checkpoint with a lower SOLVER.BASE_LR or with SOLVER.CLIP_GRADIENTS"
    )


def magnitudes(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Compute the largest absolute value of each tensor, on the device.

    Args:
        tensors: floating-point tensors. The magnitude of an empty tensor is 0.

    Returns:
        (N,) float32; NaN for tensors that contain NaN.
    """
    filled = [t.detach() if t.numel() else t.new_zeros(1) for t in tensors]
    return torch.stack([norm.float() for norm in torch._foreach_norm(filled, float("inf"))])


def explain_no_gradient(model: nn.Module, optimizers: Sequence[Optimizer]) -> str:
    """Build the error message for a step in which no parameter in the optimizers has a gradient."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    reached = [p for p in trainable if p.grad is not None]
    optimizer_params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    optimizer_ids = {id(p) for p in optimizer_params}
    shared = [p for p in trainable if id(p) in optimizer_ids]
    frozen = [name for name, p in model.named_parameters() if id(p) in optimizer_ids and not p.requires_grad]
    names = ", ".join(f"{type(optimizer).__name__}" for optimizer in optimizers)
    if not trainable:
        cause = "all parameters of the model are frozen."
        fix = "set requires_grad to True for the parameters to train"
    elif frozen and not shared:
        cause = f"all parameters in the optimizer are frozen, e.g. {', '.join(frozen[:3])}."
        fix = "freeze fewer layers (MODEL.FREEZE_LAYERS), or build the optimizer from the trainable parameters"
    elif not shared:
        cause = "the optimizer holds tensors that are not parameters of the model."
        fix = "build the optimizer after the model is final (device, head, load_state_dict(assign=True))"
    elif reached:
        cause = "the loss depends only on parameters that no optimizer holds."
        fix = "build the optimizer from the parameters to train"
    else:
        cause = "the gradients were cleared before the step, or the loss was computed with another model."
        fix = "call zero_grad() only after the step, and compute the loss with the model that is trained"
    return (
        f"the optimizer ({names}, {len(optimizer_params)} tensors) received no gradient, so it cannot step\n"
        '(torch.amp.GradScaler reports this as "No inf checks were recorded for this optimizer").\n'
        f"  found: {len(trainable)} trainable parameters in the model, {len(shared)} of them in the optimizer, "
        f"{len(reached)} with a gradient\n"
        f"  cause: {cause}\n"
        f"  fix:   {fix}"
    )


def check_losses(
    losses: dict[str, torch.Tensor], *, frozen: Sequence[str] = (), model: nn.Module | None = None
) -> None:
    """Check that every loss is a float32 or float64 scalar that depends on a parameter of the model.

    Args:
        losses: return value of the model in training mode.
        frozen: names of modules frozen by ``MODEL.FREEZE_LAYERS``. If not empty, only one of the losses must require a
            gradient.
        model: model whose parameters must occur in the autograd graph of each loss. With None, only ``requires_grad``
            is checked, which is faster.

    Raises:
        TrainingError: if there are no losses, if a loss is not a float32 or float64 scalar, or if a loss does not
            depend on a trainable parameter.
    """
    if not isinstance(losses, dict):
        raise TrainingError(
            f"in training mode the model must return a dict of loss name -> scalar tensor, got "
            f"{type(losses).__name__}.\n  fix: return such a dict if self.training is True"
        )
    if not losses:
        raise TrainingError(
            "the model returned no losses: in training mode it must return a dict of loss name -> scalar tensor.\n"
            "  fix: set at least one loss in MODEL.LOSSES.NAME"
        )
    parameter_ids = {id(p) for p in model.parameters()} if model is not None else None
    for name, loss in losses.items():
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            fix = "return its mean" if isinstance(loss, torch.Tensor) else "return the tensor, without .item()"
            raise TrainingError(f"loss {name!r} must be a scalar tensor, got {shape}.\n  fix: {fix}")
        if loss.dtype not in (torch.float32, torch.float64):
            raise TrainingError(
                f"loss {name!r} must be float32 or float64 under every precision policy, got {loss.dtype}.\n"
                "  fix: decorate the loss with fastamp.amp.force_fp32"
            )
        connected = loss.requires_grad and (parameter_ids is None or _reaches(loss, parameter_ids))
        if not connected and (loss.requires_grad or not frozen):
            raise TrainingError(
                f"loss {name!r} does not depend on any trainable parameter of the model, so it has no gradient.\n"
                f"  found: {_describe_graph(loss)}\n"
                "  cause: the loss was detached or wrapped in a new tensor, or all layers before it are frozen.\n"
                "  fix:   compute the loss from the model's outputs without .detach(), .item() or torch.tensor()"
            )
    if not any(loss.requires_grad for loss in losses.values()):
        raise TrainingError(
            f"none of the losses ({', '.join(losses)}) depends on a trainable parameter.\n"
            f"  cause: the losses depend only on layers frozen by MODEL.FREEZE_LAYERS ({', '.join(frozen)}).\n"
            "  fix:   list fewer layers in MODEL.FREEZE_LAYERS"
        )


def _describe_graph(loss: torch.Tensor) -> str:
    if not loss.requires_grad:
        return "requires_grad is False"
    if loss.grad_fn:
        return "the autograd graph of the loss does not contain parameters of the model"
    return "the loss is a leaf tensor (requires_grad is True, grad_fn is None)"


def _reaches(loss: torch.Tensor, parameters: set[int]) -> bool:
    """Return True if the autograd graph of ``loss`` may contain a tensor whose ``id()`` is in ``parameters``."""
    if loss.grad_fn is None:
        return id(loss) in parameters
    return any(_may_use_parameters(node) or id(_leaf_of(node)) in parameters for node in _nodes([loss]))


def _leaf_of(node: Any) -> torch.Tensor | None:
    """Return the leaf tensor whose gradient a node accumulates; None for other nodes."""
    leaf: torch.Tensor | None = getattr(node, "variable", None)
    return leaf


def _may_use_parameters(node: Any) -> bool:
    """Return True if ``node`` belongs to a custom autograd function that may use parameters outside the graph.

    Reentrant activation checkpointing does. Other functions set ``ctx.uses_parameters = False``.
    """
    return isinstance(node, torch.autograd.function.BackwardCFunction) and getattr(node, "uses_parameters", True)


def _nodes(losses: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield each node of the autograd graph of ``losses`` once."""
    nodes = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        yield node
        following = [function for function, _ in node.next_functions if function is not None and function not in seen]
        seen.update(following)
        nodes += following


def warn_of_foreign_leaves(losses: Mapping[str, torch.Tensor], model: nn.Module) -> None:
    """Warn if the losses depend on leaf tensors that require a gradient but are not parameters of the model.

    Such tensors are not trained, not saved, and not moved to the device. The usual cause is a layer in a plain Python
    list or dict.

    Args:
        losses: losses of one batch.
        model: model that returned the losses.
    """
    model_ids = {id(p) for p in model.parameters()}
    leaves = [leaf for node in _nodes(losses.values()) if (leaf := _leaf_of(node)) is not None]
    foreign = {id(leaf): leaf for leaf in leaves if id(leaf) not in model_ids}
    if not foreign:
        return
    containers = {id(p): name for name, p in _parameters_in_containers(model)}
    described = [containers.get(key, f"shape {tuple(leaf.shape)}") for key, leaf in foreign.items()]
    logger.warning(
        "the losses depend on %s: %s%s. Such tensors are not trained and not saved.\n"
        "  cause: a layer in a plain list or dict, or a tensor with requires_grad that is not an nn.Parameter.\n"
        "  fix:   use nn.ModuleList, nn.ModuleDict or nn.Parameter, or call requires_grad_(False)",
        plural(
            len(described),
            "tensor that requires a gradient and is not a parameter of the model",
            "tensors that require a gradient and are not parameters of the model",
        ),
        ", ".join(described[:5]),
        ", ..." if len(described) > 5 else "",
    )


def _parameters_in_containers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the tensor of each parameter in a list, tuple or dict attribute of a module."""
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                name = f"{prefix}.{attribute}[{key!r}]".lstrip(".")
                if isinstance(item, nn.Module):
                    yield from ((f"{name}.{local_name}", p) for local_name, p in item.named_parameters())
                elif isinstance(item, torch.Tensor):
                    yield name, item


@runtime_checkable
class PerRankModule(Protocol):
    """Module all of whose parameters differ between ranks by design, if its attribute is True."""

    sharded: bool


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module, PerRankModule) and module.sharded


def check_communication(parallel_model: nn.Module, *, scaled: bool) -> None:
    """Check that DDP does not all-reduce scaled gradients in float16.

    Args:
        parallel_model: a DistributedDataParallel model; other models are not checked.
        scaled: True if the loss is multiplied by a loss scale.

    Raises:
        TrainingError: if ``fp16_compress_hook`` is registered and the loss is scaled.
    """
    for hook in (hook for module in parallel_model.modules() for hook, _ in getattr(module, "_comm_hooks", ())):
        if scaled and "fp16_compress" in repr(hook):
            raise TrainingError(
                "fp16_compress_hook is registered on a DDP model, but the loss is scaled: scaled gradients overflow in "
                "a float16 all-reduce, so most steps would be skipped.\n"
                "  fix: register bf16_compress_hook instead (bfloat16 has the range of float32), or set "
                "SOLVER.AMP.DTYPE bfloat16, which does not scale the loss"
            )


@torch.no_grad()
def check_replicas(model: nn.Module, losses: Sequence[str]) -> None:
    """Check that all ranks hold the same parameters and compute the same losses.

    Two parameters count as equal if their float64 sums are equal. Buffers, such as batch-norm statistics, may differ
    between ranks. Parameters in ``row_shards`` of a module, and those of a
    ``PerRankModule``, differ by design and are not compared.

    Args:
        model: model of this rank.
        losses: names of the losses of this rank.

    Raises:
        TrainingError: if the parameters or the names of the losses differ between ranks; the message lists them.
    """
    if not comm.is_distributed():
        return
    sharded = {id(p) for module in model.modules() if _is_sharded(module) for p in module.parameters()}
    shards = row_shards(model)
    named = {name: p for name, p in model.named_parameters() if id(p) not in sharded and name not in shards}
    sums = torch.stack([p.double().sum() for p in named.values()]).tolist() if named else []
    # As text, because NaN is not equal to itself. Adding 0 turns -0 into 0.
    hex_sums = {name: (value + 0.0).hex() for name, value in zip(named, sums, strict=True)}
    gathered = [json.loads(message) for message in comm.gather_bytes(json.dumps(hex_sums).encode())]
    names = dict.fromkeys(itertools.chain.from_iterable(gathered))
    differing = [name for name in names if len({on_rank.get(name) for on_rank in gathered}) > 1]
    if differing:
        raise TrainingError(
            f"{plural(len(differing), 'parameter differs', 'parameters differ')} between ranks, e.g. "
            f"{', '.join(differing[:3])}: each rank trains "
            "a different model.\n"
            "  cause: custom code changes parameters on some ranks only, or the forward pass bypasses "
            "DistributedDataParallel, so gradients are not averaged.\n"
            "  fix:   change parameters in the same way on all ranks; set sharded = True on a module whose parameters "
            "differ by design"
        )
    of_ranks = [message.decode() for message in comm.gather_bytes(", ".join(losses).encode())]
    if len(set(of_ranks)) > 1:
        losses_by_rank = "; ".join(f"rank {rank}: {names or 'none'}" for rank, names in enumerate(of_ranks))
        raise TrainingError(
            f"the ranks compute different losses, so each rank minimizes a different total loss.\n"
            f"  found: {losses_by_rank}\n"
            "  fix: return the same losses on all ranks; if a loss does not apply to a batch, return an output of the "
            "model multiplied by 0"
        )


def zero_fraction(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Compute the fraction of gradient elements that are exactly zero, 0..1, as a scalar tensor on the device."""
    nonzero = torch.stack([torch.count_nonzero(gradient) for gradient in gradients]).sum()
    return 1 - nonzero / sum(gradient.numel() for gradient in gradients)


def _rows(tensor: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return tensor if index is None else tensor[index]


class ParameterUpdateMonitor:
    """Check that the first optimizer steps change the parameters, without an additional device synchronization.

    ``OptimizationStep`` owns the monitor, so custom training loops are monitored too. The size of each update stays on
    the device until the host reads the verdict of the next step.

    Attributes:
        reported: True after a warning that the parameters do not change.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = optimizers
        self.taken = 0
        self.change = 0.0
        self.reported = False
        self.pending: list[torch.Tensor] = []
        self._norms: list[float] = []
        self._rates: list[float] = []
        self._kept: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = []

    @property
    def finished(self) -> bool:
        """True if all monitored steps were taken and their updates were checked."""
        return self.taken >= FIRST_STEPS and not self.pending

    @torch.no_grad()
    def before_step(self) -> None:
        """Copy the parameters before an optimizer step."""
        if self.taken < FIRST_STEPS and self.change < SMALLEST_CHANGE:
            groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
            self._rates += [float(group["lr"]) for group in groups]
            moving = [p for group in groups if group["lr"] for p in group["params"] if p.grad is not None and p.numel()]
            # Of a parameter with a sparse gradient, which may be large, only the rows that the step updates.
            rows = [p.grad.indices()[0] if p.grad.is_sparse else None for p in moving]
            self._kept = [(p, index, _rows(p, index).clone()) for p, index in zip(moving, rows, strict=True)]

    @torch.no_grad()
    def after_step(self, grad_norm: float) -> None:
        """Measure how much an optimizer step changed the parameters.

        Args:
            grad_norm: total L2 norm of the gradients of the step.
        """
        if self.taken >= FIRST_STEPS:
            return
        self.taken += 1
        self._norms.append(grad_norm)
        if self._kept:
            changes = torch._foreach_norm([_rows(p, index) - before for p, index, before in self._kept], float("inf"))
            sizes = torch._foreach_norm([before for _, _, before in self._kept], float("inf"))
            self.pending = [torch.stack(changes).max() / torch.stack(sizes).max().clamp_min(SMALLEST_CHANGE)]
        elif self.taken == FIRST_STEPS:
            self._report()
        self._kept = []

    def check(self, *change: float) -> None:
        """Receive the last measured update from the device, and report after the last monitored step.

        Args:
            change: value of ``pending``, copied to the host: largest absolute change divided by the largest absolute
                parameter. Omitted if ``pending`` is empty.

        Raises:
            TrainingError: if the first steps changed no parameter by more than ``SMALLEST_CHANGE``, although the
                gradients and the learning rate were not zero.
        """
        if not change:
            return
        self.pending = []
        self.change = max(self.change, *change)
        if self.taken == FIRST_STEPS:
            self._report()

    def _report(self) -> None:
        """Warn or raise if the first steps did not change the parameters."""
        self.reported = not any(self._rates) or not any(self._norms)
        if not any(self._rates):
            logger.warning(
                "the learning rate is 0 in the first %d steps: the parameters do not change.\n"
                "  fix: increase SOLVER.BASE_LR, or start the warmup above 0 (SOLVER.WARMUP_FACTOR)",
                FIRST_STEPS,
            )
        elif not any(self._norms):
            logger.warning(
                "all gradients are exactly zero in the first %d steps: the parameters do not change.\n"
                "  cause: dead activations, a margin that all samples satisfy, a loss weight of 0, or float16 "
                "underflow (gradients below 6e-8 divided by the loss scale).\n"
                "  fix:   check the loss weights and margins; with float16, set SOLVER.AMP.DTYPE to bfloat16",
                FIRST_STEPS,
            )
        elif self.change < SMALLEST_CHANGE:
            raise TrainingError(
                f"no parameter changed in the first {FIRST_STEPS} optimizer steps.\n"
                f"  found: gradient norms {', '.join(f'{norm:.3g}' for norm in self._norms)}; learning rates "
                f"{min(self._rates):.3g} to {max(self._rates):.3g}; largest change {self.change:.2g} relative to the "
                "largest parameter\n"
                "  cause: the updates are below the resolution of float32, the optimizer does not step, or the "
                "parameters are reset after each step.\n"
                "  fix:   increase SOLVER.BASE_LR, or choose another SOLVER.OPT"
            )
