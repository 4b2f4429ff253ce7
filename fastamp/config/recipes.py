"""Recipes: the config files that are installed with the package."""

import os
from pathlib import Path

from fastamp.utils.resources import resource_folder

_SUFFIXES = (".yml", ".yaml")


def list_recipes() -> dict[str, Path]:
    """Return the recipes in alphabetical order: name, e.g. ``"Market1501/sbs_R50-ibn"``, -> path of the YAML file.

    Base files such as ``Base-SBS.yml`` are not listed, because they select no dataset.
    """
    root = resource_folder("configs")
    files = {path.relative_to(root).with_suffix("").as_posix(): path for path in root.glob("*/*.yml")}
    return dict(sorted(files.items(), key=lambda item: item[0].lower()))


def list_project_recipes() -> dict[str, Path]:
    """Return the recipes of projects in alphabetical order: name ``"PROJECT/RECIPE"`` -> path.

    Base files are listed, since FastReID's projects name them in several ways.
    """
    folders = [plugin.parent for plugin in resource_folder("projects").glob("*/plugin.py")]
    files = {f"{folder.name}/{path.stem}": path for folder in folders for path in folder.glob("configs/*.y*ml")}
    return dict(sorted(files.items(), key=lambda item: item[0].lower()))


def recipe_name(path: str) -> str:
    """Return the name of a recipe without ``configs/`` and ``.yml``."""
    return os.path.splitext(path)[0].removeprefix("configs/") if path.endswith(_SUFFIXES) else path


def find_recipe(name: str | os.PathLike[str]) -> Path | None:
    """Return the path of a recipe or base file; None if there is no recipe of this name.

    Args:
        name: name of the recipe, with or without ``configs/`` and ``.yml``; ``"PROJECT/RECIPE"`` for a recipe of a
            project.
    """
    short = os.fspath(name).removeprefix("configs/")
    if not short or os.path.isabs(short) or ".." in Path(short).parts or "\0" in short:
        return None
    path = resource_folder("configs") / short
    path = path if path.suffix in _SUFFIXES else path.with_name(f"{path.name}.yml")
    return path if path.is_file() else list_project_recipes().get(recipe_name(short))
