"""A data set's files on the disk: check that they are there, list folders, read lists of files."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from fastamp.data.datasets.base import DATASET_REGISTRY, ROOT_FIX, ImageItem, as_number
from fastamp.data.datasets.missing_dataset import missing_dataset_error
from fastamp.data.datasets.path_hints import path_hint
from fastamp.utils.errors import DataError
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "check_listed": "fastamp.data.datasets.file_utils.check_first_image",
        "describe": "fastamp.data.datasets.file_utils.describe_folder",
        "entries": "fastamp.data.datasets.file_utils.list_entries",
    },
)

_SHOWN_ENTRIES = 8


def check_tree(name: str, root: str | Path, needed: Iterable[Path], tree: str, folder: str = "") -> None:
    """Check that the folders and files of a data set are there.

    Args:
        name: the data set's name in the config.
        root: the data root.
        needed: those that must be there.
        tree: the tree expected under the root, for the message.
        folder: the data set's folder in the root, to be looked for under similar names.

    Raises:
        DataError: one is missing; says what was looked for, what is there, and how to put it right.
    """
    needed, root = list(needed), Path(root)
    missing = [path for path in needed if not path.exists()]
    if not missing:
        return
    hint = ""
    if folder and all(path.is_relative_to(root / folder) for path in needed):
        components = (DATASET_REGISTRY.get(each) for each in DATASET_REGISTRY)
        other_folders = {getattr(component, "folder", "") for component in components} - {folder}
        below = [path.relative_to(root / folder) for path in needed]
        hint = path_hint(root, folder, below, (name,), other_folders)
    expected = "\n".join(f"    {line}" for line in tree.strip().splitlines())
    raise missing_dataset_error(
        name,
        missing,
        found=f"  found there: {describe_folder(missing[0].parent)}\n"
        + (f"  near it: {hint}\n" if hint else "")
        + f"  expected under the data root {root.absolute()}:\n{expected}\n",
        fix=ROOT_FIX,
    )


def list_files(name: str, folder: Path, suffix: str) -> list[Path]:
    """Return the files of ``folder`` with this suffix in any case, hidden ones aside, in the order of their names.

    Raises:
        DataError: there is none, or the folder cannot be read.
    """
    files = [entry for entry in list_entries(name, folder) if is_image(entry, suffix)]
    if not files:
        raise DataError(
            f"{name}: no *{suffix} file is in {folder.absolute()}\n  found there: {describe_folder(folder)}"
        )
    return files


def read_lines(name: str, file: Path) -> list[str]:
    """Return the lines of a list that are not empty.

    Raises:
        DataError: there is none, or the file cannot be read.
    """
    try:
        # Names of files need not be UTF-8; this finds them all the same.
        text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise DataError(f"{name}: cannot read {file.absolute()}: {error.strerror}") from error
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not lines:
        raise DataError(f"{name}: {file.absolute()} is empty")
    return lines


def read_pairs(name: str, file: Path) -> list[tuple[str, int]]:
    """Return what stands before and after the last space of each line of a list, such as ``path pid``.

    Raises:
        DataError: a line is something else, there is none, or the file cannot be read.
    """
    pairs = []
    for line in read_lines(name, file):
        first, *rest = line.rsplit(maxsplit=1)
        if not rest or not isinstance(as_number(rest[0]), int):
            raise DataError(f"{name}: expected a name and a number on each line of {file.absolute()}, found {line!r}")
        pairs.append((first, int(rest[0])))
    return pairs


def check_first_image(name: str, file: Path, items: Sequence[ImageItem]) -> list[ImageItem]:
    """Return the images that the list ``file`` names, if the first is there.

    Raises:
        DataError: it is not.
    """
    first = Path(items[0].path)
    if not first.is_file():
        raise DataError(f"{name}: {first.absolute()}, which {file.absolute()} lists first, is not there")
    return list(items)


def list_entries(name: str, folder: Path) -> list[Path]:
    """Return what is in a folder and not hidden, in the order of the names."""
    try:
        return sorted((entry for entry in folder.iterdir() if entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{name}: cannot read the folder {folder.absolute()}: {error.strerror}") from error


def is_image(file: Path, suffix: str) -> bool:
    return file.name.lower().endswith(suffix) and not file.name.startswith(".")


def describe_folder(folder: Path) -> str:
    """Return what a folder holds, or the nearest one above it that exists, in a few words."""
    if not folder.is_dir():
        nearest = next(parent for parent in folder.absolute().parents if parent.is_dir())
        return f"no folder {folder.absolute()}; in {nearest}: {describe_folder(nearest)}"
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    if not names:
        return "nothing, the folder is empty"
    rest = f", and {len(names) - _SHOWN_ENTRIES} more" if len(names) > _SHOWN_ENTRIES else ""
    return ", ".join(names[:_SHOWN_ENTRIES]) + rest
