"""Partial FC: softmax over class centers that are divided among the ranks and sampled in each step."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fastamp.config.key import Key
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError
from fastamp.utils.sharding import divide_rows

KEYS = (
    Key(
        "MODEL.HEADS.PFC.ENABLED",
        False,
        "Partial FC, for many identities: divide the class centers among the processes, and use SAMPLE_RATE of them in "
        "each step.",
    ),
    Key(
        "MODEL.HEADS.PFC.SAMPLE_RATE",
        0.1,
        "Partial FC: fraction of the class centers of each process that the softmax of a step uses, i.e. all classes "
        "of the batch and random others; 1 is the full softmax.",
        above=0,
        high=1,
    ),
)

_SMALLEST_LOG = math.log(1e-30)


@dataclass(frozen=True)
class PartialLogits:
    """Logits of the images of all ranks for the sampled classes of this rank.

    Attributes:
        logits: (N, S) float32, with margin.
        positions: (N,) int64, column of the class of each image; -1 if another rank holds it.
    """

    logits: torch.Tensor
    positions: torch.Tensor

    def cross_entropy(self) -> torch.Tensor:
        """Compute the mean cross entropy over the images of all ranks; every rank returns the same scalar float32."""
        if comm.is_distributed():
            return _PartialCrossEntropy.apply(self.logits, self.positions)
        # PyTorch's kernel, so that rate 1 has the rounding errors of the ordinary head.
        right = F.log_softmax(self.logits, dim=1).gather(1, self.positions[:, None])
        return -(right + (right.clamp_min(_SMALLEST_LOG) - right).detach()).mean()


class PartialFC(nn.Module):
    """Sampling of class centers that are divided among the ranks (An et al. 2021, arXiv:2010.05222; 2022, 2203.15565).

    With C classes and W ranks, each rank holds the centers of C // W classes, the first C % W ranks of one more. Each
    rank computes the logits of the images of all ranks for its own classes; the softmax is over the classes of all
    ranks. With a sampling rate below 1, each rank uses ``int(rate * its classes)`` classes, at least one: those of the
    images and random others. If the images have more classes, only these are used. The random numbers depend on the
    seed, the rank and the number of previous draws, and on no other generator.

    Args:
        num_classes: number of classes C on all ranks.
        sample_rate: fraction of the classes in each step, in (0, 1]. Default 1.
        centers: number of weight rows of each class, in consecutive rows. Default 1.
        seed: seed of the sampling. Default 0.

    Attributes:
        start, count: first class of this rank, and number of classes of this rank.
        draws: number of samples drawn so far.

    Raises:
        ConfigError: if ``sample_rate`` is out of range, or if there are fewer classes than ranks.
    """

    def __init__(self, *, num_classes: int, sample_rate: float = 1.0, centers: int = 1, seed: int = 0) -> None:
        super().__init__()
        if not 0 < sample_rate <= 1:
            raise ConfigError(
                f"MODEL.HEADS.PFC.SAMPLE_RATE: expected a fraction above 0 and at most 1, got {sample_rate}.\n"
                "  fix: set e.g. 0.1, or 1 for the full softmax"
            )
        self.rank, world_size = comm.get_rank(), comm.get_world_size()
        if 0 < num_classes < world_size:
            raise ConfigError(
                f"MODEL.HEADS.PFC: {num_classes} classes cannot be divided among {world_size} processes.\n"
                f"  fix: set MODEL.HEADS.PFC.ENABLED False, or train in at most {num_classes} processes"
            )
        self.num_classes, self.sample_rate, self.centers, self.seed = num_classes, sample_rate, centers, seed
        self.start, self.count = divide_rows(num_classes, self.rank, world_size)
        self.draws = 0

    def logits(
        self, features: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, layer: nn.Module
    ) -> PartialLogits:
        """Compute the logits of the images of all ranks for the sampled classes of this rank.

        A method instead of ``forward``: backward hooks of modules, which diagnostics register on tensors passed to
        ``forward``, do not support the sparse gradient of the weight.

        Args:
            features: (B, D) float32, images of this rank; B may differ between ranks.
            weight: (count * centers, D) float32, rows of this rank. If classes are sampled, its gradient is sparse and
                has only the rows of the sampled classes.
            targets: (B,) int64 class labels in 0..num_classes-1; not modified. Labels are checked by the model
                (``ImageModel.set_label_range``).
            layer: classification layer, e.g. ``ArcSoftmax``.
        """
        features, targets = comm.all_gather_parts(features), comm.all_gather_parts(targets)
        local = targets - self.start
        if comm.is_distributed():
            local = torch.where((local >= 0) & (local < self.count), local, -1)
        elif self.count < self.num_classes:
            # An isolated pass of one of several ranks, e.g. the pre-flight, cannot reach the other centers: their
            # classes are replaced with those of this rank.
            local = local % self.count
        if self.sample_rate < 1:
            classes = self.sample(local[local >= 0].unique())
            positions = torch.where(local >= 0, torch.searchsorted(classes, local), -1)
            of_class = torch.arange(self.centers, device=classes.device)
            rows = (classes[:, None] * self.centers + of_class).flatten()
            weight = F.embedding(rows, weight, sparse=True)
        else:
            classes, positions = torch.arange(self.count, device=local.device), local
        margins = {"classes": classes + self.start} if layer.margin_per_class else {}
        return PartialLogits(layer(features, weight, positions, **margins)[0], positions)

    def sample(self, positive: torch.Tensor) -> torch.Tensor:
        """Draw the classes of this rank for one step.

        Args:
            positive: (P,) int64, classes of the images, 0..count-1, without duplicates.

        Returns:
            (S,) int64 classes of this rank, 0..count-1, in ascending order.
        """
        size = max(int(self.sample_rate * self.count), 1)
        self.draws += 1
        if len(positive) >= size:
            return positive.sort().values
        # The smaller part of the classes is drawn, so that a small sample costs the same time for any number of
        # classes, and a large one needs few further draws.
        if size <= self.count // 2:
            return torch.cat([positive, self._draw_others(positive, size - len(positive))]).sort().values
        sampled = torch.ones(self.count, dtype=torch.bool, device=positive.device)
        sampled[self._draw_others(positive, self.count - size)] = False
        return sampled.nonzero()[:, 0]

    def _draw_others(self, positive: torch.Tensor, number: int) -> torch.Tensor:
        """Draw a number of different classes that are not in ``positive``, by rejection, in O(number log number)."""
        generator, device = self.generator(positive.device), positive.device
        others = positive[:0]
        while (missing := number - len(others)) > 0:
            used = torch.cat([positive, others])
            # A drawn class is new with probability 1 - len(used) / count.
            count = math.ceil(1.1 * missing * self.count / (self.count - len(used)))
            drawn = torch.randint(self.count, (count,), generator=generator, device=device).unique()
            drawn = drawn[~torch.isin(drawn, used, assume_unique=True)]
            order = torch.randperm(len(drawn), generator=generator, device=device)
            others = torch.cat([others, drawn[order[:missing]]])
        return others

    def generator(self, device: torch.device) -> torch.Generator:
        """Create a generator seeded by the seed, the rank and the number of draws."""
        # Mixed, because PyTorch's generator on a CPU uses only the lowest 32 bits of a seed.
        seed = np.random.SeedSequence((self.seed, self.rank, self.draws)).generate_state(1, np.uint64)[0]
        return torch.Generator(device).manual_seed(int(seed >> np.uint64(1)))

    def set_draws(self, draws: int) -> None:
        """Continue with the sample that follows ``draws`` samples, after a resume."""
        self.draws = draws

    def extra_repr(self) -> str:
        return f"num_classes={self.num_classes}, sample_rate={self.sample_rate:g}, rows={self.count * self.centers}"


class _PartialCrossEntropy(torch.autograd.Function):
    """-mean max(log p, log 1e-30), with p from a softmax over the columns of all ranks. The bound has no gradient."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ctx.uses_parameters = False  # for ``check_losses``
        shifted = logits - comm.all_reduce_max(logits.amax(1))[:, None]
        log_probabilities = shifted - comm.all_reduce_sum(shifted.exp().sum(1)).log()[:, None]
        held = positions >= 0
        columns = positions.clamp_min(0)[:, None]
        right = comm.all_reduce_sum(torch.where(held, log_probabilities.gather(1, columns)[:, 0], 0.0))
        ctx.save_for_backward(log_probabilities, columns, held)
        return -right.clamp_min(_SMALLEST_LOG).mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        log_probabilities, columns, held = ctx.saved_tensors
        share = gradient / len(log_probabilities)
        wrong = log_probabilities.exp().mul_(share)
        right = wrong.gather(1, columns) - torch.where(held, share, 0.0)[:, None]
        return wrong.scatter_(1, columns, right), None
