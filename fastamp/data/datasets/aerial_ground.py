"""Aerial-ground datasets: AG-ReID and AG-ReID.v2.

The column ``platform`` is ``aerial`` (camera 0, a drone) or ``ground`` (camera 2, worn by a person; camera 3, CCTV).
The column ``altitude`` is the height of the drone's flight: 0 (low), 1 or 2 (high).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from fastamp.config import CfgNode, Key
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageItem
from fastamp.data.datasets.file_utils import check_tree, read_lines
from fastamp.data.datasets.filename_dataset import FilenameDataset
from fastamp.utils.errors import DataError

KEYS = (
    Key(
        "DATASETS.AGREID.MERGE_ALTITUDES",
        False,
        "AGReID, AGReIDv2: count images of a person at several altitudes as one identity; if False, as several, as in "
        "the published results.",
    ),
    Key(
        "DATASETS.AGREIDV2.SPLIT",
        "",
        "AGReIDv2: name, without .txt, of a file in the folder of the dataset that lists the query and gallery images "
        "of a test, one path a line, e.g. query/.../P0006T02140A0C0F1831.jpg; '' uses all images.",
    ),
)


@DATASET_REGISTRY.register()
class AGReID(FilenameDataset):
    """AG-ReID dataset (Nguyen et al. 2023, "Aerial-ground person re-ID", ICME, arXiv:2303.08597), with aerial queries
    and a ground gallery.

    2 cameras: 0 aerial, 3 ground. File names contain person, date, altitude and camera:
    ``P0006T02140A0C0F1831.jpg``. As published, the digits of person, date and altitude together are the identity, so
    that a person at another altitude is another identity.

    Args:
        root: data root, which contains the folder of the dataset. Default "datasets".
        merge_altitudes: if True, the digits of person and date are the identity. Default False.

    Raises:
        DataError: if a folder is missing (raised at construction), or contains no image with a matching name (raised at
            first use).
    """

    dataset_name = "agreid"
    folder = "AG-ReID"
    tree = "{bounding_box_train,query_all_c0,query_all_c3,bounding_box_test_all_c0,bounding_box_test_all_c3}/*.jpg"
    train_folders = ("bounding_box_train",)
    query_folders, gallery_folders = ("query_all_c0",), ("bounding_box_test_all_c3",)
    layout: ClassVar[Sequence[str]] = (r"^P(?P<person>\d+)T(?P<date>\d+)A(?P<altitude>\d+)C(?P<camera>\d+)F",)
    identity_format = "{person}{date}{altitude}"
    first_camera = 0
    example = "P0006T02140A0C0F1831.jpg (person 6, date 02140, altitude 0, camera 0)"
    protocols = ("market1501", "no_camera")
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {
        "train": (0, 199),
        "query": (1701, 189),
        "gallery": (3331, 189),
    }

    def __init__(self, root: str | Path = "datasets", *, merge_altitudes: bool = False) -> None:
        super().__init__(root)
        if merge_altitudes:
            self.identity_format = "{person}{date}"
            # A published number of identities counts each altitude.
            vars(self)["published_counts"] = {
                split: (images, 0) for split, (images, _) in self.published_counts.items()
            }

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "AGReID":
        """Build the dataset from the config section ``DATASETS.AGREID``."""
        return cls(root=root, merge_altitudes=cfg.DATASETS.AGREID.MERGE_ALTITUDES)

    def find_columns(self, fields: Mapping[str, str]) -> dict[str, int | str | None]:
        """Return the platform and the altitude."""
        return {
            "platform": "aerial" if int(fields["camera"]) == 0 else "ground",
            "altitude": int(fields["altitude"]),
        }


@DATASET_REGISTRY.register()
class AGReIDGroundToAerial(AGReID):
    """AG-ReID dataset with ground queries and an aerial gallery."""

    dataset_name, identities_of = "agreidgroundtoaerial", "agreid"
    query_folders, gallery_folders = ("query_all_c3",), ("bounding_box_test_all_c0",)
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {
        "train": (0, 199),
        "query": (962, 189),
        "gallery": (7204, 189),
    }


@DATASET_REGISTRY.register()
class AGReIDv2(AGReID):
    """AG-ReID.v2 dataset (Nguyen et al. 2024, "AG-ReID.v2: bridging aerial and ground views for person
    re-identification", IEEE TIFS, arXiv:2401.02634).

    3 cameras: 0 aerial, 2 worn by a person, 3 CCTV. File names and identities as in ``AGReID``.

    Args:
        root: data root, which contains the folder of the dataset. Default "datasets".
        merge_altitudes: if True, the digits of person and date are the identity. Default False.
        split: name, without ``.txt``, of a file in the folder of the dataset that lists the query and gallery images of
            a test, one path a line. Default "", all images in ``query`` and ``gallery``.

    Raises:
        DataError: if a folder or the file is missing (raised at construction); if a folder contains no image with a
            matching name, or the file lists none of its images or one that does not exist (raised at first use).
    """

    dataset_name = "agreidv2"
    folder = "AG-ReID.v2"
    tree = "{train_all,query,gallery}/{P*T*A*}/*.jpg"
    train_folders, query_folders, gallery_folders = ("train_all",), ("query",), ("gallery",)
    layout = ("**", *AGReID.layout)
    example = f"P0006T02140A0/{AGReID.example}"
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {"train": (0, 807)}

    def __init__(self, root: str | Path = "datasets", *, merge_altitudes: bool = False, split: str = "") -> None:
        super().__init__(root, merge_altitudes=merge_altitudes)
        self._list = self.dataset_dir / f"{split}.txt" if split else None
        if self._list:
            tree = f"{self.folder}/{self.tree}\n{self.folder}/{self._list.name} (DATASETS.AGREIDV2.SPLIT)"
            check_tree("AGReIDv2", root, [self._list], tree)

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "AGReIDv2":
        """Build the dataset from the config sections ``DATASETS.AGREID`` and ``DATASETS.AGREIDV2``."""
        section = cfg.DATASETS
        return cls(root=root, merge_altitudes=section.AGREID.MERGE_ALTITUDES, split=section.AGREIDV2.SPLIT)

    def _load(self, split: str) -> list[ImageItem]:
        """Return the images of a split that the list names."""
        items = super()._load(split)
        if self._list is None or split == "train":
            return items
        paths = {line for line in read_lines("AGReIDv2", self._list) if line.startswith(f"{split}/")}
        listed = [item for item in items if Path(item.path).relative_to(self.dataset_dir).as_posix() in paths]
        if len(listed) < len(paths) or not listed:
            raise DataError(
                f"AGReIDv2: {self._list.absolute()} lists {len(paths)} images of {split}, of which {len(listed)} "
                f"exist; expected lines such as {split}/{self.example.split()[0]}.\n"
                "  fix: restore the files of the dataset, or set DATASETS.AGREIDV2.SPLIT to another list"
            )
        return listed
