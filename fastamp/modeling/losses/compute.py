"""Compute the losses from the outputs of a head."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from fastamp.contracts import Loss, Outputs
from fastamp.layers import PartialLogits
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError, did_you_mean
from fastamp.utils.registry import adopt

_NOT_COLUMNS = ("images", "targets", "camids", "viewids", "indices", "img_paths", "augmentation")


@runtime_checkable
class AveragingLoss(Protocol):
    """Loss that averages over a subset of the batch."""

    def total_and_count(self, outputs: Outputs, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the sum of the losses of images and the number of images, so that ranks can be combined."""


def main_outputs(outputs: Outputs | list[tuple[float, Outputs]]) -> Outputs:
    """Return the outputs for the whole image, i.e. the first outputs in a list of (weight, outputs)."""
    return outputs[0][1] if isinstance(outputs, list) else outputs


class Losses(nn.ModuleDict):
    """Losses by name. Calling it computes them; see ``compute_losses``.

    Args:
        losses: loss name -> module.
        gather: see ``compute_losses``. Default False.
    """

    def __init__(self, losses: Mapping[str, nn.Module], *, gather: bool = False) -> None:
        super().__init__(losses)
        self.gather = gather

    def __setitem__(self, name: str, loss: nn.Module) -> None:
        super().__setitem__(name, adopt(loss, Loss))

    def forward(self, outputs: Outputs | list[tuple[float, Outputs]], targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Compute the losses, name -> scalar float32, from the outputs of the head in training mode."""
        return compute_losses(self, outputs, targets, gather=self.gather)


def compute_losses(
    losses: Mapping[str, nn.Module],
    outputs: Outputs | list[tuple[float, Outputs]],
    targets: torch.Tensor,
    *,
    gather: bool,
) -> dict[str, torch.Tensor]:
    """Compute each loss from the outputs of a head. If a head returns several outputs, each loss is a weighted sum.

    Args:
        losses: loss name -> module with ``forward(outputs, targets) -> scalar``.
        outputs: outputs of a head in training mode, or a list of (weight, outputs).
        targets: (B,) int64 class labels.
        gather: use the images of all ranks. Losses that compare images (``over_pairs``) then receive the features and
            targets of all ranks; losses that average over a subset of the batch (``total_and_count``) average over the
            subsets of all ranks together.

    Returns:
        Loss name -> scalar float32.
    """
    if isinstance(outputs, list):
        per_output = [
            {name: weight * loss for name, loss in compute_losses(losses, output, targets, gather=gather).items()}
            for weight, output in outputs
        ]
        return {name: torch.stack([output[name] for output in per_output]).sum() for name in losses}
    gathered = (outputs, targets)
    if gather and any(loss.over_pairs for loss in losses.values()):
        names = ["features", *needed_columns(loss for loss in losses.values() if loss.over_pairs)]
        gathered = (outputs | {name: comm.all_gather(outputs[name]) for name in names}, comm.all_gather(targets))
    return {
        name: loss(*gathered) if loss.over_pairs else _compute_per_image(loss, outputs, targets, gather=gather)
        for name, loss in losses.items()
    }


def _compute_per_image(loss: nn.Module, outputs: Outputs, targets: torch.Tensor, *, gather: bool) -> torch.Tensor:
    """Compute a loss, scaled so that the mean over ranks equals the mean over the images of all ranks."""
    if not gather or not isinstance(loss, AveragingLoss) or isinstance(outputs.get("cls_outputs"), PartialLogits):
        return loss(outputs, targets)
    # The mean of per-rank means would weight images differently if the counts of the ranks differ.
    total, count = loss.total_and_count(outputs, targets)
    return total * comm.get_world_size() / comm.all_reduce_sum(count).clamp(min=1)


def needed_columns(losses: Iterable[nn.Module]) -> list[str]:
    """Return the names of the columns of the batch that the losses use: their attributes ``columns``."""
    return list(dict.fromkeys(name for loss in losses for name in loss.columns))


def with_columns(
    outputs: Outputs | list[tuple[float, Outputs]], batch: Mapping[str, Any], losses: Mapping[str, nn.Module]
) -> Outputs | list[tuple[float, Outputs]]:
    """Add the columns of the batch that the losses use to the outputs of a head, on the device of the features.

    Args:
        outputs: outputs of a head in training mode.
        batch: batch with the columns, (B,) or (B, L).
        losses: loss name -> module.

    Raises:
        ConfigError: if the batch does not contain a column; the message lists the available columns.
    """
    names = needed_columns(losses.values())
    if not names:
        return outputs

    def add(output: Outputs) -> Outputs:
        device = output["features"].device
        return output | {name: column_of(batch, name).to(device, non_blocking=True) for name in names}

    return [(weight, add(output)) for weight, output in outputs] if isinstance(outputs, list) else add(outputs)


def column_of(batch: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return a column of a batch.

    Raises:
        ConfigError: if the batch does not contain the column as a tensor; the message lists the available columns.
    """
    if isinstance(batch.get(name), torch.Tensor):
        return batch[name]
    columns = [key for key, value in batch.items() if isinstance(value, torch.Tensor) and key not in _NOT_COLUMNS]
    raise ConfigError(
        f"the model needs the column {name!r}, which the dataset does not have; available columns: "
        f"{', '.join(columns) or 'none'}.{did_you_mean(name, columns)}\n"
        "  fix: use a dataset with this column, or add it to the CSV file"
    )
