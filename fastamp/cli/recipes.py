"""List the recipes that are installed with fastamp, or print the YAML file of one.

examples:
  fastamp recipes
  fastamp recipes Market1501
  fastamp recipes Market1501/sbs_R50-ibn > my.yml && fastamp schema > fastamp.schema.json
"""

import argparse
from pathlib import Path

from fastamp.config.projects import PROJECTS_KEY, project_of
from fastamp.config.recipes import find_recipe, list_project_recipes, list_recipes, recipe_name
from fastamp.config.schema import HEADER
from fastamp.utils.errors import ConfigError, did_you_mean
from fastamp.utils.resources import resource_folder

_QUOTES = "\"'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="recipe to print, or folder to list")


def run(args: argparse.Namespace) -> int:
    """Print the list of recipes, or one recipe.

    Raises:
        ConfigError: if there is no such recipe.
    """
    recipes = list_recipes() | list_project_recipes()
    name = recipe_name(args.name)
    path = find_recipe(name)
    if path is not None:
        print(HEADER + _standalone(path), end="")
        return 0
    listed = [recipe for recipe in recipes if recipe.lower().startswith(name.rstrip("/").lower())]
    if not listed:
        raise ConfigError(
            f"unknown recipe {args.name!r}.{did_you_mean(name, recipes)}\n"
            "  fix: list all recipes with `fastamp recipes`"
        )
    print("\n".join(listed))
    return 0


def _standalone(path: Path) -> str:
    """Read a recipe, with the names of its base files instead of relative paths and with the project of the recipe.

    A copy of the result works in any folder.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines):
        key, colon, base = line.partition(":")
        if key == "_BASE_" and colon:
            files = [part.strip().strip(_QUOTES) for part in base.strip().strip("[]").split(",")]
            names = ", ".join(_name_of(path.parent / file) for file in files)
            lines[number] = f"_BASE_: {f'[{names}]' if base.strip().startswith('[') else names}\n"
    project = project_of(path)
    return "".join(lines) + (f"\n{PROJECTS_KEY}: [{project}]\n" if project else "")


def _name_of(path: Path) -> str:
    """Return the name by which a command finds a recipe or base file, e.g. ``"configs/Base-SBS.yml"``."""
    path = path.resolve()
    if project := project_of(path):
        return f"{project}/{path.name}"
    return f"configs/{path.relative_to(resource_folder('configs').resolve()).as_posix()}"
