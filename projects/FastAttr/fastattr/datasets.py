"""Datasets of pedestrian attributes, whose labels are columns: PA-100K, Market-1501 and DukeMTMC-reID."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from fastamp.data.datasets import DATASET_REGISTRY, DukeMTMC, ImageDataset, Market1501
from fastamp.data.datasets.base import ImageItem
from fastamp.data.datasets.file_utils import check_tree
from fastamp.utils.errors import DataError

Columns = dict[str, int | str]


def read_mat(path: Path, names: Sequence[str]) -> list[Any]:
    """Read variables of a MATLAB file.

    Raises:
        DataError: if the file cannot be read, or lacks a variable.
    """
    from scipy.io import loadmat

    try:
        content = loadmat(str(path), simplify_cells=True)
    except Exception as error:  # scipy raises several types on damaged files
        raise DataError(f"cannot read {path.absolute()}: {error}.\n  fix: restore this file of the dataset") from error
    missing = [name for name in names if name not in content]
    if missing:
        variables = ", ".join(name for name in content if not name.startswith("__")) or "none"
        raise DataError(
            f"{path.absolute()} has no variable {missing[0]!r}; found: {variables}.\n"
            "  fix: restore this file of the dataset"
        )
    return [content[name] for name in names]


@DATASET_REGISTRY.register()
class PA100K(ImageDataset):
    """PA-100K dataset (Liu et al. 2017, "HydraPlus-Net", arXiv:1709.09930).

    80,000 training and 10,000 test images with 26 attributes; the 10,000 validation images are not used. The images
    have no identities: each one is an identity of its own, and all test images are queries.

    Args:
        root: data root, with ``PA-100K/annotation.mat`` and ``PA-100K/data/*.jpg``. Default "datasets".

    Raises:
        DataError: if the file or the folder is missing (raised at construction), or the file is invalid (raised at
            first use).
    """

    dataset_name = "pa100k"
    folder = "PA-100K"
    requires_gallery = False
    has_cameras = False
    has_distractors = False
    related_identities = False  # each image is its own number
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {"train": (80000, 80000), "query": (10000, 10000)}

    def __init__(self, root: str | Path = "datasets") -> None:
        self.dataset_dir = Path(root) / self.folder
        needed = [self.dataset_dir / name for name in ("annotation.mat", "data")]
        tree = f"{self.folder}/annotation.mat\n{self.folder}/data/*.jpg"
        check_tree(type(self).__name__, root, needed, tree, self.folder)
        super().__init__(
            lambda: [item._replace(pid=f"{self.name}_{item.pid}") for item in self._read("train")],
            lambda: self._read("test"),
            list,
        )

    def _read(self, split: str) -> list[ImageItem]:
        path = self.dataset_dir / "annotation.mat"
        names, labels, attributes = read_mat(path, [f"{split}_images_name", f"{split}_label", "attributes"])
        names, labels = np.atleast_1d(names), np.atleast_2d(labels)
        attributes = [str(name).strip() for name in np.atleast_1d(attributes)]
        if labels.shape != (len(names), len(attributes)):
            raise DataError(
                f"{path.absolute()}: expected {split} labels of {len(names)} images and {len(attributes)} attributes, "
                f"got {' x '.join(map(str, labels.shape))}.\n  fix: restore this file of the dataset"
            )
        rows = labels.astype(int).tolist()
        return [
            ImageItem(str(self.dataset_dir / "data" / name), number, 0, columns=dict(zip(attributes, row, strict=True)))
            for number, (name, row) in enumerate(zip(names, rows, strict=True))
        ]


class IdentityAttributes(ImageDataset):
    """Dataset whose identities have attributes in a MATLAB file (Lin et al. 2019, arXiv:1703.07220).

    Attributes:
        mat: name of the file without suffix, and of its variable.
        texts: attribute -> texts of its values 1, 2, ..., for attributes of more than two values.
        number_attributes: attribute -> largest label, for attributes of more than two values whose label is the value
            minus 1.
    """

    mat: ClassVar[str] = ""
    texts: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    number_attributes: ClassVar[Mapping[str, int]] = {}
    dataset_dir: Path

    def _load(self, split: str) -> list[ImageItem]:
        attributes = self._attributes("train" if split == "train" else "test")
        missing = dict.fromkeys(next(iter(attributes.values())))
        items = super()._load(split)  # type: ignore[misc]
        return [item._replace(columns=attributes.get(self.identity(item.pid), missing)) for item in items]

    def _attributes(self, split: str) -> dict[str, Columns]:
        """Return identity -> attributes, which are 0 or 1, or texts."""
        path = self.dataset_dir / f"{self.mat}.mat"
        if not path.is_file():
            raise DataError(
                f"{type(self).__name__}: {path.absolute()} not found.\n"
                f"  fix: download {path.name} of the dataset's attributes, and move it there"
            )
        (content,) = read_mat(path, [self.mat])
        table = content.get(split) if isinstance(content, dict) else None
        if not isinstance(table, dict) or "image_index" not in table:
            raise DataError(
                f"{path.absolute()}: expected {split!r} with image_index and attributes.\n"
                "  fix: restore this file of the dataset"
            )
        identities = [str(int(number)) for number in np.atleast_1d(table["image_index"])]
        names = sorted(name for name in table if name != "image_index")
        values = [self._values(name, np.atleast_1d(table[name]).tolist(), path) for name in names]
        return {pid: dict(zip(names, row, strict=True)) for pid, *row in zip(identities, *values, strict=True)}

    def _values(self, name: str, numbers: list[int], path: Path) -> list[Any]:
        texts = self.texts.get(name)
        largest = len(texts) if texts else 1 + self.number_attributes.get(name, 1)
        others = sorted(set(numbers) - set(range(1, 1 + largest)))
        if others:
            raise DataError(
                f"{path.absolute()}: the attribute {name!r} has the unexpected values {others[:5]}.\n"
                "  fix: restore this file of the dataset"
            )
        return [texts[number - 1] if texts else number - 1 for number in numbers]


@DATASET_REGISTRY.register()
class Market1501Attr(IdentityAttributes, Market1501):
    """Market-1501 with 27 attributes of each identity.

    The age is a text: young, teenager, adult or old, and so four attributes; see also ``Market1501AttrFastReID``.

    Args:
        root: data root, with the images of ``Market1501`` and ``market_attribute.mat`` next to them. Default
            "datasets".

    Raises:
        DataError: if a folder is missing (raised at construction), or the file is missing or invalid (raised at first
            use).
    """

    identities_of = "market1501"
    mat = "market_attribute"
    texts: ClassVar[Mapping[str, tuple[str, ...]]] = {"age": ("young", "teenager", "adult", "old")}


@DATASET_REGISTRY.register()
class Market1501AttrFastReID(Market1501Attr):
    """``Market1501Attr`` with the age as FastReID reads it: one attribute whose label is 0, 1, 2 or 3.

    Labels above 1 are not defined for the binary cross entropy, which has no minimum then: the logit of the age grows
    during the whole training. The metrics count the labels 1 to 3 as positive.

    Args:
        root: see ``Market1501Attr``.

    Raises:
        DataError: see ``Market1501Attr``.
    """

    texts: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    number_attributes: ClassVar[Mapping[str, int]] = {"age": 3}


@DATASET_REGISTRY.register()
class DukeMTMCAttr(IdentityAttributes, DukeMTMC):
    """DukeMTMC-reID with 23 attributes of each identity.

    Args:
        root: data root, with the images of ``DukeMTMC`` and ``duke_attribute.mat`` next to them. Default "datasets".

    Raises:
        DataError: see ``Market1501Attr``.
    """

    identities_of = "dukemtmc"
    mat = "duke_attribute"
