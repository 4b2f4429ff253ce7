"""Build the training and test loaders that a config describes."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastamp.amp import resolve_device
from fastamp.config import CfgNode, get_cfg
from fastamp.data.cache import ImageCache
from fastamp.data.dataset import ReidDataset
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem, data_root, log_splits
from fastamp.data.datasets.custom import PATH_DATASETS
from fastamp.data.datasets.items import PackedItems, split_path
from fastamp.data.loader import TestLoader, TrainLoader, worker_count
from fastamp.data.missing_images import check_files
from fastamp.data.samplers import SAMPLER_REGISTRY, EpochBatchSampler, InferenceSampler
from fastamp.data.transforms import build_transforms
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError, DataError, did_you_mean

logger = logging.getLogger(__name__)


def build_reid_train_loader(
    cfg: Any, *, start_iter: int = 0, rank: int | None = None, world_size: int | None = None
) -> TrainLoader:
    """Build the endless loader of DATASETS.NAMES.

    Its batches are a function of the config alone: the same ones from any ``start_iter`` on, with any number of
    workers, and divided among any number of ranks. An epoch is ``images // IMS_PER_BATCH`` batches.

    Args:
        cfg: reads DATASETS, DATALOADER, INPUT, SOLVER.IMS_PER_BATCH and SEED.
        start_iter: the first batch, counted from the start of the training.
        rank, world_size: this process among how many; None asks torch.distributed.

    Raises:
        DataError: a data set is missing or empty, or has too few images or identities for a batch.
        ConfigError: a value is out of range, a name unknown, or a batch cannot be made up as asked.
    """
    rank, world_size = _rank_and_world_size(rank, world_size)
    transforms = build_transforms(cfg, is_train=True)
    if not cfg.DATASETS.NAMES:
        raise ConfigError("DATASETS.NAMES is empty; name at least one data set to train on")
    datasets = [build_dataset(name, cfg) for name in cfg.DATASETS.NAMES]
    parts = training_parts(datasets, combine_all=cfg.DATASETS.COMBINEALL)
    dataset = ReidDataset(
        PackedItems.concat(parts),
        transforms,
        relabel=True,
        augment=cfg.INPUT.AUGMENT_ON == "worker",
        skip_corrupt=cfg.DATALOADER.ON_CORRUPT == "skip",
    )
    _check_camera_view_ids(cfg, dataset, cfg.DATASETS.NAMES)
    check_files(dataset.items, datasets, skip=dataset.skip_corrupt)
    batch_size = cfg.SOLVER.IMS_PER_BATCH
    if len(dataset) < batch_size:
        raise DataError(
            f"the training data ({', '.join(cfg.DATASETS.NAMES)}) has {len(dataset)} images, fewer than one batch: "
            f"SOLVER.IMS_PER_BATCH is {batch_size}.\n  fix: a smaller SOLVER.IMS_PER_BATCH, or more data"
        )
    if dataset.num_classes < 2:
        raise DataError(
            f"the training data ({', '.join(cfg.DATASETS.NAMES)}) has a single identity; there is nothing to tell apart"
        )
    sampler = SAMPLER_REGISTRY.build(
        cfg.DATALOADER.SAMPLER_TRAIN,
        cfg,
        labels=dataset.labels,
        camids=dataset.camids,
        sets=np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
        world_size=world_size,
    )
    batch_sampler = EpochBatchSampler(
        sampler,
        batch_size=batch_size,
        iters_per_epoch=len(dataset) // max(1, batch_size),
        rank=rank,
        world_size=world_size,
        start_iter=start_iter,
    )
    if rank == 0:
        for each in datasets:
            names = ("train", "query", "gallery") if cfg.DATASETS.COMBINEALL else ("train",)
            log_splits(each, {name: getattr(each, name) for name in names})
        logger.info(
            "training on %d images of %d identities: %d iterations of %d images an epoch",
            len(dataset),
            dataset.num_classes,
            batch_sampler.iters_per_epoch,
            batch_size,
        )
    num_workers = worker_count("DATALOADER.NUM_WORKERS", cfg.DATALOADER.NUM_WORKERS)
    _attach_cache(dataset, cfg)
    return TrainLoader(dataset, batch_sampler, num_workers=num_workers, device=_device(cfg))


def build_reid_test_loader(
    cfg: Any, dataset_name: str, *, rank: int | None = None, world_size: int | None = None
) -> tuple[TestLoader, int]:
    """Build the loader of a test set: its query images, then its gallery images, in order.

    Args:
        cfg: reads INPUT, TEST.IMS_PER_BATCH (of all ranks together) and the worker counts.
        dataset_name: a registered data set.
        rank, world_size: this process among how many, each of which gets a contiguous part; None asks
            torch.distributed.

    Returns:
        The loader, whose batches have the place of each image in ``indices``, and the number of query images.

    Raises:
        DataError: the data set is missing or empty, or the images of the first batch have different sizes.
        ConfigError: a value is out of range, or a name unknown.
    """
    rank, world_size = _rank_and_world_size(rank, world_size)
    transforms = build_transforms(cfg, is_train=False)
    source = build_dataset(dataset_name, cfg)
    for split in ("query", "gallery"):
        if not getattr(source, split):
            raise DataError(f"the data set {dataset_name} has no {split} images, so it cannot be tested on")
    items = PackedItems.concat([PackedItems.of(source.query), PackedItems.of(source.gallery)])
    dataset = ReidDataset(items, transforms, relabel=False)
    _check_camera_view_ids(cfg, dataset, [dataset_name])
    check_files(dataset.items, [source])
    if len(dataset) < world_size:
        raise DataError(
            f"the data set {dataset_name} has {len(dataset)} test images, fewer than the {world_size} processes.\n"
            "  fix: fewer processes"
        )
    batch_sampler = InferenceSampler(
        size=len(dataset),
        batch_size=max(1, cfg.TEST.IMS_PER_BATCH // world_size),
        rank=rank,
        world_size=world_size,
    )
    if rank == 0:
        log_splits(source, {"query": source.query, "gallery": source.gallery})
    key, requested = "TEST.NUM_WORKERS", cfg.TEST.NUM_WORKERS
    if requested == -1:
        key, requested = "DATALOADER.NUM_WORKERS", cfg.DATALOADER.NUM_WORKERS
    _attach_cache(dataset, cfg)
    if transforms.resize.output_size is None:
        # Images of different sizes fail here, before a training, and not at its first evaluation.
        dataset.__getitems__(next(iter(batch_sampler)))
    loader = TestLoader(dataset, batch_sampler, num_workers=worker_count(key, requested), device=_device(cfg))
    return loader, len(source.query)


def build_dataset(name: str, cfg: Any = None) -> ImageDataset:
    """Build a registered data set from the data root, or a user's own, ``csv:FILE`` or ``folder:FOLDER``.

    Args:
        name: as in DATASETS.NAMES.
        cfg: reads what some sets have keys for; None is the defaults.

    Raises:
        ConfigError: nothing has that name.
        DataError: it is not there.
    """
    cfg = get_cfg() if cfg is None else cfg
    kind, colon, path = name.partition(":")
    if colon and kind in PATH_DATASETS:
        return PATH_DATASETS[kind].from_config(cfg, path)
    if colon and name not in DATASET_REGISTRY:
        raise ConfigError(
            f"DATASETS.NAMES: {name!r} is of no kind that is known; kinds: {', '.join(PATH_DATASETS)}."
            f"{did_you_mean(kind, PATH_DATASETS)}"
        )
    if name not in DATASET_REGISTRY and (name.endswith(".csv") or "/" in name):
        kind = "csv" if name.endswith(".csv") else "folder"
        raise ConfigError(f"DATASETS.NAMES: {name!r} is a path.\n  fix: {kind}:{name}")
    component = DATASET_REGISTRY.get(name)
    # FastReID's users join the root with `os.path` or `+`, so it is a string.
    root = str(data_root())
    return component.from_config(cfg, root) if hasattr(component, "from_config") else component(root=root)


def training_items(datasets: Sequence[ImageDataset], *, combine_all: bool = False) -> list[ImageItem]:
    """Return the images of ``training_parts`` in one list."""
    return list(PackedItems.concat(training_parts(datasets, combine_all=combine_all)))


def training_parts(datasets: Sequence[ImageDataset], *, combine_all: bool = False) -> list[PackedItems]:
    """Return the training images of several data sets, whose identities and cameras are kept apart.

    Data sets of one ``family``, such as VehicleID and SmallVehicleID, share identities and cameras, and an image of
    several of them is used once. The cameras of a single data set stay as they are: they are the test images' too.

    Args:
        datasets: one or more.
        combine_all: take the query and gallery images too, except for distractors (identity 0 or less).

    Raises:
        DataError: one has no training images, or two have the same ``dataset_name``.
    """
    classes: dict[str, type] = {}
    parts: list[PackedItems] = []
    for dataset in datasets:
        if not dataset.train:
            raise DataError(f"the data set {dataset.title} has no training images")
        if dataset.name in classes and classes[dataset.name] is type(dataset):
            raise DataError(f"the data set {dataset.title} is named twice; its images would be there twice")
        if classes.setdefault(dataset.name, type(dataset)) is not type(dataset):
            raise DataError(
                f"{classes[dataset.name].__name__} and {type(dataset).__name__} have the same dataset_name "
                f"{dataset.name!r}, so their identities cannot be told apart"
            )
        if len(datasets) == 1 and not combine_all:
            return [PackedItems.of(dataset.train)]
        pid_prefix, camid_prefix = dataset.name, None
        if len(datasets) > 1:
            pid_prefix = camid_prefix = dataset.family
        train = PackedItems.of(dataset.train)
        part = [_add_prefixes(train.replace(pids=train.pids.map(dataset.identity)), pid_prefix, camid_prefix)]
        if combine_all:
            # Query and gallery number their identities by themselves, but the cameras are those of training. An image
            # may be in several splits, as all of SenseReID's are.
            known = {(item.path, item.box) for item in train}
            items = PackedItems.concat([PackedItems.of(dataset.query), PackedItems.of(dataset.gallery)])
            row_of: dict[tuple, int] = {}
            for row, item in enumerate(items):
                image = (item.path, item.box)
                if image not in known:
                    # In the place where it is first, with the identity that it has last.
                    row_of[image] = row
            rows = [row for row in row_of.values() if isinstance(pid := items.pids[row], str) or pid > 0]
            part.append(_add_prefixes(items.take(np.array(rows, dtype=np.int64)), f"{pid_prefix}_test", camid_prefix))
        part = PackedItems.concat(part)
        parts.append(_drop_shared_images(part, dataset, list(zip(datasets, parts, strict=False))))
    return parts


def _drop_shared_images(
    part: PackedItems, dataset: ImageDataset, earlier: Sequence[tuple[ImageDataset, PackedItems]]
) -> PackedItems:
    """Return the images of a data set that no earlier one has under the same identity.

    Images that an earlier one has under another identity are kept, with a warning.

    Args:
        part: the images, named.
        dataset: the data set that they are from.
        earlier: the data sets before it, and their images.
    """
    seen: dict[Any, tuple[ImageDataset, int | str]] = {}  # of images in the same folders: data set and identity
    for other, items in earlier:
        for item in (items[row] for row in items.rows_in(set(part.folders)).tolist()):
            seen.setdefault((item.path, item.box), (other, item.pid))
    folders = {split_path(path)[0] for path, _ in seen}
    same, contradicting = [], []
    for row in part.rows_in(folders).tolist():
        item = part[row]
        _, pid = seen.get((item.path, item.box), (None, None))
        if pid is not None:
            (same if pid == item.pid else contradicting).append(row)
    for rows, consequence in (
        (same, "and are used once"),
        (contradicting, "under another identity, and are trained on under both; name one of the two data sets"),
    ):
        if rows:
            first = seen[part[rows[0]].path, part[rows[0]].box][0].title
            numbers = (dataset.title, len(rows), len(part), first)
            logger.warning("%s: %d of %d training images are also in %s, %s", *numbers, consequence)
    return part.take(np.setdiff1d(np.arange(len(part)), same)) if same else part


def _attach_cache(dataset: ReidDataset, cfg: Any) -> None:
    """Let a data set read from a cache, if the config asks for one."""
    if cfg.DATALOADER.CACHE == "none":
        return
    transforms = dataset.transforms
    if transforms.resize.output_size is None:
        raise ConfigError(
            f"DATALOADER.CACHE {cfg.DATALOADER.CACHE} needs images of one size, and {transforms.size_key} "
            f"{transforms.resize.size} keeps their aspect ratios.\n"
            f"  fix: {transforms.size_key} (height, width), or DATALOADER.CACHE none"
        )
    cache = ImageCache(
        dataset.items,
        (transforms.channels, *transforms.resize.output_size),
        dataset.read,
        where=cfg.DATALOADER.CACHE,
        folder=cfg.DATALOADER.CACHE_DIR,
        kind=f"{transforms.resize}{' skip' if dataset.skip_corrupt else ''}",
    )
    dataset.use_cache(cache)


def _device(cfg: Any) -> torch.device:
    """Return where images are wanted; the CPU where that is not there, which is for the model to complain of."""
    try:
        return resolve_device(cfg.MODEL.DEVICE)
    except ConfigError:
        return torch.device("cpu")


def _check_camera_view_ids(cfg: Any, dataset: ReidDataset, names: Sequence[str]) -> None:
    """Check that the backbone has an embedding for each camera and view of the data sets ``names``.

    Raises:
        ConfigError: it has embeddings, but too few, or the numbers do not mean one camera each.
    """
    backbone, title = cfg.MODEL.BACKBONE, ", ".join(names)
    if backbone.SIE_CAMERAS and not dataset.items.camids.is_integer:
        raise ConfigError(
            f"MODEL.BACKBONE.SIE_CAMERAS is {backbone.SIE_CAMERAS}, but in {title} cameras are names, not numbers that "
            "mean the same cameras in training and test.\n"
            "  fix: MODEL.BACKBONE.SIE_CAMERAS 0, or a single training set whose cameras are integers"
        )
    viewids = dataset.items.viewids
    for key, number, what, ids in (
        ("SIE_CAMERAS", backbone.SIE_CAMERAS, "cameras", dataset.camids),
        ("SIE_VIEWS", backbone.SIE_VIEWS, "views", viewids),
    ):
        low, high = int(ids.min()), int(ids.max())
        if number and (low < 0 or high >= number):
            fix = f"\n  fix: MODEL.BACKBONE.{key} {high + 1}" if low >= 0 else ""
            raise ConfigError(
                f"MODEL.BACKBONE.{key} is {number}, for {what} 0 to {number - 1}, but {title} has {what} {low} to "
                f"{high}.{fix}"
            )
    if backbone.SIE_VIEWS and (viewids == viewids[0]).all():
        logger.warning(
            "MODEL.BACKBONE.SIE_VIEWS is %d, but all images of %s are of view %d", backbone.SIE_VIEWS, title, viewids[0]
        )
    unknown = [name for name in names if name not in cfg.DATASETS.NAMES]
    if unknown and (backbone.SIE_CAMERAS or backbone.SIE_VIEWS):
        logger.warning(
            "%s has cameras of its own, but the backbone's camera and view embeddings are those of %s",
            ", ".join(unknown),
            ", ".join(cfg.DATASETS.NAMES),
        )


def _add_prefixes(items: PackedItems, pid_prefix: str, camid_prefix: str | None) -> PackedItems:
    """Return the items with identity and camera as strings that begin with these names; None leaves the cameras."""
    camids = None if camid_prefix is None else items.camids.map(lambda camid: _add_prefix(camid, camid_prefix))
    return items.replace(pids=items.pids.map(lambda pid: _add_prefix(pid, pid_prefix)), camids=camids)


def _add_prefix(name: int | str, prefix: str) -> str:
    # FastReID's users put the data set's name in front themselves.
    return name if isinstance(name, str) and name.startswith(f"{prefix}_") else f"{prefix}_{name}"


def _rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    return (
        comm.get_rank() if rank is None else rank,
        comm.get_world_size() if world_size is None else world_size,
    )


def with_num_classes(cfg: CfgNode, num_classes: int) -> CfgNode:
    """Return a frozen copy of ``cfg`` whose ``MODEL.HEADS.NUM_CLASSES`` is the number of training identities.

    Raises:
        ConfigError: it was set to another number.
    """
    requested = cfg.MODEL.HEADS.NUM_CLASSES
    if requested not in (0, num_classes):
        raise ConfigError(
            f"MODEL.HEADS.NUM_CLASSES is {requested}, but the training data ({', '.join(cfg.DATASETS.NAMES)}) has "
            f"{num_classes} identities.\n  fix: leave it at 0, so that it is taken from the data"
        )
    return cfg.with_values({"MODEL.HEADS.NUM_CLASSES": num_classes})
