"""Create a project folder: a config with its JSON Schema, a custom component and a README with the commands to run.

examples:
  fastamp init my_project
  fastamp init my_project --recipe Market1501/bagtricks_R50
"""

import argparse
import json
import shlex
from pathlib import Path

import yaml

from fastamp.cli.config import component_choices
from fastamp.config.component_keys import declared_keys
from fastamp.config.defaults import KEYS
from fastamp.config.recipes import list_recipes, recipe_name
from fastamp.config.schema import HEADER, SCHEMA_FILE, build_schema
from fastamp.utils.errors import ConfigError, did_you_mean, writing
from fastamp.utils.resources import resource_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("folder", metavar="FOLDER", help="folder to create")
    parser.add_argument(
        "--recipe", default="Demo/quickstart", metavar="NAME", help="recipe to start from (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the files of the project.

    Raises:
        ConfigError: if the folder is not empty or cannot be written, or there is no such recipe.
    """
    folder, recipe = Path(args.folder).expanduser(), recipe_name(args.recipe)
    if recipe not in list_recipes():
        raise ConfigError(
            f"--recipe {args.recipe}: unknown recipe.{did_you_mean(recipe, list_recipes())}\n"
            "  fix: choose one of `fastamp recipes`"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{args.folder} exists and is not empty.\n  fix: choose a new folder")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for template in sorted(resource_folder("cli/project-template").iterdir()):
            if template.suffix not in (".md", ".yml", ".py"):  # e.g. __pycache__
                continue
            text = template.read_text(encoding="utf-8").replace("RECIPE", recipe)
            output_dir = f"logs/{folder.resolve().name}"
            quoted = _yaml_scalar(output_dir) if template.suffix == ".yml" else shlex.quote(output_dir)
            text = text.replace("logs/PROJECT", quoted).replace("PROJECT", folder.resolve().name)
            text = HEADER + text if template.suffix == ".yml" else text
            (folder / template.name).write_text(text, encoding="utf-8")
            print(f"wrote {folder / template.name}")
        keys = [*KEYS.values(), *declared_keys(folder / "components.py")]
        schema = json.dumps(build_schema(keys, component_choices()), indent=1)
        (folder / SCHEMA_FILE).write_text(f"{schema}\n", encoding="utf-8")
        print(f"wrote {folder / SCHEMA_FILE}")
    print(f"next: cd {shlex.quote(args.folder)} && fastamp train config.yml --plugin components.py")
    return 0


def _yaml_scalar(text: str) -> str:
    return yaml.safe_dump(text, allow_unicode=True, width=float("inf")).removesuffix("...\n").rstrip("\n")
