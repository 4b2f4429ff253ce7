"""Base classes of datasets whose file and folder names contain the identity and the camera."""

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from string import Formatter
from typing import ClassVar

from fastamp.data.datasets.base import ImageDataset, ImageItem, as_number, number_cameras
from fastamp.data.datasets.file_utils import check_tree, describe_folder, is_image, list_entries
from fastamp.data.datasets.identity_names import is_unknown_identity, log_excluded
from fastamp.utils.errors import DataError
from fastamp.utils.plural import plural

logger = logging.getLogger(__name__)


_Found = tuple[Path, int | str, int | str, dict[str, int | str | None] | None]


class FilenameDataset(ImageDataset):
    """Base class of datasets whose file and folder names contain the identity and the camera.

    Subclasses set the attributes below as class attributes.

    Attributes:
        folder: folder of the dataset in the data root.
        tree: expected files in ``folder``, for messages.
        train_folders, query_folders, gallery_folders: folders of each split, relative to ``folder``; "" is ``folder``
            itself. A split without folders is empty.
        needed: files and folders that must exist. Default: the folders of the splits.
        layout: regular expressions with the groups ``pid`` and ``camera``. The last expression is searched in the file
            name; if files of one identity differ before the match, that is an error. The preceding expressions must
            match the full names of the folders on the path from the split's folder to the file, in order; "**" matches
            any number of folders. Other groups become part of the identity. Without a group ``camera``, all images are
            from one camera.
        test_layout: ``layout`` of the query and gallery folders. Default: ``layout``.
        identity_format: format string of the groups in ``layout`` that gives the identity, e.g. "{pid}". Default: all
            groups except ``camera``, joined by "-".
        column_formats: name of a column -> format string of the groups in ``layout`` that gives its value, e.g.
            ``{"clothes": "{pid}_{clothes}"}``; an integer becomes an int. See ``find_columns``. Default: none.
        query_cameras, gallery_cameras: cameras of query and gallery images, as in file names; images of other cameras
            are not used. Default: all cameras.
        suffix: suffix of image files, in lowercase; matched case-insensitively. Default ".jpg".
        first_camera: number of the first camera in file names, which is mapped to camera 0. Default: cameras are
            numbered in sorted order.
        excluded_ids: identities that are dropped at loading, in addition to unknown ones (``identity_names``). Default
            {-1}.
        example: a valid file name and its meaning, for messages.

    Args:
        root: data root. Default "datasets".

    Raises:
        DataError: if a folder is missing (raised at construction), or contains no image with a matching name (raised at
            first use).
    """

    folder: ClassVar[str] = ""
    tree: ClassVar[str] = ""
    train_folders: ClassVar[Sequence[str]] = ("",)
    query_folders: Sequence[str] = ()
    gallery_folders: ClassVar[Sequence[str]] = ()
    needed: ClassVar[Sequence[str]] = ()
    layout: ClassVar[Sequence[str]] = ()
    test_layout: ClassVar[Sequence[str]] = ()
    identity_format: str = ""
    column_formats: ClassVar[Mapping[str, str]] = {}
    query_cameras: ClassVar[Collection[int | str]] = ()
    gallery_cameras: ClassVar[Collection[int | str]] = ()
    suffix: ClassVar[str] = ".jpg"
    first_camera: ClassVar[int | None] = None
    excluded_ids: ClassVar[frozenset[int]] = frozenset({-1})
    example: ClassVar[str] = ""
    related_identities = True

    def __init__(self, root: str | Path = "datasets") -> None:
        self.dataset_dir = self._find_dataset_dir(Path(root))
        self._folders = {"train": self.train_folders, "query": self.query_folders, "gallery": self.gallery_folders}
        self._found: dict[str, list[_Found]] = {}
        self._first_files: dict[int | str, tuple[str, Path]] = {}
        needed = self.needed or [folder for folders in self._folders.values() for folder in folders]
        tree = f"{self.folder}/{self.tree}"
        check_tree(type(self).__name__, root, [self.dataset_dir / path for path in needed], tree, self.folder)
        super().__init__(*(partial(self._load, split) for split in self._folders))

    def camera(self, camid: int | str) -> str:
        """Return the camera as it is written in file or folder names."""
        if not isinstance(camid, Integral):
            return super().camera(camid)
        if self.first_camera is not None:
            return str(camid + self.first_camera)
        names = {number: str(name) for name, number in self._camera_numbers.items()}
        return names.get(camid, str(camid))

    def _find_dataset_dir(self, root: Path) -> Path:
        """Return the folder of the dataset; subclasses may override this if the data root can have several layouts."""
        return root / self.folder

    def _load(self, split: str) -> list[ImageItem]:
        """Return the images of a split with numbered cameras."""
        images = self._find_images(split)
        items = [
            ImageItem(str(file), pid, self._camera_number(camera), columns=columns)
            for file, pid, camera, columns in images
        ]
        return self._add_name_prefix(items) if split == "train" else items

    def find_columns(self, fields: Mapping[str, str]) -> dict[str, int | str | None] | None:
        """Return the columns of an image; None if the dataset has none. Override this to compute them.

        A column is missing (None) if ``test_layout`` lacks a group of its format.

        Args:
            fields: groups of ``layout`` -> their text in the file and folder names.

        Raises:
            DataError: if a group of ``column_formats`` is empty.
        """
        columns: dict[str, int | str | None] = {}
        for name, template in self.column_formats.items():
            groups = [group for _, group, _, _ in Formatter().parse(template) if group]
            if any(fields.get(group) == "" for group in groups):
                raise DataError(f"the label of the column {name!r} is empty")
            complete = all(group in fields for group in groups)
            columns[name] = as_number(template.format(**fields)) if complete else None
        return columns or None

    def _camera_number(self, camera: int | str) -> int:
        return self._camera_numbers[camera] if self.first_camera is None else int(camera) - self.first_camera

    @cached_property
    def _camera_numbers(self) -> dict[int | str, int]:
        """Camera in a file or folder name -> camera number; the same for all splits."""
        return number_cameras(camera for split in self._folders for _, _, camera, _ in self._find_images(split))

    def _find_images(self, split: str) -> list[_Found]:
        """Return ``(file, identity, camera, columns)`` for each image of a split, from file and folder names."""
        if split not in self._found:
            folders = [self.dataset_dir / folder for folder in self._folders[split]]
            layout = self.layout if split == "train" else self.test_layout or self.layout
            cameras = {"query": self.query_cameras, "gallery": self.gallery_cameras}.get(split, ())
            self._found[split] = self._search(folders, layout, cameras) if folders else []
        return self._found[split]

    def _search(
        self, folders: Sequence[Path], layout: Sequence[str], cameras: Collection[int | str] = ()
    ) -> list[_Found]:
        name, expected = type(self).__name__, f"names such as {self.example}"
        images, unmatched, num_excluded, num_other_cameras, unknown = [], [], 0, 0, Counter[str]()
        for file, match in (pair for folder in folders for pair in _walk(name, folder, layout, self.suffix)):
            if match is None:
                unmatched.append(file)
                continue
            prefix, fields = match
            camera = as_number(fields.get("camera", "0"))
            if cameras and camera not in cameras:
                num_other_cameras += 1
                continue
            if self.first_camera is not None and int(camera) < self.first_camera:
                raise DataError(
                    f"{name}: expected camera numbers >= {self.first_camera}, got camera {camera} for "
                    f"{file.absolute()}.\n"
                    f"  fix: number the cameras from {self.first_camera} in all file names"
                )
            pid = as_number(
                self.identity_format.format(**fields)
                or "-".join(text for group, text in fields.items() if group != "camera")
            )
            if pid in self.excluded_ids:
                num_excluded += 1
                continue
            if is_unknown_identity(str(pid)):
                unknown[str(pid)] += 1
                continue
            self._check_prefix(pid, prefix, file)
            try:
                images.append((file, pid, camera, self.find_columns(fields)))
            except DataError as error:
                raise DataError(
                    f"{name}: {file.absolute()}: {error}; expected {expected}.\n"
                    "  fix: restore the original name of this file"
                ) from error
        num_excluded += sum(unknown.values())
        self.excluded_note = log_excluded(unknown, name) or self.excluded_note
        where = ", ".join(str(folder.absolute()) for folder in folders)
        if num_other_cameras and not (images or unmatched or num_excluded):
            raise DataError(
                f"{name}: no image from {_list_cameras(cameras)} in {where}.\n"
                "  fix: restore the original files of the dataset"
            )
        if not (images or unmatched or num_excluded):
            raise DataError(
                f"{name}: no *{self.suffix} file in {where}\n{self._describe_content(folders)}\n"
                "  fix: put the images in the expected folder"
            )
        if not images:
            nothing = f"only images of excluded identities ({', '.join(map(str, [*self.excluded_ids, *unknown]))})"
            first = f"{unmatched[0].name} and {len(unmatched) - 1} more" if unmatched else nothing
            raise DataError(
                f"{name}: no image with a valid name in {where}: expected {expected}, got {first}.\n"
                "  fix: restore the original files of the dataset"
            )
        if unmatched:
            logger.warning(
                "%s: skipped %s, such as %s; expected %s.\n  fix: rename the files, or remove them",
                name,
                plural(len(unmatched), "file with an unexpected name", "files with unexpected names"),
                unmatched[0],
                expected,
            )
        return images

    def _check_prefix(self, pid: int | str, prefix: str, file: Path) -> None:
        """Raise DataError if ``prefix``, the text before the match of ``layout``, differs between files of ``pid``."""
        other, first = self._first_files.setdefault(pid, (prefix, file))
        if other != prefix:
            raise DataError(
                f"{type(self).__name__}: {first.absolute()} and {file.absolute()} would be one identity, {pid}, but "
                f"their names begin with {other!r} and {prefix!r}; expected names such as {self.example}.\n"
                "  fix: rename the files, or make the beginning a group of the layout in a dataset class of your own"
            )

    def _describe_content(self, folders: Sequence[Path]) -> str:
        deeper = next((file for folder in folders for file in folder.rglob("*") if is_image(file, self.suffix)), None)
        return f"  expected: {self.folder}/{self.tree.splitlines()[0]}\n  found: {describe_folder(folders[0])}" + (
            f"\n  found in a subfolder: {deeper.absolute()}" if deeper else ""
        )


class MarketStyleDataset(FilenameDataset):
    """Base class of datasets in the layout of Market-1501.

    The folders are ``bounding_box_train``, ``query`` and ``bounding_box_test``. File names begin with the identity and
    the camera: ``0002_c1s1_000451_03.jpg``. Images of identity -1 are excluded. Images of identity 0 are distractors in
    the gallery.

    Args:
        root: data root. Default "datasets".

    Raises:
        DataError: if a folder is missing (raised at construction), or contains no image with a matching name (raised at
            first use).
    """

    tree = "{bounding_box_train,query,bounding_box_test}/*.jpg"
    train_folders, query_folders, gallery_folders = ("bounding_box_train",), ("query",), ("bounding_box_test",)
    layout = (r"(?P<pid>(?:^-)?\d+)_c(?P<camera>\d+)",)
    first_camera = 1
    example = "0002_c1s1_000451_03.jpg (identity 2, camera 1)"


def _list_cameras(cameras: Collection[int | str]) -> str:
    return f"camera{'s' * (len(cameras) > 1)} {', '.join(map(str, sorted(cameras)))}"


def _walk(
    name: str, folder: Path, layout: Sequence[str], suffix: str
) -> Iterator[tuple[Path, tuple[str, dict[str, str]] | None]]:
    """Yield ``(file, (text before the match in the file name, groups))`` for each image.

    The second element is None if the file name does not match ``layout``.
    """
    pattern, *rest = layout
    if not rest:
        for file in (entry for entry in list_entries(name, folder) if is_image(entry, suffix)):
            # Search only the file name: the name of a parent folder might match.
            match = re.search(pattern, file.name)
            yield file, match and (file.name[: match.start()], match.groupdict())
        return
    if pattern == "**":
        yield from _walk(name, folder, rest, suffix)
    for inner in (entry for entry in list_entries(name, folder) if entry.is_dir()):
        if pattern == "**":
            yield from _walk(name, inner, layout, suffix)
        elif match := re.fullmatch(pattern, inner.name):
            for file, labels in _walk(name, inner, rest, suffix):
                yield file, labels and (labels[0], match.groupdict() | labels[1])
