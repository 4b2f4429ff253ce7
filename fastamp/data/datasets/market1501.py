"""Market-1501 dataset."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from fastamp.config import CfgNode, Key
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageItem
from fastamp.data.datasets.file_utils import check_tree, list_files
from fastamp.data.datasets.filename_dataset import MarketStyleDataset

logger = logging.getLogger(__name__)

KEYS = (
    Key(
        "DATASETS.MARKET1501_500K", False, "Market1501: add the 500k distractors in the folder 'images' to the gallery."
    ),
)

_DISTRACTOR = 0


@DATASET_REGISTRY.register()
class Market1501(MarketStyleDataset):
    """Market-1501 dataset (Zheng et al. 2015, "Scalable person re-identification: a benchmark", ICCV).

    6 cameras. 12,936 training, 3,368 query and 15,913 gallery images; 751 training and 750 test identities. File names
    begin with the identity and the camera: ``0002_c1s1_000451_03.jpg``. Images of identity -1 are excluded. Images of
    identity 0 are distractors in the gallery.

    Args:
        root: data root; ``bounding_box_train``, ``query`` and ``bounding_box_test`` are in
            ``root/Market-1501-v15.09.15`` or in ``root``. Default "datasets".
        market1501_500k: add the 500k distractors to the gallery, as images from one additional camera. Their folder,
            ``images``, is next to ``query`` or one level above. Default False.

    Raises:
        DataError: if a folder is missing (raised at construction), or contains no image with a matching name (raised at
            first use).
    """

    dataset_name = "market1501"
    folder = "Market-1501-v15.09.15"
    tree = f"{MarketStyleDataset.tree}\n(or the three folders in the data root)"
    # The gallery has one identity more, of the distractors.
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {
        "train": (12936, 751),
        "query": (3368, 750),
        "gallery": (15913, 751),
    }

    def __init__(self, root: str | Path = "datasets", *, market1501_500k: bool = False) -> None:
        super().__init__(root)
        self._distractors: Path | None = None
        if market1501_500k:
            candidates = [self.dataset_dir / "images", self.dataset_dir.parent / "images"]
            self._distractors = next((candidate for candidate in candidates if candidate.is_dir()), candidates[0])
            check_tree(type(self).__name__, root, [self._distractors], f"{self.folder}/images/*.jpg")
            vars(self)["published_counts"] = {split: self.published_counts[split] for split in ("train", "query")}

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "Market1501":
        """Build the dataset from the config key ``DATASETS.MARKET1501_500K``."""
        return cls(root=root, market1501_500k=True) if cfg.DATASETS.MARKET1501_500K else cls(root=root)

    def _find_dataset_dir(self, root: Path) -> Path:
        # Prefer the folder of the original archive, which error messages describe.
        named = super()._find_dataset_dir(root)
        return named if named.is_dir() or not (root / "bounding_box_train").is_dir() else root

    def _load(self, split: str) -> list[ImageItem]:
        items = super()._load(split)
        if split == "gallery" and self._distractors:
            camera = 1 + max(int(item.camid) for item in [*self.query, *items])
            files = list_files(type(self).__name__, self._distractors, self.suffix)
            logger.info(
                "%s: added %d distractors from %s to the gallery", type(self).__name__, len(files), self._distractors
            )
            items += [ImageItem(str(file), _DISTRACTOR, camera) for file in files]
        return items
