"""Stochastic depth."""

import torch
from torchvision.ops import StochasticDepth


class DropPath(StochasticDepth):
    """Stochastic depth: replace the output of a residual branch by zeros, for each image at random.

    Huang et al. 2016, arXiv:1603.09382; as in torchvision's ``StochasticDepth(p, "row")``, other outputs are divided by
    1 - p. Unlike there, the probability is a tensor, so that blocks with different ones share a compiled graph.

    Args:
        p: probability to drop a branch, 0 <= p < 1.
    """

    keep: torch.Tensor

    def __init__(self, p: float) -> None:
        super().__init__(p, mode="row")
        self.register_buffer("keep", torch.tensor(1 - p), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, ...) to the same shape."""
        if not self.training:
            return x
        kept = torch.bernoulli(self.keep.expand(len(x))) / self.keep
        return x * kept.to(x.dtype).view(-1, *(1,) * (x.dim() - 1))
