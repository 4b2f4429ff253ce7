"""Batch-norm statistics of the weights as they are, over many batches."""

import itertools
import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fastamp.amp import PrecisionPolicy, force_fp32, to_float32
from fastamp.utils import comm
from fastamp.utils.compiled import uncompiled
from fastamp.utils.progress import track

logger = logging.getLogger(__name__)


class _PooledStatistics:
    """Mean and variance of all inputs of a layer, from those of each batch (Chan et al. 1983, updating formulas).

    Sums of squares would lose a variance that is small against the mean.
    """

    def __init__(self, layer: nn.modules.batchnorm._BatchNorm) -> None:
        self.layer = layer
        self.count = 0
        self.mean = to_float32(torch.zeros_like(layer.running_mean))
        self.squares = self.mean.clone()  # summed squared deviations from the mean, over the count

    @force_fp32
    def add(self, inputs: torch.Tensor) -> None:
        """Take (B, C, ...) ``inputs``."""
        variance, mean = torch.var_mean(inputs, [0, *range(2, inputs.dim())], unbiased=False)
        new = inputs.numel() // inputs.shape[1]
        self.count += new
        fraction = new / self.count
        difference = mean - self.mean
        self.mean += difference * fraction
        self.squares += (variance - self.squares) * fraction + difference.square() * (fraction * (1 - fraction))

    def write(self) -> None:
        """Put the statistics of all ranks' inputs into the layer."""
        count = torch.tensor(float(self.count), device=self.mean.device)
        total = comm.all_reduce_sum(count)
        mean = comm.all_reduce_sum(self.mean * (count / total))
        squares = comm.all_reduce_sum((self.squares + (self.mean - mean).square()) * (count / total))
        # A part that evaluation does not run, e.g. a second encoder of the training, keeps what it has.
        for buffer, value in (
            (self.layer.running_mean, mean),
            (self.layer.running_var, squares * (total / (total - 1).clamp_min(1))),
        ):
            buffer.copy_(torch.where(total > 0, value, buffer))


@torch.no_grad()
def update_bn_statistics(
    model: nn.Module, batches: Iterable[dict[str, Any]], num_iter: int, *, policy: PrecisionPolicy
) -> int:
    """Estimate the running statistics of batch norm anew, for the weights as they are.

    Batch norm computes with each batch's own statistics meanwhile, everything else as in evaluation. The mean and
    the unbiased variance are those of all inputs together, over all ranks (Wu & Johnson 2021, arXiv:2105.07576,
    section 3); layers without running statistics, and those in evaluation mode (frozen ones), stay as they are.

    Args:
        model: its buffers are changed, its modes and the random state are not.
        batches: of which this many are taken ...
        num_iter: ... but no more than there are.
        policy: in which precision the forward passes run.

    Returns:
        The number of layers that were changed.
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training and layer.track_running_stats
    ]
    if not layers:
        return 0
    modes = {module: module.training for module in model.modules()}
    statistics = [_PooledStatistics(layer) for layer in layers]
    saved = [
        (layer.running_mean.clone(), layer.running_var.clone(), layer.num_batches_tracked.clone()) for layer in layers
    ]
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs, each=each: each.add(inputs[0]))
        for layer, each in zip(layers, statistics, strict=True)
    ]
    done = 0
    try:
        model.eval()
        for layer in layers:
            layer.train()
        with uncompiled(model):
            for batch in track(itertools.islice(batches, num_iter), num_iter, "batch norm"):
                done += 1
                with policy.autocast():
                    model(batch)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
        for layer, (mean, variance, number) in zip(layers, saved, strict=True):
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(variance)
            layer.num_batches_tracked.copy_(number)
    for each in statistics:
        each.write()
    logger.info("batch-norm statistics of %d layers estimated anew from %d batches", len(layers), done)
    return len(layers)
