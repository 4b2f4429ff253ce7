"""VIPeR."""

import logging
from pathlib import Path
from typing import Any

import numpy as np

from fastamp.config import Key
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageItem
from fastamp.data.datasets.filename_dataset import FilenameDataset
from fastamp.utils.errors import ConfigError

logger = logging.getLogger(__name__)

KEYS = (
    Key("DATASETS.VIPER.SPLIT", 0, "VIPeR: which of the ten random halves of the identities trains.", low=0, high=9),
)

SPLITS = 10


@DATASET_REGISTRY.register()
class VIPeR(FilenameDataset):
    """Gray et al. 2007, "Evaluating appearance models for recognition, reacquisition, and tracking" (PETS).

    632 identities with one image from each of two cameras. The protocol is ten random halves, whose results are
    averaged: one half trains; of the other, ``cam_a`` has the queries and ``cam_b`` the gallery. FastReID trains on all
    identities. Identities of query and gallery are one more than in the file names, since 0 stands for a distractor.

    Args:
        root: data root; the two folders are in ``root/VIPeR``.
        split: which half trains, 0..9; the number is the seed of the draw.

    Raises:
        ConfigError: there is no such split.
        DataError: a folder is missing (at once), or has no image named so (when the images are first needed).
    """

    dataset_name = "viper"
    folder = "VIPeR"
    tree = "{cam_a,cam_b}/{pid}_*.bmp"
    train_folders, query_folders, gallery_folders = (), ("cam_a",), ("cam_b",)
    layout = (r"^(?P<pid>\d+)_",)
    suffix = ".bmp"
    example = "001_45.bmp (identity 1)"

    def __init__(self, root: str | Path = "datasets", *, split: int = 0) -> None:
        if not 0 <= split < SPLITS:
            raise ConfigError(f"DATASETS.VIPER.SPLIT is {split}; there are {SPLITS} splits, 0..{SPLITS - 1}")
        super().__init__(root)
        self._number = split
        logger.info("VIPeR: random half %d of %d for training", split, SPLITS)

    @classmethod
    def from_config(cls, cfg: Any, root: str) -> "VIPeR":
        """Build from DATASETS.VIPER."""
        return cls(root=root, split=cfg.DATASETS.VIPER.SPLIT)

    def _load(self, split: str) -> list[ImageItem]:
        query, gallery = ([*super(VIPeR, self)._load(each)] for each in ("query", "gallery"))
        gallery = [item._replace(camid=1) for item in gallery]
        pids = sorted({item.pid for item in [*query, *gallery]})
        # NumPy promises that a RandomState draws the same in every version.
        trained = set(np.random.RandomState(self._number).permutation(pids)[: len(pids) // 2].tolist())
        if split == "train":
            return self._add_name_prefix(item for item in [*query, *gallery] if item.pid in trained)
        tested = query if split == "query" else gallery
        return [item._replace(pid=item.pid + 1) for item in tested if item.pid not in trained]
