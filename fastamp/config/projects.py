"""Projects: folders of methods outside the core, whose plugins register components and declare config keys."""

import logging
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from fastamp.config.key import Key
from fastamp.utils.errors import ConfigError, did_you_mean
from fastamp.utils.files import real_path
from fastamp.utils.plugins import import_plugin_file
from fastamp.utils.resources import resource_folder

logger = logging.getLogger(__name__)

PROJECTS_KEY = "PROJECTS"
PLUGINS_KEY = "PLUGINS"
_PLUGIN = "plugin.py"


def list_projects() -> dict[str, Path]:
    """Return the projects that are installed with the package: name -> folder, in alphabetical order."""
    folders = (file.parent for file in resource_folder("projects").glob(f"*/{_PLUGIN}"))
    return {folder.name: folder for folder in sorted(folders)}


def project_of(path: str | os.PathLike[str]) -> str:
    """Return the name of the project whose folder contains a file; "" for a file outside of the projects.

    A file in ``projects/NAME`` of FastReID or of another copy of fastamp belongs to the installed project NAME.
    """
    file, projects = real_path(path), list_projects()
    if installed := next((name for name, folder in projects.items() if file.is_relative_to(real_path(folder))), ""):
        return installed
    return next(
        (parent.name for parent in file.parents if parent.name in projects and parent.parent.name == "projects"), ""
    )


def projects_of(layers: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return the projects that config files need: those whose folders contain the files.

    Args:
        layers: ``(path, mapping)`` of each file, see ``read_layers``.
    """
    return [name for name in dict.fromkeys(project_of(path) for path, _ in layers) if name]


def declaring_projects(path: str) -> list[str]:
    """Return the projects whose source declares a config key, or keys of a section, without running their code.

    Args:
        path: dotted path of the key or section.
    """
    declares = re.compile(rf"""(?:Key|define)\(\s*["']{re.escape(path)}[."']""")
    return [
        name
        for name, folder in list_projects().items()
        if any(declares.search(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("*.py")))
    ]


def project_pairs(opts: Sequence[Any]) -> list[Any]:
    """Select the pairs of ``[KEY, VALUE, ...]`` that load projects, which must precede the keys of the projects."""
    pairs = zip(opts[::2], opts[1::2], strict=False)
    return [word for pair in pairs if pair[0] == PROJECTS_KEY for word in pair]


def projects_first(mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the items of a mapping with ``PROJECTS`` and ``PLUGINS`` first, which declare keys of the others."""
    return sorted(mapping.items(), key=lambda item: item[0] not in (PROJECTS_KEY, PLUGINS_KEY))


def import_project(name: str) -> ModuleType:
    """Run the plugin of a project, once per process, with the project's folder on ``sys.path``.

    Raises:
        ConfigError: if there is no project of this name.
    """
    projects = list_projects()
    if name not in projects:
        raise ConfigError(
            f"{PROJECTS_KEY}: unknown project {name!r}.{did_you_mean(name, projects)}\n"
            f"  choices: {', '.join(projects) or 'none'}"
        )
    folder = str(projects[name])
    if folder not in sys.path:
        sys.path.append(folder)
    return import_plugin_file(projects[name] / _PLUGIN)


def load_projects(cfg: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Import the plugins of projects and declare their keys; return the names of all projects of this config."""
    loaded: tuple[str, ...] = cfg.__dict__.get("_projects", ())
    for name in names:
        if name not in loaded:
            add_keys_of(import_project(name), cfg)
            cfg.__dict__["_projects"] = loaded = (*loaded, name)
    return loaded


def name_plugins(cfg: Any, files: Iterable[str]) -> tuple[str, ...]:
    """Return the loaded plugins of a config and ``files``; warn of those that are not loaded."""
    loaded: tuple[str, ...] = cfg.__dict__.get("_plugins", ())
    names = {os.path.basename(file) for file in loaded}  # the file may have been moved
    missing = [file for file in files if os.path.basename(file) not in names]
    for file in missing:
        logger.warning("the config was saved with the plugin %s, which is not loaded\n  fix: --plugin %s", file, file)
    return (*loaded, *missing)


def add_keys_of(plugin: ModuleType, cfg: Any) -> None:
    """Declare the config keys of a plugin: those in ``KEYS``, and those of its function ``add_config(cfg)``."""
    names = vars(plugin)
    if "add_config" in names:
        names["add_config"](cfg)
    keys = names.get("KEYS", ())
    # A plugin may use the name KEYS for other things, or declare its KEYS in add_config itself.
    if isinstance(keys, tuple | list) and all(isinstance(key, Key) for key in keys):
        known = {key.path for key, _ in cfg.keys_below()}
        cfg.add_keys(key for key in keys if key.path not in known)
