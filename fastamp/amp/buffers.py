"""What training forward passes write into a model, kept so that a step that is skipped leaves no trace in it."""

import torch
from torch import nn

_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class ForwardBuffers:
    """A copy of the buffers that forward passes write: normalization layers', and those of modules that say so.

    A forward pass that overflows writes NaN into running means, where they stay for ever: the parameters are saved by
    skipping the step, the evaluation is not. A memory bank or a moving average is such state too: its module has a
    class attribute ``written_in_forward = True``, which is about all buffers in it.

    Args:
        model: has the modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m for m in model.modules() if isinstance(m, _LAYERS) or "running_mean" in m._buffers]
        self._banks = [m for m in model.modules() if getattr(m, "written_in_forward", False)]
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
        """Give the modules the buffers that were kept last."""
        if self._kept is not None:
            _copy(self._live(), self._kept)

    def _live(self) -> list[torch.Tensor]:
        buffers = [buffer for layer in self._layers for buffer in layer.buffers(recurse=False)]
        buffers += [buffer for bank in self._banks for buffer in bank.buffers()]
        return list({id(buffer): buffer for buffer in buffers}.values())


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy a list of tensors into another, in one operation for each dtype."""
    for floating in (True, False):
        chosen = [(a, b) for a, b in zip(targets, sources, strict=True) if a.is_floating_point() is floating]
        if chosen:
            torch._foreach_copy_([a for a, _ in chosen], [b for _, b in chosen])
