"""Plugins: Python files, and modules of installed distributions in the entry point group ``fastamp.plugins``."""

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from fastamp.utils.errors import ConfigError, summarize_error

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "fastamp.plugins"
SWITCH = "FASTAMP_PLUGINS"
"""Environment variable that disables installed plugins if its value is ``off``."""

_loaded: "dict[EntryPoint, ModuleType]" = {}
_in_progress = False


def import_plugin_file(file: Path) -> ModuleType:
    """Run a Python file that registers custom components, once per process, and return its module."""
    name = f"fastamp_plugin_{file}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec and spec.loader, file
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]  # a second attempt must not find half a module
            if isinstance(error, SyntaxError):
                raise ConfigError(
                    f"cannot run the plugin {file}: {error.msg}, {error.filename}, line {error.lineno}\n"
                    "  fix: correct this line"
                ) from error
            raise
    return sys.modules[name]


@cache
def installed_plugins() -> "tuple[EntryPoint, ...]":
    """Return the entry points of all installed plugins, sorted by name, without importing them; () if disabled."""
    from importlib.metadata import entry_points

    if os.environ.get(SWITCH, "").strip().lower() == "off":
        return ()
    return tuple(sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)))


def load_installed_plugins() -> "Mapping[EntryPoint, ModuleType]":
    """Import the modules of all installed plugins, once per process, which registers their components.

    Returns:
        Entry point -> module; without those that are still being imported.

    Raises:
        ConfigError: if a module cannot be imported; the message names the distribution.
    """
    global _in_progress
    if _in_progress:
        return _loaded
    _in_progress = True
    try:
        for entry in installed_plugins():
            if entry not in _loaded:
                with naming_distribution(entry):
                    _loaded[entry] = import_module(entry.module)
    finally:
        _in_progress = False
    return _loaded


def distribution_name(entry: "EntryPoint") -> str:
    """Return the name and version of the distribution that contains a plugin, e.g. ``"my-losses 1.0"``."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown"


@contextmanager
def naming_distribution(entry: "EntryPoint") -> Iterator[None]:
    """Convert exceptions of a plugin inside the context into a ConfigError that names its distribution."""
    try:
        yield
    except Exception as error:  # anything that code of another distribution raises
        raise ConfigError(
            f"plugin {entry.name!r} ({entry.value}) of the distribution {distribution_name(entry)} cannot be loaded: "
            f"{summarize_error(error)}\n"
            f"  fix: update or uninstall the distribution, or set the environment variable {SWITCH}=off"
        ) from error
