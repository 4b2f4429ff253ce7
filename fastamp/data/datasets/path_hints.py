"""Where a data set may be that is not where it should be."""

import re
from collections.abc import Container, Iterable, Sequence
from difflib import SequenceMatcher
from pathlib import Path

from fastamp.utils.moved import moved_names

__getattr__ = moved_names(__name__, {"near_layout": "fastamp.data.datasets.path_hints.path_hint"})

_MIN_SIMILARITY = 0.6


def path_hint(
    root: Path, folder: str, needed: Sequence[Path], names: Iterable[str], other_folders: Container[str]
) -> str:
    """Return where a tree is that looks like the missing one and how to put it right, or an empty string.

    Args:
        root: the data root.
        folder: the data set's folder, which should be in it.
        needed: files and folders that must be below that.
        names: further names under which people keep the data set.
        other_folders: folders of other data sets, which are not it.
    """

    def is_complete(path: Path) -> bool:
        return all((path / each).exists() for each in needed)

    expected = (root / folder).absolute()
    deeper = next((inner for inner in _subfolders(expected) if is_complete(inner)), None)
    if deeper:
        return f"found {deeper}, one level too deep; move what is in it to {expected}"
    if any(each.parts for each in needed) and is_complete(root):
        fix = (
            f"make {expected.parent.parent} the data root"
            if root.absolute().name == folder
            else f"move it to {expected}"
        )
        return f"found in the data root itself, {root.absolute()}; {fix}"
    outside = next((each for each in _subfolders(root) if is_complete(each / folder)), None)
    if outside:
        return f"found {outside.absolute() / folder}; move it to {expected}, or make {outside.absolute()} the data root"
    similarity = {
        each: _best_similarity(each.name, (folder, *names))
        for each in _subfolders(root)
        if each.name not in other_folders
    }
    similar = sorted(
        (each for each in similarity if similarity[each] >= _MIN_SIMILARITY and each.name != folder),
        key=lambda each: -similarity[each],
    )
    for each in similar:
        found = next((path for path in (each, *_subfolders(each)) if is_complete(path)), None)
        if found:
            return f"found {found.absolute()}; if it is this data set, rename it to {expected}"
    if similar:
        content = ", ".join(entry.name for entry in _subfolders(similar[0])[:4]) or "no folders"
        return f"the nearest name is {similar[0].absolute()}, which holds {content}"
    return ""


def _best_similarity(name: str, choices: Iterable[str]) -> float:
    """Return in 0..1 how much a name is like the most similar of ``choices``; 1 where one contains the other."""
    return max(_similarity(_normalize_name(name), _normalize_name(choice)) for choice in choices)


def _similarity(one: str, other: str) -> float:
    if min(len(one), len(other)) >= 3 and (one in other or other in one):
        return 1.0
    return SequenceMatcher(None, one, other).ratio()


def _normalize_name(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _subfolders(path: Path) -> list[Path]:
    """Return the folders in a path in the order of their names; none if it cannot be read."""
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []
