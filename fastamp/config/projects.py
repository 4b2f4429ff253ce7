"""Projects: folders of methods outside the core, whose plugins register components and declare config keys."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fastamp.utils.errors import ConfigError, did_you_mean
from fastamp.utils.files import real_path
from fastamp.utils.plugins import import_plugin_file
from fastamp.utils.resources import resource_folder

PROJECTS_KEY = "PROJECTS"
_PLUGIN = "plugin.py"


def list_projects() -> dict[str, Path]:
    """Return the projects that are installed with the package: name -> folder, in alphabetical order."""
    folders = (file.parent for file in resource_folder("projects").glob(f"*/{_PLUGIN}"))
    return {folder.name: folder for folder in sorted(folders)}


def project_of(path: str | os.PathLike[str]) -> str:
    """Return the name of the project whose folder contains a file; "" for a file outside of the projects."""
    file = real_path(path)
    return next((name for name, folder in list_projects().items() if file.is_relative_to(real_path(folder))), "")


def projects_of(layers: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """Return the projects that config files need: those whose folders contain the files.

    Args:
        layers: ``(path, mapping)`` of each file, see ``read_layers``.
    """
    return [name for name in dict.fromkeys(project_of(path) for path, _ in layers) if name]


def projects_first(mapping: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the items of a mapping with ``PROJECTS`` first, since a project declares keys of the others."""
    return sorted(mapping.items(), key=lambda item: item[0] != PROJECTS_KEY)


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
