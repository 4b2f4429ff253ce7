"""A user's own images with no code: a CSV file, or a folder for each identity."""

import csv
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastamp.data.datasets.base import ImageDataset, ImageItem, data_root
from fastamp.data.split import hold_out, query_and_gallery
from fastamp.utils.errors import ConfigError, DataError, did_you_mean
from fastamp.utils.files import check_no_device, expand

logger = logging.getLogger(__name__)

SPLITS = ("train", "query", "gallery")
_BOX = ("x0", "y0", "x1", "y1")
_COLUMNS = ("path", "pid", "camid", "split", *_BOX)
_NUMBER = re.compile(r"-?[0-9]{1,18}")
_JUNK = "-1"
_LONGEST_HEADER = 2**16
_CONTROL = re.compile("[\x00-\x1f\x7f]")
# What people call the parts of a data set; an identity is not called so.
_PARTS = {"train", "training", "query", "gallery", "test", "val", "validation", "probe", "bounding_box_train"}
_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")


class CsvDataset(ImageDataset):
    """The images that a CSV file lists, ``csv:/data/mine.csv`` in DATASETS.NAMES or DATASETS.TESTS.

    Its first line names the columns: ``path`` (from the CSV file's folder, where it is relative) and ``pid``, and if
    there are ``camid``, ``split`` (train, query or gallery; without the column all images are for training) and
    ``x0``, ``y0``, ``x1``, ``y1`` (the part of the image, in pixels, x1 and y1 not included). Identities and cameras
    are any text; images of identity -1 are left out. Without ``camid`` no image counts as taken by the query's camera.
    Columns may be separated by commas, semicolons or tabs.

    Args:
        path: of the CSV file.

    Raises:
        DataError: the file is not there, or a column or a line is wrong.
    """

    def __init__(self, path: str | Path) -> None:
        self.dataset_name = f"csv:{path}"
        file = _find(self.dataset_name, path)
        rows = _read_rows(file)
        junk = sum(row["pid"] == _JUNK for _, row in rows)
        if junk:
            logger.info("%s: left out %d images of identity %s, which is nobody", file, junk, _JUNK)
            rows = [(line, row) for line, row in rows if row["pid"] != _JUNK]
        if not rows:
            raise DataError(f"{file} lists no image; expected lines below its header")
        if "camid" not in rows[0][1]:
            logger.info("%s has no column camid: no image is left out as of the query's camera", file)
        camids = _numbers({row.get("camid", "") for _, row in rows}, start=0)
        tested = {row["pid"] for _, row in rows if row.get("split", "train") != "train"}
        pids = _numbers(tested, start=1)
        splits: dict[str, list[ImageItem]] = {split: [] for split in SPLITS}
        for line, row in rows:
            split = row.get("split", "train")
            if split not in SPLITS:
                hint = did_you_mean(split, SPLITS)
                raise DataError(f"{file}, line {line}: split is {split!r}; choices: {', '.join(SPLITS)}.{hint}")
            splits[split].append(
                ImageItem(
                    str(file.parent / expand(row["path"])),
                    f"{self.dataset_name}_{row['pid']}" if split == "train" else pids[row["pid"]],
                    camids[row["camid"]] if "camid" in row else line,
                    box=_box(row, f"{file}, line {line}"),
                )
            )
        self._names = {number: name for name, number in pids.items()}
        super().__init__(*splits.values())

    @classmethod
    def from_config(cls, cfg: Any, path: str) -> "CsvDataset":
        """Build from the path alone."""
        return cls(path)

    def identity(self, pid: int | str) -> str:
        """Return an identity as the file has it."""
        return self._names[pid] if isinstance(pid, int) else super().identity(pid)


class FolderDataset(ImageDataset):
    """A folder with a folder of images for each identity, ``folder:/data/mine`` in DATASETS.NAMES or DATASETS.TESTS.

    A part of the identities, drawn at random, is for training; of the others, the first image under each camera is a
    query, and the rest the gallery.

    Args:
        path: of the folder.
        camera: regular expression searched in each image's file name, whose first group is the camera; empty for no
            cameras: then no image counts as taken by the query's camera.
        test_fraction: of the identities, in 0..1, that are for testing; 0 is none, 1 all.
        seed: of the draw.

    Raises:
        DataError: the folder is not there or has no images, or a file name does not match ``camera``.
        ConfigError: ``camera`` is no regular expression with a group, or nothing is left on one side.
    """

    def __init__(self, path: str | Path, *, camera: str = "", test_fraction: float = 0.5, seed: int = 0) -> None:
        self.dataset_name = f"folder:{path}"
        folder = _find(self.dataset_name, path)
        pattern = _pattern(camera)
        if not folder.is_dir():
            raise DataError(f"{self.dataset_name}: {folder.absolute()} is no folder")
        identities = sorted(entry for entry in folder.iterdir() if entry.is_dir() and entry.name[0] not in ".@")
        parts = [entry.name for entry in identities if entry.name.lower() in _PARTS]
        if parts:
            raise DataError(
                f"{self.dataset_name}: expected a folder for each identity in {folder.absolute()}, found "
                f"{', '.join(parts)}.\n  fix: folder:{path}/{parts[0]}, or a csv: file with a column split"
            )
        files = [file for identity in identities for file in image_files(identity)]
        if not files:
            raise DataError(
                f"{self.dataset_name}: no image is in the folders of {folder.absolute()}; expected one folder for each "
                f"identity, with files that end in {', '.join(_SUFFIXES)}"
            )
        items = []
        for number, file in enumerate(files):
            identity = file.relative_to(folder).parts[0]
            found = pattern.search(file.name) if pattern else None
            if pattern and not (found and found.group(1)):
                raise DataError(
                    f"{self.dataset_name}: the name of {file} does not match DATASETS.FOLDER.CAMERA {camera!r}.\n"
                    "  fix: an expression that finds the camera in all file names; or none, for images without cameras"
                )
            items.append(ImageItem(str(file), f"{self.dataset_name}_{identity}", found.group(1) if found else number))
        if pattern is None:
            logger.info("%s: DATASETS.FOLDER.CAMERA is empty: no cameras, no image is left out as of the query's", path)
        if test_fraction == 0:
            splits = (items, [], [])
        elif test_fraction == 1:
            splits = ([], *query_and_gallery(items))
        else:
            splits = hold_out(items, test_fraction, seed, key="DATASETS.FOLDER.TEST_FRACTION")
        self._names = {item.pid: Path(item.path).relative_to(folder).parts[0] for item in [*splits[1], *splits[2]]}
        super().__init__(*splits)

    def identity(self, pid: int | str) -> str:
        """Return the name of an identity's folder."""
        return self._names[pid] if isinstance(pid, int) else super().identity(pid)

    @classmethod
    def from_config(cls, cfg: Any, path: str) -> "FolderDataset":
        """Build from DATASETS.FOLDER."""
        settings = cfg.DATASETS.FOLDER
        return cls(path, camera=settings.CAMERA, test_fraction=settings.TEST_FRACTION, seed=settings.SEED)


def _find(name: str, path: str | Path) -> Path:
    """Return a path that is there: as it stands, or in the data root."""
    if not str(path):
        raise DataError(f"{name!r} names no file; expected such as {name}/data/mine")
    places = [expand(path), data_root() / path]
    for place in places:
        if place.exists():
            return place
    looked_for = "\n".join(f"    {place.absolute()}" for place in dict.fromkeys(places))
    several = "\n  note: several sets are written \"('csv:a.csv', 'csv:b.csv')\"" if "," in str(path) else ""
    raise DataError(f"the data set {name} is not there; looked for\n{looked_for}{several}")


def image_files(folder: Path) -> list[Path]:
    """Return the image files in a folder, at any depth and sorted, but for hidden ones."""
    return [
        file
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in _SUFFIXES and _is_visible(file, folder) and file.is_file()
    ]


def _is_visible(file: Path, folder: Path) -> bool:
    return all(part[0] not in ".@" for part in file.relative_to(folder).parts)


def _read_rows(file: Path) -> list[tuple[int, dict[str, str]]]:
    """Return each line's number and its columns by name."""
    try:
        check_no_device(file)
        with file.open(encoding="utf-8-sig", newline="") as stream:
            header = stream.readline(_LONGEST_HEADER + 1)
            if len(header) > _LONGEST_HEADER:
                raise DataError(f"{file}: the first line has more than {_LONGEST_HEADER} characters; that is no header")
            stream.seek(0)
            delimiter = next((each for each in ",;\t" if each in header), ",")
            reader = csv.reader(stream, delimiter=delimiter, strict=True)
            names = [name.strip().lower() for name in next(reader, [])]
            _check_header(file, names)
            lines = [(reader.line_num, [value.strip() for value in line]) for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"{file} cannot be read as a CSV file in UTF-8: {error}.\n  fix: save it as CSV with encoding UTF-8"
        ) from error
    rows = []
    for number, line in lines:
        if not any(line):
            continue
        row = {name: value for name, value in zip(names, line, strict=False) if name in _COLUMNS}
        empty = [name for name in names if name in _COLUMNS and not row.get(name)]
        if empty or len(line) > len(names):
            what = f"no value for {', '.join(empty)}" if empty else f"{len(line) - len(names)} values more than columns"
            raise DataError(f"{file}, line {number}: {what}")
        unclean = [name for name, value in row.items() if _CONTROL.search(value)]
        if unclean:
            raise DataError(f"{file}, line {number}: {unclean[0]} has control characters: {row[unclean[0]]!r:.100}")
        rows.append((number, row))
    return rows


def _check_header(file: Path, names: Sequence[str]) -> None:
    """Raise DataError unless the columns that must be there are, each once."""
    twice = {name for name, count in Counter(names).items() if count > 1}
    boxes = [name for name in _BOX if name in names]
    missing = [name for name in ("path", "pid", *(_BOX if boxes else ())) if name not in names]
    unknown = [name for name in names if name and name not in _COLUMNS]
    if twice or missing:
        hints = [f"{name!r}?{did_you_mean(name, _COLUMNS)}" for name in unknown[:20] if did_you_mean(name, _COLUMNS)]
        fault = f"{', '.join(missing)} missing" if missing else f"{', '.join(sorted(twice))} twice"
        raise DataError(
            f"{file}: the header is {_cut(','.join(names))}: {_cut(fault)}.{' ' + ' '.join(hints) if hints else ''}\n"
            f"  fix: a first line such as path,pid,camid,split or path,pid,{','.join(_BOX)}"
        )
    if unknown:
        logger.warning(
            "%s: the columns %s are not used; known: %s", file, _cut(", ".join(unknown)), ", ".join(_COLUMNS)
        )


def _cut(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."


def _numbers(names: set[str], *, start: int) -> dict[str, int]:
    """Return a number for each name: numbers in their order first, then text in its own."""
    order = sorted(names, key=lambda name: (0, int(name), "") if _NUMBER.fullmatch(name) else (1, 0, name))
    return {name: number for number, name in enumerate(order, start=start)}


def _box(row: Mapping[str, str], where: str) -> tuple[int, int, int, int] | None:
    if "x0" not in row:
        return None
    try:
        x0, y0, x1, y1 = (round(float(row[name])) for name in _BOX)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{where}: x0 y0 x1 y1 are {', '.join(row[name] for name in _BOX)}: not numbers") from error
    if not (0 <= x0 < x1 and 0 <= y0 < y1):
        raise DataError(f"{where}: x0 y0 x1 y1 are {x0} {y0} {x1} {y1}; expected 0 <= x0 < x1 and 0 <= y0 < y1")
    return x0, y0, x1, y1


def _pattern(camera: str) -> re.Pattern[str] | None:
    if not camera:
        return None
    try:
        pattern = re.compile(camera)
    except re.error as error:
        raise ConfigError(f"DATASETS.FOLDER.CAMERA {camera!r} is no regular expression: {error}") from error
    if not pattern.groups:
        raise ConfigError(f"DATASETS.FOLDER.CAMERA {camera!r} has no group; the camera is its first, e.g. c(\\d+)")
    return pattern


OWN_DATA = {"csv": CsvDataset, "folder": FolderDataset}
"""What stands before the colon of a name in DATASETS.NAMES, and what reads what stands behind it."""
