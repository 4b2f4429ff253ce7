"""Channel attention and spatial attention for feature maps, and dot-product attention of tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.amp import force_fp32
from fastamp.layers.norm import build_norm


class SELayer(nn.Module):
    """Squeeze-and-excitation: scale each channel by a gate in 0..1 (Hu et al. 2018, arXiv:1709.01507).

    Args:
        channels: number of input channels.
        reduction: ratio of input channels to hidden channels. Default 16.
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
        """Map a (B, C, H, W) tensor to a tensor of the same shape and dtype."""
        return x * self.fc(x.mean((2, 3)))[:, :, None, None].to(x.dtype)


class NonLocal(nn.Module):
    """Non-local block with dot-product similarity (Wang et al. 2018, arXiv:1711.07971, eqs. 4 and 6).

    As in FastReID, theta, phi and g have one channel. The (N, N) similarity matrix of the N = H * W positions is not
    computed, because (theta phi) g = theta (phi g), and phi g is a single number per image. The attention and the
    normalization are computed in float32, because a product of three activations overflows float16.

    Args:
        channels: number of input channels.
        norm: name in ``NORM_REGISTRY`` of the normalization layer after the attention. The weight of this layer is
            initialized to 0, so that the block starts as the identity.
    """

    def __init__(self, channels: int, norm: str) -> None:
        super().__init__()
        self.g = nn.Conv2d(channels, 1, 1)
        self.theta = nn.Conv2d(channels, 1, 1)
        self.phi = nn.Conv2d(channels, 1, 1)
        last = build_norm(norm, channels)
        self.W = nn.Sequential(nn.Conv2d(1, channels, 1), last)
        nn.init.zeros_(last.get_parameter("weight"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map a (B, C, H, W) tensor to a tensor of the same shape and dtype."""
        return self._attend(self.theta(x), self.phi(x), self.g(x)).to(x.dtype) + x

    @force_fp32
    def _attend(self, theta: torch.Tensor, phi: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """Compute theta_i * mean_j(phi_j * g_j) from (B, 1, H, W) inputs, project it to C channels and normalize it."""
        return self.W(theta * (phi * g).mean((2, 3), keepdim=True))


def dot_product_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Compute scaled dot-product attention (Vaswani et al. 2017, arXiv:1706.03762, eq. 1).

    On a CPU, low-precision inputs that require gradients are cast to float32 and the result is cast back: the backward
    pass of PyTorch's bfloat16 kernel takes 2.4 times as long as the one in float32 (``tools/benchmark/attention.py``),
    and its gradients are less accurate. Without gradients, and so in exported models, nothing is cast, so that the
    results of training and evaluation differ by the rounding to the low precision.

    Args:
        queries: (B, heads, N, D) float.
        keys, values: (B, heads, M, D), same dtype as ``queries``.
        options: ``attn_mask``, ``dropout_p``, ``is_causal`` and ``scale`` of
            ``torch.nn.functional.scaled_dot_product_attention``.

    Returns:
        (B, heads, N, D), same dtype as ``queries``, unless autocast changes it.
    """
    needs_gradients = any(tensor.requires_grad for tensor in (queries, keys, values))
    if needs_gradients and queries.device.type == "cpu" and queries.dtype in (torch.bfloat16, torch.float16):
        return _attention_in_float32(queries, keys, values, **options).to(queries.dtype)
    return F.scaled_dot_product_attention(queries, keys, values, **options)


_attention_in_float32 = force_fp32(F.scaled_dot_product_attention)
