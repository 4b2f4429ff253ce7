"""Datasets of product retrieval and fine-grained classes: Stanford Online Products, In-Shop and CUB-200-2011.

Images have no cameras: each one has a unique camera number. Without a published query set, the first image of each test
class is a query and the others are the gallery; the protocol ``recall_at_k`` uses all of them as queries.

A dataset is also read from FastReID's list files, whose lines are ``path,label``, if its own files are missing.

Args (of each class):
    root (str or Path): data root, which contains the folder of the dataset. Default "datasets".

Raises:
    DataError: if a list or folder is missing (raised at construction); if a line is invalid, or the first image of a
        list is missing (raised at first use).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem, as_number
from fastamp.data.datasets.file_utils import check_first_image, check_tree, read_lines
from fastamp.utils.errors import DataError


class ProductDataset(ImageDataset):
    """Base class of datasets without cameras whose test images may all be queries.

    Subclasses set the attributes below and define ``read``.

    Attributes:
        folder: folder of the dataset in the data root.
        needed: files and folders that must exist.
        tree: expected files in ``folder``, for messages; may have several lines.
        lists: split -> name of FastReID's list file.
    """

    folder: ClassVar[str] = ""
    needed: ClassVar[Sequence[str]] = ()
    tree: ClassVar[str] = ""
    lists: ClassVar[Mapping[str, str]] = {"train": "train.txt", "test": "test.txt"}
    has_cameras = False

    def __init__(self, root: str | Path = "datasets") -> None:
        self.dataset_dir = Path(root) / self.folder
        needed, lists = ([self.dataset_dir / name for name in names] for names in (self.needed, self.lists.values()))
        self.uses_lists = all(file.is_file() for file in lists) and not all(file.exists() for file in needed)
        if self.uses_lists:
            self.related_identities = False  # both lists number their classes from 0
        if not self.uses_lists:
            tree = "\n".join(f"{self.folder}/{line}" for line in self.tree.splitlines())
            if needed != lists:
                tree += f"\nor {self.folder}/{{{','.join(self.lists.values())}}} with lines path,label"
            check_tree(type(self).__name__, root, needed, tree, self.folder)
        super().__init__(
            lambda: self._add_name_prefix(self._number_cameras(self.images("train"))),
            lambda: self._test[0],
            lambda: self._test[1],
        )

    def read(self, split: str) -> list[ImageItem]:
        """Return the images of a split; ``"test"`` for all test images. Cameras are numbered later."""
        raise NotImplementedError

    def images(self, split: str) -> list[ImageItem]:
        """Return the images of a split from the files of the dataset, or from FastReID's lists."""
        return self.read_list(self.lists[split]) if self.uses_lists else self.read(split)

    def read_list(self, name: str) -> list[ImageItem]:
        """Return the images in one of FastReID's list files; a label is an integer or a text."""
        items = []
        for line in read_lines(type(self).__name__, self.dataset_dir / name):
            path, comma, label = (part.strip() for part in line.rpartition(","))
            if not (path and comma and label):
                raise self._invalid_line(name, line, "images/0001.jpg,17")
            items.append(ImageItem(str(self.dataset_dir / path), as_number(label), 0))
        return check_first_image(type(self).__name__, self.dataset_dir / name, items)

    @cached_property
    def _test(self) -> tuple[list[ImageItem], list[ImageItem]]:
        """Query and gallery images."""
        items = self._number_test_images(self.images("test"))
        first: dict[int | str, ImageItem] = {}
        for item in items:
            first.setdefault(item.pid, item)
        return [*first.values()], [item for item in items if first[item.pid] is not item]

    def _number_test_images(self, items: Sequence[ImageItem]) -> list[ImageItem]:
        """Number the cameras, and the classes if a label is a text."""
        if any(isinstance(item.pid, str) for item in items):
            number_of = {pid: number for number, pid in enumerate(sorted({str(item.pid) for item in items}), start=1)}
            items = [item._replace(pid=number_of[str(item.pid)]) for item in items]
        return self._number_cameras(items)

    @staticmethod
    def _number_cameras(items: Iterable[ImageItem]) -> list[ImageItem]:
        return [item._replace(camid=number) for number, item in enumerate(items)]

    def _read_fields(self, name: str, count: int, example: str, header: int = 0) -> list[list[str]]:
        """Return the ``count`` fields of each line of a list after ``header`` lines."""
        lines = read_lines(type(self).__name__, self.dataset_dir / name)[header:]
        rows = [line.split() for line in lines]
        wrong = next((line for line, row in zip(lines, rows, strict=True) if len(row) != count), None)
        if wrong is not None or not rows:
            raise self._invalid_line(name, wrong, example)
        return rows

    def _invalid_line(self, name: str, line: str | None, example: str) -> DataError:
        content = "no lines" if line is None else repr(line)
        return DataError(
            f"{type(self).__name__}: expected lines such as {example!r} in {(self.dataset_dir / name).absolute()}, got "
            f"{content}.\n  fix: restore this file of the dataset"
        )


@DATASET_REGISTRY.register()
class SOP(ProductDataset):
    """Stanford Online Products dataset (Song et al. 2016, "Deep metric learning via lifted structured feature
    embedding", CVPR).

    The column ``category`` is the kind of product, e.g. bicycle.
    """

    dataset_name = "sop"
    folder = "Stanford_Online_Products"
    needed = ("Ebay_train.txt", "Ebay_test.txt")
    tree = "{Ebay_train,Ebay_test}.txt\n{category}_final/*.JPG"
    protocols = ("recall_at_k", "recall_at_k_first_hit")
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {
        "train": (59551, 11318),
        "query": (11316, 11316),
        "gallery": (49186, 11316),
    }

    def read(self, split: str) -> list[ImageItem]:
        """Return the images in ``Ebay_<split>.txt``, whose lines are ``image_id class_id super_class_id path``."""
        name, example = f"Ebay_{split}.txt", "1 1 1 bicycle_final/111085122871_0.JPG"
        items = []
        for row in self._read_fields(name, 4, example, header=1):
            if not row[1].isdecimal():
                raise self._invalid_line(name, " ".join(row), example)
            columns = {"category": row[3].split("/")[0].removesuffix("_final")}
            items.append(ImageItem(str(self.dataset_dir / row[3]), int(row[1]), 0, columns=columns))
        return check_first_image("SOP", self.dataset_dir / name, items)


@DATASET_REGISTRY.register()
class InShop(ProductDataset):
    """In-Shop Clothes Retrieval dataset of DeepFashion (Liu et al. 2016, "DeepFashion: powering robust clothes
    recognition and retrieval with rich annotations", CVPR).

    The column ``category`` is the kind of garment, e.g. WOMEN/Dresses.
    """

    dataset_name = "inshop"
    folder = "InShop"
    needed = ("Eval/list_eval_partition.txt", "Img/img")
    tree = "Eval/list_eval_partition.txt\nImg/img/{MEN,WOMEN}/{category}/id_*/*.jpg"
    lists: ClassVar[Mapping[str, str]] = {
        "train": "train.txt",
        "query": "test_query.txt",
        "gallery": "test_gallery.txt",
    }
    protocols = ("recall_at_k_gallery",)
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {
        "train": (25882, 3997),
        "query": (14218, 3985),
        "gallery": (12612, 3985),
    }

    def read(self, split: str) -> list[ImageItem]:
        """Return the images of a split in ``list_eval_partition.txt``, whose lines are ``path item split``."""
        name, example = self.needed[0], "img/WOMEN/Dresses/id_00000002/02_1_front.jpg id_00000002 train"
        items = []
        for path, item, part in self._read_fields(name, 3, example, header=2):
            number = item.removeprefix("id_")
            if not number.isdecimal() or part not in ("train", "query", "gallery"):
                raise self._invalid_line(name, f"{path} {item} {part}", example)
            if part == split:
                columns = {"category": "/".join(Path(path).parts[1:3])}
                items.append(ImageItem(str(self.dataset_dir / "Img" / path), int(number), 0, columns=columns))
        if not items:
            raise DataError(
                f"InShop: {(self.dataset_dir / name).absolute()} lists no {split} images.\n"
                "  fix: restore this file of the dataset"
            )
        return check_first_image("InShop", self.dataset_dir / name, items)

    @cached_property
    def _test(self) -> tuple[list[ImageItem], list[ImageItem]]:
        query = self.images("query")
        items = self._number_test_images([*query, *self.images("gallery")])
        return items[: len(query)], items[len(query) :]


@DATASET_REGISTRY.register()
class CUB200(ProductDataset):
    """CUB-200-2011 dataset of birds (Wah et al. 2011, "The Caltech-UCSD Birds-200-2011 dataset", technical report
    CNS-TR-2011-001) with the split of metric learning: classes 1 to 100 for training, 101 to 200 for testing.

    Whole images are used, not the boxes of the birds.
    """

    dataset_name = "cub200"
    folder = "CUB_200_2011"
    needed = ("images.txt", "image_class_labels.txt", "images")
    tree = "images/{class}/*.jpg\n{images,image_class_labels}.txt"
    protocols = ("recall_at_k", "recall_at_k_first_hit")
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {
        "train": (5864, 100),
        "query": (100, 100),
        "gallery": (5824, 100),
    }

    def read(self, split: str) -> list[ImageItem]:
        """Return the images of the classes of a split."""
        example = "1 1"
        class_of = dict(self._read_fields("image_class_labels.txt", 2, example))
        items = []
        for number, path in self._read_fields("images.txt", 2, "1 001.Black_footed_Albatross/x.jpg"):
            label = class_of.get(number, "")
            if not label.isdecimal():
                raise self._invalid_line("image_class_labels.txt", f"{number} {label}".strip(), example)
            if (int(label) <= 100) is (split == "train"):
                items.append(ImageItem(str(self.dataset_dir / "images" / path), int(label), 0))
        if not items:
            raise DataError(
                f"CUB200: {(self.dataset_dir / 'images.txt').absolute()} lists no images of the {split} classes.\n"
                "  fix: restore this file of the dataset"
            )
        return check_first_image("CUB200", self.dataset_dir / "images.txt", items)
