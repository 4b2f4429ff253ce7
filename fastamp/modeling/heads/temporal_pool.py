"""Temporal pooling: one feature of a tracklet from the features of its frames."""

import torch
import torch.nn.functional as F
from torch import nn

from fastamp.config import Key

KEYS = (
    Key(
        "MODEL.HEADS.TEMPORAL_POOL",
        "none",
        "Pooling of the frames of a tracklet between the spatial pooling and the neck: none, avg, or attention "
        "(temporal attention, Gao and Nevatia 2018). Training requires DATALOADER.SAMPLER_TRAIN TrackletSampler.",
        choices=("none", "avg", "attention"),
    ),
)


class TemporalAvgPool(nn.Module):
    """Average the features of the frames of each tracklet.

    Args:
        dim: channels of a frame's feature.
        frames: frames per tracklet in training mode.
    """

    def __init__(self, dim: int, *, frames: int) -> None:
        super().__init__()
        self.frames = frames

    def forward(self, features: torch.Tensor, tracklets: torch.Tensor) -> torch.Tensor:
        """Pool the frames of each tracklet.

        Args:
            features: (B, D) float, features of frames; those of a tracklet are in temporal order.
            tracklets: (B,) int64 tracklet of each frame, 0..N-1, on the device of ``features``.

        Returns:
            (N, D) features of tracklets.
        """
        frames, mask = pad_tracklets(features, tracklets)
        return (self.weights(frames, mask)[:, :, None] * frames).sum(1)

    def weights(self, frames: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the weight of each frame, (N, T), whose sum is 1 for each tracklet.

        Args:
            frames: (N, T, D) float, 0 after the last frame of a tracklet.
            mask: (N, T) bool, False after the last frame of a tracklet.
        """
        return mask / mask.sum(1, keepdim=True)


class TemporalAttention(TemporalAvgPool):
    """Average the features of the frames, weighted by temporal attention (Gao and Nevatia 2018, arXiv:1805.02104).

    The scores are computed by a layer that reduces the features to ``hidden`` channels and a convolution over time with
    kernel 3; a softmax over the frames gives the weights. The paper's first layer is a convolution that covers the
    whole feature map; here, it is a linear layer on the pooled feature.

    Args:
        dim: channels of a frame's feature.
        frames: frames per tracklet in training mode.
        hidden: channels between the two layers. Default 256, as in the paper.
    """

    def __init__(self, dim: int, *, frames: int, hidden: int = 256) -> None:
        super().__init__(dim, frames=frames)
        self.reduce = nn.Linear(dim, hidden)
        self.score = nn.Conv1d(hidden, 1, 3, padding=1)
        nn.init.kaiming_normal_(self.reduce.weight)
        # Large scores would select one frame and stop the gradients of the others: start near the average.
        nn.init.normal_(self.score.weight, std=0.001)
        for layer in (self.reduce, self.score):
            nn.init.zeros_(layer.bias)

    def weights(self, frames: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the attention weight of each frame, (N, T); see ``TemporalAvgPool.weights``."""
        hidden = F.relu(self.reduce(frames)) * mask[:, :, None]
        scores = self.score(hidden.transpose(1, 2))[:, 0]
        return scores.masked_fill(~mask, -torch.inf).softmax(1)


TEMPORAL_POOLS = {"avg": TemporalAvgPool, "attention": TemporalAttention}


def pad_tracklets(features: torch.Tensor, tracklets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Arrange the features of frames by tracklet, and pad tracklets with zeros to the length of the longest.

    Args:
        features: (B, D) float.
        tracklets: (B,) int64 tracklet of each frame, 0..N-1.

    Returns:
        Features (N, T, D), and a mask (N, T) that is False in the padding.
    """
    order, counts = tracklets.argsort(stable=True), torch.bincount(tracklets)
    position = torch.empty_like(tracklets)
    position[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[tracklets[order]]
    shape = len(counts), int(counts.max())
    frames = features.new_zeros(*shape, features.shape[1])
    mask = torch.zeros(shape, dtype=torch.bool, device=features.device)
    frames[tracklets, position], mask[tracklets, position] = features, True
    return frames, mask
