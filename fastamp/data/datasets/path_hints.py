"""Hints for locating a misplaced dataset."""

import re
from collections.abc import Container, Iterable, Sequence
from difflib import SequenceMatcher
from pathlib import Path

_MIN_SIMILARITY = 0.6


def path_hint(
    root: Path, folder: str, needed: Sequence[Path], names: Iterable[str], other_folders: Container[str]
) -> str:
    """Search for a misplaced or renamed dataset and describe where it is and how to fix this; "" if it is not found.

    Args:
        root: data root.
        folder: expected folder of the dataset in the data root.
        needed: files and folders that must exist in ``folder``.
        names: other common names for the folder.
        other_folders: folders of other datasets, which are not suggested.
    """

    def is_complete(path: Path) -> bool:
        return all((path / relative).exists() for relative in needed)

    expected = (root / folder).absolute()
    deeper = next((inner for inner in _subfolders(expected) if is_complete(inner)), None)
    if deeper:
        return f"found {deeper}, one level too deep; move its content to {expected}"
    if any(path.parts for path in needed) and is_complete(root):
        fix = (
            f"make {expected.parent.parent} the data root"
            if root.absolute().name == folder
            else f"move it to {expected}"
        )
        return f"found in the data root, {root.absolute()}; {fix}"
    outside = next((subfolder for subfolder in _subfolders(root) if is_complete(subfolder / folder)), None)
    if outside:
        return f"found {outside.absolute() / folder}; move it to {expected}, or make {outside.absolute()} the data root"
    similarity = {
        subfolder: _best_similarity(subfolder.name, (folder, *names))
        for subfolder in _subfolders(root)
        if subfolder.name not in other_folders
    }
    similar = sorted(
        (path for path in similarity if similarity[path] >= _MIN_SIMILARITY and path.name != folder),
        key=lambda path: -similarity[path],
    )
    for candidate in similar:
        complete_folder = next((path for path in (candidate, *_subfolders(candidate)) if is_complete(path)), None)
        if complete_folder:
            return f"found {complete_folder.absolute()}; if it is this dataset, rename it to {expected}"
    if similar:
        content = ", ".join(entry.name for entry in _subfolders(similar[0])[:4]) or "no folders"
        return f"similar name: {similar[0].absolute()}, which contains {content}"
    return ""


def _best_similarity(name: str, choices: Iterable[str]) -> float:
    """Compute the similarity of ``name`` to the most similar choice, in 0..1; 1 if one name contains the other."""
    return max(_similarity(_normalize_name(name), _normalize_name(choice)) for choice in choices)


def _similarity(first: str, second: str) -> float:
    if min(len(first), len(second)) >= 3 and (first in second or second in first):
        return 1.0
    return SequenceMatcher(None, first, second).ratio()


def _normalize_name(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _subfolders(path: Path) -> list[Path]:
    """Return the sorted subfolders of ``path`` that are not hidden; an empty list if it cannot be read."""
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []
