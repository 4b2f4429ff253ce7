"""Forward and backward passes without side effects."""

import copy
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fastamp.amp.checks import check_losses
from fastamp.amp.policy import PrecisionPolicy
from fastamp.amp.row_update import gradient_values
from fastamp.utils import comm
from fastamp.utils.env import random_state, set_random_state

# Attributes of nn.Module itself, and a patched forward; other attributes may be state.
_NOT_STATE = frozenset(vars(nn.Module()).keys() - {"training"} | {"forward"})


@dataclass(frozen=True)
class TrainPass:
    """Losses and gradients of a forward and a backward pass.

    Attributes:
        losses: loss name -> value.
        gradients: parameter name -> unscaled gradient, for parameters that received one; of a sparse gradient, the
            rows that have one.
        bad_gradients: names of the parameters with a gradient that was not finite before unscaling.
        reached: number of parameters that received a gradient.
    """

    losses: dict[str, float]
    gradients: dict[str, torch.Tensor]
    bad_gradients: list[str]
    reached: int

    @property
    def bad_losses(self) -> list[str]:
        """Names of the non-finite losses."""
        return [name for name, value in self.losses.items() if value - value != 0]

    @property
    def finite(self) -> bool:
        """True if all losses and gradients are finite."""
        return not self.bad_losses and not self.bad_gradients


@dataclass(eq=False)
class IsolatedPasses:
    """Context manager for passes over one batch that all start from the same model state and random state.

    On exit, buffers, gradients, training modes, random states and other attributes of modules are restored bit for bit.
    These attributes are numbers, tensors, generators, and lists, dicts and sets of such values. Parameters are not
    saved, because passes do not change them.

    Args:
        model: model that returns losses in training mode and features in evaluation mode.
        batch: input of the model; each pass gets a copy.
        random: random state at the start of each pass (``fastamp.utils.env.random_state``). Default: the current one.
        frozen: names of frozen modules, see ``OptimizationStep``.
    """

    model: nn.Module
    batch: dict[str, Any]
    _: KW_ONLY
    random: dict[str, Any] | None = None
    frozen: tuple[str, ...] = ()

    def __enter__(self) -> "IsolatedPasses":
        modules = list(self.model.modules())
        self._random = random_state()
        self._start = self.random or self._random
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module in modules
            for name, buffer in module._buffers.items()
        ]
        # Training modes, and state in plain attributes: counters, queues, generators, tensors.
        self._attributes = [(module, _attributes(module)) for module in modules]
        self._restorers = [
            restore
            for _, attributes in self._attributes
            for value in attributes.values()
            if (restore := _restorer(value)) is not None
        ]
        self._gradients = [(p, p.grad) for p in self.model.parameters()]
        self._statistics: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        for p in self.model.parameters():
            p.grad = None
        return self

    def __exit__(self, *_: object) -> None:
        self._rewind()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        set_random_state(self._random)

    def train(self, policy: PrecisionPolicy, *, scale: float = 1.0, checked: bool = False) -> TrainPass:
        """Run a forward pass and the backward pass of ``scale`` times the sum of the losses.

        Each module is in the mode (training or evaluation) that it had when the context was entered.

        Args:
            policy: precision of the pass.
            scale: loss scale. Default 1.
            checked: also check that at least one operation computes in the dtype of the policy and that the autograd
                graph connects each loss to the parameters.

        Raises:
            TrainingError: if ``check_losses`` or ``PrecisionPolicy.checked_autocast`` fails.
        """
        self._rewind()
        with torch.enable_grad():
            with policy.checked_autocast() if checked else policy.autocast():
                losses = self.model(self._copy())
            check_losses(losses, frozen=self.frozen, model=self.model if checked else None)
            (torch.stack(list(losses.values())).sum() * scale).backward()
        gradients = {name: gradient_values(p) for name, p in self.model.named_parameters() if p.grad is not None}
        for p in self.model.parameters():
            p.grad = None
        names, tensors = list(gradients), list(gradients.values())
        finite = torch.isfinite(torch.stack(torch._foreach_norm(tensors))).tolist() if tensors else []
        if scale != 1.0 and tensors:
            torch._foreach_mul_(tensors, 1.0 / scale)
        return TrainPass(
            losses={name: loss.item() for name, loss in losses.items()},
            gradients=gradients,
            bad_gradients=[name for name, ok in zip(names, finite, strict=True) if not ok],
            reached=len(names),
        )

    @torch.no_grad()
    def evaluate(self, policy: PrecisionPolicy) -> torch.Tensor:
        """Run a forward pass in evaluation mode; return its output, e.g. (B, D) features, as float32.

        Only the first output of a model that returns several is returned.

        Batch norm layers that have not been trained use the statistics of this batch. With their initial statistics,
        the activations of a deep network could grow without bound in any precision.
        """
        statistics = self.initial_statistics()
        self._rewind()
        for buffer, value in statistics:
            buffer.copy_(value)
        self.model.eval()
        with policy.autocast():
            output = self.model(self._copy())
        output = output[0] if isinstance(output, tuple | list) and output else output
        return output.float() if isinstance(output, torch.Tensor) else output

    @property
    def untrained(self) -> bool:
        """True if the model has batch norm layers that have not been trained.

        Features of such a model hardly differ between images. After batch norm has subtracted their mean, rounding
        errors of a low precision are as large as the features.
        """
        return bool(self.initial_statistics())

    @torch.no_grad()
    def initial_statistics(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Compute float32 statistics of this batch for batch norm layers that have not been trained.

        The first call runs a forward pass. Call this before registering hooks, so that ``evaluate`` runs only one pass
        with the hooks.

        Returns:
            ``(buffer, value)`` for each buffer of these layers.
        """
        if self._statistics is None:
            self._rewind()
            fresh = [
                (layer, layer.momentum)
                for layer in self.model.modules()
                if isinstance(layer, nn.modules.batchnorm._BatchNorm)
                and layer.training
                and layer.num_batches_tracked is not None
                and layer.num_batches_tracked == 0
            ]
            try:
                for layer, _ in fresh:
                    layer.momentum = 1.0
                if fresh:
                    self.model(self._copy())
            finally:
                for layer, momentum in fresh:
                    layer.momentum = momentum
            self._statistics = [(b, b.clone()) for layer, _ in fresh for b in layer.buffers(recurse=False)]
        return self._statistics

    def _copy(self) -> dict[str, Any]:
        return {key: _copied(value) for key, value in self.batch.items()}

    @torch.no_grad()
    def _rewind(self) -> None:
        """Set training modes, attributes, buffers and random states to the values with which every pass starts."""
        for module, attributes in self._attributes:
            for name in _attributes(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
        for restore in self._restorers:
            restore()
        names: dict[nn.Module, set[str]] = {}
        for module, name, buffer, kept in self._buffers:
            names.setdefault(module, set()).add(name)
            if buffer is not None and kept is not None:
                if buffer.is_inference():  # inference tensors cannot be updated in place
                    buffer = kept.clone()
                else:
                    buffer.copy_(kept)
            module._buffers[name] = buffer
        for module, _ in self._attributes:
            for name in module._buffers.keys() - names.get(module, set()):
                del module._buffers[name]  # a pass registered it
        set_random_state(self._start)


def _copied(value: Any) -> Any:
    """Copy the tensors, lists and dicts in a nested structure."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that may be state: all except parameters, buffers, submodules and hooks."""
    return {name: value for name, value in vars(module).items() if name not in _NOT_STATE}


def restore_generator(value: Any) -> Callable[[], Any] | None:
    """Create a function that resets a PyTorch, NumPy or Python generator to its current state; None for other types."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        bits = value.bit_generator if isinstance(value, np.random.Generator) else value._bit_generator
        return functools.partial(setattr, bits, "state", copy.deepcopy(bits.state))
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    return None


def _restorer(value: Any) -> Callable[[], Any] | None:
    """Create a function that restores the current content of ``value``; None for immutable or unsupported types."""
    if (restore := restore_generator(value)) is not None:
        return restore
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        saved = value.detach().clone()
        return lambda: value.copy_(saved) if not (value.requires_grad or value.is_inference()) else None
    if not isinstance(value, (list, dict, set, deque)):
        return None
    content = copy.copy(value)
    inner = [r for item in (value.values() if isinstance(value, dict) else value) if (r := _restorer(item)) is not None]

    def restore_all() -> None:
        value.clear()
        (value.update if isinstance(value, (dict, set)) else value.extend)(content)
        for restore_one in inner:
            restore_one()

    return restore_all


@contextmanager
def without_collectives(model: nn.Module) -> Iterator[None]:
    """Context manager that disables communication: SyncBatchNorm and losses use only the images of this process.

    All processes must enter the context together; they may run different code inside.
    """
    if not comm.is_distributed():
        yield
        return
    layers = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    group, former = comm.single_process_group() if layers else None, [layer.process_group for layer in layers]
    try:
        for layer in layers:
            layer.process_group = group
        with comm.as_single_process():
            yield
    finally:
        for layer, group in zip(layers, former, strict=True):
            layer.process_group = group


def batch_size(batch: dict[str, Any]) -> int:
    """Return the number of images in a batch, which is the length of its longest tensor."""
    sizes = [len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()]
    return max(sizes, default=1)


def slice_batch(batch: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the first ``count`` images of a batch."""
    size = batch_size(batch)
    if count == size:
        return batch
    sliceable = {key for key, v in batch.items() if isinstance(v, (torch.Tensor, list, tuple)) and len(v) == size}
    return {key: value[:count] if key in sliceable else value for key, value in batch.items()}
