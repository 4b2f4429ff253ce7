"""Monitoring of activations."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fastamp.engine.hooks.base import HookBase
from fastamp.utils.compiled import uncompiled

if TYPE_CHECKING:
    from fastamp.engine.train_loop import SimpleTrainer


class ActivationMonitor(HookBase):
    """Record the largest absolute activation, the layer that returned it, and its ratio to the dtype's largest number.

    The dtype is that of the trainer's precision policy. Activations are measured in the last iteration of each log
    period. Register this hook before ``PeriodicWriter``.

    Args:
        model: model whose leaf modules are monitored.
        period: log period in iterations.
    """

    trainer: "SimpleTrainer"

    def __init__(self, model: nn.Module, period: int) -> None:
        self.model = model
        self.layers = {m: name for name, m in model.named_modules() if next(m.children(), None) is None}
        self.period = period
        self._handles = ExitStack()
        self._largest: dict[str, torch.Tensor] = {}

    def before_step(self) -> None:
        done = self.trainer.iter + 1
        if done % self.period == 0 or done == self.trainer.max_iter:
            self._handles.enter_context(uncompiled(self.model))
            for layer in self.layers:
                self._handles.callback(layer.register_forward_hook(self._look).remove)

    def after_step(self) -> None:
        self._handles.close()
        if not self._largest:
            return
        values = torch.stack([value.float() for value in self._largest.values()]).tolist()
        layer, value = max(zip(self._largest, values, strict=True), key=lambda pair: (pair[1] != pair[1], pair[1]))
        self._largest.clear()
        self.trainer.metrics.latest(
            largest_activation=value,
            largest_activation_layer=layer,
            activation_limit_share=value / torch.finfo(self.trainer.policy.dtype).max,
        )

    def _look(self, layer: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel():
            low, high = torch.aminmax(output.detach())
            size, name = torch.maximum(-low, high), self.layers[layer]
            self._largest[name] = torch.maximum(self._largest[name], size) if name in self._largest else size
