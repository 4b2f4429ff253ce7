"""List the recipes that are installed with fastamp, or print the YAML file of one.

examples:
  fastamp recipes
  fastamp recipes Market1501
  fastamp recipes Market1501/sbs_R50-ibn > my.yml && fastamp schema > fastamp.schema.json
"""

import argparse
import os

from fastamp.config.recipes import find_recipe, list_recipes, recipe_name
from fastamp.config.schema import HEADER
from fastamp.utils.errors import ConfigError, did_you_mean

NEEDS_TORCH = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="recipe to print, or folder to list")


def run(args: argparse.Namespace) -> int:
    """Print the list of recipes, or one recipe.

    Raises:
        ConfigError: if there is no such recipe.
    """
    recipes = list_recipes()
    name = recipe_name(args.name)
    path = find_recipe(name)
    if path is not None:
        print(HEADER + _standalone(path.read_text(encoding="utf-8"), name), end="")
        return 0
    listed = [each for each in recipes if each.lower().startswith(name.rstrip("/").lower())]
    if not listed:
        raise ConfigError(
            f"unknown recipe {args.name!r}.{did_you_mean(name, recipes)}\n"
            "  fix: list all recipes with `fastamp recipes`"
        )
    print("\n".join(listed))
    return 0


def _standalone(text: str, name: str) -> str:
    """Replace the relative path in ``_BASE_`` by the name of the base file, so that a copy works in any folder."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        key, colon, base = line.partition(":")
        if key == "_BASE_" and colon:
            path = os.path.normpath(os.path.join("configs", os.path.dirname(name), base.strip().strip("\"'")))
            lines[number] = f"_BASE_: {path}\n"
    return "".join(lines)
