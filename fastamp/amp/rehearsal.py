"""Passes of a model over one batch that leave no trace, so that a run goes on as if they had never been."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastamp.amp.health import check_losses
from fastamp.amp.policy import PrecisionPolicy
from fastamp.utils.env import random_state, set_random_state

_PLAIN = (bool, int, float, str, type(None))


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


class Rehearsal:
    """Passes over one batch, each from the same state of the model and of all random generators.

    Use it as a context: at its end buffers, gradients, modes, modules' plain numbers and random states are, bit for
    bit, what they were. Parameters are not changed by passes, and are not kept.

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

    def __enter__(self) -> "Rehearsal":
        modules = list(self.model.modules())
        self._random = random_state()
        self._start = self._start or self._random
        # Layers may own generators, e.g. for stochastic depth.
        self._generators = [
            (each, each.get_state()) for module in modules for each in vars(module).values() if _is_generator(each)
        ]
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.clone())
            for module in modules
            for name, buffer in module._buffers.items()
        ]
        # The mode, and what counts calls or points into a memory bank.
        self._plain = [
            (module, {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)})
            for module in modules
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

    def train(self, policy: PrecisionPolicy, *, scale: float = 1.0) -> TrainPass:
        """Run the forward pass under ``policy`` and the backward pass of ``scale`` times the sum of the losses.

        The model is in the mode that it came in: training, frozen parts as in evaluation.

        Raises:
            TrainingError: the losses could not train anything, see ``check_losses``.
        """
        self._rewind()
        with torch.enable_grad():
            with policy.autocast():
                losses = self.model(self._copy())
            check_losses(losses, frozen=self.frozen)
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
        statistics = self._first_statistics()
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
        return bool(self._first_statistics())

    def prepare_evaluation(self) -> None:
        """Do now what ``evaluate`` needs a forward pass of its own for, so that who watches sees one pass alone."""
        self._first_statistics()

    @torch.no_grad()
    def _first_statistics(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (buffer, this batch's float32 value) of the normalization layers that have seen no batch yet."""
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
        return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in self.batch.items()}

    @torch.no_grad()
    def _rewind(self) -> None:
        """Give modes, counters, buffers and generators the state that passes start from."""
        for module, plain in self._plain:
            vars(module).update(plain)
        for module, name, buffer, kept in self._buffers:
            if buffer is not None:
                buffer.copy_(kept)
            module._buffers[name] = buffer
        for generator, state in self._generators:
            generator.set_state(state)
        set_random_state(self._start)


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator)
