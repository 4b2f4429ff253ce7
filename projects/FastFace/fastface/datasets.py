"""Datasets of faces: a folder for each identity, and pairs in the format of LFW."""

import re
from pathlib import Path
from typing import ClassVar

import numpy as np

from fastamp.config import CfgNode, Key
from fastamp.data.datasets import DATASET_REGISTRY, ImageDataset
from fastamp.data.datasets.base import ImageItem
from fastamp.data.datasets.custom import image_files
from fastamp.data.datasets.demo import Demo
from fastamp.data.datasets.file_utils import check_tree, read_lines
from fastamp.data.datasets.items import Column, PackedItems, PathBuilder, split_path
from fastamp.utils.errors import DataError
from fastamp.utils.files import expand
from fastface.packed_files import find_records

KEYS = (
    Key(
        "DATASETS.REC_PATH",
        "",
        "FaceFolder: RecordIO file (.rec, with an .idx file next to it) to read instead of the folder. Empty: none.",
    ),
    Key("DATASETS.FACE_FOLDER", "MS_Celeb_1M", "FaceFolder: folder in the data root with a folder for each identity."),
)

_DEMO_PAIRS = 600
# Name and number of the first image, name of the second one if it differs, and number of the second image.
_PAIR = re.compile(r"(\S+)\s+(\d+)\s+(?:(\S+)\s+)?(\d+)")


class FaceDataset(ImageDataset):
    """Base class of datasets of faces, which have no cameras; pairs have no gallery."""

    requires_gallery = False
    has_cameras = False
    has_distractors = False


@DATASET_REGISTRY.register()
class FaceFolder(FaceDataset):
    """Training images of faces in ``<folder>/<identity>/*``; all images are used.

    Args:
        root: data root. Default "datasets".
        folder: folder in the data root. Default "MS_Celeb_1M".

    Raises:
        DataError: if the folder is missing (raised at construction), or contains no images (raised at first use).
    """

    dataset_name = "faces"

    def __init__(self, root: str | Path = "datasets", *, folder: str = "MS_Celeb_1M") -> None:
        self.dataset_dir = Path(root) / folder
        check_tree(type(self).__name__, root, [self.dataset_dir], f"{folder}/<identity>/*.jpg", folder)
        super().__init__(self._read, list, list)

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> ImageDataset:
        """Build the dataset from ``DATASETS.FACE_FOLDER``, or ``FaceRecords`` if ``DATASETS.REC_PATH`` is set."""
        if cfg.DATASETS.REC_PATH:
            return FaceRecords.from_config(cfg, root)
        return cls(root, folder=cfg.DATASETS.FACE_FOLDER)

    def _read(self) -> list[ImageItem]:
        items = [
            ImageItem(str(path), f"{self.name}_{folder.name}", 0)
            for folder in sorted(path for path in self.dataset_dir.iterdir() if path.is_dir())
            for path in image_files(folder)
        ]
        if not items:
            raise DataError(
                f"{type(self).__name__}: no images in the folders of {self.dataset_dir.absolute()}.\n"
                "  fix: move the images to a folder for each identity"
            )
        return items


@DATASET_REGISTRY.register()
class FaceRecords(FaceDataset):
    """Training images of faces in a RecordIO file, which are read from it; all images are used.

    Args:
        path: file ``.rec``, with an ``.idx`` file next to it.

    Raises:
        DataError: if a file cannot be read, or a record is damaged (raised at first use); or if ``path`` is empty.
    """

    dataset_name = "faces"

    def __init__(self, path: str | Path) -> None:
        if not str(path):
            raise DataError("FaceRecords: DATASETS.REC_PATH is empty.\n  fix: set it to a .rec file")
        self.path = expand(path).absolute()
        super().__init__(self._read, list, list)

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "FaceRecords":
        """Build the dataset from ``DATASETS.REC_PATH``."""
        return cls(cfg.DATASETS.REC_PATH)

    def _read(self) -> PackedItems:
        identities, paths = find_records(self.path)
        distinct, rows = np.unique(identities, return_inverse=True)
        builder = PathBuilder()
        for path in paths:
            builder.append(*split_path(path))
        return PackedItems(
            *builder.build(),
            pids=Column.of(rows.reshape(-1), [f"{self.name}_{identity}" for identity in distinct.tolist()]),
            camids=Column(np.zeros(len(identities), dtype=np.int64)),
        )


@DATASET_REGISTRY.register()
class LFW(FaceDataset):
    """Pairs of faces of Labeled Faces in the Wild (Huang et al. 2007): 6,000 pairs in ten folds.

    The column ``same`` is 1 for both images of a pair of one identity. Images ``2 i`` and ``2 i + 1`` are pair i.

    Args:
        root: data root, with ``lfw/pairs.txt`` and ``lfw/<name>/<name>_0001.jpg``, or ``.png`` for all images. Default
            "datasets".

    Raises:
        DataError: if the file is missing (raised at construction), or invalid (raised at first use).
    """

    dataset_name = "lfw"
    folder: ClassVar[str] = "lfw"

    def __init__(self, root: str | Path = "datasets") -> None:
        self.dataset_dir = Path(root) / self.folder
        tree = f"{self.folder}/pairs.txt\n{self.folder}/<name>/<name>_0001.jpg"
        check_tree(type(self).__name__, root, [self.dataset_dir / "pairs.txt"], tree, self.folder)
        super().__init__(list, self._read, list)

    def _read(self) -> list[ImageItem]:
        path = self.dataset_dir / "pairs.txt"
        lines = read_lines(type(self).__name__, path)
        if len(lines[0].split()) <= 2:  # number of folds and of pairs in each
            lines = lines[1:]
        items, numbers, suffix = [], {}, ".jpg"
        for line in lines:
            pair = _PAIR.fullmatch(line)
            if pair is None:
                raise DataError(
                    f"{path.absolute()}: expected 'name number number' or 'name number name number', got {line!r}.\n"
                    "  fix: restore this file of the dataset"
                )
            for name, number in ((pair[1], pair[2]), (pair[3] or pair[1], pair[4])):
                file = self.dataset_dir / name / f"{name}_{int(number):04d}{suffix}"
                if not items and not file.exists() and file.with_suffix(".png").exists():
                    suffix = ".png"
                    file = file.with_suffix(suffix)
                pid = numbers.setdefault(name, len(numbers))
                items.append(ImageItem(str(file), pid, 0, columns={"same": int(pair[3] is None)}))
        if not items:
            raise DataError(f"{path.absolute()} has no pairs.\n  fix: restore this file of the dataset")
        return items


@DATASET_REGISTRY.register()
class DemoFaces(FaceDataset):
    """Images of ``Demo`` in place of faces: training identities, and 600 pairs of test images in ten folds.

    Half of the pairs of each fold are of one identity, in different cameras. The pairs are random, with a fixed seed.

    Args:
        root: data root, in which ``Demo`` is generated if it is missing. Default "datasets".
    """

    dataset_name = "demofaces"

    def __init__(self, root: str | Path = "datasets") -> None:
        self._demo = Demo(root)
        super().__init__(self._train, self._pairs, list)

    def _train(self) -> list[ImageItem]:
        items = [item._replace(pid=self._demo.identity(item.pid), camid=0) for item in self._demo.train]
        return self._add_name_prefix(items)

    def _pairs(self) -> list[ImageItem]:
        people: dict[int, list[ImageItem]] = {}
        for item in (*self._demo.query, *self._demo.gallery):
            if item.pid > 0:  # no distractors
                people.setdefault(item.pid, []).append(item)
        rng, items = np.random.default_rng(0), []
        for number in range(_DEMO_PAIRS):
            same = number % 2 == 0
            first, second = rng.choice(list(people), 2, replace=False).tolist()
            one = people[first][rng.integers(len(people[first]))]
            others = [item for item in people[first if same else second] if not same or item.camid != one.camid]
            pair = one, others[rng.integers(len(others))]
            items += [item._replace(camid=0, columns={"same": int(same)}) for item in pair]
        return items


@DATASET_REGISTRY.register()
class MS1MV2(FaceFolder):
    """FastReID's name of ``FaceFolder``."""


def _register_pairs(name: str) -> None:
    """Register a dataset of pairs in the format of ``LFW``, in the folder of its name in lower case."""
    text = f"Pairs of faces of {name.replace('_', '-')}, in the format of ``LFW``."
    values = {"dataset_name": name.lower(), "folder": name.lower(), "__doc__": text, "__module__": __name__}
    DATASET_REGISTRY.register()(type(name, (LFW,), values))


for _name in ("CALFW", "CPLFW", "CFP_FF", "CFP_FP", "AgeDB_30", "VGG2_FP"):
    _register_pairs(_name)
