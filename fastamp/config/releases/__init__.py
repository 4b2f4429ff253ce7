"""Config files and key names of FastReID's releases v0.1.1 and v1.0.0, and their translation to the current keys."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from fastamp.config.defaults import KEYS
from fastamp.config.files import read_layers
from fastamp.config.releases.tables import OLD_KEYS, RELEASE_DEFAULTS, SPELLINGS
from fastamp.config.releases.translation import Layers, Translation, detect, flat
from fastamp.utils.errors import check_choice

RELEASES = tuple(RELEASE_DEFAULTS)
NO_COUNTERPART = "no counterpart"
OLD_NAMES = SPELLINGS | OLD_KEYS
"""Name of a key in FastReID that is not a current key -> current key; "" if there is none."""


@dataclass
class Recipe:
    """A config file and its bases, translated to the current keys.

    Attributes:
        layers: ``(source, mapping)`` of each file in the order of merging. For an old release, one pair with the
            translated mapping of all files.
        release: "v0.1.1", "v1.0.0", or "" for a file of the current keys.
        notes: log lines: the detected release, one line per translated key, and one line per key without a
            counterpart, which starts with ``NO_COUNTERPART``.
    """

    layers: Layers
    release: str = ""
    notes: list[str] = field(default_factory=list)


def read_recipe(path: str | os.PathLike[str], *, known: Iterable[str] = KEYS, release: str = "") -> Recipe:
    """Read a config file and its ``_BASE_`` files, and translate files of old FastReID releases.

    Args:
        path: a YAML file.
        known: paths of all current keys, including those of projects.
        release: "v0.1.1" or "v1.0.0"; "" detects the release from the keys of all files. Default "".

    Raises:
        ConfigError: if a file cannot be read, ``release`` is unknown, a value has the wrong type, or files of an old
            release and of the current keys are mixed.
    """
    if release:
        check_choice("release", release, RELEASES)
    layers, known = read_layers(path), set(known)
    settings = [(source, dict(flat(mapping))) for source, mapping in layers]
    read_as, lines = release, [f"read as a config of FastReID {release}, as requested"]
    if not release:
        read_as, lines = detect(settings, known)
    if not read_as:
        return Recipe(layers)
    source, translation = os.fspath(path), Translation(read_as, settings, known)
    missing = [f"{NO_COUNTERPART}: {line}" for line in translation.missing]
    notes = [f"{source}: {lines[0]}", *lines[1:], *translation.lines, *missing]
    return Recipe([(source, translation.new)], read_as, notes)


def current_path(path: str) -> str:
    """Return the current path of a key in a spelling that is accepted everywhere, not only in files."""
    return SPELLINGS.get(path, path)


def hint(path: str) -> str:
    """Return the error message for a key from an old release, with its current name; "" for any other key."""
    if path not in OLD_KEYS:
        return ""
    new = OLD_KEYS[path]
    fix = f"\n  fix: use {new}" if new else " It has no counterpart.\n  fix: remove the key"
    return f"unknown config key {path!r}: the key exists only in old releases of FastReID.{fix}"
