"""What a data set is: three lists of images."""

import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from fastamp.data.datasets.items import ImageItem, PackedItems
from fastamp.data.datasets.missing_dataset import missing_dataset_error
from fastamp.utils.files import expand
from fastamp.utils.registry import Registry

logger = logging.getLogger(__name__)

DATASET_REGISTRY = Registry("DATASETS.NAMES")

ROOT_VARIABLES = ("FASTAMP_DATASETS", "FASTREID_DATASETS")
ROOT_FIX = f"put the data there, or set {ROOT_VARIABLES[0]} to the folder that holds it"


Items = Sequence[tuple] | Callable[[], Sequence[tuple]]


class ImageDataset:
    """The training, query and gallery images of a data set.

    A subclass registers itself with ``DATASET_REGISTRY``, sets ``dataset_name``, and is built as ``cls(root=...)``
    with the data root; it passes on three lists of (path, pid, camid[, viewid]), or functions that return them, which
    are then called when the split is first needed. A ``PackedItems`` in the place of a list stays one.

    Attributes:
        dataset_name: put before identities and cameras of training images.
        identities_of: ``dataset_name`` of the data set whose images and identity numbers this one shares, such as the
            largest of several test sets; "" for none.
    """

    dataset_name = ""
    identities_of = ""

    def __init__(self, train: Items, query: Items, gallery: Items) -> None:
        self._splits: dict[str, Items] = {"train": train, "query": query, "gallery": gallery}
        self._items: dict[str, Sequence[ImageItem]] = {}

    @classmethod
    def from_config(cls, cfg: Any, root: str) -> "ImageDataset":
        """Build from the config; a data set with keys of its own passes their values on."""
        return cls(root=root)

    @property
    def name(self) -> str:
        """``dataset_name``, or the name of the class if it has none."""
        return self.dataset_name or type(self).__name__.lower()

    @property
    def family(self) -> str:
        """``identities_of``, or else ``name``: equal for data sets that share images and identity numbers."""
        return self.identities_of or self.name

    @property
    def title(self) -> str:
        """The data set's name as in the config, for people."""
        return self.name if ":" in self.name else type(self).__name__

    def identity(self, pid: int | str) -> str:
        """Return what the data set itself calls an identity, in whichever split it is."""
        return str(pid).removeprefix(f"{self.name}_")

    @property
    def train(self) -> Sequence[ImageItem]:
        """Training images."""
        return self._split("train")

    @property
    def query(self) -> Sequence[ImageItem]:
        """Query images."""
        return self._split("query")

    @property
    def gallery(self) -> Sequence[ImageItem]:
        """Gallery images, among them distractors, whose identity is 0."""
        return self._split("gallery")

    def origin(self, path: str) -> str:
        """Return the place that lists an image file, such as the line of a CSV file; empty where there is none."""
        return ""

    def check_before_run(self, required_files: str | Sequence[str]) -> None:
        """Check that files or folders are there, for a data set written for FastReID; ours call ``tree.check_tree``.

        Raises:
            DataError: one is missing.
        """
        paths = [required_files] if isinstance(required_files, str) else required_files
        missing = [Path(path) for path in paths if not Path(path).exists()]
        if missing:
            raise missing_dataset_error(type(self).__name__, missing, fix=ROOT_FIX)

    def _split(self, split: str) -> Sequence[ImageItem]:
        if split not in self._items:
            items = self._splits[split]
            items = items() if callable(items) else items
            packed = isinstance(items, PackedItems)
            self._items[split] = items if packed else [ImageItem(*item) for item in items]
        return self._items[split]

    def _add_name_prefix(self, items: Iterable[ImageItem]) -> list[ImageItem]:
        """Return the images with the data set's name in front of their identities."""
        return [item._replace(pid=f"{self.name}_{item.pid}") for item in items]


def data_root() -> Path:
    """Return the folder that holds the data sets: $FASTAMP_DATASETS, else $FASTREID_DATASETS, else ``datasets``."""
    folders = [os.environ[variable] for variable in ROOT_VARIABLES if os.environ.get(variable)]
    return expand([*folders, "datasets"][0])


def as_number(text: str) -> int | str:
    """Return the whole number that ``text`` is, or the text."""
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def number_cameras(cameras: Iterable[int | str]) -> dict[int | str, int]:
    """Return a number from 0 for each camera: numbers in their order first, then names in theirs."""
    order = sorted(set(cameras), key=lambda camera: (isinstance(camera, str), camera))
    return {camera: number for number, camera in enumerate(order)}


def count_items(items: Sequence[ImageItem]) -> tuple[int, int, int]:
    """Return the number of images, identities and cameras."""
    if isinstance(items, PackedItems):
        return len(items), len(items.pids.unique()[0]), len(items.camids.unique()[0])
    return len(items), len({item.pid for item in items}), len({item.camid for item in items})


def log_splits(dataset: ImageDataset, splits: dict[str, Sequence[ImageItem]]) -> None:
    """Log how many images, identities and cameras were taken."""
    rows = [[split, *count_items(items)] for split, items in splits.items()]
    table = tabulate(rows, headers=["split", "images", "identities", "cameras"], tablefmt="github")
    logger.info("%s:\n%s", dataset.title, table)
