"""Precise batch norm: recompute the running statistics for the current weights over many batches."""

import itertools
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fastamp.amp import PrecisionPolicy, force_fp32, to_float32
from fastamp.feature_pass import evaluation_mode
from fastamp.utils import comm
from fastamp.utils.compiled import uncompiled
from fastamp.utils.plural import plural
from fastamp.utils.progress import track

logger = logging.getLogger(__name__)


class _PooledStatistics:
    """Pooled mean and variance of a layer's inputs over batches (Chan et al. 1983, updating formulas).

    Sums of squares are not accumulated, because they would lose precision if the variance is small relative to
    the mean.
    """

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm) -> None:
        self.layer = layer
        self.count = 0
        self.mean = to_float32(torch.zeros_like(next(layer.buffers())))
        self.squares = self.mean.clone()  # sum of squared deviations from the mean, divided by the count

    @force_fp32
    def add(self, inputs: torch.Tensor) -> None:
        """Update the statistics with (B, C, ...) ``inputs``."""
        variance, mean = torch.var_mean(inputs, [0, *range(2, inputs.dim())], unbiased=False)
        new = inputs.numel() // inputs.shape[1]
        self.count += new
        fraction = new / self.count
        difference = mean - self.mean
        self.mean += difference * fraction
        self.squares += (variance - self.squares) * fraction + difference.square() * (fraction * (1 - fraction))

    def write(self) -> None:
        """Combine the statistics of all ranks and write them to the layer's buffers."""
        count = torch.tensor(float(self.count), device=self.mean.device)
        total = comm.all_reduce_sum(count)
        mean = comm.all_reduce_sum(self.mean * (count / total))
        squares = comm.all_reduce_sum((self.squares + (self.mean - mean).square()) * (count / total))
        # Layers that evaluation does not run, e.g. those of a momentum encoder, keep their statistics.
        values = (mean, squares * (total / (total - 1).clamp_min(1)))
        for buffer, value in zip(self.layer.buffers(), values, strict=False):  # the running mean and variance
            buffer.copy_(torch.where(total > 0, value, buffer))


@torch.no_grad()
def update_bn_statistics(
    model: nn.Module, batches: Iterable[dict[str, Any]], num_iter: int, *, policy: PrecisionPolicy
) -> int:
    """Recompute the running statistics of batch norm layers for the current weights (precise BN).

    During the forward passes, batch norm layers use batch statistics, and all other modules are in evaluation mode. The
    mean and the unbiased variance are pooled over all inputs and ranks (Wu & Johnson 2021, arXiv:2105.07576,
    section 3). Layers without running statistics and frozen layers (those already in evaluation mode) are not changed.

    Args:
        model: model whose batch norm buffers are updated; the mode of each module is restored.
        batches: training batches.
        num_iter: maximum number of batches to use.
        policy: precision policy of the forward passes.

    Returns:
        The number of updated layers.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training and layer.track_running_stats
    ]
    if not layers:
        return 0
    statistics = [_PooledStatistics(layer) for layer in layers]
    saved = [[buffer.clone() for buffer in layer.buffers()] for layer in layers]
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, statistic=statistic: statistic.add(inputs[0]))
        for layer, statistic in zip(layers, statistics, strict=True)
    ]
    done = 0
    try:
        with evaluation_mode(model), uncompiled(model):
            for layer in layers:
                layer.train()
            for batch in track(itertools.islice(batches, num_iter), num_iter, "batch norm"):
                done += 1
                with policy.autocast():
                    model(batch)
    finally:
        for handle in handles:
            handle.remove()
        for layer, values in zip(layers, saved, strict=True):
            for buffer, value in zip(layer.buffers(), values, strict=True):
                buffer.copy_(value)
    for statistic in statistics:
        statistic.write()
    counts = plural(len(layers), "layer"), plural(done, "batch", "batches")
    logger.info("recomputed batch norm statistics of %s from %s", *counts)
    return len(layers)
