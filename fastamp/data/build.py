"""Build train and test data loaders from a config."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch

from fastamp import contracts
from fastamp.amp import requested_device, resolve_device
from fastamp.config import CfgNode, get_cfg
from fastamp.data.cache import ImageCache
from fastamp.data.columns import CAMERA, EncodedColumn
from fastamp.data.dataset import ReidDataset
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, data_root, log_splits
from fastamp.data.datasets.custom import PATH_DATASETS, CsvDataset
from fastamp.data.datasets.items import PackedItems
from fastamp.data.loader import TestLoader, TrainLoader, worker_count
from fastamp.data.missing_images import check_files
from fastamp.data.samplers import SAMPLER_REGISTRY, EpochBatchSampler, IdentitySampler, InferenceSampler, build_sampler
from fastamp.data.tracklets import TrackletInferenceSampler, TrackletSampler, select_test_frames, tracklets_of
from fastamp.data.training_images import exclude_rare_identities, training_parts
from fastamp.data.transforms import build_transforms
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError, DataError, UserError, did_you_mean
from fastamp.utils.files import expand
from fastamp.utils.plural import plural

logger = logging.getLogger(__name__)


def build_reid_train_loader(
    cfg: CfgNode,
    *,
    start_iter: int = 0,
    rank: int | None = None,
    world_size: int | None = None,
) -> TrainLoader:
    """Build the infinite loader for the training sets in DATASETS.NAMES.

    ``build_custom_train_loader`` builds one for a dataset that is not registered.

    Which images form batch n depends only on the config, not on ``start_iter``, the number of workers or the number of
    ranks. One epoch is ``num_images // SOLVER.IMS_PER_BATCH`` iterations.

    Args:
        cfg: config; the sections DATASETS, DATALOADER and INPUT and the keys SOLVER.IMS_PER_BATCH and SEED are used.
        start_iter: index of the first batch to load, counted from the start of training. Default 0.
        rank, world_size: rank of this process and number of processes. Default: values from torch.distributed, or 0 and
            1 if it is not initialized.

    Returns:
        Infinite loader of batches, whose format ``ReidDataset.__getitems__`` describes.

    Raises:
        DataError: if a dataset is missing or empty, or the training set has too few images or identities for a batch.
        ConfigError: if a value is out of range, a name is unknown, or the sampler cannot build batches of this size.
    """
    rank, world_size = _rank_and_world_size(rank, world_size)
    transforms = build_transforms(cfg, is_train=True)
    if not cfg.DATASETS.NAMES:
        raise ConfigError("DATASETS.NAMES is empty.\n  fix: set DATASETS.NAMES to at least one training set")
    datasets = [build_dataset(name, cfg) for name in cfg.DATASETS.NAMES]
    parts = training_parts(datasets, combine_all=cfg.DATASETS.COMBINEALL)
    parts = exclude_rare_identities(parts, cfg.DATASETS.MIN_IMAGES)
    dataset = ReidDataset(
        PackedItems.concat(parts),
        transforms,
        relabel=True,
        augment=cfg.INPUT.AUGMENT_ON == "worker",
        skip_corrupt=cfg.DATALOADER.ON_CORRUPT == "skip",
        sources=datasets,
        categories=cfg.DATASETS.CATEGORIES,
    )
    _check_camera_view_ids(cfg, dataset, cfg.DATASETS.NAMES)
    check_files(dataset.items, datasets, skip=dataset.skip_corrupt)
    sets = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    batch_sampler = _build_batch_sampler(cfg, dataset, sets, start_iter, rank, world_size)
    if rank == 0:
        for training_set in datasets:
            names = ("train", "query", "gallery") if cfg.DATASETS.COMBINEALL else ("train",)
            log_splits(training_set, {name: training_set.images_in(name) for name in names})
        logger.info(
            "training set: %d images, %d identities; one epoch is %s of %s",
            len(dataset),
            dataset.num_classes,
            plural(batch_sampler.iters_per_epoch, "iteration"),
            plural(cfg.SOLVER.IMS_PER_BATCH, "image"),
        )
        if repeats := describe_repeats(batch_sampler):
            logger.warning("%s", repeats)
    num_workers = worker_count("DATALOADER.NUM_WORKERS", cfg.DATALOADER.NUM_WORKERS)
    _attach_cache(dataset, cfg)
    return TrainLoader(dataset, batch_sampler, num_workers=num_workers, device=loading_device(cfg))


def _build_batch_sampler(
    cfg: CfgNode, dataset: ReidDataset, sets: np.ndarray, start_iter: int, rank: int, world_size: int
) -> EpochBatchSampler:
    """Build the batch sampler of a training set; ``sets`` is the index of the dataset of each image."""
    batch_size = cfg.SOLVER.IMS_PER_BATCH
    if len(dataset) < batch_size:
        raise DataError(
            f"the training set ({', '.join(cfg.DATASETS.NAMES)}) is smaller than one batch: "
            f"{plural(len(dataset), 'image')}, SOLVER.IMS_PER_BATCH is {batch_size}.\n"
            "  fix: reduce SOLVER.IMS_PER_BATCH, or add images"
        )
    if dataset.num_classes < 2 and SAMPLER_REGISTRY.get(cfg.DATALOADER.SAMPLER_TRAIN).needs_identities:
        raise DataError(
            f"the training set ({', '.join(cfg.DATASETS.NAMES)}) has only one identity; expected at least 2.\n"
            "  fix: add images of other identities"
        )
    if SAMPLER_REGISTRY.get(cfg.DATALOADER.SAMPLER_TRAIN) is TrackletSampler:
        tracklets_of(dataset, ", ".join(cfg.DATASETS.NAMES), sets)
    sampler = build_sampler(
        cfg,
        labels=dataset.labels,
        camids=dataset.camids,
        sets=sets,
        world_size=world_size,
        columns={CAMERA: dataset.camids} | {name: column.values for name, column in dataset.columns.items()},
    )
    return EpochBatchSampler(
        sampler,
        batch_size=batch_size,
        iters_per_epoch=(sampler.images_per_epoch or len(dataset)) // max(1, batch_size),
        rank=rank,
        world_size=world_size,
        start_iter=start_iter,
    )


def describe_repeats(batches: EpochBatchSampler) -> str:
    """Describe how many images of a batch repeat another image of it; "" if identities have enough images."""
    sampler = batches.sampler
    if not isinstance(sampler, IdentitySampler) or not (repeats := sampler.repeats_per_batch):
        return ""
    too_few = sampler.images_per_identity < sampler.num_instances
    return (
        f"{too_few.sum()} of {plural(len(too_few), 'identity', 'identities')} have fewer than "
        f"{sampler.num_instances} images (DATALOADER.NUM_INSTANCE): a batch of {batches.batch_size} repeats "
        f"{repeats:.1f} images on average, and the triplet loss compares them with themselves.\n"
        "  fix: set DATALOADER.NUM_INSTANCE to 0 (2 to 4, by the images that exist), or DATASETS.MIN_IMAGES to "
        f"{sampler.num_instances}"
    )


def build_training_batches(dataset: ImageDataset, cfg: CfgNode) -> EpochBatchSampler | None:
    """Build the batch sampler that a run of this config would use on ``dataset``.

    Args:
        dataset: the training set.
        cfg: config of the run; DATASETS.NAMES is ignored.

    Returns:
        The batch sampler; None if there are no training images, or ``find_training_problems`` reports why a training is
        impossible.
    """
    if not dataset.train:
        return None
    try:
        return _check_training_set(cfg, PackedItems.of(dataset.train), dataset)
    except UserError:
        return None


def find_training_problems(dataset: ImageDataset, cfg: CfgNode, *, is_trained: bool = True) -> list[str]:
    """List what would stop a training or an evaluation of this config on ``dataset``.

    Files are read only if the config keeps the aspect ratio, until two images of different sizes are found.

    Args:
        dataset: dataset to check.
        cfg: config of the run; DATASETS.NAMES and DATASETS.TESTS are ignored.
        is_trained: whether the run trains on the dataset. Default True.

    Returns:
        Error messages.
    """
    problems: list[str] = []
    if is_trained and dataset.train:
        train = PackedItems.of(dataset.train)
        _collect_problem(problems, _check_training_set, cfg, train, dataset)
    test = [PackedItems.of(items) for items in (dataset.query, dataset.gallery) if items]
    if len(test) == 2:
        _collect_problem(problems, _check_test_set, cfg, PackedItems.concat(test), dataset)
    return problems


def _collect_problem(problems: list[str], check: Callable[..., Any], *args: Any) -> None:
    try:
        check(*args)
    except UserError as error:
        problems.append(str(error))


def _check_training_set(cfg: CfgNode, items: PackedItems, source: ImageDataset) -> EpochBatchSampler:
    cfg = cfg.with_values({"DATASETS.NAMES": (source.title,)})
    transforms = build_transforms(cfg, is_train=True)
    [items] = exclude_rare_identities([items], cfg.DATASETS.MIN_IMAGES)
    dataset = ReidDataset(items, transforms, relabel=True, sources=[source], categories=cfg.DATASETS.CATEGORIES)
    _check_camera_view_ids(cfg, dataset, [source.title])
    batches = _build_batch_sampler(cfg, dataset, np.zeros(len(dataset), dtype=np.int64), 0, 0, 1)
    _check_equal_sizes(dataset, cfg.SOLVER.IMS_PER_BATCH)
    return batches


def _check_test_set(cfg: CfgNode, items: PackedItems, source: ImageDataset) -> None:
    cfg = cfg.with_values({"DATASETS.NAMES": (source.title,)})
    transforms, categories = build_transforms(cfg, is_train=False), cfg.DATASETS.CATEGORIES
    dataset = ReidDataset(items, transforms, relabel=False, sources=[source], categories=categories)
    tracklets_of(dataset, source.title)
    _check_camera_view_ids(cfg, dataset, [source.title])
    _check_equal_sizes(dataset, cfg.TEST.IMS_PER_BATCH)


def _check_equal_sizes(dataset: ReidDataset, batch_size: int) -> None:
    """Load two images of different aspect ratios in one batch, if the resize keeps the aspect ratio."""
    if batch_size < 2 or dataset.transforms.resize.output_size is not None:
        return
    shapes: dict[tuple[int, int], int] = {}
    for row in range(len(dataset)):
        try:
            height, width = dataset.read(row).shape[1:]
        except DataError:
            continue  # reported as unreadable
        shapes.setdefault((height, width), row)
        if len(shapes) == 2:
            dataset.__getitems__([(0, place, row) for place, row in enumerate(shapes.values())])
            return


def build_reid_test_loader(
    cfg: CfgNode,
    dataset_name: str,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    requires_gallery: bool = True,
) -> tuple[TestLoader, int]:
    """Build the loader for a test set. It loads all query images, then all gallery images, without shuffling.

    ``build_custom_test_loader`` builds one for a dataset that is not registered.

    Args:
        cfg: config; the sections INPUT, DATALOADER and TEST are used. TEST.IMS_PER_BATCH is the number of images per
            batch over all ranks.
        dataset_name: name of a registered dataset, ``csv:FILE`` or ``folder:FOLDER``.
        rank, world_size: rank of this process and number of processes; each rank loads a contiguous part of the test
            set. Default: values from torch.distributed, or 0 and 1 if it is not initialized.
        requires_gallery: if False, the dataset may have query images only, e.g. for a protocol in which each image is a
            query against all others. Default True.

    Returns:
        The loader and the number of query images. In each batch, ``indices`` contains the positions of the images in
        the test set; queries come first.

    Raises:
        DataError: if the dataset is missing or empty, or the images of the first batch have different sizes.
        ConfigError: if a value is out of range or a name is unknown.
    """
    rank, world_size = _rank_and_world_size(rank, world_size)
    transforms = build_transforms(cfg, is_train=False)
    source = build_dataset(dataset_name, cfg)
    for split in ("query", "gallery") if requires_gallery and source.requires_gallery else ("query",):
        check_split(dataset_name, split, len(source.images_in(split)))
    items = PackedItems.concat([PackedItems.of(items) for items in source.test_items()])
    options: dict[str, Any] = {"relabel": False, "sources": [source], "categories": cfg.DATASETS.CATEGORIES}
    dataset = ReidDataset(items, transforms, **options)
    num_query, tracklets = len(source.query), tracklets_of(dataset, dataset_name)
    if tracklets is not None:
        rows = select_test_frames(tracklets, cfg.TEST.TRACKLET.FRAMES, num_query)
        dataset = ReidDataset(items.take(rows), transforms, **options)
        num_query, tracklets = int((rows < num_query).sum()), tracklets[rows]
    check_known_cameras(cfg, source)
    _check_camera_view_ids(cfg, dataset, [dataset_name])
    check_files(dataset.items, [source])
    if len(dataset) < world_size:
        raise DataError(
            f"dataset {dataset_name} contains {plural(len(dataset), 'test image')}, which is too few for {world_size} "
            "processes: each process requires at least one image.\n"
            f"  fix: run with at most {plural(len(dataset), 'process', 'processes')}"
        )
    shards: dict[str, Any] = {
        "batch_size": max(1, cfg.TEST.IMS_PER_BATCH // world_size),
        "rank": rank,
        "world_size": world_size,
    }
    batch_sampler = InferenceSampler(size=len(dataset), **shards)
    if tracklets is not None:
        batch_sampler = TrackletInferenceSampler(tracklets=tracklets, num_query=num_query, **shards)
    if rank == 0:
        log_splits(source, {"query": source.query, "gallery": source.gallery})
        _warn_of_other_protocol(cfg.TEST.PROTOCOL, source)
    _attach_cache(dataset, cfg)
    if transforms.resize.output_size is None:
        # Fail on images of different sizes here, instead of at the first evaluation.
        dataset.__getitems__(next(iter(batch_sampler)))
    loader = TestLoader(dataset, batch_sampler, num_workers=inference_workers(cfg), device=loading_device(cfg))
    return loader, num_query


def inference_workers(cfg: CfgNode, requested: int | None = None) -> int:
    """Return the number of workers of a loader of test images.

    Args:
        cfg: config.
        requested: number that the user requests. Default: TEST.NUM_WORKERS.
    """
    if requested is not None:
        return worker_count("workers", requested)
    if cfg.TEST.NUM_WORKERS != -1:
        return worker_count("TEST.NUM_WORKERS", cfg.TEST.NUM_WORKERS)
    return worker_count("DATALOADER.NUM_WORKERS", cfg.DATALOADER.NUM_WORKERS)


def _warn_of_other_protocol(rule: str, source: ImageDataset) -> None:
    if source.protocols and rule not in source.protocols:
        logger.warning(
            "%s: results under TEST.PROTOCOL %s are not comparable with published results, which are under %s\n"
            "  fix: set TEST.PROTOCOL to %s",
            source.title,
            rule,
            ", ".join(source.protocols),
            source.protocols[0],
        )


def check_split(dataset_name: str, split: str, images: int) -> None:
    """Raise a ``DataError`` if the split ``"query"`` or ``"gallery"`` of a test set has no images."""
    if not images:
        raise DataError(
            f"dataset {dataset_name} has no {split} images; a test set requires query and gallery images.\n"
            f"  fix: add {split} images, or remove the dataset from DATASETS.TESTS"
        )


def build_dataset(name: str, cfg: CfgNode | None = None, *, skip_invalid: bool = False) -> ImageDataset:
    """Build a dataset from its name in the config.

    Args:
        name: name of a registered dataset, ``csv:FILE`` or ``folder:FOLDER``, as in DATASETS.NAMES.
        cfg: config that contains the settings of the datasets, e.g. DATASETS.CUHK03. Default: the default config.
        skip_invalid: exclude invalid lines of a CSV file; see ``CsvDataset``. Default False.

    Returns:
        The dataset, whose splits may be read at first use.

    Raises:
        TypeError: if the name is not a string.
        ConfigError: if the name is unknown.
        DataError: if the dataset is not found.
    """
    cfg = get_cfg() if cfg is None else cfg
    if not isinstance(name, str):
        raise TypeError(
            f"expected the name of a dataset, got {name!r} ({type(name).__name__}).\n"
            "  fix: pass a registered name, csv:FILE or folder:FOLDER"
        )
    kind, colon, path = name.partition(":")
    if colon and kind in PATH_DATASETS:
        options = {"skip_invalid": True} if skip_invalid and kind == "csv" else {}
        path_dataset: ImageDataset = PATH_DATASETS[kind].from_config(cfg, path, **options)
        return path_dataset
    if colon and name not in DATASET_REGISTRY:
        raise ConfigError(
            f"DATASETS.NAMES: unknown prefix {kind!r} in {name!r}; choices: {', '.join(PATH_DATASETS)}."
            f"{did_you_mean(kind, PATH_DATASETS)}"
        )
    if name not in DATASET_REGISTRY and (name.endswith(".csv") or "/" in name):
        kind = "csv" if name.endswith(".csv") else "folder"
        raise ConfigError(f"DATASETS.NAMES: {name!r} is a path without a prefix.\n  fix: use {kind}:{name}")
    component, root = DATASET_REGISTRY.get(name), str(data_root())
    dataset: ImageDataset = component.from_config(cfg, root) if is_dataset_class(component) else component(root=root)
    return dataset


def family_of(name: str) -> str:
    """Return ``ImageDataset.family`` of a dataset by its name in the config, without building it.

    Paths of ``csv:FILE`` and ``folder:FOLDER`` are made absolute.
    """
    kind, _, path = name.partition(":")
    if kind in PATH_DATASETS:
        return f"{kind}:{os.path.abspath(expand(path))}"
    if name not in DATASET_REGISTRY:
        return name
    component = DATASET_REGISTRY.get(name)
    return component.identities_of or component.dataset_name or name


def is_dataset_class(component: Any) -> TypeGuard[type[ImageDataset]]:
    """Return True for a class of a dataset; False e.g. for a function that builds one."""
    return isinstance(component, type) and issubclass(component, ImageDataset)


def _attach_cache(dataset: ReidDataset, cfg: CfgNode) -> None:
    """Attach the image cache selected by DATALOADER.CACHE to a dataset."""
    if cfg.DATALOADER.CACHE == "none":
        return
    transforms = dataset.transforms
    if transforms.resize.output_size is None:
        raise ConfigError(
            f"DATALOADER.CACHE {cfg.DATALOADER.CACHE} requires images of equal size, but {transforms.size_key} "
            f"{transforms.resize.size} keeps the aspect ratio.\n"
            f"  fix: set {transforms.size_key} to (height, width), or DATALOADER.CACHE to none"
        )
    cache = ImageCache(
        dataset.items,
        (transforms.channels, *transforms.resize.output_size),
        dataset.read,
        where=cfg.DATALOADER.CACHE,
        folder=cfg.DATALOADER.CACHE_DIR,
        kind=f"{transforms.resize} {transforms.bit_depth}"
        + (" reduced" if transforms.reduced else "")
        + (" skip" if dataset.skip_corrupt else ""),
    )
    dataset.use_cache(cache)


def loading_device(cfg: CfgNode) -> torch.device:
    """Return the device in MODEL.DEVICE, or the CPU if it is invalid: building the model will raise the error."""
    try:
        return resolve_device(requested_device(cfg))
    except ConfigError:
        return torch.device("cpu")


def _check_camera_view_ids(cfg: CfgNode, dataset: ReidDataset, names: Sequence[str]) -> None:
    """Check that the backbone has an embedding for every camera and view in ``dataset``.

    Raises:
        ConfigError: if there are fewer embeddings than cameras or views, or the cameras are not integers.
    """
    backbone, title = cfg.MODEL.BACKBONE, ", ".join(names)
    if backbone.SIE_CAMERAS and not dataset.items.camids.is_integer:
        raise ConfigError(
            f"MODEL.BACKBONE.SIE_CAMERAS is {backbone.SIE_CAMERAS}, but the camera IDs of {title} are not integers, so "
            "cameras of training and test images cannot be matched.\n"
            "  fix: set MODEL.BACKBONE.SIE_CAMERAS to 0, or train on a single dataset with integer camera IDs"
        )
    viewids = dataset.items.viewids
    for key, number, kind, ids in (
        ("SIE_CAMERAS", backbone.SIE_CAMERAS, "cameras", dataset.camids),
        ("SIE_VIEWS", backbone.SIE_VIEWS, "views", viewids),
    ):
        low, high = int(ids.min()), int(ids.max())
        if number and (low < 0 or high >= number):
            fix = f"\n  fix: set MODEL.BACKBONE.{key} to {high + 1}" if low >= 0 else ""
            raise ConfigError(
                f"MODEL.BACKBONE.{key} is {number}: expected {kind} 0 to {number - 1}, got {low} to {high} in "
                f"{title}.{fix}"
            )
    if backbone.SIE_VIEWS and (viewids == viewids[0]).all():
        logger.warning(
            "MODEL.BACKBONE.SIE_VIEWS is %d, but all images of %s have view %d.\n"
            "  fix: use a dataset with several views, or set MODEL.BACKBONE.SIE_VIEWS to 0",
            backbone.SIE_VIEWS,
            title,
            viewids[0],
        )
    unknown = [name for name in names if name not in cfg.DATASETS.NAMES]
    if unknown and (backbone.SIE_CAMERAS or backbone.SIE_VIEWS):
        logger.warning(
            "the camera and view embeddings do not apply to %s: they were trained on %s, which has different "
            "cameras.\n  fix: for a test on other cameras, train with MODEL.BACKBONE.SIE_CAMERAS 0 and SIE_VIEWS 0",
            ", ".join(unknown),
            ", ".join(cfg.DATASETS.NAMES),
        )


def check_known_cameras(cfg: CfgNode, dataset: ImageDataset | None) -> None:
    """Check that the cameras of a CSV file are those of the training, if the model has an embedding for each of them.

    Raises:
        ConfigError: if a camera is not in DATASETS.CAMERAS.
    """
    known = cfg.DATASETS.CAMERAS if cfg.MODEL.BACKBONE.SIE_CAMERAS else ()
    names = dataset.camera_names if isinstance(dataset, CsvDataset) and known else ()
    unknown = [name for name in names if name not in known]
    if dataset is not None and unknown:
        raise ConfigError(
            f"{dataset.title}: the model has no embedding for {plural(len(unknown), 'camera')}: "
            f"{', '.join(unknown[:5])}; those of the training (DATASETS.CAMERAS) are {', '.join(known[:10])}.\n"
            "  fix: use images of these cameras, or a model without MODEL.BACKBONE.SIE_CAMERAS"
        )


def _rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    return (
        comm.get_rank() if rank is None else rank,
        comm.get_world_size() if world_size is None else world_size,
    )


def with_num_classes(cfg: CfgNode, num_classes: int) -> CfgNode:
    """Return a frozen copy of the config with ``MODEL.HEADS.NUM_CLASSES`` set to the number of training identities.

    Raises:
        ConfigError: if the key is already set to a different number.
    """
    requested = cfg.MODEL.HEADS.NUM_CLASSES
    if requested not in (0, num_classes):
        raise ConfigError(
            f"MODEL.HEADS.NUM_CLASSES is {requested}, but the training set ({', '.join(cfg.DATASETS.NAMES)}) has "
            f"{num_classes} identities.\n  fix: set MODEL.HEADS.NUM_CLASSES to 0, which uses the number of identities"
        )
    return cfg.with_values({"MODEL.HEADS.NUM_CLASSES": num_classes})


def with_num_categories(cfg: CfgNode, dataset: contracts.Dataset) -> CfgNode:
    """Return a frozen copy of the config with what its model learns of a training set.

    ``DATASETS.NUM_CATEGORIES`` is set for the columns, and ``DATASETS.CAMERAS`` for embeddings of cameras.
    """
    columns: Mapping[str, EncodedColumn] = dataset.columns
    categories = {name: len(column.names) for name, column in columns.items() if column.names}
    values: dict[str, Any] = {"DATASETS.NUM_CATEGORIES": categories} if categories else {}
    if cfg.MODEL.BACKBONE.SIE_CAMERAS and len(dataset.sources) == 1 and isinstance(dataset.sources[0], CsvDataset):
        values["DATASETS.CAMERAS"] = dataset.sources[0].camera_names
    return cfg.with_values(values) if values else cfg
