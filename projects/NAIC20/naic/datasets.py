"""Datasets of the person re-identification track of the NAIC challenges 2019 and 2020.

Many of the identities have few images. The images of a year and round are in one folder, with a list file of names and
identities. Queries have camera 0, the gallery camera 1, because the cameras are unknown.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from fastamp.config import CfgNode, Key
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem, as_number
from fastamp.data.datasets.demo import Demo
from fastamp.data.datasets.file_utils import check_first_image, check_tree, list_files, read_lines
from fastamp.utils.errors import DataError

KEYS = (
    Key(
        "DATASETS.RM_LT",
        True,
        "Datasets of NAIC20: exclude identities with a single training image, the end of the long tail. They form no "
        "positive pair.",
    ),
    Key(
        "TEST.SAVE_DISTMAT",
        False,
        "In FastReID, write the submission of the challenge during the evaluation. Here submit.py writes it from saved "
        "features, and this key of FastReID's files has no effect.",
    ),
)


def remove_long_tail(items: Iterable[ImageItem], name: str) -> list[ImageItem]:
    """Return the images without those whose identity has a single image.

    Args:
        items: training images.
        name: name of the dataset, for the message.

    Raises:
        DataError: if no image is left.
    """
    items = list(items)
    counts = Counter(item.pid for item in items)
    kept = [item for item in items if counts[item.pid] > 1]
    if not kept:
        raise DataError(
            f"{name}: each of the {len(counts)} training identities has a single image, and DATASETS.RM_LT excludes "
            "them.\n  fix: set DATASETS.RM_LT False"
        )
    return kept


def read_list(title: str, file: Path, separator: str = ":") -> list[tuple[str, str]]:
    """Read the name and the identity of each image in a list file.

    Args:
        title: name of the dataset, for the message.
        file: list file.
        separator: string between name and identity on a line. Default ":".

    Raises:
        DataError: if the file cannot be read or is empty, or a line is invalid.
    """
    pairs = []
    for line in read_lines(title, file):
        name, _, identity = (part.strip() for part in line.rpartition(separator))
        if not (name and identity):
            raise DataError(
                f"{title}: expected lines like 0001.png{separator}17 in {file.absolute()}, got {line!r}.\n"
                "  fix: restore this file of the dataset"
            )
        pairs.append((name, identity))
    return pairs


class LongTailDataset(ImageDataset):
    """Base class of datasets without cameras, in which many identities have few images; subclasses define ``_read``.

    Args:
        remove_tail: if True, exclude training identities with a single image.
    """

    def __init__(self, *, remove_tail: bool) -> None:
        self.remove_tail = remove_tail
        super().__init__(self._train, lambda: self._read("query", 0), lambda: self._read("gallery", 1))

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "LongTailDataset":
        """Build the dataset; ``DATASETS.RM_LT`` excludes the long tail."""
        return cls(root=root, remove_tail=cfg.DATASETS.RM_LT)

    def camera(self, camid: int | str) -> str:
        """Return "query" or "gallery": the cameras are unknown."""
        return ("query", "gallery")[int(camid)]

    def _train(self) -> list[ImageItem]:
        items = self._read("train", 0)
        if self.remove_tail:
            items = remove_long_tail(items, type(self).__name__)
        return self._add_name_prefix(items)

    def _read(self, split: str, camera: int) -> list[ImageItem]:
        """Return the images of a split, with ``camera`` as their camera."""
        raise NotImplementedError


class NaicDataset(LongTailDataset):
    """Base class of the datasets of the challenge.

    Args:
        root: data root. Default "datasets".
        remove_tail: if True, exclude training identities with a single image. Default True.

    Attributes:
        folder: folder of the lists in the data root.
        images: folder of the images in ``folder``; "" if the lists contain the path.
        lists: split -> list file in ``folder``. Without test lists, the dataset is for training only.
        separator: string between name and identity on a line, or a space.

    Raises:
        DataError: if a list or the folder of the images is missing (raised at construction); if a line is invalid, or
            the first image of a list is missing (raised at first use).
    """

    folder: ClassVar[str] = ""
    images: ClassVar[str] = "images"
    lists: ClassVar[dict[str, str]] = {"train": "label.txt"}
    separator: ClassVar[str] = ":"

    def __init__(self, root: str | Path = "datasets", *, remove_tail: bool = True) -> None:
        self.dataset_dir = Path(root) / self.folder
        names = [*self.lists.values(), *([self.images] if self.images else [])]
        image = f"{self.images}/{{name}}.png" if self.images else "{path}.png"
        lines = f"{{name}}.png{self.separator}{{identity}}"
        tree = f"{self.folder}/{{{','.join(self.lists.values())}}} with lines {lines}\n{self.folder}/{image}"
        check_tree(type(self).__name__, root, [self.dataset_dir / name for name in names], tree, self.folder)
        super().__init__(remove_tail=remove_tail)

    def _read(self, split: str, camera: int) -> list[ImageItem]:
        """Return the images in the list of a split; [] without a list."""
        if split not in self.lists:
            return []
        file = self.dataset_dir / self.lists[split]
        items = [
            ImageItem(str(self.dataset_dir / self.images / name), as_number(identity), camera)
            for name, identity in read_list(type(self).__name__, file, self.separator)
        ]
        return check_first_image(type(self).__name__, file, items)


@DATASET_REGISTRY.register()
class NAIC20_R2(NaicDataset):
    """Second round of 2020, with a validation set."""

    dataset_name = "naic20_r2"
    folder = "naic/2020_NAIC/fusai/train"
    lists: ClassVar[dict[str, str]] = {
        "train": "naic20r2_train_list_clean.txt",
        "query": "val_query.txt",
        "gallery": "val_gallery.txt",
    }


@DATASET_REGISTRY.register()
class NAIC20_R1(NaicDataset):
    """First round of 2020, for training."""

    dataset_name = "naic20_r1"
    folder = "naic/2020_NAIC/chusai/train"


@DATASET_REGISTRY.register()
class NAIC20_R2CNV(NaicDataset):
    """Training images of ``NAIC20_R2`` with exchanged color channels as further identities; see
    ``shuffle_channels.py``."""

    dataset_name = "naic20_r2cnv"
    folder = NAIC20_R2.folder
    images = "images_convert"
    lists: ClassVar[dict[str, str]] = {"train": NAIC20_R2.lists["train"]}


@DATASET_REGISTRY.register()
class NAIC20_R1CNV(NaicDataset):
    """Images of ``NAIC20_R1`` with exchanged color channels as further identities; see ``shuffle_channels.py``."""

    dataset_name = "naic20_r1cnv"
    folder = NAIC20_R1.folder
    images = "images_convert"


@DATASET_REGISTRY.register()
class NAIC19(NaicDataset):
    """Second round of 2019, for training; the list contains the paths."""

    dataset_name = "naic19"
    folder = "naic/2019_NAIC/fusai"
    images = ""
    lists: ClassVar[dict[str, str]] = {"train": "train_list_clean.txt"}
    separator = " "


@DATASET_REGISTRY.register()
class NAIC20_R2A(ImageDataset):
    """Test set A of the second round of 2020: the folders ``query`` and ``gallery``, whose identities are unknown.

    For `fastamp extract` and ``submit.py``. Queries have identity 0 and the gallery -1, so that an evaluation stops for
    lack of matches.

    Args:
        root: data root. Default "datasets".

    Raises:
        DataError: if a folder is missing (raised at construction), or contains no image (raised at first use).
    """

    dataset_name = "naic20_r2a"
    folder = "naic/round2/image_A"

    def __init__(self, root: str | Path = "datasets") -> None:
        self.dataset_dir = Path(root) / self.folder
        needed = [self.dataset_dir / split for split in ("query", "gallery")]
        check_tree(type(self).__name__, root, needed, f"{self.folder}/{{query,gallery}}/{{name}}.png", self.folder)
        super().__init__([], lambda: self._read("query", 0, 0), lambda: self._read("gallery", -1, 1))

    def _read(self, split: str, identity: int, camera: int) -> list[ImageItem]:
        files = list_files(type(self).__name__, self.dataset_dir / split, ".png")
        return [ImageItem(str(file), identity, camera) for file in files]


@DATASET_REGISTRY.register()
class DemoNAIC(LongTailDataset):
    """Images of ``Demo`` with a long tail: every third training identity has one image, the next one two images.

    Args:
        root: data root, in which ``Demo`` is generated if it is missing. Default "datasets".
        remove_tail: if True, exclude training identities with a single image. Default True.
    """

    dataset_name = "demonaic"

    def __init__(self, root: str | Path = "datasets", *, remove_tail: bool = True) -> None:
        self._demo = Demo(root)
        super().__init__(remove_tail=remove_tail)

    def _read(self, split: str, camera: int) -> list[ImageItem]:
        """Return the images of a split; of training identities 1, 2 or all images by turns."""
        items = [item._replace(camid=camera) for item in self._demo.images_in(split)]
        if split != "train":
            return items
        pids = sorted({self._demo.identity(item.pid) for item in items})
        limits = {pid: (1, 2, len(items))[number % 3] for number, pid in enumerate(pids)}
        kept: list[ImageItem] = []
        seen: Counter = Counter()
        for item in items:
            pid = self._demo.identity(item.pid)
            if seen[pid] < limits[pid]:
                kept.append(item._replace(pid=pid))
            seen[pid] += 1
        return kept
