"""Airport dataset of the ALERT center."""

import logging
import re
from pathlib import Path

from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem, as_number, number_cameras
from fastamp.data.datasets.file_utils import check_first_image, check_tree, read_lines
from fastamp.utils.errors import DataError
from fastamp.utils.plural import plural

logger = logging.getLogger(__name__)

_FIRST_IDENTITY = 11001


@DATASET_REGISTRY.register()
class AirportALERT(ImageDataset):
    r"""Airport dataset (Karanam et al. 2019, "A systematic evaluation and benchmark for person re-identification:
    features, metrics, and datasets", IEEE TPAMI).

    Training images only. Each line of ``filepath.txt`` is ``camera\pid\file``. Images with a person ID below 11001 are
    excluded, as in FastReID.

    Args:
        root: data root; ``filepath.txt`` and the camera folders are in ``root/AirportALERT``. Default "datasets".

    Raises:
        DataError: if ``filepath.txt`` is missing (raised at construction); if a line is invalid or the first image in
            the list is missing (raised at first use).
    """

    dataset_name = "airportalert"
    folder = "AirportALERT"

    def __init__(self, root: str | Path = "datasets") -> None:
        self.dataset_dir = Path(root) / self.folder
        self._list = self.dataset_dir / "filepath.txt"
        tree = f"{self.folder}/filepath.txt, with lines camera\\pid\\file\n{self.folder}/{{camera}}/{{pid}}/*"
        check_tree(type(self).__name__, root, [self._list], tree, self.folder)
        super().__init__(self._train, [], [])

    def _train(self) -> list[ImageItem]:
        rows = [(line, *re.split(r"[\\/]", line)) for line in read_lines("AirportALERT", self._list)]
        wrong = next((row[0] for row in rows if len(row) != 4 or not isinstance(as_number(row[2]), int)), None)
        if wrong is not None:
            raise DataError(
                f"AirportALERT: expected camera\\pid\\file on each line of {self._list}, got {wrong!r}.\n"
                "  fix: restore the original files of the dataset"
            )
        selected = [fields for _, *fields in rows if int(fields[1]) >= _FIRST_IDENTITY]
        logger.info(
            "AirportALERT: excluded %s with person IDs below %d",
            plural(len(rows) - len(selected), "image"),
            _FIRST_IDENTITY,
        )
        if not selected:
            raise DataError(
                f"AirportALERT: {self._list} contains no image with a person ID >= {_FIRST_IDENTITY}.\n"
                "  fix: restore the original file"
            )
        numbers = number_cameras(as_number(camera) for camera, _, _ in selected)
        items = [
            ImageItem(str(self.dataset_dir.joinpath(*fields)), int(fields[1]), numbers[as_number(fields[0])])
            for fields in selected
        ]
        return self._add_name_prefix(check_first_image("AirportALERT", self._list, items))
