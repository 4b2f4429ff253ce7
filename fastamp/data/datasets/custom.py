"""Custom datasets without code: a CSV file, or a folder with one subfolder per identity."""

import logging
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastamp.config import CfgNode, Key
from fastamp.data.boxes import Box
from fastamp.data.columns import number_names
from fastamp.data.datasets.base import ImageDataset, ImageItem, data_root
from fastamp.data.datasets.csv_table import (
    COLUMNS,
    DATABASE,
    SPLIT_NUMBERS,
    SPLITS,
    CsvTable,
    box_columns,
    open_table,
    read_table,
)
from fastamp.data.datasets.identity_names import is_unknown_identity, log_excluded, merge_equal_names
from fastamp.data.datasets.items import Column, PackedItems
from fastamp.data.datasets.missing_dataset import missing_dataset_error
from fastamp.data.split import hold_out, query_and_gallery
from fastamp.utils.errors import ConfigError, DataError
from fastamp.utils.files import expand
from fastamp.utils.plural import plural

logger = logging.getLogger(__name__)


KEYS = (
    Key(
        "DATASETS.FOLDER.CAMERA",
        "",
        "folder:PATH datasets: regular expression searched in the path of each file below the folder of its identity; "
        "its first group is the camera, e.g. c(\\d+) a number after c, or ^(.+)/ the name of a subfolder. If empty, "
        "images have no camera labels.",
    ),
    Key(
        "DATASETS.FOLDER.TEST_FRACTION",
        0.5,
        "folder:PATH datasets, and csv:FILE datasets without a column split: fraction of the identities used for "
        "testing.",
        low=0,
        high=1,
    ),
    Key(
        "DATASETS.FOLDER.SEED",
        0,
        "folder:PATH datasets, and csv:FILE datasets without a column split: seed of the random split of the "
        "identities.",
        low=0,
    ),
    Key(
        "DATASETS.CSV.IDENTITY",
        ("pid",),
        "csv:FILE datasets: columns whose values together are the identity, e.g. [name, side] if the left and the "
        "right flank of an animal count as two identities.",
    ),
)

_MAX_LISTED = 10
# Common folder names of splits, which are not identities.
_SPLIT_FOLDERS = {"train", "training", "query", "gallery", "test", "val", "validation", "probe", "bounding_box_train"}
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")


class CsvDataset(ImageDataset):
    """Dataset whose images are listed in a CSV file.

    In DATASETS.NAMES and DATASETS.TESTS, the dataset is called ``csv:`` plus the path, e.g. ``csv:/data/custom.csv``.

    The first line of the file names the columns: ``path`` (relative to the folder of the CSV file, or absolute) and
    ``pid``, and optionally ``camid``, ``split`` (train, query, gallery, or database for training and gallery; case does
    not matter) and ``x0``, ``y0``, ``x1``, ``y1`` (box of the person or object in the image file, in pixels; x1 and y1
    are exclusive), or ``x``, ``y``, ``w``, ``h`` (box with width and height). Identities and cameras can be any text;
    images of unknown identities are excluded (``identity_names``). Without ``camid``, gallery images from the query's
    camera are not excluded. All other columns become columns of the images; ``csv_columns`` describes their types.
    Columns are separated by commas, semicolons or tabs.

    Without ``split``, randomly selected identities are used for testing, as in ``FolderDataset``. If that is not
    possible, e.g. with fewer than four identities, all images are training images.

    Args:
        path: CSV file.
        test_fraction: fraction of identities used for testing if there is no column ``split``. 0 uses all identities
            for training, 1 uses all identities for testing. Default 0.5.
        seed: seed of the random choice of identities. Default 0.
        skip_invalid: if True, exclude invalid lines and list them in ``invalid_lines``. If False, they are an error.
            Default False.
        identity: columns whose values together are the identity. Default ``("pid",)``.
        name: ``dataset_name``. Default "": ``csv:`` and the path.
        cameras: names of cameras in the order of their numbers; others have higher ones. Default ().
        folders: where a relative path is looked for after the current folder. Default ().

    Attributes:
        file: CSV file.
        has_cameras: True if gallery images from the query's camera are excluded from the evaluation.
        database_lines: line numbers of the images that are for training and in the gallery.
        invalid_lines: line number -> problem; empty unless ``skip_invalid``.

    Raises:
        DataError: if the file is not found, or a column or line is invalid.
    """

    has_distractors = False
    related_identities = True

    def __init__(
        self,
        path: str | Path,
        *,
        test_fraction: float = 0.5,
        seed: int = 0,
        skip_invalid: bool = False,
        identity: Sequence[str] = ("pid",),
        name: str = "",
        cameras: Sequence[str] = (),
        folders: Sequence[str] = (),
    ) -> None:
        self.dataset_name = name or f"csv:{path}"
        self.file = file = _resolve_path(self.dataset_name, path, folders)
        table = read_table(file, identity)
        self.invalid_lines = table.invalid
        if table.invalid and not skip_invalid:
            raise _invalid_lines_error(file, table.invalid)
        self.excluded_note = log_excluded(table.excluded, str(file))
        if not len(table.lines):
            excluded = f" ({self.excluded_note})" * bool(table.excluded)
            raise DataError(f"{file}: no images; expected one per line below the header{excluded}.\n  fix: add images")
        if not skip_invalid:  # else, the report of check_dataset lists them
            _warn_about_repeated_images(file, table)
        if table.camids is None:
            logger.info("%s: column camid is missing; gallery images from the query's camera are not excluded", file)
            camids, self._cameras = Column(table.lines), {}
        else:
            numbers = {camera: number for number, camera in enumerate(cameras)}
            numbers |= number_names(set(table.camids.values) - numbers.keys(), start=len(numbers))
            camids = Column(np.array([numbers[camid] for camid in table.camids.values])[table.camids.codes])
            self._cameras = {number: name for name, number in numbers.items()}
        split_of, self.has_cameras = table.splits, table.camids is not None
        if split_of is None:
            split_of, self.has_cameras, self.split_note = _draw_split(file, table, test_fraction, seed)
            if not self.has_cameras:
                # Each image has its own camera number, so that no gallery image is excluded.
                named = self._cameras
                lines = enumerate(table.lines.tolist())
                self._cameras = {line: named.get(camids[row], "") for row, line in lines}
                camids = Column(table.lines)
        names, codes = table.pids.values, table.pids.codes
        test_ids = number_names({names[code] for code in np.unique(codes[split_of > 0]).tolist()}, start=1)
        numbers_of = np.array([test_ids.get(name, 0) for name in names], dtype=np.int64)
        self._names = {number: name for name, number in test_ids.items()}
        self._lines, splits = {}, []
        in_database = split_of == SPLIT_NUMBERS[DATABASE]
        self.database_lines = frozenset(table.lines[in_database].tolist())
        self.is_closed_set = bool(self.database_lines)
        for number, split in enumerate(SPLITS):
            rows = np.flatnonzero((split_of == number) | (in_database & (split != "query")))
            if split == "train":
                pids = Column.of(codes[rows], [f"{self.dataset_name}_{name}" for name in names])
            else:
                pids = Column(numbers_of[codes[rows]])
            folders, folder_of, files = table.paths
            boxes = None if table.boxes is None else table.boxes[rows]
            splits.append(
                PackedItems(
                    folders,
                    folder_of[rows],
                    files.take(rows),
                    pids=pids,
                    camids=camids.take(rows),
                    boxes=boxes,
                    columns={name: column.take(rows) for name, column in table.columns.items()},
                )
            )
            self._lines[split] = table.lines[rows]
        super().__init__(*splits)

    def line(self, split: str, row: int) -> int:
        """Return the line number in the CSV file of the image in row ``row`` of ``split``."""
        return int(self._lines[split][row])

    def origin(self, path: str, box: Box | None = None) -> str:
        """Return the CSV file and the number of the first line that lists an image, or its box; "" if none does."""
        for split in self._lines:
            index = PackedItems.of(self.images_in(split)).find(path, box)
            if index is not None:
                return f"{self.file}, line {self.line(split, index)}"
        return ""

    def further_columns(self) -> tuple[list[str], dict[int, list[str]]]:
        """Read the further columns as text: ``(names, line number -> values)``."""
        with open_table(self.file) as (reader, names):
            used = (*COLUMNS, *box_columns(names))
            column_numbers = [column for column, name in enumerate(names) if name not in used]
            rows: dict[int, list[str]] = {}
            for line in reader:
                rows[reader.line_num] = [
                    line[column].strip() if column < len(line) else "" for column in column_numbers
                ]
        return [names[column] for column in column_numbers], rows

    @classmethod
    def from_config(cls, cfg: CfgNode, path: str, *, skip_invalid: bool = False) -> "CsvDataset":
        """Build the dataset from the path of the CSV file and the config section ``DATASETS.FOLDER``."""
        settings = cfg.DATASETS.FOLDER
        return cls(
            path,
            test_fraction=settings.TEST_FRACTION,
            seed=settings.SEED,
            skip_invalid=skip_invalid,
            identity=cfg.DATASETS.CSV.IDENTITY,
            cameras=cfg.DATASETS.CAMERAS,
            folders=cfg.saved_in(),
        )

    def identity(self, pid: int | str) -> str:
        """Return the identity as written in the CSV file."""
        return self._names[pid] if isinstance(pid, int) else super().identity(pid)

    @property
    def camera_names(self) -> tuple[str, ...]:
        """Cameras of the file in the order of their numbers; () if they are not used."""
        return tuple(self._cameras[number] for number in sorted(self._cameras)) if self.has_cameras else ()

    def camera(self, camid: int | str) -> str:
        """Return the camera as written in the CSV file; "" if there is no column camid."""
        return self._cameras.get(camid, "") if isinstance(camid, int) else super().camera(camid)


class FolderDataset(ImageDataset):
    """Dataset in a folder that contains one subfolder of images per identity.

    In DATASETS.NAMES and DATASETS.TESTS, the dataset is called ``folder:`` plus the path, e.g. ``folder:/data/custom``.

    Randomly selected identities are used for testing, all other identities for training. ``hold_out`` describes which
    test images are queries and which are in the gallery. Images of unknown identities are excluded
    (``identity_names``).

    Args:
        path: folder of the dataset.
        camera: regular expression searched in the path of each file below the folder of its identity; its first group
            is the camera. If empty, images have no camera, and no gallery image is excluded for being from the query's
            camera. Default "".
        test_fraction: fraction of identities used for testing. 0 uses all identities for training, 1 uses all
            identities for testing. Default 0.5.
        seed: seed of the random choice of identities. Default 0.
        folders: where a relative path is looked for after the current folder. Default ().

    Attributes:
        has_cameras: True if gallery images from the query's camera are excluded from the evaluation.

    Raises:
        DataError: if the folder is not found or has no images, or a file does not match ``camera``.
        ConfigError: if ``camera`` is not a regular expression with a group, or there are too few identities for
            training or testing.
    """

    has_distractors = False
    related_identities = True

    def __init__(
        self,
        path: str | Path,
        *,
        camera: str = "",
        test_fraction: float = 0.5,
        seed: int = 0,
        folders: Sequence[str] = (),
    ) -> None:
        self.dataset_name = f"folder:{path}"
        folder = _resolve_path(self.dataset_name, path, folders)
        pattern = _compile_camera_pattern(camera)
        if not folder.is_dir():
            raise DataError(
                f"{self.dataset_name}: {folder.absolute()} is a file; expected a folder.\n  fix: correct the path"
            )
        entries = sorted(entry for entry in folder.iterdir() if entry.name[0] not in ".@")
        identities = [entry for entry in entries if entry.is_dir() and not _is_parent(entry, folder)]
        parts = [entry.name for entry in identities if entry.name.lower() in _SPLIT_FOLDERS]
        if parts:
            raise DataError(
                f"{self.dataset_name}: expected one folder per identity in {folder.absolute()}, got "
                f"{', '.join(parts)}.\n"
                f"  fix: use folder:{path}/{parts[0]}, or csv:FILE with a CSV file that has a column named split"
            )
        files = [(identity.name, file) for identity in identities for file in image_files(identity)]
        if not files:
            raise DataError(
                f"{self.dataset_name}: no images in {folder.absolute()}; expected one folder per identity, with files "
                f"that end in {', '.join(IMAGE_SUFFIXES)}.\n  fix: correct the path, or add images"
            )
        named = {identity for identity, _ in files}
        skipped = [entry.name for entry in entries if entry.name not in named and _may_be_image(entry)]
        if skipped:
            logger.warning(
                "%s: skipped %s: files outside of the identities' folders, or folders without images\n"
                "  fix: move images into one folder per identity, directly below %s",
                self.dataset_name,
                _list_first(skipped, len(skipped)),
                folder,
            )
        unknown = Counter(identity for identity, _ in files if is_unknown_identity(identity))
        self.excluded_note = log_excluded(unknown, self.dataset_name)
        files = [(identity, file) for identity, file in files if identity not in unknown]
        if not files:
            raise DataError(
                f"{self.dataset_name}: no identities in {folder.absolute()} ({self.excluded_note}).\n"
                "  fix: add folders of identities"
            )
        merged = merge_equal_names(dict.fromkeys(identity for identity, _ in files), self.dataset_name)
        start = len(_path_prefix(folder))
        items = []
        for number, (identity, file) in enumerate(files):
            name = _camera_of(pattern, file, start)
            if pattern and not name:
                raise DataError(
                    f"{self.dataset_name}: DATASETS.FOLDER.CAMERA {camera!r} does not match the path of {file} "
                    f"below the folder of its identity, {_path_in_identity(file, start)!r}.\n"
                    '  fix: use an expression that matches all files, or "" if there are no cameras'
                )
            items.append(ImageItem(file, f"{self.dataset_name}_{merged[identity]}", name or number))
        if pattern is None:
            logger.info(
                "%s: DATASETS.FOLDER.CAMERA is empty; gallery images from the query's camera are not excluded", path
            )
        if test_fraction == 0:
            splits: tuple[Any, Any, Any] = (items, [], [])
        elif test_fraction == 1:
            splits = ([], *query_and_gallery(items))
        else:
            splits = hold_out(items, test_fraction, seed, key="DATASETS.FOLDER.TEST_FRACTION")
        tested = [*splits[1], *splits[2]]
        self._names = {item.pid: merged[item.path[start:].partition("/")[0]] for item in tested}
        self._cameras = {}
        if pattern:
            self._cameras = {item.camid: _camera_of(pattern, item.path, start) for item in tested}
        # Without usable cameras, ``query_and_gallery`` gives each image its own camera number.
        self.has_cameras = pattern is not None and (not tested or len(self._cameras) < len(tested))
        ignored = pattern is not None and not self.has_cameras
        self.split_note = _describe_split(map(len, splits), items, tested, test_fraction, seed, ignores_cameras=ignored)
        logger.info("%s: %s", self.dataset_name, self.split_note)
        super().__init__(*map(PackedItems.of, splits))

    def identity(self, pid: int | str) -> str:
        """Return the name of the subfolder with the images of identity ``pid``."""
        return self._names[pid] if isinstance(pid, int) else super().identity(pid)

    def camera(self, camid: int | str) -> str:
        """Return the camera that DATASETS.FOLDER.CAMERA found; "" without this key."""
        return self._cameras.get(camid, "") if isinstance(camid, int) else super().camera(camid)

    @classmethod
    def from_config(cls, cfg: CfgNode, path: str) -> "FolderDataset":
        """Build the dataset from its path and the config section ``DATASETS.FOLDER``."""
        settings = cfg.DATASETS.FOLDER
        return cls(
            path,
            camera=settings.CAMERA,
            test_fraction=settings.TEST_FRACTION,
            seed=settings.SEED,
            folders=cfg.saved_in(),
        )


def _describe_split(
    counts: Iterable[int],
    items: Sequence[Any],
    tested: Sequence[Any],
    fraction: float,
    seed: int,
    *,
    ignores_cameras: bool,
) -> str:
    """Describe how the identities were split into training and test identities."""
    train, query, gallery = counts
    number, total = len({item.pid for item in tested}), len({item.pid for item in items})
    return (
        f"split by identity, {number} of {total} identities for testing (DATASETS.FOLDER.TEST_FRACTION {fraction:g}, "
        f"drawn with DATASETS.FOLDER.SEED {seed}): {train} training, {query} query and "
        f"{plural(gallery, 'gallery image')}"
        + "; cameras are ignored, because the test images are all from one camera or each from its own"
        * ignores_cameras
    )


def _draw_split(file: Path, table: CsvTable, fraction: float, seed: int) -> tuple[np.ndarray, bool, str]:
    """Split the images of a CSV file without a column ``split`` as ``FolderDataset`` does.

    Returns:
        ``(splits, has_cameras, note)``: (N,) int8 indices into ``SPLITS``; False if the cameras are ignored because the
        test images have only one camera or no column ``camid``; and a description of the split.
    """
    count = len(table.lines)
    cameras = range(count) if table.camids is None else table.camids.codes.tolist()
    items = [
        ImageItem(str(row), table.pids.values[code], camera)
        for row, (code, camera) in enumerate(zip(table.pids.codes.tolist(), cameras, strict=True))
    ]
    parts: tuple[Sequence[ImageItem], ...] = (items, [], [])
    if fraction == 1:
        parts = ([], *query_and_gallery(items))
    elif fraction > 0:
        try:
            parts = hold_out(items, fraction, seed, key="DATASETS.FOLDER.TEST_FRACTION")
        except (ConfigError, DataError) as error:
            note = f"column split is missing; all images are for training, because {error}"
            logger.warning("%s: %s", file, note)
            return np.zeros(count, dtype=np.int8), table.camids is not None, note
    splits = np.zeros(count, dtype=np.int8)
    for number, part in enumerate(parts):
        splits[[int(item.path) for item in part]] = number
    tested = [*parts[1], *parts[2]]
    has_cameras = table.camids is not None and (not tested or len({item.camid for item in tested}) < len(tested))
    ignored = table.camids is not None and not has_cameras
    note = _describe_split(map(len, parts), items, tested, fraction, seed, ignores_cameras=ignored)
    note = f"column split is missing: {note}"
    logger.info("%s: %s", file, note)
    return splits, has_cameras, note


def _warn_about_repeated_images(file: Path, table: CsvTable) -> None:
    """Log a warning if several lines list the same image with the same box."""
    _, folder_of, names = table.paths
    boxes = () if table.boxes is None else table.boxes.T.tolist()
    columns = zip(folder_of.tolist(), names.encoded(np.arange(len(names))), *boxes, strict=True)
    _, first, inverse = np.unique(
        np.fromiter(map(hash, columns), np.int64, len(names)), return_index=True, return_inverse=True
    )
    first_row = first[inverse.reshape(-1)]
    repeated = np.flatnonzero(first_row != np.arange(len(names))).tolist()
    if repeated:
        examples = [
            f"line {table.lines[row]} repeats line {table.lines[first_row[row]]} ({names[row]})"
            for row in repeated[:_MAX_LISTED]
        ]
        logger.warning(
            "%s: %s the image of another line: %s\n  fix: remove these lines, or write a file without them: %s",
            file,
            plural(len(repeated), "line repeats", "lines repeat"),
            _list_first(examples, len(repeated)),
            clean_command(f"csv:{file}"),
        )


def _invalid_lines_error(file: Path, invalid: dict[int, str]) -> DataError:
    """Return the error for invalid lines in a CSV file."""
    fix = f"or write a file without invalid lines: {clean_command(f'csv:{file}')}"
    description = describe_invalid_lines(file, invalid)
    if len(invalid) == 1:
        return DataError(f"{description[0]}\n  fix: correct the line, {fix}")
    first = "".join(f"\n    {text}" for text in description[:_MAX_LISTED])
    more = f"\n    and {len(description) - _MAX_LISTED} more problems" * (len(description) > _MAX_LISTED)
    return DataError(f"{file}: {len(invalid)} invalid lines:{first}{more}\n  fix: correct the lines, {fix}")


def describe_invalid_lines(file: Path, invalid: dict[int, str]) -> list[str]:
    """Describe ``CsvDataset.invalid_lines`` in one text for each problem, with the numbers of its first lines."""
    lines_of: dict[str, list[int]] = {}
    for number, problem in invalid.items():
        lines_of.setdefault(problem, []).append(number)
    return [
        f"{file}, {'lines' if len(numbers) > 1 else 'line'} {', '.join(map(str, numbers[:_MAX_LISTED]))}"
        f"{f' and {len(numbers) - _MAX_LISTED} more' if len(numbers) > _MAX_LISTED else ''}: {problem}"
        for problem, numbers in lines_of.items()
    ]


def path_fix(paths: Iterable[str]) -> str:
    """Suggest a fix for image files that were not found or cannot be read."""
    if os.sep == "/" and any("\\" in path for path in paths):
        return "write the paths with / instead of \\, and without a Windows drive such as C:"
    return "restore the files, or correct the paths"


def clean_command(name: str) -> str:
    """Return the command that writes a CSV file without the images of a dataset that cannot be used."""
    return f"fastamp check-data {shlex.quote(name)} --write-clean OUT.csv"


def _list_first(examples: Sequence[str], count: int) -> str:
    rest = count - _MAX_LISTED
    return "; ".join(examples[:_MAX_LISTED]) + (f"; and {rest} more" if rest > 0 else "")


def _resolve_path(name: str, path: str | Path, folders: Sequence[str] = ()) -> Path:
    """Return the first path that exists: ``path`` itself, or relative to one of ``folders``, or to the data root."""
    if not str(path):
        raise DataError(f"{name!r}: empty path; expected a name such as {name}/data/custom.\n  fix: add the path")
    places = [(folder, Path(folder) / file) for file in (expand(path), data_root() / path) for folder in ("", *folders)]
    for folder, candidate in places:
        if candidate.exists():
            if folder:
                logger.info("%s: using %s, relative to the folder in which the run was started", name, candidate)
            return candidate
    hint = "; to use several datasets, write \"('csv:a.csv', 'csv:b.csv')\"" if "," in str(path) else ""
    raise missing_dataset_error(name, [candidate for _, candidate in places], fix=f"correct the path{hint}")


def image_files(folder: Path) -> list[str]:
    """Return the sorted paths of the image files in a folder and its subfolders.

    Hidden files and subfolders, links to subfolders, and subfolders without read permission are skipped. Links to
    files are listed even if they are broken. A warning counts HEIC files, which cannot be read.
    """
    paths: list[str] = []
    heic: list[str] = []
    _add_images(_path_prefix(folder), paths, heic)
    if heic:
        logger.warning(
            "%s: skipping %s; the first: %s\n  fix: convert HEIC images to JPEG",
            *(folder, plural(len(heic), "HEIC file"), heic[0]),
        )
    return paths


def _add_images(prefix: str, paths: list[str], heic: list[str]) -> None:
    """Append the paths of the image files in the folder ``prefix``, which ends with a slash or is empty."""
    try:
        with os.scandir(prefix or ".") as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
    except PermissionError:
        return
    for entry in ordered:
        if entry.name[0] in ".@":
            continue
        if entry.is_dir(follow_symlinks=False):
            _add_images(f"{prefix}{entry.name}/", paths, heic)
        elif _has_image_suffix(entry.name) and (entry.is_symlink() or entry.is_file()):
            paths.append(prefix + entry.name)
        elif entry.name.lower().endswith((".heic", ".heif")):
            heic.append(prefix + entry.name)


def _has_image_suffix(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def _may_be_image(entry: Path) -> bool:
    return _has_image_suffix(entry.name) or entry.is_dir()


def _is_parent(entry: Path, folder: Path) -> bool:
    """Return True if ``entry`` is a link to ``folder`` or one of its parent folders."""
    return entry.is_symlink() and folder.resolve().is_relative_to(entry.resolve())


def _path_in_identity(path: str, start: int) -> str:
    return path[start:].partition("/")[2]


def _camera_of(pattern: re.Pattern[str] | None, path: str, start: int) -> str:
    """Search the camera of an image in its path below the folder of its identity.

    Args:
        pattern: expression whose first group is the camera.
        path: image file.
        start: length of the path of the dataset's folder, with a final slash.

    Returns:
        The camera; "" if it is not found, or without a pattern.
    """
    match = pattern.search(_path_in_identity(path, start)) if pattern else None
    return (match.group(1) or "") if match else ""


def _path_prefix(folder: Path) -> str:
    """Return the path of a folder with a final slash; "" for the current folder."""
    return str(folder / "x")[:-1]


def _compile_camera_pattern(camera: str) -> re.Pattern[str] | None:
    if not camera:
        return None
    try:
        pattern = re.compile(camera)
    except re.error as error:
        raise ConfigError(
            f"DATASETS.FOLDER.CAMERA {camera!r} is not a valid regular expression: {error}.\n"
            "  fix: correct the expression, e.g. c(\\d+)"
        ) from error
    if not pattern.groups:
        raise ConfigError(
            f"DATASETS.FOLDER.CAMERA {camera!r} has no group; expected the camera in its first group.\n"
            "  fix: put parentheses around the camera, e.g. c(\\d+)"
        )
    return pattern


PATH_DATASETS: dict[str, type[CsvDataset] | type[FolderDataset]] = {"csv": CsvDataset, "folder": FolderDataset}
"""Prefix of a name in DATASETS.NAMES -> dataset class for the path after the colon."""
