"""Snapshot of the buffers that forward passes modify, restored after a skipped step."""

import itertools
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from fastamp.amp.model_tensors import ModelTensors

_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


@runtime_checkable
class ForwardWriter(Protocol):
    """Module whose forward passes write its buffers, if its attribute is True."""

    written_in_forward: bool


@runtime_checkable
class WriteRecorder(Protocol):
    """Module whose forward passes keep the values that they overwrite, while it records."""

    def record_writes(self, on: bool) -> None:
        """Start to record, or stop and discard the record."""

    def undo_writes(self) -> None:
        """Restore the recorded values."""


class ForwardBuffers:
    """Snapshot of the buffers that forward passes modify.

    These are the buffers of normalization layers and of each ``ForwardWriter``, such as moving averages. A forward pass
    that overflows writes NaN into running means. Skipping the step protects the parameters but not these buffers, and
    an evaluation would use the NaN values.

    Modules that write a small part of large buffers, such as memory banks, are a ``WriteRecorder`` instead.

    Args:
        model: module that owns the buffers.
        tensors: cached lists of the modules of ``model``. Default: new ones.
    """

    def __init__(self, model: nn.Module, tensors: ModelTensors | None = None) -> None:
        self._tensors = tensors or ModelTensors(model)
        self._version = 0
        self._recording: list[WriteRecorder] = []
        self._groups: list[list[torch.Tensor]] = []
        self._owners: list[list[tuple[nn.Module, str]]] = []  # module and name of each buffer in _groups
        self._saved: list[list[torch.Tensor]] | None = None

    @torch.no_grad()
    def save(self) -> None:
        """Copy the current buffers, and let modules with ``record_writes`` record from now on."""
        if self._update() or self._saved is None:
            self._saved = [[buffer.clone() for buffer in group] for group in self._groups]
        else:
            _copy(self._saved, self._groups)
        self._record_writes(True)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers from the last snapshot."""
        if self._saved is not None:
            owners = self._owners
            if self._update():  # a forward pass has assigned, added or removed a buffer
                self._restore_by_owner(owners, self._saved)
            else:
                _copy(self._groups, self._saved)
            for module in self._recording:
                module.undo_writes()
        self._record_writes(False)

    def _restore_by_owner(self, owners: list[list[tuple[nn.Module, str]]], saved: list[list[torch.Tensor]]) -> None:
        """Restore the buffers that still exist; ``owners`` belongs to the snapshot ``saved``."""
        chain = itertools.chain.from_iterable
        current = dict(zip(chain(self._owners), chain(self._groups), strict=True))
        for owner, value in zip(chain(owners), chain(saved), strict=True):
            if owner in current:
                current[owner].copy_(value)
        self._saved = None

    def discard(self) -> None:
        """Discard the recorded writes after an applied step."""
        self._record_writes(False)

    def _record_writes(self, on: bool) -> None:
        for module in self._recording:
            module.record_writes(on)

    def _update(self) -> bool:
        """Update the list of buffers if modules or tensors were added, removed or replaced; return True if so."""
        version = self._tensors.refresh()
        if version == self._version:
            return False
        self._version = version
        modules = self._tensors.modules
        self._recording = [m for m in modules if isinstance(m, WriteRecorder)]
        layers = [m for m in modules if isinstance(m, _LAYERS) or "running_mean" in m._buffers]
        for module in modules:
            if isinstance(module, ForwardWriter) and module.written_in_forward:
                layers += module.modules()
        unique: dict[int, tuple[tuple[nn.Module, str], torch.Tensor]] = {}
        for layer in layers:
            for name, buffer in layer.named_buffers(recurse=False):
                unique.setdefault(id(buffer), ((layer, name), buffer))
        # Fused copies need groups with the same kind of dtype.
        grouped = [[x for x in unique.values() if x[1].is_floating_point() is floating] for floating in (True, False)]
        self._owners = [[owner for owner, _ in group] for group in grouped]
        self._groups = [[buffer for _, buffer in group] for group in grouped]
        return True


def _copy(targets: list[list[torch.Tensor]], sources: list[list[torch.Tensor]]) -> None:
    for target, source in zip(targets, sources, strict=True):
        if target:
            torch._foreach_copy_(target, source)
