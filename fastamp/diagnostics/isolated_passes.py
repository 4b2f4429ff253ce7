"""Passes of a model over one batch that leave no trace, so that a run goes on as if they had never been."""

import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fastamp.amp.checks import check_losses
from fastamp.amp.policy import PrecisionPolicy
from fastamp.utils import comm
from fastamp.utils.env import random_state, set_random_state
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "is_out_of_memory": "fastamp.amp.device_errors.is_out_of_memory",
        "Rehearsal": "fastamp.diagnostics.isolated_passes.IsolatedPasses",
        "apart": "fastamp.diagnostics.isolated_passes.without_collectives",
        "part_of": "fastamp.diagnostics.isolated_passes.slice_batch",
    },
)

# What PyTorch keeps in a module's attributes, and a forward that was put there: no state.
_OF_PYTORCH = frozenset(vars(nn.Module()).keys() - {"training"} | {"forward"})


@dataclass(frozen=True)
class TrainPass:
    """What a forward and a backward pass gave.

    Attributes:
        losses: loss name -> its value.
        gradients: parameter name -> gradient, divided by the loss scale again; without those that got none.
        bad_gradients: names of the parameters whose gradient was not finite, before that division.
        reached: how many parameters got a gradient.
    """

    losses: dict[str, float]
    gradients: dict[str, torch.Tensor]
    bad_gradients: list[str]
    reached: int

    @property
    def bad_losses(self) -> list[str]:
        """Names of the losses that are not finite."""
        return [name for name, value in self.losses.items() if value - value != 0]

    @property
    def finite(self) -> bool:
        """Whether all losses and all gradients are."""
        return not self.bad_losses and not self.bad_gradients


class IsolatedPasses:
    """Passes over one batch, each from the same state of the model and of all random generators.

    Use it as a context: at its end buffers, gradients, modes, modules' other attributes (numbers, tensors, generators,
    and lists, dicts and sets of them) and random states are, bit for bit, what they were. Parameters are not changed by
    passes, and are not kept.

    Args:
        model: batch -> losses in training mode, features in evaluation mode.
        batch: of the model's own kind; the model gets copies of it.
        random: the random state that passes start from (``fastamp.utils.env.random_state``); None is the present one.
        frozen: modules that are frozen on purpose, see ``OptimizationStep``.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: dict[str, Any],
        *,
        random: dict[str, Any] | None = None,
        frozen: tuple[str, ...] = (),
    ) -> None:
        self.model = model
        self.batch = batch
        self.frozen = frozen
        self._start = random

    def __enter__(self) -> "IsolatedPasses":
        modules = list(self.model.modules())
        self._random = random_state()
        self._start = self._start or self._random
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module in modules
            for name, buffer in module._buffers.items()
        ]
        # Modes, and whatever else layers remember in plain attributes: counters, queues, generators, tensors.
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
        """Run the forward pass under ``policy`` and the backward pass of ``scale`` times the sum of the losses.

        The model is in the mode that it came in: training, frozen parts as in evaluation.

        Args:
            policy, scale: of the pass.
            checked: look whether anything computes in the policy's dtype, and follow each loss to the parameters.

        Raises:
            TrainingError: the losses could not train anything, see ``check_losses``; nothing computes in low precision.
        """
        self._rewind()
        with torch.enable_grad():
            with policy.checked_autocast() if checked else policy.autocast():
                losses = self.model(self._copy())
            check_losses(losses, frozen=self.frozen, model=self.model if checked else None)
            (torch.stack(list(losses.values())).sum() * scale).backward()
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        for p in self.model.parameters():
            p.grad = None
        names, tensors = list(gradients), list(gradients.values())
        finite = torch.isfinite(torch.stack(torch._foreach_norm(tensors))).tolist() if tensors else []
        if scale != 1.0 and tensors:
            torch._foreach_mul_(tensors, 1.0 / scale)
        return TrainPass(
            losses={name: loss.item() for name, loss in losses.items()},
            gradients=gradients,
            bad_gradients=[name for name, good in zip(names, finite, strict=True) if not good],
            reached=len(names),
        )

    @torch.no_grad()
    def evaluate(self, policy: PrecisionPolicy) -> torch.Tensor:
        """Return what the model returns in evaluation mode under ``policy``, e.g. (B, D) features, as float32.

        A normalization layer that has seen no batch yet takes this one's statistics: with those that it was made
        with, a deep network's values may grow without bound, which says nothing about the precision.
        """
        statistics = self.initial_statistics()
        self._rewind()
        for buffer, value in statistics:
            buffer.copy_(value)
        self.model.eval()
        with policy.autocast():
            output = self.model(self._copy())
        return output.float() if isinstance(output, torch.Tensor) else output

    @property
    def untrained(self) -> bool:
        """Whether there are normalization layers that have seen no batch yet.

        The features of such a model hardly differ from image to image; behind a batch norm, which takes their mean
        away, what is left of a low precision's rounding is of their size.
        """
        return bool(self.initial_statistics())

    @torch.no_grad()
    def initial_statistics(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (buffer, this batch's float32 value) of the normalization layers that have seen no batch yet.

        ``evaluate`` needs them, from a forward pass of its own the first time; who watches layers asks before.
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
        """Give modes, attributes, buffers and generators the state that passes start from."""
        for module, attributes in self._attributes:
            for name in _attributes(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)
        for restore in self._restorers:
            restore()
        names: dict[nn.Module, set[str]] = {}
        for module, name, buffer, kept in self._buffers:
            names.setdefault(module, set()).add(name)
            if buffer is not None and buffer.is_inference():  # cannot be written to here
                buffer = kept.clone()
            elif buffer is not None:
                buffer.copy_(kept)
            module._buffers[name] = buffer
        for module, _ in self._attributes:
            for name in module._buffers.keys() - names.get(module, set()):
                del module._buffers[name]  # registered by a pass
        set_random_state(self._start)


def _copied(value: Any) -> Any:
    """Return ``value`` with copies of the tensors, lists and dicts in it."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if type(value) is list else value


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that may be state: not parameters, buffers, modules and hooks."""
    return {name: value for name, value in vars(module).items() if name not in _OF_PYTORCH}


def restore_generator(value: Any) -> Callable[[], Any] | None:
    """Return what resets a generator of PyTorch, NumPy or Python to its present state; None for any other value."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, (np.random.Generator, np.random.RandomState)):
        bits = value.bit_generator if isinstance(value, np.random.Generator) else value._bit_generator
        state = copy.deepcopy(bits.state)
        return lambda: setattr(bits, "state", state)
    if isinstance(value, random.Random):
        state = value.getstate()
        return lambda: value.setstate(state)
    return None


def _restorer(value: Any) -> Callable[[], Any] | None:
    """Return what gives ``value`` the content that it has now; None where it cannot change, or is not looked into."""
    if (restore := restore_generator(value)) is not None:
        return restore
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        kept = value.detach().clone()
        return lambda: value.copy_(kept) if not (value.requires_grad or value.is_inference()) else None
    if not isinstance(value, (list, dict, set, deque)):
        return None
    content = copy.copy(value)
    inner = [r for item in (value.values() if isinstance(value, dict) else value) if (r := _restorer(item)) is not None]

    def restore() -> None:
        value.clear()
        (value.update if isinstance(value, (dict, set)) else value.extend)(content)
        for each in inner:
            each()

    return restore


@contextmanager
def without_collectives(model: nn.Module) -> Iterator[None]:
    """Have passes inside wait for no other process: gathering losses and syncBN see this process's images alone.

    Among several processes all of them must come here together; what they do inside need not be the same.
    """
    if not comm.is_distributed():
        yield
        return
    layers = [module for module in model.modules() if isinstance(module, nn.SyncBatchNorm)]
    own, former = comm.single_process_group() if layers else None, [layer.process_group for layer in layers]
    try:
        for layer in layers:
            layer.process_group = own
        with comm.as_single_process():
            yield
    finally:
        for layer, group in zip(layers, former, strict=True):
            layer.process_group = group


def batch_size(batch: dict[str, Any]) -> int:
    """Return the number of images of a batch: the length of its longest tensor."""
    sizes = [len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim()]
    return max(sizes, default=1)


def slice_batch(batch: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the first ``count`` images of a batch."""
    size = batch_size(batch)
    if count == size:
        return batch
    sliceable = {key for key, v in batch.items() if isinstance(v, (torch.Tensor, list, tuple)) and len(v) == size}
    return {key: value[:count] if key in sliceable else value for key, value in batch.items()}
