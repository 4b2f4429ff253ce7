"""Market-1501."""

import logging
import re
from pathlib import Path

from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem, check_tree, list_files
from fastamp.utils.errors import DataError

logger = logging.getLogger(__name__)

_FILE_NAME = re.compile(r"(-?\d+)_c(\d+)")
_JUNK = -1
_TRAIN, _QUERY, _GALLERY = "bounding_box_train", "query", "bounding_box_test"


@DATASET_REGISTRY.register()
class Market1501(ImageDataset):
    """Zheng et al. 2015, "Scalable person re-identification: a benchmark" (ICCV).

    12,936 / 3,368 / 15,913 training, query and gallery images of 751 / 750 identities from 6 cameras. A file name
    begins with identity and camera, ``0002_c1s1_000451_03.jpg``. Identity -1 is junk and left out; 0 is a distractor,
    which stays in the gallery.

    Args:
        root: data root; the three folders are in ``root/Market-1501-v15.09.15``, or in ``root`` itself.

    Raises:
        DataError: a folder is missing (at once), or has no image named so (when the split is first needed).
    """

    dataset_name = "market1501"
    folder = "Market-1501-v15.09.15"

    def __init__(self, root: str | Path = "datasets") -> None:
        named = Path(root) / self.folder
        # The tree that the archive unpacks to goes first, and is the one that an error describes.
        base = named if named.is_dir() or not (Path(root) / _TRAIN).is_dir() else Path(root)
        tree = f"{self.folder}/{{{_TRAIN},{_QUERY},{_GALLERY}}}/*.jpg\n(or the three folders in the root itself)"
        check_tree(type(self).__name__, root, [base / _TRAIN, base / _QUERY, base / _GALLERY], tree)
        super().__init__(
            lambda: [item._replace(pid=f"{self.name}_{item.pid}") for item in self._read(base / _TRAIN)],
            lambda: self._read(base / _QUERY),
            lambda: self._read(base / _GALLERY),
        )

    def _read(self, folder: Path) -> list[ImageItem]:
        """Return the images of a folder; identities as numbers, cameras from 0."""
        name = type(self).__name__
        items, unmatched = [], []
        for file in list_files(name, folder, ".jpg"):
            # Only the file's name is searched: a folder above it may look like one.
            match = _FILE_NAME.search(file.name)
            if match is None:
                unmatched.append(file.name)
                continue
            pid, camera = map(int, match.groups())
            if camera < 1:
                raise DataError(f"{name}: {file.absolute()} is of camera {camera}; cameras are numbered from 1")
            if pid != _JUNK:
                items.append(ImageItem(str(file), pid, camera - 1))
        expected = "names such as 0002_c1s1_000451_03.jpg (identity 2, camera 1)"
        if not items:
            found = f"{unmatched[0]} and {len(unmatched) - 1} more" if unmatched else f"junk alone (identity {_JUNK})"
            raise DataError(f"{name}: no image of use is in {folder.absolute()}: expected {expected}, found {found}")
        if unmatched:
            logger.warning(
                "%s: left out %d files of %s that are not named as expected, %s first; expected %s",
                name,
                len(unmatched),
                folder,
                unmatched[0],
                expected,
            )
        return items
