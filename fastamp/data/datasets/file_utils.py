"""File utilities for datasets: checks of folders, lists of their files, and readers of list files."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from fastamp.data.datasets.base import DATASET_REGISTRY, ROOT_FIX, ImageItem, as_number
from fastamp.data.datasets.missing_dataset import missing_dataset_error
from fastamp.data.datasets.path_hints import path_hint
from fastamp.utils.errors import DataError

_SHOWN_ENTRIES = 8


def check_tree(name: str, root: str | Path, needed: Iterable[Path], tree: str, folder: str = "") -> None:
    """Check that the folders and files of a dataset exist.

    Args:
        name: name of the dataset in the config.
        root: data root.
        needed: files and folders that must exist.
        tree: expected files in the data root, for the message; may have several lines.
        folder: folder of the dataset in the root; if it is missing, folders with similar names are suggested. Default
            "".

    Raises:
        DataError: if a file or folder is missing. The message lists the expected and the existing files, and a fix.
    """
    needed, root = list(needed), Path(root)
    missing = [path for path in needed if not path.exists()]
    if not missing:
        return
    hint = ""
    if folder and all(path.is_relative_to(root / folder) for path in needed):
        components = (DATASET_REGISTRY.get(name) for name in DATASET_REGISTRY)
        other_folders = {component.folder for component in components} - {folder}
        below = [path.relative_to(root / folder) for path in needed]
        hint = path_hint(root, folder, below, (name,), other_folders)
    expected = "\n".join(f"    {line}" for line in tree.strip().splitlines())
    raise missing_dataset_error(
        name,
        missing,
        description=f"  found: {describe_folder(missing[0].parent)}\n"
        + (f"  hint: {hint}\n" if hint else "")
        + f"  expected under the data root {root.absolute()}:\n{expected}\n",
        fix=ROOT_FIX,
    )


def list_files(name: str, folder: Path, suffix: str) -> list[Path]:
    """Return the sorted files in ``folder`` that have the suffix and are not hidden.

    Args:
        name: name of the dataset, for the message.
        folder: folder to list.
        suffix: suffix in lowercase, e.g. ".jpg"; matched case-insensitively.

    Raises:
        DataError: if there are no such files, or the folder cannot be read.
    """
    files = [entry for entry in list_entries(name, folder) if is_image(entry, suffix)]
    if not files:
        raise DataError(
            f"{name}: no *{suffix} file in {folder.absolute()}\n  found: {describe_folder(folder)}\n"
            "  fix:   add the images of the dataset to this folder"
        )
    return files


def read_lines(name: str, file: Path) -> list[str]:
    """Read the non-empty lines of a list file.

    Raises:
        DataError: if the file is empty or cannot be read.
    """
    try:
        # File names need not be UTF-8.
        text = file.read_text(encoding="utf-8-sig", errors="surrogateescape")
    except OSError as error:
        raise DataError(
            f"{name}: cannot read {file.absolute()}: {error.strerror}.\n"
            "  fix: make the file readable, or restore the original files of the dataset"
        ) from error
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not lines:
        raise DataError(f"{name}: {file.absolute()}: the file is empty.\n  fix: restore this file of the dataset")
    return lines


def read_pairs(name: str, file: Path) -> list[tuple[str, int]]:
    """Read a list file whose lines contain a name and a number, separated by a space; names can contain spaces.

    Raises:
        DataError: if a line is invalid, or the file is empty or cannot be read.
    """
    pairs = []
    for line in read_lines(name, file):
        first, *rest = line.rsplit(maxsplit=1)
        if not rest or not isinstance(as_number(rest[0]), int):
            raise DataError(
                f"{name}: expected a name and a number on each line of {file.absolute()}, got {line!r}.\n"
                "  fix: restore this file of the dataset"
            )
        pairs.append((first, int(rest[0])))
    return pairs


def check_first_image(name: str, file: Path, items: Sequence[ImageItem]) -> list[ImageItem]:
    """Check that the first image listed in ``file`` exists, and return ``items`` as a list.

    Raises:
        DataError: if the first image does not exist.
    """
    first = Path(items[0].path)
    if not first.is_file():
        raise DataError(
            f"{name}: image not found: {first.absolute()}, the first image listed in {file.absolute()}.\n"
            "  fix: restore the images of the dataset"
        )
    return list(items)


def list_entries(name: str, folder: Path) -> list[Path]:
    """Return the sorted entries of a folder that are not hidden.

    Raises:
        DataError: if the folder cannot be read.
    """
    try:
        return sorted((entry for entry in folder.iterdir() if entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(
            f"{name}: cannot read the folder {folder.absolute()}: {error.strerror}.\n"
            "  fix: make the folder readable, or restore the original files of the dataset"
        ) from error


def is_image(file: Path, suffix: str) -> bool:
    """Return True if the file is not hidden and has the suffix, given in lowercase and matched case-insensitively."""
    return file.name.lower().endswith(suffix) and not file.name.startswith(".")


def describe_folder(folder: Path) -> str:
    """Describe the contents of a folder in one line. If the folder is missing, describe its nearest existing parent."""
    if not folder.is_dir():
        nearest = next(parent for parent in folder.absolute().parents if parent.is_dir())
        return f"no folder {folder.absolute()}; {nearest} contains {describe_folder(nearest)}"
    names = sorted(entry.name + "/" * entry.is_dir() for entry in folder.iterdir())
    if not names:
        return "an empty folder"
    rest = f", and {len(names) - _SHOWN_ENTRIES} more" if len(names) > _SHOWN_ENTRIES else ""
    return ", ".join(names[:_SHOWN_ENTRIES]) + rest
