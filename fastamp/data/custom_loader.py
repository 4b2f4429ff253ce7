"""Training and test loaders for custom datasets that load one image at a time."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, default_collate

from fastamp import contracts
from fastamp.config import CfgNode
from fastamp.contracts import EpochUser, TrainLoader
from fastamp.data.build import loading_device
from fastamp.data.columns import CAMERA
from fastamp.data.loader import start_worker, worker_count
from fastamp.data.samplers import EpochSampler, InferenceSampler, batch_size_per_rank, build_sampler
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError
from fastamp.utils.registry import adopt


@dataclass(eq=False)
class CustomTrainLoader:
    """Infinite training loader over a map-style dataset.

    A resumed run continues with the next batch of the sampler. It is bit-identical to an uninterrupted run only if
    neither the sampler nor loading an image draws numbers from a global random generator.

    Args:
        dataset: returns a dict with at least ``images``: (C, H, W) and ``targets``: int.
        batches: function of the number of the pass, from 0, that returns an iterable over the indices of each batch of
            this rank. It is called again when the iterable ends.
        iters_per_epoch: number of batches in an epoch.
        num_workers: number of worker processes. Default 0.
        collate: function that combines a list of items to a batch. Default: PyTorch's ``default_collate``.
        pin_memory: load batches into pinned memory, for a model on CUDA. Default False.
        seed: seed of the random generators in the workers, which also depend on the rank. Default 0.
        worker_init_fn: see ``torch.utils.data.DataLoader``.

    Raises:
        ConfigError: if ``iters_per_epoch`` is 0.
    """

    dataset: Dataset
    batches: Callable[[int], Iterable[list[int]]]
    _: KW_ONLY
    iters_per_epoch: int
    num_workers: int = 0
    collate: Callable[[list[Any]], Any] = default_collate
    pin_memory: bool = False
    seed: int = 0
    worker_init_fn: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        if self.iters_per_epoch < 1:
            raise ConfigError(
                f"the training set is smaller than one batch: {len(self.dataset)} images.\n"  # type: ignore[arg-type]
                "  fix: reduce SOLVER.IMS_PER_BATCH, or add images"
            )
        self._start = 0

    @classmethod
    def wrap(
        cls, loader: DataLoader, *, batch_size: int, pin_memory: bool = False, seed: int = 0
    ) -> "CustomTrainLoader":
        """Wrap a ``DataLoader`` over a map-style dataset.

        Args:
            loader: loader of this rank.
            batch_size: images per batch over all ranks, for the length of an epoch.
            pin_memory, seed: see the class.
        """
        sampler = loader.batch_sampler
        if sampler is None:
            raise ConfigError(
                f"build_train_loader returned a {type(loader).__name__} without batch_sampler.\n"
                "  fix: pass batch_size or batch_sampler to the DataLoader"
            )

        def batches(number: int) -> Iterable[list[int]]:
            _set_epoch(sampler, number)
            _set_epoch(loader.sampler, number)
            return sampler

        # ``as_train_loader`` sets attributes, which a list does not have.
        dataset = loader.dataset if hasattr(loader.dataset, "__dict__") else ConcatDataset([loader.dataset])
        return cls(
            dataset,
            batches,
            iters_per_epoch=max(1, len(loader.dataset) // batch_size),  # type: ignore[arg-type]
            num_workers=loader.num_workers,
            collate=loader.collate_fn,
            pin_memory=pin_memory,
            seed=seed,
            worker_init_fn=loader.worker_init_fn,
        )

    def start_at(self, start_iter: int) -> None:
        """Let the next iterator start at batch ``start_iter``, counted from the start of training."""
        self._start = start_iter

    def _stream(self) -> Iterator[list[int]]:
        """Repeat ``batches`` forever."""
        for number in itertools.count():
            empty = True
            for indices in self.batches(number):
                empty = False
                yield indices
            if empty:
                raise ConfigError(
                    "the sampler of the training loader returned no batch.\n"
                    "  fix: reduce SOLVER.IMS_PER_BATCH, or check the sampler"
                )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        stream = itertools.islice(self._stream(), self._start, None)  # skips indices without loading images
        loader = DataLoader(
            self.dataset,
            batch_sampler=_Once(stream),
            num_workers=self.num_workers,
            collate_fn=self.collate,
            pin_memory=self.pin_memory,
            worker_init_fn=functools.partial(_start_custom_worker, self.worker_init_fn),
            generator=torch.Generator().manual_seed(self._worker_seed()),
        )
        yield from loader

    def _worker_seed(self) -> int:
        sequence = np.random.SeedSequence((self.seed, comm.get_rank(), self._start))
        return int(sequence.generate_state(1, np.uint64)[0])


def as_train_loader(loader: Any, cfg: CfgNode) -> TrainLoader:
    """Return a training loader with the members that ``DefaultTrainer`` reads, see ``TrainLoader`` in contracts.

    Args:
        loader: return value of ``build_train_loader``. A ``torch.utils.data.DataLoader`` over a map-style dataset is
            wrapped.
        cfg: config; the length of an epoch is computed from SOLVER.IMS_PER_BATCH.

    Raises:
        ConfigError: if ``loader`` is neither a ``TrainLoader`` nor a ``DataLoader``.
    """
    missing = [name for name in ("dataset", "iters_per_epoch", "start_at") if not hasattr(loader, name)]
    if isinstance(loader, DataLoader) and missing:
        on_cuda = loading_device(cfg).type == "cuda"
        loader = CustomTrainLoader.wrap(loader, batch_size=cfg.SOLVER.IMS_PER_BATCH, pin_memory=on_cuda, seed=cfg.SEED)
        missing = []
    if not missing:
        adopt(loader.dataset, contracts.Dataset)
        return loader
    raise ConfigError(
        f"build_train_loader returned {type(loader).__name__}, without {', '.join(missing)}.\n"
        "  fix: return the result of build_custom_train_loader(cfg, dataset), or a torch.utils.data.DataLoader"
    )


def _start_custom_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """Initialize a worker as in the other loaders, and then as the user of the loader asks."""
    start_worker(worker)
    if then is not None:
        then(worker)


class _Once:
    """Batch sampler over one iterator."""

    def __init__(self, batches: Iterator[list[int]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches


def build_custom_train_loader(
    cfg: CfgNode,
    dataset: Dataset,
    sampler: Iterable[int] | EpochSampler | None = None,
    *,
    items: Sequence[tuple] | None = None,
) -> CustomTrainLoader:
    """Build an infinite training loader over a map-style dataset.

    Args:
        cfg: config; reads SOLVER.IMS_PER_BATCH, DATALOADER, SEED and MODEL.DEVICE.
        dataset: returns a dict with at least ``images``: (C, H, W) and ``targets``: int. Its attribute ``num_classes``
            is the number of classes.
        sampler: indices of the images of this rank, or an ``EpochSampler``, whose batches are split among the ranks.
            Default: DATALOADER.SAMPLER_TRAIN; samplers of identities require ``items``.
        items: ``(path, pid, camid)`` of each image. Default: the attribute ``items`` of the dataset, if it has one.

    Returns:
        Loader of the batches of this rank.

    Raises:
        ConfigError: if the sampler requires identities that the dataset does not provide, or the dataset is smaller
            than one batch.
    """
    size, world_size = cfg.SOLVER.IMS_PER_BATCH, comm.get_world_size()
    iters_per_epoch = len(dataset) // size  # type: ignore[arg-type]
    if sampler is None:
        name = cfg.DATALOADER.SAMPLER_TRAIN
        labels, camids = _labels(dataset, items, required_by=name)
        sets = np.zeros(len(labels), dtype=np.int64)
        sampler = build_sampler(
            cfg, labels=labels, camids=camids, sets=sets, world_size=world_size, columns={CAMERA: camids}
        )
    if isinstance(sampler, EpochSampler):
        epochs = functools.partial(_batches_of_epochs, sampler, size, iters_per_epoch)

        def batches(number: int) -> Iterable[list[int]]:
            return _rank_parts(epochs())
    else:
        own_size = batch_size_per_rank(size, world_size)

        def batches(number: int) -> Iterable[list[int]]:
            _set_epoch(sampler, number)
            return _batches(sampler, own_size)

    workers = worker_count("DATALOADER.NUM_WORKERS", cfg.DATALOADER.NUM_WORKERS)
    return CustomTrainLoader(
        dataset,
        batches,
        iters_per_epoch=iters_per_epoch,
        num_workers=workers,
        pin_memory=loading_device(cfg).type == "cuda",
        seed=cfg.SEED,
    )


def build_custom_test_loader(cfg: CfgNode, dataset: Dataset, num_query: int = 0) -> tuple[DataLoader, int]:
    """Build a test loader over a map-style dataset; each rank loads a contiguous part of it.

    Args:
        cfg: config; reads TEST.IMS_PER_BATCH and TEST.NUM_WORKERS.
        dataset: returns a dict with at least ``images``: (C, H, W); query images come first.
        num_query: number of query images. Default 0.

    Returns:
        The loader and ``num_query``.
    """
    batch_sampler = InferenceSampler(
        size=len(dataset),  # type: ignore[arg-type]
        batch_size=max(1, cfg.TEST.IMS_PER_BATCH // comm.get_world_size()),
        rank=comm.get_rank(),
        world_size=comm.get_world_size(),
    )
    workers = worker_count("TEST.NUM_WORKERS", max(0, cfg.TEST.NUM_WORKERS))
    batches = [[index for _, _, index in keys] for keys in batch_sampler]
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        worker_init_fn=start_worker,
        # Otherwise the workers' seeds would be drawn from the global generator, so that an evaluation affects training.
        generator=torch.Generator(),
    )
    return loader, num_query


def _labels(dataset: Dataset, items: Sequence[tuple] | None, *, required_by: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the identities and cameras of the items of a dataset: (N,) int64 each."""
    if items is None:
        items = getattr(dataset, "items", None)
    labeled = items is not None and all(len(item) >= 3 for item in items)
    if not labeled and required_by == "TrainingSampler":
        zeros = np.zeros(len(dataset), dtype=np.int64)  # type: ignore[arg-type]
        return zeros, zeros
    if items is None or not labeled:
        raise ConfigError(
            f"DATALOADER.SAMPLER_TRAIN={required_by} requires identities and cameras, but "
            f"{type(dataset).__name__} has no list items of (path, pid, camid).\n"
            "  fix: set DATALOADER.SAMPLER_TRAIN to TrainingSampler, or pass sampler=..."
        )
    pids, camids = (np.unique([str(item[column]) for item in items], return_inverse=True)[1] for column in (1, 2))
    return pids, camids


def _set_epoch(sampler: Any, epoch: int) -> None:
    """Set the epoch of a sampler such as ``DistributedSampler``, which otherwise repeats the order of epoch 0."""
    if isinstance(sampler, EpochUser):
        sampler.set_epoch(epoch)


def _batches(sampler: Iterable[int], size: int) -> Iterator[list[int]]:
    """Group indices into batches of ``size``; an incomplete last batch is dropped."""
    indices = iter(sampler)
    while len(batch := list(itertools.islice(indices, size))) == size:
        yield batch


def _batches_of_epochs(sampler: EpochSampler, size: int, iters_per_epoch: int) -> Iterator[list[int]]:
    """Yield the batches over all ranks, of one epoch after another."""
    for epoch in itertools.count():
        yield from itertools.islice(_batches(sampler.epoch(epoch), size), iters_per_epoch)


def _rank_parts(batches: Iterable[list[int]]) -> Iterator[list[int]]:
    """Yield this rank's part of each batch."""
    rank, count = comm.get_rank(), comm.get_world_size()
    for batch in batches:
        size = len(batch) // count
        yield batch[rank * size : (rank + 1) * size]
