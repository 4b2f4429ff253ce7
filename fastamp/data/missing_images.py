"""Detect missing and unreadable image files before training."""

import itertools
import logging
import os
from collections.abc import Container, Iterable, Sequence

import numpy as np

from fastamp.data.boxes import Box
from fastamp.data.datasets.base import ImageDataset
from fastamp.data.datasets.custom import IMAGE_SUFFIXES, clean_command, path_fix
from fastamp.data.datasets.items import PackedItems, encode
from fastamp.data.decode import cause_of, format_fault
from fastamp.data.file_parts import check_readable, file_of
from fastamp.utils.errors import DataError

logger = logging.getLogger(__name__)

_MAX_LISTED = 10
# Testing each file is slow on a network file system.
_MAX_OPENED = 20_000
# Folders with far more entries than requested files are not listed.
_ENTRIES_PER_FILE, _ENTRIES = 100, 10_000


def check_files(items: PackedItems, datasets: Sequence[ImageDataset], *, skip: bool = False) -> None:
    """Check that the file of every image exists. Up to 20,000 files are also opened, see ``unreadable_files``.

    Args:
        items: images to check.
        datasets: datasets of the images, for the message.
        skip: log a warning instead of raising, because ``ReidDataset`` substitutes other images of the same identities.
            Default False.

    Raises:
        DataError: if files are missing, empty or not readable. The message lists the first 10 and, for images from a
            CSV file, their line numbers.
    """
    missing = missing_files(items).tolist()
    unreadable = {} if len(items) > _MAX_OPENED else unreadable_files(items, excluded=set(missing))
    titles = ", ".join(dataset.title for dataset in datasets)
    blocks = []
    for faults, what in ((dict.fromkeys(missing, ""), "not found"), (unreadable, "cannot be read")):
        reasons = {items.path(row): reason for row, reason in faults.items()}
        lines = []
        for path, reason in itertools.islice(reasons.items(), _MAX_LISTED):
            origin = find_origin(datasets, path)
            lines.append(f"\n    {path}" + (f" ({origin})" if origin else "") + (f": {reason}" if reason else ""))
        if lines:
            blocks.append(f"{len(faults)} of {len(items)} image files of {titles} {what}; the first:{''.join(lines)}")
    if not blocks:
        return
    listing = "\n".join(blocks)
    if skip:
        logger.warning(
            "%s\n  substituting other images of the same identities (DATALOADER.ON_CORRUPT is skip).\n"
            "  fix: restore the files, or remove them from the dataset",
            listing,
        )
        return
    fix = path_fix(map(items.path, missing)) + " (those in a CSV file are relative to its folder)"
    listed = [dataset.title for dataset in datasets if dataset.title.startswith("csv:")]
    if listed:
        fix += f"; or write a CSV file without these lines: {clean_command(listed[0])}"
    raise DataError(f"{listing}\n  fix: {fix}")


def find_origin(datasets: Iterable[ImageDataset], path: str, box: Box | None = None) -> str:
    """Return the annotation file and line number that list an image, or its box; "" if unknown."""
    return next(filter(None, (dataset.origin(path, box) for dataset in datasets)), "")


def unreadable_files(items: PackedItems, *, excluded: Container[int] = ()) -> dict[int, str]:
    """Find files that cannot be opened, are empty or, despite their suffix, are not images, without decoding them.

    Args:
        items: images to check.
        excluded: rows to skip.

    Returns:
        Row in ``items`` -> reason, ascending.
    """
    faults = {}
    for row in range(len(items)):
        if row not in excluded:
            path = items.path(row)
            try:
                check_readable(path)
            except OSError as error:
                faults[row] = cause_of(error)
            else:
                if path.lower().endswith(IMAGE_SUFFIXES) and (fault := format_fault(path)):
                    faults[row] = fault
    return faults


def missing_files(items: PackedItems) -> np.ndarray:
    """Find the images for which no file exists.

    Each folder is listed once, which is faster on a network file system than checking each file.

    Args:
        items: images to check.

    Returns:
        (n,) int64 indices of these images in ``items``, ascending.
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
        # Several images may be in one file.
        is_file: dict[str, bool] = {}
        for row in not_listed:
            file = file_of(items.path(row))
            if file not in is_file:
                is_file[file] = os.path.isfile(file)
            if not is_file[file]:
                missing.append(row)
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
