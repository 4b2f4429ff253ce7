"""FastReID's functions that build loaders."""

from typing import Any

from torch.utils.data import DataLoader, Dataset
from torch.utils.data import default_collate as fast_batch_collator

from fastamp.config import CfgNode, get_cfg
from fastamp.data import build
from fastamp.data.custom_loader import CustomTrainLoader, build_custom_test_loader, build_custom_train_loader
from fastamp.data.datasets import ImageDataset, data_root
from fastamp.data.loader import TestLoader, TrainLoader
from fastamp.data.training_images import training_items
from fastamp.data.transforms import build_transforms
from fastamp.fastreid.data.common import CommDataset
from fastamp.fastreid.data.datasets.registered import DATASET_REGISTRY

__all__ = [
    "DATASET_REGISTRY",
    "CommDataset",
    "build_reid_test_loader",
    "build_reid_train_loader",
    "build_transforms",
    "fast_batch_collator",
]


def __getattr__(name: str) -> Any:
    if name == "_root":  # the environment may change after the import
        return str(data_root())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def build_reid_train_loader(
    cfg: CfgNode | Dataset | None = None,
    *,
    train_set: Dataset | None = None,
    transforms: Any = None,
    sampler: Any = None,
    total_batch_size: int | None = None,
    num_workers: int | None = None,
    combineall: bool | None = None,
    **kwargs: Any,
) -> TrainLoader | CustomTrainLoader:
    """Build the infinite training loader from a config, or from a dataset.

    Args:
        cfg: config, or the dataset. Default: the default config.
        train_set: map-style dataset instead of DATASETS.NAMES.
        transforms: function of a PIL image instead of the augmentations in INPUT.
        sampler: indices of the images of this rank. Default: DATALOADER.SAMPLER_TRAIN, which takes the identities from
            ``train_set.img_items``.
        total_batch_size, num_workers, combineall: values of SOLVER.IMS_PER_BATCH, DATALOADER.NUM_WORKERS and
            DATASETS.COMBINEALL. Default: those of the config.
        kwargs: constructor arguments of the datasets in DATASETS.NAMES.

    Returns:
        The loader of ``fastamp.data.build_reid_train_loader``; with ``train_set``, ``sampler``, ``transforms`` or
        ``kwargs`` that of ``build_custom_train_loader``.
    """
    values = {"SOLVER.IMS_PER_BATCH": total_batch_size, "DATALOADER.NUM_WORKERS": num_workers}
    cfg, train_set = _with_values(cfg, train_set, values | {"DATASETS.COMBINEALL": combineall})
    if train_set is None and transforms is None and sampler is None and not kwargs:
        return _with_attributes(build.build_reid_train_loader(cfg))
    if train_set is None:
        datasets = [_build_dataset(name, cfg, kwargs) for name in cfg.DATASETS.NAMES]
        items = training_items(datasets, combine_all=cfg.DATASETS.COMBINEALL)
        train_set = CommDataset(items, transforms or build_transforms(cfg, is_train=True))
    return build_custom_train_loader(cfg, train_set, sampler, items=getattr(train_set, "img_items", None))


def build_reid_test_loader(
    cfg: CfgNode | Dataset | None = None,
    dataset_name: str | int = "",
    num_query: int = 0,
    num_workers: int | None = None,
    *,
    test_set: Dataset | None = None,
    transforms: Any = None,
    test_batch_size: int | None = None,
    **kwargs: Any,
) -> tuple[TestLoader | DataLoader, int]:
    """Build a test loader from a config, or from a dataset.

    Args:
        cfg: config, or the dataset. Default: the default config.
        dataset_name: name of a dataset; or ``test_batch_size``, if the first argument is a dataset.
        num_query: number of query images, at the start of ``test_set``. Default 0.
        num_workers, test_batch_size: values of TEST.NUM_WORKERS and TEST.IMS_PER_BATCH. Default: those of the config.
        test_set: map-style dataset instead of ``dataset_name``.
        transforms: function of a PIL image instead of the resize in INPUT.
        kwargs: constructor arguments of the dataset.

    Returns:
        The loader and the number of query images.
    """
    if isinstance(dataset_name, int):
        test_batch_size = dataset_name
    values = {"TEST.IMS_PER_BATCH": test_batch_size, "TEST.NUM_WORKERS": num_workers}
    cfg, test_set = _with_values(cfg, test_set, values)
    if test_set is None and transforms is None and not kwargs:
        loader, num_query = build.build_reid_test_loader(cfg, dataset_name, requires_gallery=False)
        return _with_attributes(loader), num_query
    if test_set is None:
        query, gallery = _build_dataset(dataset_name, cfg, kwargs).test_items()
        transforms = transforms or build_transforms(cfg, is_train=False)
        test_set, num_query = CommDataset([*query, *gallery], transforms, relabel=False), len(query)
    return build_custom_test_loader(cfg, test_set, num_query)


def _with_values(
    cfg: CfgNode | Dataset | None, dataset: Dataset | None, values: dict[str, Any]
) -> tuple[Any, Dataset | None]:
    """Return a copy of the config with the values that are not None, and the dataset, which may be given as ``cfg``."""
    if isinstance(cfg, Dataset):
        cfg, dataset = None, cfg
    cfg = get_cfg() if cfg is None else cfg
    given = {key: value for key, value in values.items() if value is not None}
    return cfg.with_values(given) if given else cfg, dataset


def _build_dataset(name: str, cfg: CfgNode, options: dict[str, Any]) -> ImageDataset:
    """Build a dataset; with ``options``, from these constructor arguments instead of the config."""
    return DATASET_REGISTRY.get(name)(root=str(data_root()), **options) if options else build.build_dataset(name, cfg)


def _with_attributes(loader: Any) -> Any:
    """Give the dataset of a loader the attributes of ``CommDataset``."""
    dataset = loader.dataset
    vars(dataset).update(img_items=dataset.items, num_cameras=len(set(dataset.camids.tolist())))
    return loader
