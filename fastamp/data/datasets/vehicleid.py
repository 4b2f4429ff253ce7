"""VehicleID dataset, with its small, medium and large test sets."""

import logging
from collections import defaultdict
from functools import cached_property
from pathlib import Path

import numpy as np

from fastamp.config import CfgNode, Key
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem
from fastamp.data.datasets.file_utils import check_first_image, check_tree, read_pairs
from fastamp.utils.errors import DataError

logger = logging.getLogger(__name__)

KEYS = (
    Key(
        "DATASETS.VEHICLEID.SEED",
        0,
        "VehicleID: seed of the random gallery, which contains one image of each test identity.",
        low=0,
        high=2**32 - 1,
    ),
)


@DATASET_REGISTRY.register()
class VehicleID(ImageDataset):
    """VehicleID dataset (Liu et al. 2016, "Deep relative distance learning: tell the difference between similar
    vehicles", CVPR).

    Each line of a list file is ``imgid vid``, the numbers of an image and of its vehicle. The gallery consists of one
    random image of each test identity; all other test images are queries. Cameras are unknown: each image has a unique
    camera number, so that no gallery image is excluded for being from the query's camera. If TEST.PROTOCOL is
    ``vehicleid``, the evaluation draws ten random galleries from the union of query and gallery.

    Args:
        root: data root; ``image`` and ``train_test_split`` are in ``root/vehicleid``. Default "datasets".
        seed: seed of the random gallery, 0..2**32-1. Default 0.

    Raises:
        DataError: if a list or the folder is missing (raised at construction); if a line is invalid or the first image
            of a list is missing (raised at first use).
    """

    dataset_name = identities_of = "vehicleid"
    folder = "vehicleid"
    test_identities = 13164

    def __init__(self, root: str | Path = "datasets", *, seed: int = 0) -> None:
        self._images = Path(root) / self.folder / "image"
        lists = Path(root) / self.folder / "train_test_split"
        train, self._test_list = lists / "train_list.txt", lists / f"test_list_{self.test_identities}.txt"
        self._seed = seed
        tree = (
            f"{self.folder}/image/{{imgid}}.jpg\n"
            f"{self.folder}/train_test_split/{{train_list,test_list_{self.test_identities}}}.txt"
        )
        check_tree(type(self).__name__, root, [self._images, train, self._test_list], tree, self.folder)
        super().__init__(
            lambda: self._add_name_prefix(self._read(train)), lambda: self._drawn[0], lambda: self._drawn[1]
        )

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "VehicleID":
        """Build the dataset from the config section ``DATASETS.VEHICLEID``."""
        return cls(root=root, seed=cfg.DATASETS.VEHICLEID.SEED)

    @cached_property
    def _drawn(self) -> tuple[list[ImageItem], list[ImageItem]]:
        """Test images as ``(query, gallery)``. The gallery contains one random image of each identity."""
        # RandomState gives the same numbers in every NumPy version.
        generator = np.random.RandomState(self._seed)
        images: dict[int | str, list[ImageItem]] = defaultdict(list)
        for item in self._read(self._test_list):
            images[item.pid].append(item)
        query: list[ImageItem] = []
        gallery: list[ImageItem] = []
        for _, items in sorted(images.items()):
            chosen = generator.randint(len(items))
            gallery.append(items[chosen])
            query += items[:chosen] + items[chosen + 1 :]
        name = type(self).__name__
        logger.info("%s: drew %d gallery images from %s with seed %d", name, len(gallery), self._test_list, self._seed)
        return query, gallery

    def _read(self, file: Path) -> list[ImageItem]:
        """Return the images that ``file`` lists, sorted by name."""
        name, pairs = type(self).__name__, read_pairs(type(self).__name__, file)
        wrong = next((image for image, _ in pairs if not image.isdecimal()), None)
        if wrong is not None:
            raise DataError(
                f"{name}: expected two numbers on each line of {file.absolute()}, got {wrong!r}.\n"
                "  fix: restore the original files of the dataset"
            )
        items = [ImageItem(str(self._images / f"{image}.jpg"), vehicle, int(image)) for image, vehicle in sorted(pairs)]
        return check_first_image(name, file, items)


@DATASET_REGISTRY.register()
class SmallVehicleID(VehicleID):
    """VehicleID with 800 test identities."""

    dataset_name = "smallvehicleid"
    test_identities = 800


@DATASET_REGISTRY.register()
class MediumVehicleID(VehicleID):
    """VehicleID with 1600 test identities."""

    dataset_name = "mediumvehicleid"
    test_identities = 1600


@DATASET_REGISTRY.register()
class LargeVehicleID(VehicleID):
    """VehicleID with 2400 test identities."""

    dataset_name = "largevehicleid"
    test_identities = 2400
