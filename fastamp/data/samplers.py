"""Which images make up the batches: streams of indices that are pure functions of the seed and the epoch."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fastamp.utils.errors import ConfigError, DataError
from fastamp.utils.moved import renamed_attribute
from fastamp.utils.registry import Registry

SAMPLER_REGISTRY = Registry("DATALOADER.SAMPLER_TRAIN")

# (epoch, position in the epoch's stream, index in the data set)
SampleKey = tuple[int, int, int]


class EpochSampler:
    """Draws the indices of an epoch, for all ranks together.

    A subclass has a classmethod ``from_config(cfg, *, labels, camids, sets, world_size)`` and draws from nothing but
    ``generator(seed, epoch)``.
    """

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return the endless index stream of ``epoch``; the same one at every call."""
        raise NotImplementedError


def generator(seed: int, epoch: int) -> np.random.Generator:
    """Return the generator that belongs to ``seed`` and ``epoch``."""
    return np.random.default_rng([seed % 2**64, epoch])


@SAMPLER_REGISTRY.register()
class TrainingSampler(EpochSampler):
    """Every image once in random order, then again in another order, without end.

    Args:
        size: number of images.
        seed: any integer.
    """

    def __init__(self, *, size: int, seed: int) -> None:
        self.size = size
        self.seed = seed

    @classmethod
    def from_config(cls, cfg: Any, *, labels: Sequence[int], **unused: Any) -> "EpochSampler":
        """Build from SEED."""
        return cls(size=len(labels), seed=cfg.SEED)

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return the endless index stream of ``epoch``."""
        rng = generator(self.seed, epoch)
        while True:
            yield from rng.permutation(self.size).tolist()


@SAMPLER_REGISTRY.register()
class ImbalancedDatasetSampler(EpochSampler):
    """Images at random, with replacement, so that each identity comes equally often whatever its images.

    Args:
        labels: identity of each image.
        seed: any integer.
    """

    def __init__(self, *, labels: Sequence[int], seed: int) -> None:
        _, identity, counts = np.unique(labels, return_inverse=True, return_counts=True)
        self._ends = np.cumsum(1.0 / counts[identity])
        self.seed = seed

    @classmethod
    def from_config(cls, cfg: Any, *, labels: Sequence[int], **unused: Any) -> "EpochSampler":
        """Build from SEED."""
        return cls(labels=labels, seed=cfg.SEED)

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return the endless index stream of ``epoch``."""
        rng = generator(self.seed, epoch)
        while True:
            draws = rng.random(len(self._ends)) * self._ends[-1]
            yield from np.searchsorted(self._ends, draws, side="right").tolist()


class IdentitySampler(EpochSampler):
    """Batches of P identities with K images each (Hermans et al. 2017, arXiv:1703.07737, section 2).

    The K images of an identity follow each other, and no identity is in a batch twice; ``batch_size`` is the batch of
    all ranks together, so this holds across them.

    Args:
        labels: identity of each image.
        camids: camera of each image.
        batch_size: P * K.
        num_instances: K.
        seed: any integer.
        world_size: ranks among which a batch is divided; each gets whole identities.

    Raises:
        ConfigError: the batch cannot be divided so.
        DataError: there are fewer identities than a batch holds.
    """

    def __init__(
        self,
        *,
        labels: Sequence[int],
        camids: Sequence[int],
        batch_size: int,
        num_instances: int,
        seed: int,
        world_size: int = 1,
    ) -> None:
        if num_instances < 1:
            raise ConfigError(f"DATALOADER.NUM_INSTANCE is {num_instances}; it must be at least 1")
        share = batch_size_per_rank(batch_size, world_size)
        if share % num_instances:
            ranks = f" on each of {world_size} ranks" if world_size > 1 else ""
            raise ConfigError(
                f"SOLVER.IMS_PER_BATCH {batch_size} makes {share} images{ranks}, which DATALOADER.NUM_INSTANCE "
                f"{num_instances} does not divide.\n  fix: make it a multiple of {num_instances * world_size}"
            )
        labels = np.asarray(labels)
        # The images of one identity follow each other in ``_order``, from its entry in ``_starts`` on.
        self._order = np.argsort(labels, kind="stable")
        self.identities, self._starts = np.unique(labels[self._order], return_index=True)
        self._ends = np.append(self._starts[1:], len(labels))
        self.camids = np.asarray(camids)
        self.identities_per_batch = batch_size // num_instances
        self.num_instances = num_instances
        self.seed = seed
        if len(self.identities) < self.identities_per_batch:
            raise DataError(
                f"the training set has {len(self.identities)} identities, but a batch needs "
                f"{self.identities_per_batch}: SOLVER.IMS_PER_BATCH {batch_size} / DATALOADER.NUM_INSTANCE "
                f"{num_instances}.\n  fix: a smaller SOLVER.IMS_PER_BATCH, a larger DATALOADER.NUM_INSTANCE, or "
                f"DATALOADER.SAMPLER_TRAIN TrainingSampler"
            )

    def images_of(self, number: int) -> np.ndarray:
        """Return the images of ``identities[number]``, in their order: (n,) int64."""
        return self._order[self._starts[number] : self._ends[number]]

    @classmethod
    def from_config(
        cls, cfg: Any, *, labels: Sequence[int], camids: Sequence[int], world_size: int, **unused: Any
    ) -> "EpochSampler":
        """Build from SOLVER.IMS_PER_BATCH, DATALOADER.NUM_INSTANCE and SEED."""
        return cls(
            labels=labels,
            camids=camids,
            batch_size=cfg.SOLVER.IMS_PER_BATCH,
            num_instances=cfg.DATALOADER.NUM_INSTANCE,
            seed=cfg.SEED,
            world_size=world_size,
        )


@SAMPLER_REGISTRY.register()
class NaiveIdentitySampler(IdentitySampler):
    """Deal each identity's images out in chunks of K, to batches of P random identities.

    An identity's images are shuffled and dealt without replacement, those that make no whole chunk are left out; only
    one with fewer than K images is drawn with replacement. When fewer than P identities have a chunk left, all are
    dealt anew.
    """

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return the endless index stream of ``epoch``."""
        rng = generator(self.seed, epoch)
        while True:
            chunks = [self._chunk(rng, number) for number in range(len(self.identities))]
            left = [len(each) for each in chunks]
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
        """Return (chunks, K) images of an identity."""
        images, size = self.images_of(number), self.num_instances
        if len(images) < size:
            return rng.choice(images, size)[None]
        return rng.permutation(images)[: len(images) // size * size].reshape(-1, size)


@SAMPLER_REGISTRY.register()
class BalancedIdentitySampler(IdentitySampler):
    """Each identity once in random order: a random image of it, and K - 1 others that prefer other cameras.

    The rest come from as many different cameras as there are, none of them that of the first image; when those
    images do not suffice, from its own camera, and only when all images are in, with replacement. An epoch's last
    identities that make no whole batch are left out. Differs from FastReID, which draws among the images of other
    cameras without regard to which, and repeats them before it takes one of the first image's camera.
    """

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return the endless index stream of ``epoch``."""
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
        # The sort is stable, so images of equal preference stay in their random order.
        ranked.sort(key=lambda image: image[:2])
        chosen = [index for _, _, index in ranked[: self.num_instances - 1]]
        missing = self.num_instances - 1 - len(chosen)
        return [anchor, *chosen, *rng.choice(rest or [anchor], missing).tolist()]


@SAMPLER_REGISTRY.register()
class SetReWeightSampler(BalancedIdentitySampler):
    """Batches in which each data set has a share of the identities, however large it is.

    Of each set the identities come in random order, and with K images as ``BalancedIdentitySampler`` draws them; the
    sets' identities are mixed within a batch. A share that is no whole number of identities is rounded, those with
    the largest remainders up.

    Args:
        sets: number of the data set that each image belongs to.
        weights: relative weight of each data set.
        options: of ``IdentitySampler``.

    Raises:
        ConfigError: there are not as many weights as sets, or a set has no place in a batch.
        DataError: a set has fewer identities than its share of a batch.
    """

    shares = renamed_attribute("shares", "identities_per_set")

    def __init__(self, *, sets: Sequence[int], weights: Sequence[float], **options: Any) -> None:
        super().__init__(**options)
        sets = np.asarray(sets)
        count = int(sets.max()) + 1
        if len(weights) != count or not all(0 < weight < float("inf") for weight in weights):
            raise ConfigError(
                f"DATALOADER.SET_WEIGHT is {tuple(weights)}; SetReWeightSampler needs a number above 0 for each of the "
                f"{count} data sets of DATASETS.NAMES"
            )
        set_of = sets[self._order[self._starts]]
        self._identities = [np.flatnonzero(set_of == number) for number in range(count)]
        exact = np.array(weights) / sum(weights) * self.identities_per_batch
        shares = np.floor(exact).astype(int)
        left = self.identities_per_batch - shares.sum()
        shares[np.argsort(shares - exact, kind="stable")[:left]] += 1
        self.identities_per_set = shares.tolist()
        for number, (share, identities) in enumerate(zip(self.identities_per_set, self._identities, strict=True)):
            if not share:
                raise ConfigError(
                    f"DATALOADER.SET_WEIGHT {tuple(weights)} leaves data set {number + 1} no identity among the "
                    f"{self.identities_per_batch} of a batch.\n  fix: a larger weight, or a larger SOLVER.IMS_PER_BATCH"
                )
            if share > len(identities):
                raise DataError(
                    f"data set {number + 1} has {len(identities)} identities, and DATALOADER.SET_WEIGHT "
                    f"{tuple(weights)} asks for {share} of it in each batch.\n  fix: a smaller weight"
                )

    @classmethod
    def from_config(
        cls, cfg: Any, *, labels: Sequence[int], camids: Sequence[int], sets: Sequence[int], world_size: int
    ) -> "EpochSampler":
        """Build from DATALOADER.SET_WEIGHT, SOLVER.IMS_PER_BATCH, DATALOADER.NUM_INSTANCE and SEED."""
        return cls(
            sets=sets,
            weights=cfg.DATALOADER.SET_WEIGHT,
            labels=labels,
            camids=camids,
            batch_size=cfg.SOLVER.IMS_PER_BATCH,
            num_instances=cfg.DATALOADER.NUM_INSTANCE,
            seed=cfg.SEED,
            world_size=world_size,
        )

    def epoch(self, epoch: int) -> Iterator[int]:
        """Return the endless index stream of ``epoch``."""
        rng = generator(self.seed, epoch)
        queues: list[list[int]] = [[] for _ in self.identities_per_set]
        while True:
            batch = []
            for set_index, share in enumerate(self.identities_per_set):
                if len(queues[set_index]) < share:
                    queues[set_index] = rng.permutation(self._identities[set_index]).tolist()
                batch += [queues[set_index].pop() for _ in range(share)]
            for number in rng.permutation(batch).tolist():
                yield from self._draw(rng, self.images_of(number))


class EpochBatchSampler:
    """Cut the epochs' streams into batches, and give each rank its share.

    The ranks together see the batches that one process would see: rank r gets the r-th part of each batch.

    Args:
        sampler: draws the indices.
        batch_size: images of a batch, of all ranks together.
        iters_per_epoch: batches of an epoch.
        rank, world_size: this process among how many.
        start_iter: index of the first batch, counted from the start of the training; see ``start_at``.

    Raises:
        ConfigError: ``batch_size`` is not a multiple of ``world_size``.
    """

    def __init__(
        self,
        sampler: EpochSampler,
        *,
        batch_size: int,
        iters_per_epoch: int,
        rank: int = 0,
        world_size: int = 1,
        start_iter: int = 0,
    ) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.iters_per_epoch = iters_per_epoch
        self.start_iter = start_iter
        share = batch_size_per_rank(batch_size, world_size)
        self._share = slice(rank * share, (rank + 1) * share)

    def start_at(self, start_iter: int) -> None:
        """Begin the next iteration with batch ``start_iter``, counted from the start of the training."""
        self.start_iter = start_iter

    def __iter__(self) -> Iterator[list[SampleKey]]:
        """Yield this rank's keys of each batch, without end, from ``start_iter`` on."""
        first_epoch, first_batch = divmod(self.start_iter, self.iters_per_epoch)
        for epoch in itertools.count(first_epoch):
            stream = enumerate(self.sampler.epoch(epoch))
            skipped = first_batch if epoch == first_epoch else 0
            stream = itertools.islice(stream, skipped * self.batch_size, self.iters_per_epoch * self.batch_size)
            for _ in range(skipped, self.iters_per_epoch):
                batch = [(epoch, position, index) for position, index in itertools.islice(stream, self.batch_size)]
                yield batch[self._share]


class InferenceSampler:
    """Batches of this rank's contiguous part of a test set, in order; the parts differ by one image at most.

    Args:
        size: number of images.
        batch_size: images of this rank's batches; the last one may be smaller.
        rank, world_size: this process among how many.
        images: indices of the ``size`` images in the data set; None is the first ones.

    Attributes:
        indices: this rank's images, by their indices in the data set.
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
        """Yield the keys of each batch."""
        for start in range(0, len(self.indices), self.batch_size):
            yield [(0, index, index) for index in self.indices[start : start + self.batch_size]]


def batch_size_per_rank(batch_size: int, world_size: int) -> int:
    """Return each rank's images of a batch.

    Raises:
        ConfigError: there is none for each, or they cannot be divided evenly.
    """
    if batch_size < 1 or batch_size % world_size:
        raise ConfigError(
            f"SOLVER.IMS_PER_BATCH is {batch_size}, the batch of all {world_size} ranks together; "
            f"it must be a positive multiple of {world_size}"
        )
    return batch_size // world_size
