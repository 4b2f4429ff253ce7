"""Averages of model weights over training: EMA and SWA."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fastamp.amp.model_tensors import ModelTensors
from fastamp.checkpoint.shards import gather_rows, select_rows
from fastamp.utils.sharding import row_shards


class WeightAverage:
    """Running average of the parameters and floating-point buffers of a model, in the dtype of each tensor.

    Integer and boolean buffers are copied from the model at each update. An exponential moving average (EMA) calls
    ``update(1 - decay)`` after every step; stochastic weight averaging (SWA, Izmailov et al. 2018, arXiv:1803.05407)
    calls ``update(1 / (updates + 1))`` after every averaged epoch, or with a smaller weight if the average contains the
    initial weights.

    Args:
        model: model to average. Its current values initialize the average.
        kind: name of the average in checkpoints, e.g. ``"ema"``.
    """

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.kind = kind
        self.updates = 0
        self._model = model
        self._tensors = ModelTensors(model)
        self._version = 0
        self._stored: dict[str, torch.Tensor] = {}
        self._refresh()
        self._applied = False

    def _refresh(self) -> None:
        """Update the list of the model's tensors if modules or tensors were added, removed or replaced.

        The average of a new tensor, or of one with another shape, starts with its current values.
        """
        version = self._tensors.refresh()
        if version == self._version:
            return
        self._version = version
        saved = self._model.state_dict().keys()
        named = itertools.chain(self._model.named_parameters(), self._model.named_buffers())
        # Not detached: a detached tensor keeps the old data if the data of a parameter is replaced, as model.to does.
        self._live = live = {name: tensor for name, tensor in named if name in saved}
        kept = {name: value for name, value in self._stored.items() if name in live and value.shape == live[name].shape}
        self._stored = {name: kept[name] if name in kept else tensor.detach().clone() for name, tensor in live.items()}
        # (averages, values of the model) of the floating-point tensors, and of the others.
        self._floating, self._others = (
            ([self._stored[name] for name in names], [live[name] for name in names])
            for names in (
                [name for name, tensor in live.items() if tensor.is_floating_point() is floating]
                for floating in (True, False)
            )
        )

    @torch.no_grad()
    def restart(self) -> None:
        """Restart the average from the current values of the model."""
        self._refresh()
        for name, live in self._live.items():
            self._stored[name].copy_(live)
        self.updates = 0

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Update the average to average + ``weight`` * (model - average), with ``weight`` in 0..1."""
        self._refresh()
        torch._foreach_lerp_(*self._floating, weight)
        if self._others[0]:
            torch._foreach_copy_(*self._others)
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager that swaps the values of the model and the average on entry, and swaps them back on exit.

        Changes to the model inside the context, e.g. re-estimated batch norm statistics, become part of the average.
        """
        self._refresh()
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, live in self._live.items():
            values = live.clone()
            live.copy_(self._stored[name])
            self._stored[name].copy_(values)
        self._applied = not self._applied

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the averaged tensors, keyed by name in the model's state dict."""
        return {name: tensor.detach() for name, tensor in (self._live if self._applied else self._stored).items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the kind, the number of updates and the averaged tensors. Must be called on every rank."""
        tensors, shards = self.tensors(), row_shards(self._model)
        return {
            "kind": self.kind,
            "updates": self.updates,
            "model": gather_rows(tensors, shards) if shards else tensors,
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the average from ``state``.

        Raises:
            ValueError: if ``state`` contains another kind of average, or the average of another model.
        """
        if state["kind"] != self.kind:
            raise ValueError(f"expected an average of kind {self.kind!r}, got {state['kind']!r}")
        tensors = self.tensors()
        if tensors.keys() != state["model"].keys():
            raise ValueError("the average was saved for another model: the tensor names differ")
        saved = select_rows(state["model"], tensors, row_shards(self._model))
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])
        self.updates = state["updates"]
