"""Detect missing image files before training."""

import itertools
import logging
import os
from collections.abc import Sequence

import numpy as np

from fastamp.data.datasets.base import ImageDataset
from fastamp.data.datasets.items import PackedItems, encode
from fastamp.utils.errors import DataError

logger = logging.getLogger(__name__)

_MAX_LISTED = 10
# Folders with far more entries than requested files are not listed.
_ENTRIES_PER_FILE, _ENTRIES = 100, 10_000


def check_files(items: PackedItems, datasets: Sequence[ImageDataset], *, skip: bool = False) -> None:
    """Check that the file of every image exists.

    Args:
        items (PackedItems): images to check.
        datasets (Sequence[ImageDataset]): datasets of the images, for the message.
        skip (bool): log a warning instead of raising, because ``ReidDataset`` substitutes other images of the same
            identities. Default False.

    Raises:
        DataError: if files are missing. The message lists the first 10 and, for images from a CSV file, their line
            numbers.
    """
    rows = missing_files(items).tolist()
    if not rows:
        return
    lines = []
    for path in itertools.islice(dict.fromkeys(map(items.path, rows)), _MAX_LISTED):
        origin = next(filter(None, (dataset.origin(path) for dataset in datasets)), "")
        lines.append(f"\n    {path}" + (f" ({origin})" if origin else ""))
    titles = ", ".join(dataset.title for dataset in datasets)
    found = f"{len(rows)} of {len(items)} image files of {titles} not found; the first:{''.join(lines)}"
    if skip:
        logger.warning("%s\n  substituting other images of the same identities (DATALOADER.ON_CORRUPT is skip)", found)
        return
    raise DataError(
        f"{found}\n  fix: restore the files, or correct the paths (those in a CSV file are relative to its folder)"
    )


def missing_files(items: PackedItems) -> np.ndarray:
    """Find the images for which no file exists.

    Each folder is listed once, which is faster on a network file system than checking each file.

    Args:
        items (PackedItems): images to check.

    Returns:
        np.ndarray: (n,) int64 indices of these images in ``items``, ascending.
    """
    order = np.argsort(items.folder_of, kind="stable")
    folders, starts = np.unique(items.folder_of[order], return_index=True)
    missing: list[int] = []
    for folder, rows in zip(folders.tolist(), np.split(order, starts[1:]), strict=True):
        names = _list_files(items.folders[folder], len(rows))
        not_listed = [
            row for row, name in zip(rows.tolist(), items.names.encoded(rows), strict=True) if name not in names
        ]
        # Test these individually: the file system may ignore case or Unicode normalization.
        missing += [row for row in not_listed if not os.path.isfile(items.path(row))]
    return np.array(sorted(missing), dtype=np.int64)


def _list_files(folder: str, count: int) -> set[bytes]:
    """List the file names in a folder; return an empty set if that fails or there are far more than ``count``."""
    names = set()
    try:
        with os.scandir(folder or ".") as entries:
            for number, entry in enumerate(entries):
                if number >= _ENTRIES + _ENTRIES_PER_FILE * count:
                    return set()
                if entry.is_file():
                    names.add(encode(entry.name))
    except OSError:
        return set()
    return names
