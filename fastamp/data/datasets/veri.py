"""VeRi-776 dataset."""

import logging
import re
from functools import cached_property
from pathlib import Path

from fastamp.config import CfgNode, Key
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageItem
from fastamp.data.datasets.file_utils import check_tree, read_lines
from fastamp.data.datasets.filename_dataset import FilenameDataset
from fastamp.utils.errors import DataError

logger = logging.getLogger(__name__)

KEYS = (
    Key(
        "DATASETS.VERI.VIEWS",
        False,
        "VeRi: read views from keypoint_{train,test}.txt, for models with MODEL.BACKBONE.SIE_VIEWS set to 8; "
        "images without a view are excluded, as in TransReID.",
    ),
)

VIEW_LISTS = ("keypoint_train.txt", "keypoint_test.txt")
_VIEW = re.compile(r"(.*/)?(?P<name>[^/]+\.jpg) (.* )?(?P<view>\d+)", re.IGNORECASE)


@DATASET_REGISTRY.register()
class VeRi(FilenameDataset):
    """VeRi-776 dataset (Liu et al. 2016, "A deep learning-based approach to progressive vehicle re-identification for
    urban surveillance", ECCV).

    776 vehicles, 20 cameras. File names begin with the identity and the camera: ``0002_c002_00030600_0.jpg``.

    Args:
        root: data root, which contains the folder ``veri``. Default "datasets".
        views: read the view of each image, 0 to 7, from the keypoint files of Wang et al. 2017, "Orientation invariant
            feature embedding and spatial temporal regularization for vehicle re-identification" (ICCV),
            ``root/veri/keypoint_{train,test}.txt``. Each line begins with an image path and ends with the view. Images
            that neither file lists are excluded, as in TransReID. If False, all images have view 0. Default False.

    Raises:
        DataError: if a folder or keypoint file is missing (raised at construction); if a folder contains no image with
            a matching name or no image with a view, or a line of a keypoint file is invalid (raised at first use).
    """

    dataset_name = "veri"
    folder = "veri"
    tree = "{image_train,image_query,image_test}/*.jpg"
    train_folders, query_folders, gallery_folders = ("image_train",), ("image_query",), ("image_test",)
    layout = (r"(?P<pid>\d+)_c(?P<camera>\d+)",)
    first_camera = 1
    example = "0002_c002_00030600_0.jpg (identity 2, camera 2)"

    def __init__(self, root: str | Path = "datasets", *, views: bool = False) -> None:
        super().__init__(root)
        self._has_views = views
        if views:
            tree = f"{self.folder}/{self.tree}\n{self.folder}/{{{','.join(VIEW_LISTS)}}} (DATASETS.VERI.VIEWS)"
            check_tree("VeRi", root, [self.dataset_dir / name for name in VIEW_LISTS], tree)

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "VeRi":
        """Build the dataset from the config section ``DATASETS.VERI``."""
        return cls(root=root, views=cfg.DATASETS.VERI.VIEWS)

    def _load(self, split: str) -> list[ImageItem]:
        """Return the images of a split, with their views if ``views`` is True."""
        items = super()._load(split)
        if not self._has_views:
            return items
        with_view = [
            item._replace(viewid=self._views[Path(item.path).name])
            for item in items
            if Path(item.path).name in self._views
        ]
        if not with_view:
            raise DataError(
                f"VeRi: no {split} image is listed in {' or '.join(VIEW_LISTS)} in {self.dataset_dir.absolute()}.\n"
                "  fix: restore the original lists, or set DATASETS.VERI.VIEWS False"
            )
        if len(with_view) < len(items):
            logger.warning(
                "VeRi: excluded %d of %d %s images without a view.\n  fix: to keep them, set DATASETS.VERI.VIEWS False",
                len(items) - len(with_view),
                len(items),
                split,
            )
        return with_view

    @cached_property
    def _views(self) -> dict[str, int]:
        """File name -> view number, read from both keypoint files."""
        views: dict[str, int] = {}
        for file in (self.dataset_dir / name for name in VIEW_LISTS):
            for line in read_lines("VeRi", file):
                match = _VIEW.fullmatch(line)
                if match is None:
                    raise DataError(
                        f"VeRi: expected an image path, keypoints and a view number on each line of "
                        f"{file.absolute()}, got {line!r}.\n  fix: restore the original file"
                    )
                views.setdefault(match["name"], int(match["view"]))
        return views
