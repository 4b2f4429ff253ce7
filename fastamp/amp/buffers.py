"""The running statistics of normalization layers, kept so that a step that is skipped leaves no trace in them."""

import torch
from torch import nn

_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class NormalizationBuffers:
    """A copy of the buffers of a model's normalization layers.

    A forward pass that overflows writes NaN into running means, where they stay for ever: the parameters are saved by
    skipping the step, the evaluation is not.

    Args:
        model: has the layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, _LAYERS) or "running_mean" in m._buffers]
        self._kept: list[torch.Tensor] | None = None

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the buffers as they are."""
        live = self._live()
        if self._kept is None:
            self._kept = [buffer.clone() for buffer in live]
        else:
            _copy(self._kept, live)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the layers the buffers that were kept last."""
        if self._kept is not None:
            _copy(self._live(), self._kept)

    def _live(self) -> list[torch.Tensor]:
        return [buffer for layer in self._layers for buffer in layer.buffers(recurse=False)]


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy a list of tensors into another, in one operation for each dtype."""
    for floating in (True, False):
        chosen = [(a, b) for a, b in zip(targets, sources, strict=True) if a.is_floating_point() is floating]
        if chosen:
            torch._foreach_copy_([a for a, _ in chosen], [b for _, b in chosen])
