"""FastReID's samplers: endless iterables over the indices of the images of this rank.

They take lists of ``(path, pid, camid)`` and draw the images as the samplers of ``fastamp.data.samplers`` do. A loader
with such a sampler divides its batches among the ranks.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastamp.data import samplers
from fastamp.fastreid.utils.comm import shared_random_seed
from fastamp.utils import comm

__all__ = [
    "BalancedIdentitySampler",
    "ImbalancedDatasetSampler",
    "InferenceSampler",
    "NaiveIdentitySampler",
    "SetReWeightSampler",
    "TrainingSampler",
]


class _RankIndices(samplers.EpochSampler):
    """Base class that yields this rank's part of each ``mini_batch_size`` images per rank."""

    mini_batch_size = 1

    def __iter__(self) -> Iterator[int]:
        size, rank = self.mini_batch_size, comm.get_rank()
        indices = self.epoch(0)
        while batch := list(itertools.islice(indices, size * comm.get_world_size())):
            yield from batch[rank * size : (rank + 1) * size]


class TrainingSampler(_RankIndices, samplers.TrainingSampler):
    """Visit ``size`` images in random order.

    Args:
        size: number of images.
        shuffle: if False, visit them in their order. Default True.
        seed: seed of the order; None (default) for the same random one on all ranks.
    """

    def __init__(self, size: int, shuffle: bool = True, seed: int | None = None) -> None:
        super().__init__(size=size, seed=_seed(seed))
        self.shuffle = shuffle

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return an infinite stream of image indices."""
        return super().epoch(epoch) if self.shuffle else itertools.cycle(range(self.size))


class InferenceSampler:
    """Yield this rank's contiguous part of ``size`` images in order."""

    def __init__(self, size: int) -> None:
        rank, count = comm.get_rank(), comm.get_world_size()
        sampler = samplers.InferenceSampler(size=size, batch_size=1, rank=rank, world_size=count)
        self._indices = sampler.indices

    def __iter__(self) -> Iterator[int]:
        yield from self._indices

    def __len__(self) -> int:
        return len(self._indices)


class ImbalancedDatasetSampler(_RankIndices, samplers.ImbalancedDatasetSampler):
    """Draw images so that each identity has the same probability.

    Args:
        data_source: ``(path, pid, camid)`` of each image.
        size: ignored: the stream is endless.
        seed: see ``TrainingSampler``.
        callback_get_label: function ``(data_source, index)`` that returns the label of an image. Default: its identity.
    """

    def __init__(
        self,
        data_source: Sequence[tuple],
        size: int | None = None,
        seed: int | None = None,
        callback_get_label: Callable[[Any, int], Any] | None = None,
    ) -> None:
        labels = [item[1] for item in data_source]
        if callback_get_label is not None:
            labels = [callback_get_label(data_source, index) for index in range(len(data_source))]
        super().__init__(labels=_numbers(labels), seed=_seed(seed))


class _Identities(_RankIndices):
    """Base class of samplers whose batches contain P identities with K images each.

    Args:
        data_source: ``(path, pid, camid)`` of each image.
        mini_batch_size: images per batch of this rank, P * K.
        num_instances: images per identity, K.
        seed: see ``TrainingSampler``.
        options: further arguments of the sampler of ``fastamp.data.samplers``.
    """

    def __init__(
        self,
        data_source: Sequence[tuple],
        mini_batch_size: int,
        num_instances: int,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        count = comm.get_world_size()
        options["labels"], options["camids"] = (_numbers([item[column] for item in data_source]) for column in (1, 2))
        options |= {"batch_size": mini_batch_size * count, "num_instances": num_instances, "world_size": count}
        super().__init__(**options, **{"seed": _seed(seed)})
        self.mini_batch_size = mini_batch_size


class NaiveIdentitySampler(_Identities, samplers.NaiveIdentitySampler):
    """Draw random identities, and random images of each; see ``fastamp.data.samplers.NaiveIdentitySampler``."""


class BalancedIdentitySampler(_Identities, samplers.BalancedIdentitySampler):
    """Draw images of different cameras; see ``fastamp.data.samplers.BalancedIdentitySampler``."""


class SetReWeightSampler(_Identities, samplers.SetReWeightSampler):
    """Draw a number of identities per batch from each dataset; see ``fastamp.data.samplers.SetReWeightSampler``.

    Args:
        data_source: ``(path, pid, camid)`` of each image; the dataset is the part of the identity before the first
            ``_``.
        mini_batch_size, num_instances, seed: see ``BalancedIdentitySampler``.
        set_weight: relative weight of each dataset, in the order of their first images.
    """

    def __init__(
        self,
        data_source: Sequence[tuple],
        mini_batch_size: int,
        num_instances: int,
        set_weight: Sequence[float],
        seed: int | None = None,
    ) -> None:
        sets = _numbers([str(item[1]).partition("_")[0] for item in data_source])
        super().__init__(data_source, mini_batch_size, num_instances, seed, sets=sets, weights=set_weight)


def _numbers(values: Sequence[Any]) -> list[int]:
    """Number distinct values from 0, in the order in which they occur first."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return [numbers[value] for value in values]


def _seed(seed: int | None) -> int:
    return shared_random_seed() if seed is None else seed
