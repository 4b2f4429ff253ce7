"""Batch norm with constant statistics."""

from torchvision import ops

from fastamp.layers.norm import NORM_REGISTRY


@NORM_REGISTRY.register("FrozenBN")
class FrozenBatchNorm2d(ops.FrozenBatchNorm2d):
    """Batch norm with constant statistics, weight and bias, which are buffers."""

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return the names of the buffers that are equal on all ranks: all."""
        return ("weight", "bias", "running_mean", "running_var")
