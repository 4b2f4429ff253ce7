"""MSMT17 dataset."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from fastamp.config import CfgNode, Key
from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem
from fastamp.data.datasets.file_utils import check_first_image, check_tree, read_pairs
from fastamp.utils.errors import DataError, check_choice

logger = logging.getLogger(__name__)

KEYS = (
    Key(
        "DATASETS.MSMT17.VERSION",
        "auto",
        "MSMT17: V1, V2 (faces masked), or auto (V1 if both exist).",
        choices=("auto", "V1", "V2"),
    ),
    Key(
        "DATASETS.MSMT17.VALIDATION",
        False,
        "MSMT17: also train on list_val.txt, as in TransReID. Also enabled by DATASETS.COMBINEALL, as in FastReID.",
    ),
)

# Version -> dataset folder, folder of training images, folder of test images.
VERSIONS = {"V1": ("MSMT17_V1", "train", "test"), "V2": ("MSMT17_V2", "mask_train_v2", "mask_test_v2")}


@DATASET_REGISTRY.register()
class MSMT17(ImageDataset):
    """MSMT17 dataset (Wei et al. 2018, "Person transfer GAN to bridge domain gap for person re-identification", CVPR).

    15 cameras. Each line of ``list_{train,val,query,gallery}.txt`` is ``path pid``. The third underscore-separated
    field of a file name is the camera, e.g. 01 in ``0000/0000_000_01_0303morning_0015_0.jpg``. The number of training
    identities is added to the identities of query and gallery images.

    Args:
        root: data root; the lists are in ``root/MSMT17_V1`` next to ``train`` and ``test``, or in ``root/MSMT17_V2``
            next to ``mask_train_v2`` and ``mask_test_v2``, where faces are masked. Default "datasets".
        version: ``V1``, ``V2``, or ``auto``, which selects the existing version and prefers V1, as FastReID does.
            Default "auto".
        validation: also train on ``list_val.txt``, which contains more images of the training identities. TransReID
            always trains on these images; FastReID does so only with DATASETS.COMBINEALL. Default False.

    Raises:
        ConfigError: if the version is unknown.
        DataError: if a list or folder is missing (raised at construction); if a line or file name is invalid or the
            first image of a list is missing (raised at first use).
    """

    dataset_name = "msmt17"
    folder = VERSIONS["V1"][0]
    # The number of training images depends on ``validation``.
    published_counts: ClassVar[Mapping[str, tuple[int, int]]] = {
        "train": (0, 1041),
        "query": (11659, 3060),
        "gallery": (82161, 3060),
    }

    def __init__(self, root: str | Path = "datasets", *, version: str = "auto", validation: bool = False) -> None:
        check_choice("DATASETS.MSMT17.VERSION", version, ("auto", *VERSIONS))
        if version == "auto":
            version = next((version for version in VERSIONS if (Path(root) / VERSIONS[version][0]).is_dir()), "V1")
        folder, train, test = VERSIONS[version]
        self.dataset_dir = Path(root) / folder
        training = ("train", "val") if validation else ("train",)
        tree = "\n".join(
            f"{folders[0]}/{{{folders[1]},{folders[2]},list_train.txt,list_val.txt,list_query.txt,list_gallery.txt}}"
            for folders in VERSIONS.values()
        )
        needed = [train, test, *(f"list_{split}.txt" for split in (*training, "query", "gallery"))]
        check_tree(type(self).__name__, root, [self.dataset_dir / path for path in needed], tree, folder)
        logger.info("MSMT17: version %s, training on %s", version, " and ".join(f"list_{x}.txt" for x in training))
        super().__init__(
            lambda: self._add_name_prefix(item for split in training for item in self._read(split, train)),
            lambda: self._read("query", test, offset=self._training_identities()),
            lambda: self._read("gallery", test, offset=self._training_identities()),
        )

    @classmethod
    def from_config(cls, cfg: CfgNode, root: str) -> "MSMT17":
        """Build the dataset from the config section ``DATASETS.MSMT17`` and the key ``DATASETS.COMBINEALL``."""
        settings = cfg.DATASETS.MSMT17
        return cls(root=root, version=settings.VERSION, validation=settings.VALIDATION or cfg.DATASETS.COMBINEALL)

    def _training_identities(self) -> int:
        return len({pid for _, pid in read_pairs("MSMT17", self.dataset_dir / "list_train.txt")})

    def _read(self, part: str, folder: str, offset: int = 0) -> list[ImageItem]:
        """Return the images in ``folder`` that ``list_<part>.txt`` lists, with ``offset`` added to the identities."""
        file = self.dataset_dir / f"list_{part}.txt"
        items = []
        for path, pid in read_pairs("MSMT17", file):
            camera = [*Path(path).name.split("_"), "", ""][2]
            if not camera.isdecimal() or int(camera) < 1:
                raise DataError(
                    "MSMT17: expected image names such as 0000_000_01_0303morning_0015_0.jpg (camera 1) in "
                    f"{file.absolute()}, got {path}.\n  fix: restore the original files of the dataset"
                )
            items.append(ImageItem(str(self.dataset_dir / folder / path), pid + offset, int(camera) - 1))
        return check_first_image("MSMT17", file, items)
