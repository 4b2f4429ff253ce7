"""Data sets whose file and folder names tell identity and camera."""

import logging
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from fastamp.data.datasets.base import ImageDataset, ImageItem, as_number, number_cameras
from fastamp.data.datasets.file_utils import check_tree, describe_folder, is_image, list_entries
from fastamp.utils.errors import DataError
from fastamp.utils.moved import moved_names, renamed_attribute

logger = logging.getLogger(__name__)

__getattr__ = moved_names(
    __name__,
    {
        "MarketImages": "fastamp.data.datasets.filename_dataset.MarketStyleDataset",
        "NamedImages": "fastamp.data.datasets.filename_dataset.FilenameDataset",
    },
)

_Found = tuple[Path, int | str, int | str]


class FilenameDataset(ImageDataset):
    """A data set whose images say by their names, or by the folders they are in, whom they show and from where.

    A subclass is made of these attributes, and seldom of more.

    Attributes:
        folder: the data set's folder in the data root.
        tree: what is in it, for messages.
        train_folders, query_folders, gallery_folders: the folders in it that hold the images of a split; "" is the
            folder itself. A split without folders is empty.
        needed: what must be there; the splits' folders, if it is empty.
        layout: regular expressions with groups ``pid`` and ``camera``: for each folder between those and the images
            one that its whole name matches ("**" stands for folders of any depth), then one that is searched in the
            file's name. Other groups are parts of the identity; without ``camera`` all images are from one.
        suffix: what the images' names end in, in any case.
        first_camera: the number that becomes camera 0; None numbers the cameras in the order of their names.
        excluded_ids: identities that are nobody in particular.
        example: a name and its meaning, for messages.

    Args:
        root: data root.

    Raises:
        DataError: a folder is missing (at once), or has no image named so (when the split is first needed).
    """

    folder: ClassVar[str] = ""
    tree: ClassVar[str] = ""
    train_folders: ClassVar[Sequence[str]] = ("",)
    query_folders: ClassVar[Sequence[str]] = ()
    gallery_folders: ClassVar[Sequence[str]] = ()
    needed: ClassVar[Sequence[str]] = ()
    layout: ClassVar[Sequence[str]] = ()
    suffix: ClassVar[str] = ".jpg"
    first_camera: ClassVar[int | None] = None
    excluded_ids: ClassVar[frozenset[int]] = frozenset({-1})
    example: ClassVar[str] = ""
    place = renamed_attribute("place", "dataset_dir")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "left_out" in vars(cls):
            warnings.warn(f"{cls.__name__}.left_out is now excluded_ids", DeprecationWarning, stacklevel=2)
            cls.excluded_ids = cls.left_out

    def __init__(self, root: str | Path = "datasets") -> None:
        self.dataset_dir = self._find_dataset_dir(Path(root))
        self._folders = {"train": self.train_folders, "query": self.query_folders, "gallery": self.gallery_folders}
        self._found: dict[str, list[_Found]] = {}
        needed = self.needed or [folder for folders in self._folders.values() for folder in folders]
        tree = f"{self.folder}/{self.tree}"
        check_tree(type(self).__name__, root, [self.dataset_dir / each for each in needed], tree, self.folder)
        super().__init__(*(partial(self._load, split) for split in self._folders))

    def _find_dataset_dir(self, root: Path) -> Path:
        """Return the data set's folder."""
        return root / self.folder

    def _load(self, split: str) -> list[ImageItem]:
        """Return the images of a split."""
        found = self._find_images(split)
        if self.first_camera is None:
            items = [ImageItem(str(file), pid, self._camera_numbers[camera]) for file, pid, camera in found]
        else:
            items = [ImageItem(str(file), pid, camera - self.first_camera) for file, pid, camera in found]
        return self._add_name_prefix(items) if split == "train" else items

    @cached_property
    def _camera_numbers(self) -> dict[int | str, int]:
        """The number of each camera, the same in all splits."""
        return number_cameras(camera for split in self._folders for _, _, camera in self._find_images(split))

    def _find_images(self, split: str) -> list[_Found]:
        """Return file, identity and camera of a split's images, as they are named."""
        if split not in self._found:
            folders = [self.dataset_dir / folder for folder in self._folders[split]]
            self._found[split] = self._search(folders) if folders else []
        return self._found[split]

    def _search(self, folders: Sequence[Path]) -> list[_Found]:
        name, expected = type(self).__name__, f"names such as {self.example}"
        found, unmatched, junk = [], [], 0
        for file, fields in (each for folder in folders for each in _walk(name, folder, self.layout, self.suffix)):
            if fields is None:
                unmatched.append(file)
                continue
            camera = as_number(fields.pop("camera", "0"))
            if self.first_camera is not None and camera < self.first_camera:
                raise DataError(
                    f"{name}: {file.absolute()} is of camera {camera}; cameras are numbered from {self.first_camera}"
                )
            pid = as_number("-".join(fields.values()))
            if pid in self.excluded_ids:
                junk += 1
            else:
                found.append((file, pid, camera))
        where = ", ".join(str(folder.absolute()) for folder in folders)
        if not (found or unmatched or junk):
            raise DataError(f"{name}: no *{self.suffix} file is in place in {where}\n{self._describe_content(folders)}")
        if not found:
            nothing = f"junk alone (identity {', '.join(map(str, self.excluded_ids))})"
            first = f"{unmatched[0].name} and {len(unmatched) - 1} more" if unmatched else nothing
            raise DataError(f"{name}: no image of use is in {where}: expected {expected}, found {first}")
        if unmatched:
            logger.warning(
                "%s: left out %d files that are not named as expected, %s first; expected %s",
                name,
                len(unmatched),
                unmatched[0],
                expected,
            )
        return found

    def _describe_content(self, folders: Sequence[Path]) -> str:
        deeper = next((file for folder in folders for file in folder.rglob("*") if is_image(file, self.suffix)), None)
        return (
            f"  expected: {self.folder}/{self.tree.splitlines()[0]}\n  found there: {describe_folder(folders[0])}"
            + (f"\n  elsewhere below: {deeper.absolute()}" if deeper else "")
        )


class MarketStyleDataset(FilenameDataset):
    """Three folders and file names like those of Market-1501, ``0002_c1s1_000451_03.jpg``.

    They begin with identity and camera. Identity -1 is junk and left out; 0 is a distractor, which stays in the
    gallery.

    Args:
        root: data root.

    Raises:
        DataError: a folder is missing (at once), or has no image named so (when the split is first needed).
    """

    tree = "{bounding_box_train,query,bounding_box_test}/*.jpg"
    train_folders, query_folders, gallery_folders = ("bounding_box_train",), ("query",), ("bounding_box_test",)
    layout = (r"(?P<pid>-?\d+)_c(?P<camera>\d+)",)
    first_camera = 1
    example = "0002_c1s1_000451_03.jpg (identity 2, camera 1)"


def _walk(name: str, folder: Path, layout: Sequence[str], suffix: str) -> Iterator[tuple[Path, dict[str, str] | None]]:
    """Yield the images of a ``FilenameDataset`` layout with the groups of their names, or None."""
    pattern, *rest = layout
    if not rest:
        for file in (entry for entry in list_entries(name, folder) if is_image(entry, suffix)):
            # Only the file's name is searched: a folder above it may look like one.
            match = re.search(pattern, file.name)
            yield file, match and match.groupdict()
        return
    if pattern == "**":
        yield from _walk(name, folder, rest, suffix)
    for inner in (entry for entry in list_entries(name, folder) if entry.is_dir()):
        if pattern == "**":
            yield from _walk(name, inner, layout, suffix)
        elif match := re.fullmatch(pattern, inner.name):
            for file, fields in _walk(name, inner, rest, suffix):
                yield file, fields if fields is None else match.groupdict() | fields
