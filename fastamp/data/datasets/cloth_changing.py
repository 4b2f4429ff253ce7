"""Cloth-changing datasets: LTCC, PRCC, VC-Clothes, LaST and DeepChange.

The column ``clothes`` is the outfit of an image. Outfits of different persons have different names, e.g. 000_1 and
002_1.

Args (of each class):
    root (str or Path): data root, which contains the folder of the dataset. Default "datasets".

Raises:
    DataError: if a folder or list is missing (raised at construction); if a folder contains no image with a matching
        name, a line of a list is invalid, the clothes are empty, or the first image of a list is missing (raised at
        first use).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem
from fastamp.data.datasets.file_utils import check_first_image, check_tree, read_lines
from fastamp.data.datasets.filename_dataset import FilenameDataset
from fastamp.utils.errors import DataError


class ClothesDataset(FilenameDataset):
    """Base class of datasets whose file names contain the identity and the clothes.

    Subclasses set ``layout`` with the groups ``pid`` and ``clothes``, and the other attributes of ``FilenameDataset``.
    If ``test_layout`` has no group ``clothes``, the clothes of test images are missing.
    """

    identity_format = "{pid}"
    column_formats: ClassVar[Mapping[str, str]] = {"clothes": "{pid}_{clothes}"}


@DATASET_REGISTRY.register()
class LTCC(ClothesDataset):
    """LTCC dataset (Qian et al. 2020, "Long-term cloth-changing person re-identification", arXiv:2005.12633).

    12 cameras. File names begin with the identity, the clothes and the camera: ``000_1_c9_015833.png``. Identity 000 is
    a person, not distractors.
    """

    dataset_name = "ltcc"
    folder = "LTCC_ReID"
    tree = "{train,query,test}/*.png"
    train_folders, query_folders, gallery_folders = ("train",), ("query",), ("test",)
    layout = (r"^(?P<pid>\d+)_(?P<clothes>\d*)_c(?P<camera>\d+)",)
    has_distractors = False
    suffix = ".png"
    first_camera = 1
    example = "000_1_c9_015833.png (identity 0, clothes 1, camera 9)"
    protocols = ("market1501", "cloth_changing", "same_clothes")
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {
        "train": (9576, 77),
        "query": (493, 75),
        "gallery": (7050, 75),
    }


@DATASET_REGISTRY.register()
class PRCC(ClothesDataset):
    """PRCC dataset with the queries of its cross-clothes test (Yang et al. 2021, "Person re-identification by contour
    sketch under moderate clothing change", IEEE TPAMI, arXiv:2002.02295).

    3 cameras: A and B show the same clothes, C shows others. The gallery is camera A, the queries are camera C. The
    images in ``rgb/val``, of the training identities, are not used.
    """

    dataset_name = "prcc"
    folder = "prcc"
    tree = "rgb/train/{pid}/{A,B,C}_*.jpg\nprcc/rgb/test/{A,B,C}/{pid}/*.jpg"
    train_folders, query_folders, gallery_folders = ("rgb/train",), ("rgb/test",), ("rgb/test",)
    needed = ("rgb/train", "rgb/test/A", "rgb/test/B", "rgb/test/C")
    layout = (r"(?P<pid>\d+)", r"^(?P<camera>[ABC])_")
    test_layout = (r"(?P<camera>[ABC])", r"(?P<pid>\d+)", "")
    query_cameras, gallery_cameras = ("C",), ("A",)
    example = "001/A_cropped_rgb001.jpg (identity 1, camera A)"
    protocols = ("prcc", "prcc_multi_shot")
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {
        "train": (17896, 150),
        "query": (0, 71),  # sources differ
        "gallery": (3384, 71),
    }

    def find_columns(self, fields: Mapping[str, str]) -> dict[str, int | str | None]:
        """Return the clothes: ``<pid>_AB`` for cameras A and B, ``<pid>_C`` for camera C."""
        return {"clothes": f"{fields['pid']}_{'C' if fields['camera'] == 'C' else 'AB'}"}


@DATASET_REGISTRY.register()
class PRCCSC(PRCC):
    """PRCC dataset with the queries of its same-clothes test, from camera B."""

    dataset_name, identities_of = "prccsc", "prcc"
    query_cameras = ("B",)


@DATASET_REGISTRY.register()
class VCClothes(ClothesDataset):
    """VC-Clothes dataset (Wan et al. 2020, "When person re-identification meets changing clothes", CVPR workshops).

    4 cameras, rendered images. File names contain the identity, the camera and the clothes: ``0001-01-01-02.jpg``.
    """

    dataset_name = "vcclothes"
    folder = "VC-Clothes"
    tree = "{train,query,gallery}/*.jpg"
    train_folders, query_folders, gallery_folders = ("train",), ("query",), ("gallery",)
    layout = (r"^(?P<pid>\d+)-(?P<camera>\d+)-(?P<clothes>\d*)-",)
    first_camera = 1
    example = "0001-01-02-03.jpg (identity 1, camera 1, clothes 2)"
    protocols = ("market1501",)
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {
        "train": (9449, 256),
        "query": (1020, 0),
        "gallery": (8591, 0),
    }


@DATASET_REGISTRY.register()
class VCClothesSC(VCClothes):
    """VC-Clothes dataset with the test images of cameras 2 and 3, in which a person wears the same clothes."""

    dataset_name, identities_of = "vcclothessc", "vcclothes"
    query_cameras = gallery_cameras = (2, 3)
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {"train": VCClothes.published_counts["train"]}


@DATASET_REGISTRY.register()
class VCClothesCC(VCClothes):
    """VC-Clothes dataset with the test images of cameras 3 and 4, between which a person changes clothes."""

    dataset_name, identities_of = "vcclothescc", "vcclothes"
    query_cameras = gallery_cameras = (3, 4)
    published_counts = VCClothesSC.published_counts


@DATASET_REGISTRY.register()
class LaST(ClothesDataset):
    """LaST dataset (Shu et al. 2022, "Large-scale spatio-temporal person re-identification: algorithms and benchmark",
    IEEE TCSVT, arXiv:2105.15076).

    File names begin with the identity. Those of training images end with the clothes; the clothes of test images are
    missing. Cameras are unknown: each image has a unique camera number, as in ``VehicleID``.
    """

    dataset_name = "last"
    folder = "last"
    tree = "train/{pid}/*.jpg\nlast/test/query/*.jpg\nlast/test/gallery/{pid}/*.jpg"
    train_folders, query_folders, gallery_folders = ("train",), ("test/query",), ("test/gallery",)
    layout = ("**", r"^(?P<pid>\d+)_(?:[^.]*_)?(?P<clothes>[^_.]*)\.")
    test_layout = ("**", r"^(?P<pid>\d+)_")
    example = "000001/000001_0001_A.jpg (identity 1, clothes A)"
    protocols = ("market1501", "no_camera")
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {
        "train": (71248, 5000),
        "query": (10176, 0),
        "gallery": (125353, 5806),
    }
    has_cameras = False

    def camera(self, camid: int | str) -> str:
        """Return "": the cameras are unknown."""
        return ""

    def _load(self, split: str) -> list[ImageItem]:
        """Return the images of a split, each with a unique camera number."""
        start = len(self._find_images("query")) if split == "gallery" else 0
        return [item._replace(camid=start + row) for row, item in enumerate(super()._load(split))]


@DATASET_REGISTRY.register()
class DeepChange(ImageDataset):
    """DeepChange dataset (Xu and Zhu 2023, "DeepChange: a long-term person re-identification benchmark with clothes
    change", ICCV, arXiv:2105.14685).

    17 cameras. Each line of the lists ``*-bbox.txt`` begins with ``name,tracklet``; names begin with the identity, the
    camera and the day: ``P16_C3_1_*.jpg``. Clothes are not labeled: as in the program of Gu et al. 2022 (CAL,
    arXiv:2204.06890), the images of a person on one day show the same clothes. As in the paper, matches from the
    query's camera count, but not those of its tracklet: the camera number of an image is the number of its tracklet.
    """

    dataset_name = "deepchange"
    folder = "DeepChangeDataset"
    protocols = ("market1501", "cloth_changing", "same_clothes")
    _NAME = re.compile(r"P(?P<pid>\d+)_C(?P<camera>\d+)_(?P<day>[^_.]+)[_.]")

    def __init__(self, root: str | Path = "datasets") -> None:
        folders = {"train": "train-set", "query": "test-set-query", "gallery": "test-set-gallery"}
        self.dataset_dir = Path(root) / self.folder
        needed = [self.dataset_dir / f"{name}{end}" for name in folders.values() for end in ("", "-bbox.txt")]
        tree = f"{self.folder}/{{{','.join(folders.values())}}}/*.jpg\n{self.folder}/{{...}}-bbox.txt"
        check_tree("DeepChange", root, needed, tree, self.folder)
        super().__init__(
            lambda: self._add_name_prefix(self._read("train-set")),
            lambda: self._read("test-set-query"),
            lambda: self._read("test-set-gallery"),
        )

    def _read(self, folder: str) -> list[ImageItem]:
        """Return the images in ``folder`` that ``<folder>-bbox.txt`` lists."""
        file = self.dataset_dir / f"{folder}-bbox.txt"
        items = []
        for line in read_lines("DeepChange", file):
            name, tracklet = [*line.split(","), ""][:2]
            match = self._NAME.match(name)
            if match is None or not tracklet.strip().isdecimal():
                raise DataError(
                    f"DeepChange: expected lines such as P16_C3_1_0001.jpg,12 (identity 16, camera 3, day 1, "
                    f"tracklet 12) in {file.absolute()}, got {line!r}.\n  fix: restore this file of the dataset"
                )
            columns = {"clothes": f"P{match['pid']}_{match['day']}"}
            path = str(self.dataset_dir / folder / name)
            items.append(ImageItem(path, int(match["pid"]), int(tracklet), columns=columns))
        return check_first_image("DeepChange", file, items)
