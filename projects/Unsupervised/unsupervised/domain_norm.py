"""Batch norm whose statistics are separate for labeled and unlabeled images."""

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.layers.norm import NORM_REGISTRY


@NORM_REGISTRY.register("DomainBN")
class DomainBatchNorm2d(nn.BatchNorm2d):
    """Batch norm of batches in which labeled and unlabeled images alternate (Ge et al. 2020, arXiv:2006.02713).

    In training, the images at even positions (labeled, the source domain) and at odd positions (unlabeled, the target
    domain) are normalized with their own statistics. The running statistics, and therefore an evaluation, are those of
    the unlabeled images. Differs: weight and bias are shared by the domains, so that weights files have the names of
    ``BatchNorm2d``.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map a (B, C, H, W) tensor to a tensor of the same shape."""
        if not self.training or len(input) < 2:
            return super().forward(input)
        labeled = F.batch_norm(input[0::2], None, None, self.weight, self.bias, training=True, eps=self.eps)
        unlabeled = super().forward(input[1::2])
        output = torch.empty_like(input, dtype=unlabeled.dtype)
        output[0::2], output[1::2] = labeled, unlabeled
        return output
