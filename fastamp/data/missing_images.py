"""Find missing image files of a data set before a training. A data set that is missing: datasets/missing_dataset.py."""

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
# A folder is listed unless it has far more entries than are asked for.
_ENTRIES_PER_FILE, _ENTRIES = 100, 10_000


def check_files(items: PackedItems, datasets: Sequence[ImageDataset], *, skip: bool = False) -> None:
    """Check that the files of all images are there.

    Args:
        items: the images.
        datasets: where they are from.
        skip: log a warning instead of raising, since other images take the place of missing ones.

    Raises:
        DataError: files are missing; names the first, and the lines that list them.
    """
    rows = missing_files(items).tolist()
    if not rows:
        return
    lines = []
    for path in itertools.islice(dict.fromkeys(map(items.path, rows)), _MAX_LISTED):
        origin = next(filter(None, (dataset.origin(path) for dataset in datasets)), "")
        lines.append(f"\n    {path}" + (f" ({origin})" if origin else ""))
    titles = ", ".join(dataset.title for dataset in datasets)
    found = f"{len(rows)} of {len(items)} images of {titles} have no file; the first:{''.join(lines)}"
    if skip:
        logger.warning("DATALOADER.ON_CORRUPT is skip: %s\n  other images of their identities take their places", found)
        return
    raise DataError(
        f"{found}\n  fix: restore the files, or correct the list (paths in a CSV file are relative to its folder)"
    )


def missing_files(items: PackedItems) -> np.ndarray:
    """Return the images without a file.

    Each folder is listed once, which takes a network file system less than asking for each file.

    Args:
        items: the images.

    Returns:
        (n,) int64 rows of ``items``, ascending.
    """
    order = np.argsort(items.folder_of, kind="stable")
    folders, starts = np.unique(items.folder_of[order], return_index=True)
    missing: list[int] = []
    for folder, rows in zip(folders.tolist(), np.split(order, starts[1:]), strict=True):
        names = _list_files(items.folders[folder], len(rows))
        not_listed = [
            row for row, name in zip(rows.tolist(), items.names.encoded(rows), strict=True) if name not in names
        ]
        # Asked for again: a name may be spelled in another way, where the file system allows that.
        missing += [row for row in not_listed if not os.path.isfile(items.path(row))]
    return np.array(sorted(missing), dtype=np.int64)


def _list_files(folder: str, count: int) -> set[bytes]:
    """Return the names of the files in a folder; empty where it cannot be listed, or has too many for ``count``."""
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
