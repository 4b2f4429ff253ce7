"""Sampler that draws the identities of a batch from groups of images, such as species, with equal probability."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fastamp.config import CfgNode, Key
from fastamp.data.columns import integers_of
from fastamp.data.samplers import SAMPLER_REGISTRY, BalancedIdentitySampler, EpochSampler, generator
from fastamp.utils.errors import DataError

KEYS = (
    Key(
        "DATALOADER.GROUPS.COLUMN",
        "species",
        "Column whose values are the groups of GroupIdentitySampler, e.g. species; integer or text.",
    ),
    Key(
        "DATALOADER.GROUPS.BATCH",
        "mixed",
        "Batches of GroupIdentitySampler: mixed shares the identities of each batch equally among the groups; single "
        "draws each batch from one group, so that all negatives are of the same species.",
        choices=("mixed", "single"),
    ),
)


@SAMPLER_REGISTRY.register()
class GroupIdentitySampler(BalancedIdentitySampler):
    """Draw P identities with K images each, from groups of identities with equal probability.

    Species with few individuals are therefore drawn as often as those with many. The identities of a group are visited
    in random order, and the K images are drawn as in ``BalancedIdentitySampler``. The group of an identity is that of
    its first image.

    Args:
        groups: group of each image.
        single: if True, all identities of a batch are from one group, drawn with equal probability. If False (default),
            each group has P / G identities in a batch, and randomly drawn groups have one more if P is not a multiple
            of G. A group with fewer identities is replaced by the others.
        options: keyword arguments of ``IdentitySampler``.

    Raises:
        DataError: if ``single``, and a group has fewer than P identities.
    """

    def __init__(self, *, groups: Sequence[int] | np.ndarray, single: bool = False, **options: Any) -> None:
        super().__init__(**options)
        group_of = np.asarray(groups)[self._order[self._starts]]
        self._groups = [np.flatnonzero(group_of == value) for value in np.unique(group_of)]
        self.single = single
        smallest = min(map(len, self._groups))
        if single and smallest < self.identities_per_batch:
            raise DataError(
                f"too few identities: a group of DATALOADER.GROUPS.COLUMN has {smallest}, but a batch of one group "
                f"needs {self.identities_per_batch} (SOLVER.IMS_PER_BATCH / DATALOADER.NUM_INSTANCE).\n"
                "  fix: set DATALOADER.GROUPS.BATCH to mixed, or reduce SOLVER.IMS_PER_BATCH"
            )

    @classmethod
    def from_config(cls, cfg: CfgNode, *, columns: Mapping[str, Any], **images: Any) -> "EpochSampler":
        """Build the sampler from DATALOADER.GROUPS and the keys of ``IdentitySampler``.

        Raises:
            ConfigError: if the column does not exist, or has no integers or texts.
        """
        key, name = "DATALOADER.GROUPS.COLUMN", cfg.DATALOADER.GROUPS.COLUMN
        title = f"the training set ({', '.join(cfg.DATASETS.NAMES)})"
        groups = integers_of(name, columns, key, title)
        return cls(
            groups=groups,
            single=cfg.DATALOADER.GROUPS.BATCH == "single",
            **cls.options_from_config(cfg, **images),
        )

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return an infinite stream of image indices, shuffled with a seed derived from ``epoch``."""
        rng = generator(self.seed, epoch)
        queues: list[list[int]] = [[] for _ in self._groups]
        while True:
            batch: list[int] = []
            for group, count in enumerate(self._counts(rng)):
                batch += self._take(rng, queues, group, count)
            for number in rng.permutation(batch).tolist():
                yield from self._draw(rng, self.images_of(number))

    def _counts(self, rng: np.random.Generator) -> list[int]:
        """Return the number of identities of each group in the next batch."""
        counts = [0] * len(self._groups)
        if self.single:
            counts[rng.integers(len(counts))] = self.identities_per_batch
            return counts
        missing = self.identities_per_batch
        while missing:
            open_groups = [group for group in rng.permutation(len(counts)) if counts[group] < len(self._groups[group])]
            for group in open_groups[:missing]:
                counts[group] += 1
            missing -= min(missing, len(open_groups))
        return counts

    def _take(self, rng: np.random.Generator, queues: list[list[int]], group: int, count: int) -> list[int]:
        """Take the next ``count`` distinct identities of a group; the order is shuffled again after each pass."""
        taken = queues[group][:count]
        queues[group] = queues[group][count:]
        if len(taken) < count:
            order = rng.permutation(self._groups[group]).tolist()
            # Identities that this batch already has come last.
            order.sort(key=taken.__contains__)
            more = order[: count - len(taken)]
            queues[group] = order[len(more) :]
            taken += more
        return taken
