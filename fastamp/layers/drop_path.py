"""Stochastic depth."""

import torch
from torch import nn


class DropPath(nn.Module):
    """Stochastic depth: replace the output of a residual branch by zeros, for each image at random.

    Huang et al. 2016, arXiv:1603.09382; as in torchvision's ``StochasticDepth(p, "row")``, other outputs are divided by
    1 - p. Unlike there, the probability is a tensor, so that blocks with different ones share a compiled graph.

    Args:
        p: probability to drop a branch, 0 <= p < 1.

    Attributes:
        keep: () float32, 1 - p.
    """

    keep: torch.Tensor

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"expected a probability 0 <= p < 1, got {p}")
        self.register_buffer("keep", torch.tensor(1 - p), persistent=False)

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return the names of the buffers that are constants."""
        return ("keep",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, ...) to the same shape."""
        if not self.training:
            return x
        kept = torch.bernoulli(self.keep.expand(len(x))) / self.keep
        return x * kept.to(x.dtype).view(-1, *(1,) * (x.dim() - 1))
