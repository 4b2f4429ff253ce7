"""SenseReID dataset."""

import logging
from pathlib import Path

from fastamp.data.datasets.base import DATASET_REGISTRY, ImageItem
from fastamp.data.datasets.filename_dataset import FilenameDataset

logger = logging.getLogger(__name__)


@DATASET_REGISTRY.register()
class SenseReID(FilenameDataset):
    """SenseReID dataset (Zhao et al. 2017, "Spindle Net: person re-identification with human body region guided feature
    decomposition and fusion", CVPR).

    The dataset is a test set. Query images are in ``test_probe`` (or ``test_prob``, as in FastReID), gallery images in
    ``test_gallery``. As in FastReID, the images in both folders are also the training images; a model trained on them
    cannot be tested on SenseReID. File names contain the identity and the camera: ``00012_0.jpg`` shows identity 12
    from camera 0.

    Args:
        root: data root, which contains the folder ``SenseReID``. Default "datasets".

    Raises:
        DataError: if a folder is missing (raised at construction), or contains no image with a matching name (raised at
            first use).
    """

    dataset_name = "sensereid"
    is_closed_set = True
    folder = "SenseReID"
    tree = "{test_probe or test_prob,test_gallery}/{pid}_{camera}.jpg"
    train_folders, query_folders, gallery_folders = (), ("test_probe",), ("test_gallery",)
    layout = (r"^(?P<pid>\d+)_(?P<camera>\d+)",)
    example = "00012_0.jpg (identity 12, camera 0)"

    def __init__(self, root: str | Path = "datasets") -> None:
        dataset_dir = Path(root) / self.folder
        if not (dataset_dir / "test_probe").is_dir() and (dataset_dir / "test_prob").is_dir():
            self.query_folders = ("test_prob",)
        super().__init__(root)

    def _load(self, split: str) -> list[ImageItem]:
        if split != "train":
            return super()._load(split)
        logger.warning(
            "SenseReID: training on its query and gallery images: test results on SenseReID are not valid.\n"
            "  fix: remove SenseReID from DATASETS.NAMES or from DATASETS.TESTS"
        )
        return self._add_name_prefix([*self.query, *self.gallery])
