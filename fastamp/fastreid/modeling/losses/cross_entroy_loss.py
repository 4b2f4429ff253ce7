"""Cross entropy, and the accuracy of the training batch."""

from collections.abc import Sequence

import torch

from fastamp.fastreid.utils.events import get_event_storage
from fastamp.modeling.losses import cross_entropy


def cross_entropy_loss(
    pred_class_outputs: torch.Tensor, gt_classes: torch.Tensor, eps: float, alpha: float = 0.2
) -> torch.Tensor:
    """Compute the cross entropy with smoothed labels; see ``fastamp.modeling.losses.cross_entropy_loss``."""
    return cross_entropy.cross_entropy_loss(pred_class_outputs, gt_classes, eps, alpha)


def log_accuracy(pred_class_logits: torch.Tensor, gt_classes: torch.Tensor, topk: Sequence[int] = (1,)) -> None:
    """Put the top-k accuracy, in 0..1, into the event storage as ``cls_accuracy``, for the first k in ``topk``.

    Args:
        pred_class_logits: (B, K) float.
        gt_classes: (B,) int64 class labels.
        topk: numbers of classes. Default (1,).
    """
    predicted = pred_class_logits.topk(topk[0], 1).indices
    accuracy = (predicted == gt_classes[:, None]).any(1).float().mean()
    get_event_storage().put_scalar("cls_accuracy", accuracy)
