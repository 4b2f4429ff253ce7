"""What a data set is: three lists of images, and how to say that one is not there."""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from fastamp.utils.errors import DataError
from fastamp.utils.registry import Registry

logger = logging.getLogger(__name__)

DATASET_REGISTRY = Registry("DATASETS.NAMES")

_ROOT_VARIABLES = ("FASTAMP_DATASETS", "FASTREID_DATASETS")
_SHOWN_ENTRIES = 8


class ImageItem(NamedTuple):
    """One image: its file, whom it shows, and which camera took it from which side.

    Training identities are strings with the data set's name in front ("market1501_2"), so that those of several sets
    stay apart; query and gallery identities are integers.
    """

    path: str
    pid: int | str
    camid: int | str
    viewid: int = 0


Items = Sequence[tuple] | Callable[[], Sequence[tuple]]


class ImageDataset:
    """The training, query and gallery images of a data set.

    A subclass registers itself with ``DATASET_REGISTRY``, sets ``dataset_name``, and is built as ``cls(root=...)``
    with the data root; it passes on three lists of (path, pid, camid[, viewid]), or functions that return them, which
    are then called when the split is first needed.
    """

    dataset_name = ""

    def __init__(self, train: Items, query: Items, gallery: Items) -> None:
        self._splits: dict[str, Items] = {"train": train, "query": query, "gallery": gallery}
        self._items: dict[str, list[ImageItem]] = {}

    @property
    def name(self) -> str:
        """``dataset_name``, or the name of the class if it has none."""
        return self.dataset_name or type(self).__name__.lower()

    @property
    def train(self) -> list[ImageItem]:
        """Training images."""
        return self._split("train")

    @property
    def query(self) -> list[ImageItem]:
        """Query images."""
        return self._split("query")

    @property
    def gallery(self) -> list[ImageItem]:
        """Gallery images, among them distractors, whose identity is 0."""
        return self._split("gallery")

    def check_before_run(self, required_files: str | Sequence[str]) -> None:
        """Check that files or folders are there, under the name by which FastReID's data sets do it.

        Raises:
            DataError: one is missing.
        """
        for path in [required_files] if isinstance(required_files, str) else required_files:
            if not Path(path).exists():
                raise DataError(
                    f"the data set {type(self).__name__} is not there; not found: {Path(path).absolute()}\n"
                    f"  fix: put the data there, or set {_ROOT_VARIABLES[0]} to the folder that holds it"
                )

    def _split(self, split: str) -> list[ImageItem]:
        if split not in self._items:
            items = self._splits[split]
            self._items[split] = [ImageItem(*item) for item in (items() if callable(items) else items)]
        return self._items[split]


def data_root() -> Path:
    """Return the folder that holds the data sets: $FASTAMP_DATASETS, else $FASTREID_DATASETS, else ``datasets``."""
    folders = [os.environ[variable] for variable in _ROOT_VARIABLES if os.environ.get(variable)]
    return Path([*folders, "datasets"][0]).expanduser()


def check_tree(name: str, root: str | Path, folders: Iterable[Path], tree: str) -> None:
    """Check that the folders of a data set are there.

    Args:
        name: the data set's name in the config.
        root: the data root.
        folders: those that must be there.
        tree: the tree expected under the root, for the message.

    Raises:
        DataError: one is missing; says what was looked for, what is there, and how to change the root.
    """
    folders = list(folders)
    missing = [folder for folder in folders if not folder.is_dir()]
    if not missing:
        return
    looked_for = "\n".join(f"    {folder.absolute()}" for folder in missing)
    raise DataError(
        f"the data set {name} is not there; of its {len(folders)} folders, {len(missing)} were not found:\n"
        f"{looked_for}\n"
        f"  found there: {_describe(missing[0].parent)}\n"
        f"  expected under the data root {Path(root).absolute()}:\n"
        + "\n".join(f"    {line}" for line in tree.strip().splitlines())
        + f"\n  fix: put the data there, or set {_ROOT_VARIABLES[0]} to the folder that holds it"
    )


def list_files(name: str, folder: Path, suffix: str) -> list[Path]:
    """Return the files of ``folder`` with this suffix, in the order of their names.

    Raises:
        DataError: there is none, or the folder cannot be read.
    """
    try:
        files = sorted(entry for entry in folder.iterdir() if entry.name.endswith(suffix))
    except OSError as error:
        raise DataError(f"{name}: cannot read the folder {folder.absolute()}: {error.strerror}") from error
    if not files:
        raise DataError(f"{name}: no *{suffix} file is in {folder.absolute()}\n  found there: {_describe(folder)}")
    return files


def log_splits(dataset: ImageDataset, splits: dict[str, Sequence[ImageItem]]) -> None:
    """Log how many images, identities and cameras were taken."""
    rows = [
        [split, len(items), len({item.pid for item in items}), len({item.camid for item in items})]
        for split, items in splits.items()
    ]
    table = tabulate(rows, headers=["split", "images", "identities", "cameras"], tablefmt="github")
    logger.info("%s:\n%s", type(dataset).__name__, table)


def _describe(folder: Path) -> str:
    """Return what a folder holds, or the nearest one above it that exists, in a few words."""
    if not folder.is_dir():
        nearest = next(parent for parent in folder.absolute().parents if parent.is_dir())
        return f"no folder {folder.absolute()}; in {nearest}: {_describe(nearest)}"
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    if not names:
        return "nothing, the folder is empty"
    rest = f", and {len(names) - _SHOWN_ENTRIES} more" if len(names) > _SHOWN_ENTRIES else ""
    return ", ".join(names[:_SHOWN_ENTRIES]) + rest
