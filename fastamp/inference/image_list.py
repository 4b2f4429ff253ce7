"""List of the images to extract: those of a dataset, a CSV file or a folder, with their columns."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from fastamp.config import CfgNode
from fastamp.data.build import build_dataset
from fastamp.data.columns import to_array
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, number_cameras
from fastamp.data.datasets.custom import PATH_DATASETS, image_files
from fastamp.data.datasets.items import Column, ImageItem, PackedItems
from fastamp.retrieval.columns import ImageColumns
from fastamp.utils.choices import EXTRACTED_SPLITS
from fastamp.utils.errors import DataError, check_choice, did_you_mean


@dataclass(frozen=True)
class Listing:
    """N images to extract.

    Attributes:
        items: the images with their inputs of the model; without identities.
        columns: their columns in the extraction.
        dataset: dataset of the images; None for a folder.
    """

    items: PackedItems
    columns: ImageColumns
    dataset: ImageDataset | None = None


def dataset_name(source: str | PathLike[str]) -> str:
    """Return the name of a dataset or CSV file as in DATASETS.NAMES; "" for a folder.

    Raises:
        DataError: if ``source`` is neither a dataset, a CSV file nor a folder.
    """
    name = str(source)
    if name in DATASET_REGISTRY or name.partition(":")[0] in PATH_DATASETS:
        return name
    if Path(name).expanduser().is_dir():
        return ""
    if name.endswith(".csv"):
        return f"csv:{name}"
    suggestion = "" if "/" in name else did_you_mean(name, DATASET_REGISTRY)
    raise DataError(
        f"{name} not found; expected a folder, a CSV file or a dataset name as in DATASETS.NAMES.{suggestion}\n"
        "  fix: correct the path or the dataset name"
    )


def image_paths(given: Iterable[str | PathLike[str]]) -> list[str]:
    """Return the paths of images: those that are given, and those of the images in folders and their subfolders.

    Raises:
        DataError: if a path does not exist, or a folder contains no images.
    """
    paths: list[str] = []
    for path in given:
        if not os.path.exists(path):
            raise DataError(f"{path} not found.\n  fix: correct the path of the image or folder")
        found = image_files(Path(path)) if os.path.isdir(path) else [os.fspath(path)]
        if not found:
            raise DataError(
                f"no images found in {os.path.abspath(path)} or its subfolders.\n"
                "  fix: choose a folder that contains image files"
            )
        paths += found
    return paths


def list_images(source: str | PathLike[str], cfg: CfgNode, splits: Sequence[str] = EXTRACTED_SPLITS) -> Listing:
    """List the images of a dataset, a CSV file or a folder, in a fixed order.

    Args:
        source: dataset name as in DATASETS.NAMES, including ``csv:FILE`` and ``folder:FOLDER``; a CSV file; or a folder
            whose images, including those in subfolders, are used without identities and cameras.
        cfg: config; only DATASETS is read.
        splits: splits of a dataset to include. Default: query, gallery, train.

    Returns:
        The images with their identities, cameras and splits.

    Raises:
        ConfigError: if a split is unknown.
        DataError: if the dataset is unknown or invalid, or contains no images.
    """
    for split in splits:
        check_choice("splits", split, EXTRACTED_SPLITS)
    name = dataset_name(source)
    if not name:
        files = image_paths([Path(source).expanduser()])
        unknown = np.full(len(files), -1)
        items = PackedItems.of(ImageItem(file, 0, -1) for file in files)
        return Listing(items, ImageColumns(paths=np.array(files), pids=unknown, camids=unknown))
    dataset = build_dataset(name, cfg)
    parts = {split: PackedItems.of(dataset.images_in(split)) for split in EXTRACTED_SPLITS if split in splits}
    items = PackedItems.concat([*parts.values(), PackedItems.of([])])
    if not items:
        raise DataError(
            f"dataset {name} contains no {' or '.join(parts)} images.\n  fix: choose other splits with --splits"
        )
    values, inverse = items.pids.unique()
    pids = [dataset.identity(pid) for pid in values]
    are_integers = all(re.fullmatch(r"0|-?[1-9][0-9]{0,17}", pid) for pid in pids)
    cameras, codes = items.camids.unique()
    names = [dataset.camera(camera) for camera in cameras]
    has_names = any(name not in ("", str(camera)) for name, camera in zip(names, cameras, strict=True))
    numbers = items.camids if items.camids.is_integer else items.camids.map(number_cameras(cameras).get)
    boxes = np.array([items.box(row) or (-1, -1, -1, -1) for row in range(len(items))])
    columns = ImageColumns(
        paths=np.array(items.paths(np.arange(len(items)))),
        pids=np.array(pids, dtype=np.int64 if are_integers else None)[inverse],
        camids=numbers.codes if any(names) else np.full(len(items), -1),
        split=np.concatenate([np.full(len(part), split) for split, part in parts.items()]),
        boxes=boxes if (boxes != -1).any() else None,
        cameras=np.array(names)[codes] if has_names else None,
        further={name: to_array(column) for name, column in items.columns.items()},
    )
    items = items.replace(pids=Column(np.zeros(len(items), dtype=np.int64)), camids=numbers)
    return Listing(items, columns, dataset)
