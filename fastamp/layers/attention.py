"""Attention over channels and over positions of a feature map."""

import torch
from torch import nn

from fastamp.amp import force_fp32
from fastamp.layers.norm import build_norm


class SELayer(nn.Module):
    """Squeeze and excitation: scale each channel by a gate in 0..1 (Hu et al. 2018, arXiv:1709.01507).

    Args:
        channels: of the (B, C, H, W) input.
        reduction: the hidden layer is narrower by this.
    """

    def __init__(self, channels: int, reduction: int = 16) -> None:
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(channels, channels // reduction, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(channels // reduction, channels, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, C, H, W) float to the same shape."""
        return x * self.fc(x.mean((2, 3)))[:, :, None, None].to(x.dtype)


class NonLocal(nn.Module):
    """A non-local block with dot-product similarity (Wang et al. 2018, arXiv:1711.07971, eqs. 4 and 6).

    As in FastReID, the three embeddings are one channel wide. The (N, N) similarities of the N = H * W positions are
    never made: (theta phi) g equals theta (phi g), which is one number an image. What follows the embeddings is float32
    up to the normalization, because a product of three activations leaves float16's range.

    Args:
        channels: of the (B, C, H, W) input.
        norm: name of the normalization layer behind the attention; its weight starts at 0, the block as the identity.
    """

    def __init__(self, channels: int, norm: str) -> None:
        super().__init__()
        self.g = nn.Conv2d(channels, 1, 1)
        self.theta = nn.Conv2d(channels, 1, 1)
        self.phi = nn.Conv2d(channels, 1, 1)
        self.W = nn.Sequential(nn.Conv2d(1, channels, 1), build_norm(norm, channels))
        nn.init.zeros_(self.W[1].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, C, H, W) float to the same shape."""
        return self._attend(self.theta(x), self.phi(x), self.g(x)).to(x.dtype) + x

    @force_fp32
    def _attend(self, theta: torch.Tensor, phi: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Return the normalized (B, C, H, W) of theta_i * mean_j(phi_j * g_j), from (B, 1, H, W) embeddings."""
        return self.W(theta * (phi * g).mean((2, 3), keepdim=True))
