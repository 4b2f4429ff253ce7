"""Losses between image and text features (Li et al. 2023, arXiv:2211.13977)."""

import torch
import torch.nn.functional as F

from fastamp.amp import force_fp32
from fastamp.modeling.losses import LOSS_REGISTRY, CrossEntropyLoss


@LOSS_REGISTRY.register()
class MeanCrossEntropyLoss(CrossEntropyLoss):
    """Mean of the cross entropies of all images; ``CrossEntropyLoss`` excludes those that are 0, as FastReID does."""

    def total_and_count(
        self, outputs: dict[str, torch.Tensor], targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute ``(sum of the cross entropies, number of images)``, () each."""
        return super().total_and_count(outputs, targets)[0], torch.tensor(len(targets), device=targets.device)


@force_fp32
def image_text_supcon(
    anchors: torch.Tensor, others: torch.Tensor, anchor_targets: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Compute the supervised contrastive loss between two sets of features (eq. 4 and 5).

    The mean over anchors i, and over the p of the same identity, of -log softmax_j(a_i . b_j)_p. Features are not
    normalized, and there is no temperature, as in the authors' program.

    Args:
        anchors: (B, D) float.
        others: (N, D) float.
        anchor_targets, targets: (B,) and (N,) int64 identities; each anchor's is among ``targets``.

    Returns:
        Scalar float32.
    """
    positive = (anchor_targets[:, None] == targets[None, :]).float()
    log_probabilities = F.log_softmax(anchors @ others.t(), dim=1)
    return -((positive * log_probabilities).sum(1) / positive.sum(1)).mean()


@force_fp32
def image_text_logits(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """Compute the logits (B, K), dot products of image features (B, D) and the text features (K, D) of identities."""
    return images @ texts.t()
