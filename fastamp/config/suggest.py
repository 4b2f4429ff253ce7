"""Error messages for unknown config keys, with the nearest keys, and for words that are not KEY VALUE pairs."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from fastamp.config.projects import PROJECTS_KEY, declaring_projects
from fastamp.config.releases import hint


def unknown_key(path: str, section: str, siblings: Iterable[str], keys: Iterable[str]) -> str:
    """Return the message for an unknown key: its current name, the project that declares it, or similar keys.

    Args:
        path: dotted path from the root.
        section: longest prefix of ``path`` that is a section; "" for the root.
        siblings: names in that section.
        keys: paths of all keys.
    """
    if old := hint(path):
        return old
    if projects := declaring_projects(path):
        return (
            f"unknown config key {path!r}, which {' and '.join(projects)} declares.\n"
            f"  fix: load the project: {PROJECTS_KEY}: [{projects[0]}] in the file, {PROJECTS_KEY}=[{projects[0]}] or "
            f"--plugin {projects[0]}"
        )
    keys = set(keys)
    sections = {key[:dot] for key in keys for dot, letter in enumerate(key) if letter == "."}
    # A typing error in one name of the path is more likely than a key in the wrong section.
    name, _, rest = path.removeprefix(f"{section}.").partition(".")
    nearest: str | None = ".".join(filter(None, (section, _nearest(name, siblings), rest)))
    if nearest not in keys | sections or nearest == section:
        nearest = _nearest(path, keys)
    last = path.rpartition(".")[2].lower()
    same_name = sorted(other for other in keys - {nearest} if other.rpartition(".")[2].lower() == last)
    message = f"unknown config key {path!r}."
    if nearest:
        message += f" Did you mean {nearest!r}?"
    if same_name:
        message += f" Keys of the same name: {', '.join(same_name[:4])}."
    if not nearest and not same_name:
        message += f"\n  fix: list all keys with `fastamp config list {section}".rstrip() + "`"
    return message


def is_misspelled(name: str, siblings: Iterable[str]) -> bool:
    """Return True if ``name`` is similar to one of the names in the same section, and probably a typing error of it."""
    return bool(difflib.get_close_matches(name.lower(), [other.lower() for other in siblings], n=1, cutoff=0.85))


def _nearest(name: str, choices: Iterable[str]) -> str | None:
    by_lower = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def fix_of_pairs(words: Sequence[Any]) -> str:
    """Return the correction of words that are not ``KEY VALUE KEY VALUE ...``; "" if they are.

    A shell splits ``SEED = 1`` and ``INPUT.SIZE_TRAIN=[64, 32]`` into several words.
    """
    if isinstance(words, str):
        return 'pass a list of keys and values, e.g. ["SOLVER.BASE_LR", 1e-3]'
    texts = [word if isinstance(word, str) else "" for word in words]
    option = next((text for text in texts[::2] if text.startswith("--")), "")
    key = next((text for text in texts[::2] if " " in text or "=" in text), "")
    if option:
        return f"write {option} before the KEY VALUE pairs"
    if any(text.startswith("=") for text in texts):
        return 'remove the spaces around "=": KEY=VALUE'
    if any(text.count("[") > text.count("]") and "]" in "".join(texts[at + 1 :]) for at, text in enumerate(texts)):
        return "quote a value that contains spaces, e.g. INPUT.SIZE_TRAIN='[256, 128]'"
    if key:
        return f"separate key and value: {' '.join(key.replace('=', ' ', 1).split())}"
    if len(words) % 2:
        if not texts[-1]:
            return 'pass a list of keys and values, e.g. ["SOLVER.BASE_LR", 1e-3]'
        if not texts[-1][:1].isalpha():
            return "write several values as one list, e.g. [256,128]"
        return f"add a value after {texts[-1]}" + " or, if it is not a config key, remove it" * texts[-1].islower()
    return ""
