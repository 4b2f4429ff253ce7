"""Training images of several datasets, with identities and cameras that are unique across them."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastamp.data.datasets.base import ImageDataset, ImageItem
from fastamp.data.datasets.items import Column, PackedItems, split_path
from fastamp.utils.errors import DataError
from fastamp.utils.plural import plural

logger = logging.getLogger(__name__)

LEAK_FIX = (
    "use each identity either for training or for testing; for a closed set, whose test identities are meant to be "
    "in training, list the gallery images that are also for training once, as split database"
)
_MAX_LISTED = 5


def leaked_identities(dataset: ImageDataset) -> set[str]:
    """Return the names of the identities that are both in the training and in the test images of a dataset.

    They are not an error in a closed set (``ImageDataset.is_closed_set``), and not found if the numbers of both
    are unrelated (``ImageDataset.related_identities``). Distractors are not identities.
    """
    if dataset.is_closed_set or dataset.related_identities is False:
        return set()
    trained, *tested = (_names(dataset, dataset.images_in(split)) for split in ("train", "query", "gallery"))
    distractors = {"0", "-1"} if dataset.has_distractors else set()
    return trained & set().union(*tested) - distractors


def check_not_leaked(dataset: ImageDataset) -> None:
    """Raise a ``DataError`` if ``leaked_identities`` finds any."""
    leaked = sorted(leaked_identities(dataset))
    if leaked:
        names = ", ".join(leaked[:_MAX_LISTED]) + ", ..." * (len(leaked) > _MAX_LISTED)
        raise DataError(
            f"{dataset.title}: {plural(len(leaked), 'identity is', 'identities are')} in both training and test images "
            f"({names}); results would be too high.\n"
            f"  fix: {LEAK_FIX}"
            + "; if the numbers are unrelated, set related_identities = False in the class of the dataset"
            * (dataset.related_identities is None)
        )


def _names(dataset: ImageDataset, items: Sequence[ImageItem]) -> set[str]:
    """Return the names of the identities of images."""
    return {dataset.identity(pid) for pid in PackedItems.of(items).pids.unique()[0]}


def training_items(datasets: Sequence[ImageDataset], *, combine_all: bool = False) -> list[ImageItem]:
    """Return the training images of all ``datasets`` in one list; see ``training_parts``."""
    return list(PackedItems.concat(training_parts(datasets, combine_all=combine_all)))


def training_parts(datasets: Sequence[ImageDataset], *, combine_all: bool = False) -> list[PackedItems]:
    """Collect the training images of each dataset, with identities and cameras that are unique across datasets.

    The name of the dataset is added to identities and cameras as a prefix. Datasets of the same ``family``, such as
    VehicleID and SmallVehicleID, share identities and cameras. If several of them contain an image with the same
    identity, the image is used once. If there is only one dataset, its cameras are not changed, so that they match
    those of the test images.

    Args:
        datasets: at least one dataset.
        combine_all: also train on query and gallery images, except distractors (identity 0 or less; see
            ``ImageDataset.has_distractors``). Default False.

    Returns:
        Training images of each dataset, in the order of ``datasets``.

    Raises:
        DataError: if a dataset has no training images, or two datasets have the same ``dataset_name``.
    """
    classes: dict[str, type] = {}
    parts: list[PackedItems] = []
    for dataset in datasets:
        if not dataset.train:
            raise DataError(
                f"dataset {dataset.title} has no training images.\n  fix: remove the dataset from DATASETS.NAMES"
            )
        if dataset.name in classes and classes[dataset.name] is type(dataset):
            raise DataError(f"dataset {dataset.title} is listed twice in DATASETS.NAMES.\n  fix: remove one entry")
        if classes.setdefault(dataset.name, type(dataset)) is not type(dataset):
            raise DataError(
                f"{classes[dataset.name].__name__} and {type(dataset).__name__} have the same dataset_name "
                f"{dataset.name!r}, which must be unique because it is the prefix of the identities.\n"
                "  fix: give each class a unique dataset_name"
            )
        if len(datasets) == 1 and not combine_all:
            return [PackedItems.of(dataset.train)]
        pid_prefix, camid_prefix = dataset.name, None
        if len(datasets) > 1:
            pid_prefix = camid_prefix = dataset.family
        train = PackedItems.of(dataset.train)
        part = [_add_prefixes(train.replace(pids=train.pids.map(dataset.identity)), pid_prefix, camid_prefix)]
        if combine_all:
            # Query and gallery identities are numbered independently of training; cameras are the same. An image can
            # be in several splits: all images of SenseReID are.
            known = {(item.path, item.box) for item in train}
            items = PackedItems.concat([PackedItems.of(dataset.query), PackedItems.of(dataset.gallery)])
            row_of: dict[tuple, int] = {}
            for row, item in enumerate(items):
                image = (item.path, item.box)
                if image not in known:
                    # The dict keeps the position of the first occurrence and the row of the last.
                    row_of[image] = row
            rows = [*row_of.values()]
            if dataset.has_distractors:
                rows = [row for row in rows if isinstance(pid := items.pids[row], str) or pid > 0]
            items = items.take(np.array(rows, dtype=np.int64))
            shared = _names(dataset, train) if dataset.related_identities else set()
            values, inverse = items.pids.unique()
            names = [name if (name := dataset.identity(pid)) in shared else f"test_{pid}" for pid in values]
            part.append(_add_prefixes(items.replace(pids=Column.of(inverse, names)), pid_prefix, camid_prefix))
        parts.append(_drop_shared_images(PackedItems.concat(part), dataset, list(zip(datasets, parts, strict=False))))
    return parts


def exclude_rare_identities(parts: Sequence[PackedItems], min_images: int) -> list[PackedItems]:
    """Exclude the identities with fewer than ``min_images`` training images over all datasets.

    Args:
        parts: result of ``training_parts``.
        min_images: DATASETS.MIN_IMAGES; 1 keeps all images.

    Raises:
        DataError: if no identity has as many images.
    """
    if min_images < 2:
        return list(parts)
    values, identities = Column.concat([part.pids for part in parts]).unique()
    counts = np.bincount(identities, minlength=len(values))
    kept = counts[identities] >= min_images
    if not kept.any():
        raise DataError(
            f"DATASETS.MIN_IMAGES is {min_images}, but no identity has more than "
            f"{plural(int(counts.max()), 'training image')}.\n  fix: reduce DATASETS.MIN_IMAGES"
        )
    logger.info(
        "DATASETS.MIN_IMAGES %d excluded %d of %d identities and %d of %d training images",
        min_images,
        int((counts < min_images).sum()),
        len(counts),
        int((~kept).sum()),
        len(kept),
    )
    bounds = np.cumsum([len(part) for part in parts])[:-1]
    return [part.take(np.flatnonzero(rows)) for part, rows in zip(parts, np.split(kept, bounds), strict=True)]


def _drop_shared_images(
    part: PackedItems, dataset: ImageDataset, earlier: Sequence[tuple[ImageDataset, PackedItems]]
) -> PackedItems:
    """Drop images that an earlier dataset contains with the same identity.

    Images that an earlier dataset contains with a different identity are kept. A warning is logged in both cases.

    Args:
        part: images of ``dataset``, with prefixed identities.
        dataset: dataset of these images.
        earlier: earlier datasets, with their images.
    """
    seen: dict[Any, tuple[ImageDataset, int | str]] = {}  # image in a shared folder -> dataset, identity
    for earlier_dataset, items in earlier:
        for item in (items[row] for row in items.rows_in(set(part.folders)).tolist()):
            seen.setdefault((item.path, item.box), (earlier_dataset, item.pid))
    folders = {split_path(path)[0] for path, _ in seen}
    same: list[int] = []
    conflicting: list[Any] = []
    for row in part.rows_in(folders).tolist():
        item = part[row]
        _, pid = seen.get((item.path, item.box), (None, None))
        if pid is not None:
            (same if pid == item.pid else conflicting).append(row)
    for rows, consequence in (
        (same, "with the same identity; each of them is used once"),
        (conflicting, "with a different identity, and are used with both.\n  fix: list only one of the datasets"),
    ):
        if rows:
            first = seen[part[rows[0]].path, part[rows[0]].box][0].title
            numbers = (dataset.title, len(rows), len(part), first)
            logger.warning("%s: %d of %d training images are also in %s, %s", *numbers, consequence)
    return part.take(np.setdiff1d(np.arange(len(part)), same)) if same else part


def _add_prefixes(items: PackedItems, pid_prefix: str, camid_prefix: str | None) -> PackedItems:
    """Add ``pid_prefix`` to the identities and, if it is not None, ``camid_prefix`` to the cameras."""
    camids = None if camid_prefix is None else items.camids.map(lambda camid: _add_prefix(camid, camid_prefix))
    return items.replace(pids=items.pids.map(lambda pid: _add_prefix(pid, pid_prefix)), camids=camids)


def _add_prefix(name: int | str, prefix: str) -> str:
    # Some dataset classes add the prefix themselves.
    return name if isinstance(name, str) and name.startswith(f"{prefix}_") else f"{prefix}_{name}"
