"""Base class of datasets: training, query and gallery images."""

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from tabulate import tabulate

from fastamp.config import CfgNode
from fastamp.data.boxes import Box, are_normalized, normalized_error, warn_of_small_boxes
from fastamp.data.datasets.identity_names import is_unknown_identity, log_excluded
from fastamp.data.datasets.items import ImageItem, PackedItems
from fastamp.data.datasets.missing_dataset import missing_dataset_error
from fastamp.utils.files import expand
from fastamp.utils.registry import Registry

logger = logging.getLogger(__name__)


class RegisteredDataset(Protocol):
    """Class of a dataset, or function with an argument ``root`` that builds one; see ``ImageDataset``.

    Attributes:
        folder: folder of the dataset in the data root. Default "": unknown.
    """

    dataset_name: str = ""
    identities_of: str = ""
    evaluator: str = ""
    protocols: ClassVar[tuple[str, ...]] = ()
    folder: str = ""


DATASET_REGISTRY = Registry("DATASETS.NAMES", replaces_built_in=True, contract=RegisteredDataset)

ROOT_VARIABLES = ("FASTAMP_DATASETS", "FASTREID_DATASETS")
ROOT_FIX = f"move the data there, or set {ROOT_VARIABLES[0]} to the folder that contains it"


Items = Sequence[tuple] | Callable[[], Sequence[tuple]]


class ImageDataset:
    """Training, query and gallery images of a dataset.

    To add a dataset, register a subclass in ``DATASET_REGISTRY`` and set ``dataset_name``. The constructor of the
    subclass is called with the data root: ``cls(root=...)``.

    Args:
        train, query, gallery: images of the split: list of (path, pid, camid[, viewid[, box]]), ``PackedItems``, or a
            function that returns one of these and is called when the split is first accessed.

    Attributes:
        dataset_name: prefix of training identities and cameras.
        identities_of: ``dataset_name`` of another dataset with the same images and identities, for example "vehicleid"
            in ``SmallVehicleID``. Default "".
        split_note: how a random split was drawn. Default "".
        excluded_note: how many images of unknown identities were excluded, see ``identity_names``. Default "".
        related_identities: whether the same name or number in training and test images is the same identity; False e.g.
            if each split is numbered from 0. Default None, unknown: identities in both are an error, and
            ``DATASETS.COMBINEALL`` keeps them distinct.
        is_closed_set: whether the identities of the test images are meant to be in the training set. Default False.
        excludes_unknown: whether training images of unknown identities are excluded. Default True.
        has_distractors: whether images of identity 0 or less are distractors, which ``DATASETS.COMBINEALL`` excludes
            from training. Default True.
        has_cameras: whether the cameras of the images are known; those of the query's camera are then junk. Default
            True.
        requires_gallery: whether a test set without gallery images is an error. Default True.
        evaluator: name of the evaluator if TEST.EVALUATOR is auto and all test sets have the same, for datasets that
            are not evaluated by retrieval. Default "": that of the meta-architecture.
        protocols: values of TEST.PROTOCOL under which results on the dataset are published. Default: any.
        published_counts: split -> published numbers of images and of identities; 0 if unknown. Default: unknown.
        split_key: config key that selects a random split of the identities into training and test, with bounds; the
            protocol averages the results of all splits, see ``TEST.ALL_SPLITS``. Default "": one split.
        direction_key: config key that exchanges query and gallery, with choices, over which the protocol also averages;
            the training images are the same. Default "": none.
    """

    dataset_name = ""
    identities_of = ""
    split_note = ""
    excluded_note = ""
    excludes_unknown = True
    related_identities: bool | None = None
    is_closed_set = False
    has_distractors = True
    requires_gallery = True
    has_cameras = True
    evaluator = ""
    protocols: ClassVar[tuple[str, ...]] = ()
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {}
    split_key: ClassVar[str] = ""
    direction_key: ClassVar[str] = ""

    def __init__(self, train: Items, query: Items, gallery: Items) -> None:
        self._splits: dict[str, Items] = {"train": train, "query": query, "gallery": gallery}
        self._items: dict[str, Sequence[ImageItem]] = {}

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "ImageDataset":
        """Build the dataset from the config. Override this if the constructor has arguments besides ``root``.

        Args:
            cfg: config.
            root: data root.
        """
        return cls(root=root)  # type: ignore[call-arg]

    @classmethod
    def random_split_key(cls, cfg: CfgNode) -> str:
        """Return ``split_key``, or "" if the dataset has one split with this config."""
        return cls.split_key

    def adapt_config(self, cfg: CfgNode, training_set: Any) -> Any:
        """Return the config of a training on this dataset, before the model and the test sets are built.

        Args:
            cfg: config.
            training_set: images of all training sets, with ``sources`` and the labels.
        """
        return cfg

    def test_items(self) -> tuple[Sequence[ImageItem], Sequence[ImageItem]]:
        """Return the query and the gallery images of a test loader, with integer identities and cameras."""
        return self.query, self.gallery

    @property
    def name(self) -> str:
        """``dataset_name``, or the lowercase class name if ``dataset_name`` is empty."""
        return self.dataset_name or type(self).__name__.lower()

    @property
    def family(self) -> str:
        """``identities_of``, or ``name`` if ``identities_of`` is empty.

        Datasets with the same images and identities have the same family.
        """
        return self.identities_of or self.name

    @property
    def title(self) -> str:
        """Name of the dataset in the config, for messages."""
        return self.name if ":" in self.name else type(self).__name__

    def identity(self, pid: int | str) -> str:
        """Return the name of an identity without the dataset's prefix."""
        return str(pid).removeprefix(f"{self.name}_")

    def camera(self, camid: int | str) -> str:
        """Return the name of a camera without the dataset's prefix; "" if the dataset has no cameras."""
        return str(camid).removeprefix(f"{self.name}_") if self.has_cameras else ""

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
        """Gallery images, including distractors, which have identity 0 (see ``has_distractors``)."""
        return self._split("gallery")

    def origin(self, path: str, box: Box | None = None) -> str:
        """Return the annotation file and line number that list an image, or its box, for messages; "" if unknown."""
        return ""

    def check_before_run(self, required_files: str | Sequence[str]) -> None:
        """Check that files or folders exist; ``check_tree`` also describes the expected layout.

        Raises:
            DataError: if a file or folder is missing.
        """
        paths = [required_files] if isinstance(required_files, str) else required_files
        missing = [Path(path) for path in paths if not Path(path).exists()]
        if missing:
            raise missing_dataset_error(type(self).__name__, missing, fix=ROOT_FIX)

    def images_in(self, name: str) -> Sequence[ImageItem]:
        """Return the images in the split ``"train"``, ``"query"`` or ``"gallery"``."""
        items: Sequence[ImageItem] = getattr(self, name)
        return items

    def _split(self, split: str) -> Sequence[ImageItem]:
        if split not in self._items:
            source = self._splits[split]
            given = source() if callable(source) else source
            items: Sequence[ImageItem] = (
                given if isinstance(given, PackedItems) else [ImageItem(*item) for item in given]
            )
            self._check_boxes(split, items)
            if split == "train" and self.excludes_unknown:
                items = self._exclude_unknown(items)
            self._items[split] = items
        return self._items[split]

    def _check_boxes(self, split: str, items: Sequence[ImageItem]) -> None:
        """Raise DataError if the boxes of a split are not in pixels, and log a warning about those of a few pixels."""
        if isinstance(items, PackedItems):
            boxes, rows = items.boxes, None
        else:
            rows = [row for row, item in enumerate(items) if item.box is not None]
            boxes = np.array([items[row].box for row in rows], dtype=np.float64).reshape(-1, 4)
        if boxes is None or not len(boxes):
            return
        place = f"{self.title}, {split}"
        if are_normalized(boxes):
            raise normalized_error(place)

        def name_of(row: int) -> str:
            item = items[row if rows is None else rows[row]]
            return f"{item.box} of {item.path}"

        warn_of_small_boxes(boxes, place, name_of)

    def _exclude_unknown(self, items: Sequence[ImageItem]) -> Sequence[ImageItem]:
        """Exclude training images of unknown identities."""
        pids = items.pids.unique()[0] if isinstance(items, PackedItems) else {item.pid for item in items}
        unknown = {pid for pid in pids if is_unknown_identity(self.identity(pid))}
        if not unknown or len(unknown) == len(pids):  # all: for training without labels
            return items
        counts = Counter(self.identity(item.pid) for item in items if item.pid in unknown)
        self.excluded_note = log_excluded(counts, f"{self.title}, training images")
        kept = [item for item in items if item.pid not in unknown]
        return PackedItems.of(kept) if isinstance(items, PackedItems) else kept

    def _add_name_prefix(self, items: Iterable[ImageItem]) -> list[ImageItem]:
        """Add the dataset's name as a prefix to the identities."""
        return [item._replace(pid=f"{self.name}_{item.pid}") for item in items]


def data_root() -> Path:
    """Return the data root: $FASTAMP_DATASETS, else $FASTREID_DATASETS, else ``datasets``."""
    folders = [os.environ[variable] for variable in ROOT_VARIABLES if os.environ.get(variable)]
    return expand([*folders, "datasets"][0])


def as_number(text: str) -> int | str:
    """Convert text to int if it represents an integer; otherwise return it unchanged."""
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def number_cameras(cameras: Iterable[int | str]) -> dict[int | str, int]:
    """Number distinct cameras from 0: integers in ascending order, then names in alphabetical order."""
    order = sorted(set(cameras), key=lambda camera: (isinstance(camera, str), camera))
    return {camera: number for number, camera in enumerate(order)}


def count_items(items: Sequence[ImageItem], dataset: ImageDataset | None = None) -> tuple[int, int, int]:
    """Return the number of images, of distinct identities, and of distinct cameras.

    Args:
        items: images.
        dataset: dataset of the images, which names their cameras: images without a camera do not count as cameras.
            Default None: distinct ``camid``.
    """
    if isinstance(items, PackedItems):
        identities, cameras = len(items.pids.unique()[0]), set(items.camids.unique()[0])
    else:
        identities, cameras = len({item.pid for item in items}), {item.camid for item in items}
    if dataset is not None:
        cameras = {dataset.camera(camera) for camera in cameras} - {""}
    return len(items), identities, len(cameras)


def log_splits(dataset: ImageDataset, splits: dict[str, Sequence[ImageItem]]) -> None:
    """Log the numbers of images, identities and cameras in each split."""
    rows = [[split, *count_items(items, dataset)] for split, items in splits.items()]
    table = tabulate(rows, headers=["split", "images", "identities", "cameras"], tablefmt="github")
    logger.info("%s:\n%s", dataset.title, table)
