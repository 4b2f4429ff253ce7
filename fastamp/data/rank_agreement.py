"""Check that all ranks have the same images, labels and columns in the same order.

Each rank lists the images for itself, but the sampler, the labels and the gathered features refer to positions in the
list. A list that differs, e.g. because a dataset enumerates a set, gives wrong labels without any other sign.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastamp.data.datasets.items import Column, PackedItems, encode
from fastamp.utils import comm
from fastamp.utils.errors import DataError


def check_equal_on_all_ranks(dataset: Any, title: str) -> None:
    """Check that a dataset is the same on all ranks; a collective operation of all of them.

    Paths are compared relative to the folder that contains all images, because machines may mount it elsewhere.

    Args:
        dataset: dataset with a sequence ``items``; others are not checked.
        title: description of the dataset, for the message.

    Raises:
        DataError: on all ranks, if the number, the order, the paths, the labels or the columns of the images differ;
            the message names the first image that differs.
    """
    if not comm.is_distributed() or not isinstance(getattr(dataset, "items", None), Sequence):
        return
    items = PackedItems.of(dataset.items)
    fields = _hashes(items, _common_folder(items))
    digests = {name: hashlib.sha256(values.tobytes()).hexdigest() for name, values in fields.items()}
    of_ranks = [json.loads(message) for message in comm.gather_bytes(json.dumps([len(items), digests]).encode())]
    other = next((rank for rank, content in enumerate(of_ranks) if content != of_ranks[0]), None)
    if other is None:
        return
    (count, first), (other_count, second) = of_ranks[0], of_ranks[other]
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    # Relative to the common folder, a missing image can change all paths; absolute ones differ between machines.
    row = max(_first_difference(digests, other) for digests in (fields, _hashes(items, "")))
    here = _describe(items[row]) if row < len(items) else "missing"
    texts = [message.decode(errors="replace") for message in comm.gather_bytes(here.encode(errors="replace"))]
    raise DataError(
        f"{title} differs between the processes ({', '.join(names)}; {count} images on rank 0, {other_count} on rank "
        f"{other}): image {row + 1} is {texts[0]} on rank 0, and {texts[other]} on rank {other}.\n"
        "  fix: list the images in the same order in each process, e.g. sorted, instead of in the order of a set or a "
        "folder, and give all machines the same files"
    )


def _hashes(items: PackedItems, root: str) -> dict[str, np.ndarray]:
    """Return hashes of each image: path relative to ``root``, identity, camera and so on -> (N,) integers."""
    folders = np.zeros(len(items.folders), dtype=np.uint64)
    for code in np.unique(items.folder_of).tolist():
        folders[code] = zlib.crc32(encode(items.folders[code].removeprefix(root)))
    names = np.fromiter(map(zlib.crc32, items.names.encoded(np.arange(len(items)))), np.uint64, len(items))
    fields = {
        "paths": folders[items.folder_of] << np.uint64(32) | names,
        "identities": _hash_column(items.pids),
        "cameras": _hash_column(items.camids),
        "views": np.asarray(items.viewids, dtype=np.int64).view(np.uint64),
    }
    if items.boxes is not None:
        fields["boxes"] = _hash_column(Column.pack(map(tuple, items.boxes.tolist())))
    return fields | {f"column {name}": _hash_column(column) for name, column in items.columns.items()}


def _hash_column(column: Column) -> np.ndarray:
    """Return a hash of each value; 0 for a missing one, as if the column did not exist."""
    values, inverse = column.unique()
    hashes = [0 if value is None or value != value else zlib.crc32(repr(value).encode()) for value in values]
    return np.array(hashes, dtype=np.uint64)[inverse]


def _common_folder(items: PackedItems) -> str:
    """Return the folder that contains all images, with a final slash; "" if there is none."""
    folders = [items.folders[code] or "./" for code in np.unique(items.folder_of).tolist()]
    try:
        return os.path.join(os.path.commonpath(folders), "")
    except ValueError:  # no images, or absolute and relative paths
        return ""


def _first_difference(fields: dict[str, np.ndarray], other: int) -> int:
    """Return the position of the first image that differs between rank 0 and the rank ``other``."""
    rows = sum(values * np.uint64(zlib.crc32(name.encode()) << 32 | 1) for name, values in fields.items())
    gathered = comm.gather_bytes(np.asarray(rows, dtype=np.uint64).tobytes())
    both = [np.frombuffer(gathered[rank], dtype=np.uint64) for rank in (0, other)]
    count = min(map(len, both))
    return next(iter(np.flatnonzero(both[0][:count] != both[1][:count]).tolist()), count)


def _describe(item: Any) -> str:
    columns = "".join(f", {name} {value}" for name, value in (item.columns or {}).items())
    return f"{item.path} (identity {item.pid}, camera {item.camid}{columns})"
