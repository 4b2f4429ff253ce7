"""Snapshot of the buffers that forward passes modify, restored after a skipped step."""

import torch
from torch import nn

from fastamp.utils.moved import renamed_attribute

_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class ForwardBuffers:
    """Snapshot of the buffers that forward passes modify.

    These are the buffers of normalization layers and of modules with the class attribute
    ``written_in_forward = True``, such as memory banks and moving averages. A forward pass that overflows writes NaN
    into running means. Skipping the step protects the parameters but not these buffers, and an evaluation would use
    the NaN values.

    Args:
        model: module that owns the buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, _LAYERS) or "running_mean" in m._buffers]
        self._banks = [m for m in model.modules() if getattr(m, "written_in_forward", False)]
        self._saved: list[torch.Tensor] | None = None

    @torch.no_grad()
    def save(self) -> None:
        """Copy the current buffers."""
        current = self._current()
        if self._saved is None:
            self._saved = [buffer.clone() for buffer in current]
        else:
            _copy(self._saved, current)

    keep = renamed_attribute("keep", "save")

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers from the last snapshot."""
        if self._saved is not None:
            _copy(self._current(), self._saved)

    def _current(self) -> list[torch.Tensor]:
        buffers = [buffer for layer in self._layers for buffer in layer.buffers(recurse=False)]
        buffers += [buffer for bank in self._banks for buffer in bank.buffers()]
        return list({id(buffer): buffer for buffer in buffers}.values())


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy ``sources`` into ``targets``, with one fused operation for floating-point and one for integer tensors."""
    for floating in (True, False):
        chosen = [(a, b) for a, b in zip(targets, sources, strict=True) if a.is_floating_point() is floating]
        if chosen:
            torch._foreach_copy_([a for a, _ in chosen], [b for _, b in chosen])
