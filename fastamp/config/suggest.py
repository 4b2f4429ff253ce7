"""The message for a config key that does not exist: which key was probably meant."""

import difflib
from collections.abc import Iterable


def unknown_key(path: str, section: str, siblings: Iterable[str], keys: Iterable[str]) -> str:
    """Return that ``path`` is no config key, with the nearest key and those of the same name elsewhere.

    Args:
        path: dotted, from the root.
        section: the longest part of ``path`` that is a section; empty for the root.
        siblings: the names in that section.
        keys: the paths of all keys.
    """
    keys = set(keys)
    sections = {key[:dot] for key in keys for dot, letter in enumerate(key) if letter == "."}
    # A slip in one name of the path is likelier than a key in the wrong section.
    name, _, rest = path.removeprefix(f"{section}.").partition(".")
    near = ".".join(filter(None, (section, _nearest(name, siblings), rest)))
    if near not in keys | sections or near == section:
        near = _nearest(path, keys)
    last = path.rpartition(".")[2].lower()
    elsewhere = sorted(other for other in keys - {near} if other.rpartition(".")[2].lower() == last)
    message = f"{path!r} is no config key."
    if near:
        message += f" Did you mean {near!r}?"
    if elsewhere:
        message += f" There is {', '.join(elsewhere[:4])}."
    if not near and not elsewhere:
        message += f" All there are: --list-config {section}".rstrip()
    return message


def _nearest(name: str, choices: Iterable[str]) -> str | None:
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[near[0]] if near else None
