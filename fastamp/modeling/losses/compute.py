"""From what a head returns in training mode to the values of the losses."""

from collections.abc import Mapping

import torch
from torch import nn

from fastamp.utils import comm

Outputs = dict[str, torch.Tensor]


def main_outputs(outputs: Outputs | list[tuple[float, Outputs]]) -> Outputs:
    """Return what a head returned in training mode; of several outputs the first, which are of the whole image."""
    return outputs[0][1] if isinstance(outputs, list) else outputs


def compute_losses(
    losses: Mapping[str, nn.Module],
    outputs: Outputs | list[tuple[float, Outputs]],
    targets: torch.Tensor,
    *,
    gather: bool,
) -> dict[str, torch.Tensor]:
    """Return each loss of a head's outputs; where it has several, the sum of the loss of each times its weight.

    Args:
        losses: name -> module of ``(outputs, targets) -> ()``.
        outputs: what a head returns in training mode, or several of that with their weights.
        targets: (B,) int64 class numbers.
        gather: let the losses that compare images with each other (``over_pairs``) see those of all ranks, and those
            that average over some of the images (``total_and_count``) average over those of all ranks.

    Returns:
        Loss name -> () float32.
    """
    if isinstance(outputs, list):
        per_output = [
            {name: weight * loss for name, loss in compute_losses(losses, output, targets, gather=gather).items()}
            for weight, output in outputs
        ]
        return {name: torch.stack([output[name] for output in per_output]).sum() for name in losses}
    gathered = (outputs, targets)
    if gather and any(over_pairs(loss) for loss in losses.values()):
        gathered = (outputs | {"features": comm.all_gather(outputs["features"])}, comm.all_gather(targets))
    return {
        name: loss(*gathered) if over_pairs(loss) else _compute_per_image(loss, outputs, targets, gather=gather)
        for name, loss in losses.items()
    }


def _compute_per_image(loss: nn.Module, outputs: Outputs, targets: torch.Tensor, *, gather: bool) -> torch.Tensor:
    """Return a loss that looks at each image by itself: this rank's share, whose mean over the ranks is the loss."""
    if not gather or not hasattr(loss, "total_and_count"):
        return loss(outputs, targets)
    # The mean of the ranks' own means would weigh images differently where the ranks count different numbers of them.
    total, count = loss.total_and_count(outputs, targets)
    return total * comm.get_world_size() / comm.all_reduce_sum(count).clamp(min=1)


def over_pairs(loss: nn.Module) -> bool:
    """Whether a loss compares images with each other, of which it then needs as many as there are."""
    return getattr(loss, "over_pairs", False)
