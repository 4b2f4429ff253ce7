"""MixStyle (Zhou et al. 2021, arXiv:2104.02008): augmentation of the style of feature maps."""

import torch
from torch import nn

from fastamp.amp import force_fp32

_EPSILON = 1e-6


class MixStyle(nn.Module):
    """Mix the channel means and standard deviations of each image with those of another image of the batch.

    Applied in training mode with a given probability to whole batches; the identity in evaluation mode. The statistics
    are constants for the gradient, as in the authors' program. Random numbers are those of PyTorch's global generators,
    which checkpoints contain.

    Args:
        probability: probability of mixing a batch, in 0..1. Default 0.5.
        alpha: parameter of the Beta distribution of the weights. Default 0.1.
    """

    def __init__(self, probability: float = 0.5, alpha: float = 0.1) -> None:
        super().__init__()
        self.probability, self.alpha = probability, alpha

    def extra_repr(self) -> str:
        return f"probability={self.probability}, alpha={self.alpha}"

    def forward(self, maps: torch.Tensor) -> torch.Tensor:
        """Mix the styles of (B, C, H, W) feature maps; the result has their shape and dtype."""
        if not self.training:
            return maps
        count, alpha = len(maps), torch.full((len(maps),), self.alpha, device=maps.device)
        weights = torch.distributions.Beta(alpha, alpha, validate_args=False).sample()
        # A weight of 1 keeps the style. Without a branch, the host does not wait for the device.
        weights = torch.where(torch.rand((), device=maps.device) < self.probability, weights, 1.0)
        return mix_styles(maps, torch.randperm(count, device=maps.device), weights)


@force_fp32
def mix_styles(maps: torch.Tensor, others: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Give each image the mean and standard deviation w * own + (1 - w) * other, per channel.

    Args:
        maps: (B, C, H, W) float, with at least two places.
        others: (B,) int64, index of the other image.
        weights: (B,) float in 0..1, w.

    Returns:
        (B, C, H, W) float32.
    """
    variance, mean = torch.var_mean(maps.detach(), dim=(2, 3), keepdim=True)
    deviation = (variance + _EPSILON).sqrt()
    weight = weights[:, None, None, None]
    mixed_mean = weight * mean + (1 - weight) * mean[others]
    mixed_deviation = weight * deviation + (1 - weight) * deviation[others]
    return (maps - mean) / deviation * mixed_deviation + mixed_mean
