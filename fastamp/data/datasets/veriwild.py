"""VERI-Wild dataset, with its small, medium and large test sets."""

from functools import cached_property
from pathlib import Path

from fastamp.data.datasets.base import DATASET_REGISTRY, ImageDataset, ImageItem, as_number, number_cameras
from fastamp.data.datasets.file_utils import check_first_image, check_tree, read_lines
from fastamp.utils.errors import DataError


@DATASET_REGISTRY.register()
class VeRiWild(ImageDataset):
    """VERI-Wild dataset (Lou et al. 2019, "VERI-Wild: a large dataset and a new method for vehicle re-identification in
    the wild", CVPR).

    Each line of a list file is ``vid/imgid``, the numbers of a vehicle and of its image, with or without a file suffix.
    Each line of ``vehicle_info.txt`` is ``vid/imgid;camera;...``. Cameras are renumbered from 0 in ascending order.

    Args:
        root: data root; ``images`` and ``train_test_split`` are in ``root/VERI-Wild``. Default "datasets".

    Raises:
        DataError: if a list or the folder is missing (raised at construction); if a line is invalid, an image has no
            camera, or the first image of a list is missing (raised at first use).
    """

    dataset_name = identities_of = "veriwild"
    folder = "VERI-Wild"
    test_identities = 10000

    def __init__(self, root: str | Path = "datasets") -> None:
        dataset_dir, name = Path(root) / self.folder, type(self).__name__
        self._images, lists = dataset_dir / "images", dataset_dir / "train_test_split"
        self._info, train = lists / "vehicle_info.txt", lists / "train_list.txt"
        query, gallery = (lists / f"test_{self.test_identities}{ending}.txt" for ending in ("_query", ""))
        tree = (
            f"{self.folder}/images/{{vid}}/{{imgid}}.jpg\n"
            f"{self.folder}/train_test_split/{{vehicle_info,train_list,{gallery.stem},{query.stem}}}.txt"
        )
        check_tree(name, root, [self._images, self._info, train, query, gallery], tree, self.folder)
        super().__init__(
            lambda: self._add_name_prefix(self._read(train)), lambda: self._read(query), lambda: self._read(gallery)
        )

    @cached_property
    def _cameras(self) -> dict[str, int]:
        """``vid/imgid`` -> camera number."""
        rows = [line.split(";") for line in read_lines(type(self).__name__, self._info)]
        # The first line may be a header.
        cameras = {_image(row[0]): as_number(row[1].strip()) for row in rows if len(row) > 1 and "/" in row[0]}
        cameras = {image: camera for image, camera in cameras.items() if isinstance(camera, int)}
        numbers = number_cameras(cameras.values())
        return {image: numbers[camera] for image, camera in cameras.items()}

    def _read(self, file: Path) -> list[ImageItem]:
        """Return the images that ``file`` lists."""
        name, items = type(self).__name__, []
        for line in read_lines(name, file):
            image = _image(line)
            vehicle, _, number = image.partition("/")
            if not vehicle.isdecimal() or not number:
                raise DataError(
                    f"{name}: expected vid/imgid on each line of {file.absolute()}, got {line!r}.\n"
                    "  fix: restore the original files of the dataset"
                )
            if image not in self._cameras:
                raise DataError(
                    f"{name}: {self._info.absolute()} has no camera for {image}, which is listed in {file}.\n"
                    "  fix: restore the original files of the dataset"
                )
            items.append(ImageItem(str(self._images / f"{image}.jpg"), int(vehicle), self._cameras[image]))
        return check_first_image(name, file, items)


def _image(name: str) -> str:
    """Return ``name``, e.g. ``vid/imgid.jpg``, without whitespace at its ends and without a file suffix."""
    return name.strip().rsplit(".", 1)[0]


@DATASET_REGISTRY.register()
class SmallVeRiWild(VeRiWild):
    """VERI-Wild with 3000 test identities."""

    dataset_name = "smallveriwild"
    test_identities = 3000


@DATASET_REGISTRY.register()
class MediumVeRiWild(VeRiWild):
    """VERI-Wild with 5000 test identities."""

    dataset_name = "mediumveriwild"
    test_identities = 5000


@DATASET_REGISTRY.register()
class LargeVeRiWild(VeRiWild):
    """VERI-Wild with 10000 test identities; equal to ``VeRiWild``."""

    dataset_name = "largeveriwild"
    test_identities = 10000
