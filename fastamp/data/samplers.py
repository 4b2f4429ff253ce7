"""Batch samplers: index streams that depend only on the seed and the epoch."""

import inspect
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from fastamp.config import CfgNode, Key
from fastamp.data.columns import integers_of
from fastamp.utils.errors import ConfigError, DataError
from fastamp.utils.registry import Registry, adopt

KEYS = (
    Key(
        "DATALOADER.BALANCE_COLUMN",
        "camera",
        "Column whose values share the NUM_INSTANCE images of each identity equally, for ColumnBalancedSampler: "
        "camera, or a column of the dataset, e.g. modality or clothes.",
    ),
    Key(
        "DATALOADER.BALANCED_EPOCH",
        False,
        "ColumnBalancedSampler: an epoch has as many images as if all values of the column were as frequent as the "
        "most frequent one. If False, as many as the training set.",
    ),
)

# (epoch, position in the epoch's stream, index in the dataset)
SampleKey = tuple[int, int, int]


class EpochSampler:
    """Base class of samplers that generate the image indices of an epoch for all ranks.

    A subclass defines a classmethod ``from_config(cfg, *, labels, camids, sets, world_size)`` and draws random numbers
    only from ``generator(seed, epoch)``. If ``from_config`` has a parameter ``columns``, it receives the columns of the
    images, name -> (N,) values; ``camera`` is one of them.

    Attributes:
        images_per_epoch: images in an epoch. Default None: as many as the training set has.
        needs_identities: whether the training set needs at least two identities. Default True.
    """

    images_per_epoch: int | None = None
    needs_identities = True

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return an infinite stream of image indices, shuffled with a seed derived from ``epoch``.

        Calls with the same ``epoch`` return the same indices.
        """
        raise NotImplementedError


SAMPLER_REGISTRY = Registry("DATALOADER.SAMPLER_TRAIN", contract=EpochSampler)


def generator(seed: int, epoch: int) -> np.random.Generator:
    """Create the random generator of an epoch."""
    return np.random.default_rng([seed % 2**64, epoch])


@SAMPLER_REGISTRY.register()
class TrainingSampler(EpochSampler):
    """Visit all images in random order, and shuffle them again after each pass.

    Args:
        size: number of images.
        seed: seed of the random order; any integer.
    """

    def __init__(self, *, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed

    @classmethod
    def from_config(cls, cfg: CfgNode, *, labels: Sequence[int] | np.ndarray, **unused: Any) -> "EpochSampler":
        """Build the sampler from the config key ``SEED``."""
        return cls(size=len(labels), seed=cfg.SEED)

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return an infinite stream of image indices, shuffled with a seed derived from ``epoch``."""
        rng = generator(self.seed, epoch)
        while True:
            yield from rng.permutation(self.size).tolist()


@SAMPLER_REGISTRY.register()
class ImbalancedDatasetSampler(EpochSampler):
    """Draw images at random with replacement, so that each identity has the same probability.

    Args:
        labels: identity of each image.
        seed: seed of the random choice; any integer.
    """

    def __init__(self, *, labels: Sequence[int] | np.ndarray, seed: int) -> None:
        _, identity, counts = np.unique(labels, return_inverse=True, return_counts=True)
        self._ends = np.cumsum(1.0 / counts[identity])
        self.seed = seed

    @classmethod
    def from_config(cls, cfg: CfgNode, *, labels: Sequence[int] | np.ndarray, **unused: Any) -> "EpochSampler":
        """Build the sampler from the config key ``SEED``."""
        return cls(labels=labels, seed=cfg.SEED)

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return an infinite stream of image indices, shuffled with a seed derived from ``epoch``."""
        rng = generator(self.seed, epoch)
        while True:
            draws = rng.random(len(self._ends)) * self._ends[-1]
            yield from np.searchsorted(self._ends, draws, side="right").tolist()


class IdentitySampler(EpochSampler):
    """Base class of samplers whose batches contain P identities with K images each.

    This is the PK sampling of Hermans et al. 2017, arXiv:1703.07737, section 2. The P identities of a batch are
    distinct, also across ranks. The K images of an identity are consecutive.

    Args:
        labels: identity of each image.
        camids: camera of each image.
        batch_size: images per batch over all ranks, P * K.
        num_instances: images per identity, K; 0 chooses 2, 3 or 4 by the images that the identities have.
        seed: any integer.
        world_size: number of ranks that share a batch; all K images of an identity go to one rank. Default 1.
        frames_per_instance: batch positions of each of the K; more than 1 for tracklets. Default 1.

    Attributes:
        images_per_identity: (I,) int64, number of images of each identity.

    Raises:
        ConfigError: if ``batch_size`` is not a multiple of ``num_instances * frames_per_instance * world_size``.
        DataError: if there are fewer than P identities.
    """

    def __init__(
        self,
        *,
        labels: Sequence[int] | np.ndarray,
        camids: Sequence[int] | np.ndarray,
        batch_size: int,
        num_instances: int,
        seed: int,
        world_size: int = 1,
        frames_per_instance: int = 1,
    ) -> None:
        if num_instances < 0:
            raise ConfigError(
                f"DATALOADER.NUM_INSTANCE must be at least 0, got {num_instances}.\n"
                "  fix: set the images per identity in a batch, or 0 to choose 2 to 4 by the images that exist"
            )
        per_rank = batch_size_per_rank(batch_size, world_size)
        self.images_per_identity = np.unique(labels, return_counts=True)[1]
        if num_instances == 0:
            num_instances = self._instances_that_exist(per_rank // frames_per_instance)
        size, divisor = num_instances * frames_per_instance, f"DATALOADER.NUM_INSTANCE {num_instances}"
        if frames_per_instance > 1:
            divisor += f" x DATALOADER.TRACKLET.FRAMES {frames_per_instance}"
        if per_rank % size:
            ranks = f" on each of {world_size} ranks" if world_size > 1 else ""
            raise ConfigError(
                f"SOLVER.IMS_PER_BATCH {batch_size} gives {per_rank} images{ranks}: expected a multiple of {divisor}.\n"
                f"  fix: set SOLVER.IMS_PER_BATCH to a multiple of {size * world_size}"
            )
        # Indices sorted by identity; ``_starts`` and ``_ends`` delimit each identity.
        self._order = np.argsort(labels, kind="stable")
        self.identities, self._starts = np.unique(np.asarray(labels)[self._order], return_index=True)
        self._ends = np.append(self._starts[1:], len(labels))
        self.camids = np.asarray(camids)
        self.identities_per_batch = batch_size // size
        self.num_instances = num_instances
        self.seed = seed
        if len(self.identities) < self.identities_per_batch:
            raise DataError(
                f"too few identities: the training set has {len(self.identities)}, but a batch needs "
                f"{self.identities_per_batch} (SOLVER.IMS_PER_BATCH {batch_size} / {divisor}).\n"
                "  fix: reduce SOLVER.IMS_PER_BATCH, increase DATALOADER.NUM_INSTANCE, or set "
                "DATALOADER.SAMPLER_TRAIN to TrainingSampler"
            )

    def _instances_that_exist(self, per_rank: int) -> int:
        """Return K from 2 to 4: the number of images that at least half of the identities have, if it divides a batch.

        Otherwise K is the next smaller divisor of ``per_rank``.
        """
        typical = int(np.sort(self.images_per_identity)[(len(self.images_per_identity) - 1) // 2])
        return next((k for k in range(min(typical, 4), 2, -1) if per_rank % k == 0), 2)

    @property
    def repeats_per_batch(self) -> float:
        """Mean number of images in a batch that repeat another one, because identities have fewer than K images."""
        missing = np.maximum(self.num_instances - self.images_per_identity, 0)
        return float(missing.mean()) * self.identities_per_batch

    def images_of(self, number: int) -> np.ndarray:
        """Return the indices of the images of ``identities[number]``: (n,) int64."""
        return self._order[self._starts[number] : self._ends[number]]

    @classmethod
    def from_config(cls, cfg: CfgNode, **images: Any) -> "EpochSampler":
        """Build the sampler from SOLVER.IMS_PER_BATCH, DATALOADER.NUM_INSTANCE and SEED; see ``EpochSampler``."""
        return cls(**cls.options_from_config(cfg, **images))

    @staticmethod
    def options_from_config(
        cfg: CfgNode,
        *,
        labels: Sequence[int] | np.ndarray,
        camids: Sequence[int] | np.ndarray,
        world_size: int,
        **unused: Any,
    ) -> dict[str, Any]:
        """Return the arguments of ``IdentitySampler`` for a config and the images of the training set."""
        return {
            "labels": labels,
            "camids": camids,
            "batch_size": cfg.SOLVER.IMS_PER_BATCH,
            "num_instances": cfg.DATALOADER.NUM_INSTANCE,
            "seed": cfg.SEED,
            "world_size": world_size,
        }


@SAMPLER_REGISTRY.register()
class NaiveIdentitySampler(IdentitySampler):
    """Draw P random identities with K images each, without replacement.

    The images of each identity are shuffled and split into chunks of K images; the remaining images, fewer than K, are
    dropped. For an identity with fewer than K images in total, one chunk is drawn with replacement. When fewer than P
    identities have unused chunks, all identities are split into chunks again.
    """

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return an infinite stream of image indices, shuffled with a seed derived from ``epoch``."""
        rng = generator(self.seed, epoch)
        while True:
            chunks = [self._chunk(rng, number) for number in range(len(self.identities))]
            left = [len(chunk) for chunk in chunks]
            remaining = np.arange(len(self.identities))
            while len(remaining) >= self.identities_per_batch:
                candidates = rng.choice(len(remaining), self.identities_per_batch, replace=False)
                used_up = []
                for candidate in candidates.tolist():
                    number = int(remaining[candidate])
                    left[number] -= 1
                    yield from chunks[number][left[number]].tolist()
                    if not left[number]:
                        used_up.append(candidate)
                remaining = np.delete(remaining, used_up)

    def _chunk(self, rng: np.random.Generator, number: int) -> np.ndarray:
        """Shuffle the images of an identity, and split them into an array of shape (chunks, K)."""
        images, size = self.images_of(number), self.num_instances
        if len(images) < size:
            return rng.choice(images, size)[None]
        return rng.permutation(images)[: len(images) // size * size].reshape(-1, size)


@SAMPLER_REGISTRY.register()
class BalancedIdentitySampler(IdentitySampler):
    """Visit identities in random order. Draw an anchor image and K - 1 images, preferably from other cameras, of each.

    The anchor is a random image of the identity. The K - 1 images come from as many different cameras as possible,
    excluding the anchor's camera. If there are too few such images, images from the anchor's camera are added, and
    finally images are repeated. Identities that do not fill a batch at the end of a pass are dropped. FastReID instead
    draws from all images of other cameras, without balancing the cameras, and repeats these images before it uses the
    anchor's camera.
    """

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return an infinite stream of image indices, shuffled with a seed derived from ``epoch``."""
        rng = generator(self.seed, epoch)
        whole_batches = len(self.identities) // self.identities_per_batch * self.identities_per_batch
        while True:
            for number in rng.permutation(len(self.identities))[:whole_batches].tolist():
                yield from self._draw(rng, self.images_of(number))

    def _draw(self, rng: np.random.Generator, images: np.ndarray) -> list[int]:
        shuffled = rng.permutation(images)
        anchor, *rest = shuffled.tolist()
        anchor_camera, *cameras = self.camids[shuffled].tolist()
        seen: dict[int, int] = defaultdict(int)
        ranked = []
        for index, camera in zip(rest, cameras, strict=True):
            ranked.append((camera == anchor_camera, seen[camera], index))
            seen[camera] += 1
        # The sort is stable: images with equal preference stay in random order.
        ranked.sort(key=lambda image: image[:2])
        chosen = [index for _, _, index in ranked[: self.num_instances - 1]]
        missing = self.num_instances - 1 - len(chosen)
        return [anchor, *chosen, *rng.choice(rest or [anchor], missing).tolist()]


@SAMPLER_REGISTRY.register()
class ColumnBalancedSampler(BalancedIdentitySampler):
    """Visit identities in random order, and draw K images of each, shared equally by the values of a column.

    If K is not a multiple of the number of values that an identity has, randomly chosen values get one more image. A
    value with too few images repeats them. Identities that do not fill a batch at the end of a pass are dropped. With
    the column modality, these are the batches of visible-infrared methods: K / 2 visible and K / 2 infrared images.

    Args:
        values: (N,) value of the column for each image.
        balanced_epoch: ``DATALOADER.BALANCED_EPOCH``. Default False.
        options: keyword arguments of ``IdentitySampler``.
    """

    def __init__(self, *, values: np.ndarray, balanced_epoch: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.values = values
        if balanced_epoch:
            counts = np.unique(values, return_counts=True)[1]
            self.images_per_epoch = int(counts.max()) * len(counts)

    @classmethod
    def from_config(cls, cfg: CfgNode, *, columns: Mapping[str, Any], **images: Any) -> "EpochSampler":
        """Build the sampler from DATALOADER.BALANCE_COLUMN, BALANCED_EPOCH and the keys of ``IdentitySampler``.

        Raises:
            ConfigError: if the column does not exist, or is a list.
        """
        key, name = "DATALOADER.BALANCE_COLUMN", cfg.DATALOADER.BALANCE_COLUMN
        title = f"the training set ({', '.join(cfg.DATASETS.NAMES)})"
        values = integers_of(name, columns, key, title)
        return cls(
            values=values,
            balanced_epoch=cfg.DATALOADER.BALANCED_EPOCH,
            **cls.options_from_config(cfg, **images),
        )

    def _draw(self, rng: np.random.Generator, images: np.ndarray) -> list[int]:
        shuffled = rng.permutation(images)
        values = self.values[shuffled]
        order = rng.permutation(np.unique(values))
        counts = [len(part) for part in np.array_split(np.arange(self.num_instances), len(order))]
        chosen: list[int] = []
        for value, count in zip(order, counts, strict=True):
            chosen += itertools.islice(itertools.cycle(shuffled[values == value].tolist()), count)
        return chosen


@SAMPLER_REGISTRY.register()
class SetReWeightSampler(BalancedIdentitySampler):
    """Draw a fixed number of identities per batch from each dataset, independent of the dataset sizes.

    The identities of each dataset are visited in random order, with K images each, selected as in
    ``BalancedIdentitySampler``. The order of the identities within a batch is random. The number of identities from a
    dataset is proportional to its weight, rounded by the largest remainder method.

    Args:
        sets: dataset index of each image.
        weights: relative weight of each dataset, greater than 0.
        options: keyword arguments of ``IdentitySampler``.

    Raises:
        ConfigError: if the number of weights differs from the number of datasets, or a weight is so small that no
            identity in a batch comes from its dataset.
        DataError: if a dataset has fewer identities than a batch requires from it.
    """

    def __init__(self, *, sets: Sequence[int], weights: Sequence[float], **options: Any) -> None:
        super().__init__(**options)
        numbers = np.asarray(sets)
        count = int(numbers.max()) + 1
        if len(weights) != count or not all(0 < weight < float("inf") for weight in weights):
            raise ConfigError(
                f"DATALOADER.SET_WEIGHT must be {count} positive numbers, one for each dataset in DATASETS.NAMES; got "
                f"{tuple(weights)}.\n  fix: set one weight above 0 for each dataset"
            )
        set_of = numbers[self._order[self._starts]]
        self._identities = [np.flatnonzero(set_of == number) for number in range(count)]
        exact = np.array(weights) / sum(weights) * self.identities_per_batch
        counts = np.floor(exact).astype(int)
        remainder = self.identities_per_batch - counts.sum()
        counts[np.argsort(counts - exact, kind="stable")[:remainder]] += 1
        self.identities_per_set = counts.tolist()
        for number, (needed, identities) in enumerate(zip(self.identities_per_set, self._identities, strict=True)):
            if not needed:
                raise ConfigError(
                    f"DATALOADER.SET_WEIGHT {tuple(weights)} gives dataset {number + 1} in DATASETS.NAMES "
                    f"none of the {self.identities_per_batch} identities in a batch.\n"
                    "  fix: increase this weight, or SOLVER.IMS_PER_BATCH"
                )
            if needed > len(identities):
                raise DataError(
                    f"too few identities: dataset {number + 1} in DATASETS.NAMES has {len(identities)}, but "
                    f"DATALOADER.SET_WEIGHT {tuple(weights)} requires {needed} in each batch.\n"
                    "  fix: reduce this weight"
                )

    @classmethod
    def from_config(cls, cfg: CfgNode, *, sets: Sequence[int], **images: Any) -> "EpochSampler":
        """Build the sampler from DATALOADER.SET_WEIGHT, SOLVER.IMS_PER_BATCH, DATALOADER.NUM_INSTANCE and SEED."""
        return cls(
            sets=sets,
            weights=cfg.DATALOADER.SET_WEIGHT,
            **cls.options_from_config(cfg, **images),
        )

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return an infinite stream of image indices, shuffled with a seed derived from ``epoch``."""
        rng = generator(self.seed, epoch)
        queues: list[list[int]] = [[] for _ in self.identities_per_set]
        while True:
            batch = []
            for set_index, needed in enumerate(self.identities_per_set):
                if len(queues[set_index]) < needed:
                    queues[set_index] = rng.permutation(self._identities[set_index]).tolist()
                batch += [queues[set_index].pop() for _ in range(needed)]
            for number in rng.permutation(batch).tolist():
                yield from self._draw(rng, self.images_of(number))


@dataclass(eq=False)
class EpochBatchSampler:
    """Split the index stream of each epoch into batches, and each batch among the ranks.

    Rank r loads part r of each batch, so that the parts of all ranks form the same batch as with a single process.

    Args:
        sampler: sampler of the indices.
        batch_size: images per batch, over all ranks.
        iters_per_epoch: batches per epoch.
        rank, world_size: rank of this process and number of processes. Default 0 and 1.
        start_iter: index of the first batch, counted from the start of training; see ``start_at``. Default 0.

    Raises:
        ConfigError: if ``batch_size`` is not a multiple of ``world_size``.
    """

    sampler: EpochSampler
    _: KW_ONLY
    batch_size: int
    iters_per_epoch: int
    rank: int = 0
    world_size: int = 1
    start_iter: int = 0

    def __post_init__(self) -> None:
        per_rank = batch_size_per_rank(self.batch_size, self.world_size)
        self._slice = slice(self.rank * per_rank, (self.rank + 1) * per_rank)

    def start_at(self, start_iter: int) -> None:
        """Let the next iterator start at batch ``start_iter``, counted from the start of training."""
        self.start_iter = start_iter

    def __iter__(self) -> Iterator[list[SampleKey]]:
        """Yield this rank's sample keys for each batch, indefinitely, starting at batch ``start_iter``."""
        first_epoch, first_batch = divmod(self.start_iter, self.iters_per_epoch)
        for epoch in itertools.count(first_epoch):
            skipped = first_batch if epoch == first_epoch else 0
            stream = itertools.islice(
                enumerate(self.sampler.epoch(epoch)), skipped * self.batch_size, self.iters_per_epoch * self.batch_size
            )
            for _ in range(skipped, self.iters_per_epoch):
                batch = [(epoch, position, index) for position, index in itertools.islice(stream, self.batch_size)]
                yield batch[self._slice]


class InferenceSampler:
    """Divide a test set into contiguous parts, one per rank, and yield the batches of this rank's part in order.

    The sizes of the parts differ by at most one image.

    Args:
        size: number of images.
        batch_size: images per batch on this rank; the last batch can be smaller.
        rank, world_size: rank of this process and number of processes. Default 0 and 1.
        images: indices of the ``size`` images in the dataset. Default: the first ``size``.

    Attributes:
        indices: indices of this rank's images in the dataset.
    """

    def __init__(
        self, *, size: int, batch_size: int, rank: int = 0, world_size: int = 1, images: Sequence[int] | None = None
    ) -> None:
        candidates = range(size) if images is None else images
        self.indices: Sequence[int] = candidates[rank * size // world_size : (rank + 1) * size // world_size]
        self.batch_size = batch_size

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        """Yield this rank's sample keys for each batch."""
        for start in range(0, len(self.indices), self.batch_size):
            yield [(0, index, index) for index in self.indices[start : start + self.batch_size]]


def build_sampler(cfg: CfgNode, *, columns: Mapping[str, Any], **images: Any) -> EpochSampler:
    """Build the sampler in DATALOADER.SAMPLER_TRAIN.

    Args:
        cfg: config.
        columns: name -> (N,) values, for samplers whose ``from_config`` has a parameter ``columns``.
        images: ``labels``, ``camids``, ``sets`` and ``world_size``; see ``EpochSampler``.
    """
    name = cfg.DATALOADER.SAMPLER_TRAIN
    if "columns" in inspect.signature(SAMPLER_REGISTRY.builder(name)).parameters:
        images["columns"] = columns
    return adopt(SAMPLER_REGISTRY.build(name, cfg, **images), EpochSampler)


def batch_size_per_rank(batch_size: int, world_size: int) -> int:
    """Compute the number of images per batch on each rank.

    Raises:
        ConfigError: if ``batch_size`` is not a positive multiple of ``world_size``.
    """
    if batch_size < 1 or batch_size % world_size:
        raise ConfigError(
            "SOLVER.IMS_PER_BATCH, the batch size over all ranks, must be a positive multiple of the number of ranks "
            f"({world_size}); got {batch_size}.\n  fix: set SOLVER.IMS_PER_BATCH to a multiple of {world_size}"
        )
    return batch_size // world_size
