"""Where a data set may be that is not where it should be."""

import re
from collections.abc import Container, Iterable, Sequence
from difflib import SequenceMatcher
from pathlib import Path

_NEAR = 0.6


def near_layout(root: Path, folder: str, needed: Sequence[Path], names: Iterable[str], others: Container[str]) -> str:
    """Return where a tree is that looks like the missing one and how to put it right, or an empty string.

    Args:
        root: the data root.
        folder: the data set's folder, which should be in it.
        needed: files and folders that must be below that.
        names: further names under which people keep the data set.
        others: folders of other data sets, which are not it.
    """

    def is_whole(place: Path) -> bool:
        return all((place / each).exists() for each in needed)

    expected = (root / folder).absolute()
    deeper = next((inner for inner in _folders(expected) if is_whole(inner)), None)
    if deeper:
        return f"found {deeper}, one level too deep; move what is in it to {expected}"
    if any(each.parts for each in needed) and is_whole(root):
        fix = (
            f"make {expected.parent.parent} the data root"
            if root.absolute().name == folder
            else f"move it to {expected}"
        )
        return f"found in the data root itself, {root.absolute()}; {fix}"
    outside = next((each for each in _folders(root) if is_whole(each / folder)), None)
    if outside:
        return f"found {outside.absolute() / folder}; move it to {expected}, or make {outside.absolute()} the data root"
    alike = {each: _likeness(each.name, (folder, *names)) for each in _folders(root) if each.name not in others}
    near = sorted(
        (each for each in alike if alike[each] >= _NEAR and each.name != folder), key=lambda each: -alike[each]
    )
    for each in near:
        found = next((place for place in (each, *_folders(each)) if is_whole(place)), None)
        if found:
            return f"found {found.absolute()}; if it is this data set, rename it to {expected}"
    if near:
        held = ", ".join(entry.name for entry in _folders(near[0])[:4]) or "no folders"
        return f"the nearest name is {near[0].absolute()}, which holds {held}"
    return ""


def _likeness(name: str, choices: Iterable[str]) -> float:
    """Return in 0..1 how much a name is like the most similar of ``choices``; 1 where one contains the other."""
    return max(_alike(_letters(name), _letters(choice)) for choice in choices)


def _alike(one: str, other: str) -> float:
    if min(len(one), len(other)) >= 3 and (one in other or other in one):
        return 1.0
    return SequenceMatcher(None, one, other).ratio()


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _folders(place: Path) -> list[Path]:
    """Return the folders in a place in the order of their names; none if it cannot be read."""
    try:
        return sorted(entry for entry in place.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []
