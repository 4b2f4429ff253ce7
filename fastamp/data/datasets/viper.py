"""VIPeR dataset."""

import logging
from pathlib import Path

import numpy as np

from fastamp.config import CfgNode, Key
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageItem
from fastamp.data.datasets.filename_dataset import FilenameDataset
from fastamp.utils.errors import ConfigError

logger = logging.getLogger(__name__)

KEYS = (
    Key(
        "DATASETS.VIPER.SPLIT",
        0,
        "VIPeR: index of the random split of the identities into a training and a test half.",
        low=0,
        high=9,
    ),
    Key("DATASETS.VIPER.QUERY", "cam_a", "VIPeR: camera of the query images.", choices=("cam_a", "cam_b")),
)

SPLITS = 10
_CAMERAS = ("cam_a", "cam_b")


@DATASET_REGISTRY.register()
class VIPeR(FilenameDataset):
    """VIPeR dataset (Gray et al. 2007, "Evaluating appearance models for recognition, reacquisition, and tracking",
    PETS).

    632 identities with one image from each of two cameras. The identities are split at random into two halves: one is
    used for training, the other for testing. The protocol averages the results of ten random splits; torchreid averages
    each split also over both directions: ``cam_a`` as query and ``cam_b`` as gallery, and the reverse. FastReID instead
    trains on all identities. Query and gallery identities are the numbers in the file names plus one, because identity
    0 denotes distractors.

    Args:
        root: data root; ``cam_a`` and ``cam_b`` are in ``root/VIPeR``. Default "datasets".
        split: index of the random split, 0..9, used as its seed. Default 0.
        query: camera of the query images, ``cam_a`` (default) or ``cam_b``; the gallery is from the other camera.

    Raises:
        ConfigError: if the split or the camera does not exist.
        DataError: if a folder is missing (raised at construction), or contains no image with a matching name (raised at
            first use).
    """

    dataset_name = "viper"
    folder = "VIPeR"
    tree = "{cam_a,cam_b}/{pid}_*.bmp"
    train_folders, query_folders, gallery_folders = (), ("cam_a",), ("cam_b",)
    layout = (r"^(?P<pid>\d+)_",)
    suffix = ".bmp"
    related_identities = False
    example = "001_45.bmp (identity 1)"
    split_key = "DATASETS.VIPER.SPLIT"
    direction_key = "DATASETS.VIPER.QUERY"

    def __init__(self, root: str | Path = "datasets", *, split: int = 0, query: str = "cam_a") -> None:
        if not 0 <= split < SPLITS:
            raise ConfigError(
                f"DATASETS.VIPER.SPLIT must be in 0..{SPLITS - 1}, got {split}.\n  fix: set DATASETS.VIPER.SPLIT to 0"
            )
        if query not in _CAMERAS:
            raise ConfigError(
                f"DATASETS.VIPER.QUERY must be cam_a or cam_b, got {query!r}.\n  fix: set DATASETS.VIPER.QUERY to cam_a"
            )
        super().__init__(root)
        self._number, self._query = split, query
        logger.info("VIPeR: random split %d of %d", split, SPLITS)

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "VIPeR":
        """Build the dataset from the config section ``DATASETS.VIPER``."""
        return cls(root=root, split=cfg.DATASETS.VIPER.SPLIT, query=cfg.DATASETS.VIPER.QUERY)

    def _load(self, split: str) -> list[ImageItem]:
        first, second = ([*super(VIPeR, self)._load(name)] for name in ("query", "gallery"))
        second = [item._replace(camid=1) for item in second]
        pids = sorted({item.pid for item in [*first, *second]})
        # RandomState gives the same numbers in every NumPy version.
        trained = set(np.random.RandomState(self._number).permutation(pids)[: len(pids) // 2].tolist())
        if split == "train":
            return self._add_name_prefix(item for item in [*first, *second] if item.pid in trained)
        tested = first if (split == "query") is (self._query == "cam_a") else second
        return [item._replace(pid=int(item.pid) + 1) for item in tested if item.pid not in trained]
