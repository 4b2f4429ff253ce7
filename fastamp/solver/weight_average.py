"""Averages of a model's weights over the training, in float32."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class WeightAverage:
    """A running average of a model's parameters and floating-point buffers; other buffers are those of the last update.

    An exponential moving average (EMA) is ``update(1 - decay)`` after every step, stochastic weight averaging (SWA,
    Izmailov et al. 2018, arXiv:1803.05407) is ``update(1 / (updates + 1))`` after every epoch.

    Args:
        model: its present values are where the average starts.
        kind: what the average is called in a checkpoint, e.g. ``"ema"``.
    """

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.kind = kind
        self.updates = 0
        saved = model.state_dict().keys()
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        self._live = {name: tensor.detach() for name, tensor in named if name in saved}
        self._stored = {name: tensor.clone() for name, tensor in self._live.items()}
        self._floating = [name for name, tensor in self._live.items() if tensor.is_floating_point()]
        self._applied = False

    @torch.no_grad()
    def restart(self) -> None:
        """Start anew from the model's present values."""
        for name, live in self._live.items():
            self._stored[name].copy_(live)
        self.updates = 0

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Move the average by ``weight`` (0..1) of its difference to the model."""
        average = [self._stored[name] for name in self._floating]
        torch._foreach_lerp_(average, [self._live[name] for name in self._floating], weight)
        for name in self._live.keys() - set(self._floating):
            self._stored[name].copy_(self._live[name])
        self.updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the model have the average's values inside, and its own again afterwards.

        What changes in the model inside, e.g. statistics that are estimated anew, stays with the average.
        """
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
        """Return the averaged tensors by the names of the model's state dict."""
        return dict(self._live if self._applied else self._stored)

    def state_dict(self) -> dict[str, Any]:
        """Return kind, number of updates and the averaged tensors."""
        return {"kind": self.kind, "updates": self.updates, "model": self.tensors()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``.

        Raises:
            ValueError: it is another kind of average, or of another model.
        """
        if state["kind"] != self.kind:
            raise ValueError(f"it holds an average of kind {state['kind']!r}, and this run keeps {self.kind!r}")
        own = self.tensors()
        if own.keys() != state["model"].keys():
            raise ValueError("its averaged weights are of another model")
        for name, tensor in own.items():
            tensor.copy_(state["model"][name])
        self.updates = state["updates"]
