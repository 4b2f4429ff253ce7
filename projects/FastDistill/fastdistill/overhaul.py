"""Overhaul of feature distillation (Heo et al. 2019, arXiv:1904.01866): margins, connectors and loss."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from fastamp.amp import force_fp32

# Below this probability of a negative value, the margin is _FAR standard deviations below zero.
_LEAST_PROBABILITY, _FAR = 0.001, 3.0


@torch.no_grad()
def channel_margins(norm: nn.Module) -> torch.Tensor:
    """Compute the mean of the negative values of each channel after batch norm.

    The values of a channel are taken as normal with the bias m as mean and the absolute weight s as standard deviation.
    If less than 0.1 % of them are negative, the margin is -3 s.

    Args:
        norm: normalization with ``weight`` and ``bias``, (C,).

    Returns:
        (C,) float32, at most 0.
    """
    s = norm.weight.double().abs().clamp_min(torch.finfo(torch.float64).tiny)
    m = norm.bias.double()
    negative = torch.special.ndtr(-m / s)
    density = torch.exp(-(m / s).square() / 2) / math.sqrt(2 * math.pi)
    means = m - s * density / negative.clamp_min(_LEAST_PROBABILITY)
    return torch.where(negative > _LEAST_PROBABILITY, means, -_FAR * s).float()


def build_connector(in_channels: int, out_channels: int) -> nn.Sequential:
    """Build the 1x1 convolution without bias, and the batch norm, that map a student's stage to a teacher's width."""
    convolution = nn.Conv2d(in_channels, out_channels, 1, bias=False)
    nn.init.normal_(convolution.weight, std=math.sqrt(2 / out_channels))
    return nn.Sequential(convolution, nn.BatchNorm2d(out_channels))


@force_fp32
def overhaul_loss(
    student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor], margins: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Compute the partial L2 distance between the feature maps of student and teacher, summed over all values.

    The target is max(teacher, margin). A value counts where the student is above the target, or the target is
    positive. Stage j of n has the weight 2^-(n - j). The sum is divided by the batch size only, so it grows with the
    size and the width of the maps.

    Args:
        student: (B, C, h, w) of each stage, after its connector.
        teacher: (B, C, h, w) of each stage, before the last ReLU.
        margins: (C,) of each stage, see ``channel_margins``.

    Returns:
        Scalar float32.
    """
    total = student[0].new_zeros(())
    for depth, (of_student, of_teacher, margin) in enumerate(
        zip(student, teacher, margins, strict=True), start=1 - len(student)
    ):
        target = torch.maximum(of_teacher, margin.view(1, -1, 1, 1))
        counted = (of_student > target) | (target > 0)
        total = total + 2.0**depth * ((of_student - target).square() * counted).sum()
    return total / len(student[0])
