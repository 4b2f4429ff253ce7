"""Recipes of projects that must equal FastReID's files."""

import json
from pathlib import Path

import yaml

from fastamp.config import read_config

ROOT = Path(__file__).parents[2]
FILES = json.loads((ROOT / "tests/reference/fastreid_project_configs.json").read_text())
"""Path in FastReID's repository -> content of the YAML file, at commit c9bc3ce.

The files face_base, r50_ir, inshop, cars, nest101-base, submit, dukemtmc and pa100 are from the public copy
dashengge/pet-biometrics, commit dd9b53d, whose other files have the same values. No copy contains sbs_r101ibn.
"""


def files_of(project: str) -> list[str]:
    """List the paths in ``FILES`` of a project."""
    return [path for path in FILES if path.startswith(f"projects/{project}/")]


def check_equal_to_fastreid(path: str, folder: Path, different: tuple[str, ...] = ()) -> None:
    """Check that FastReID's file, and the recipe of the same name, have the same config.

    Args:
        path: path in ``FILES``.
        folder: empty folder for a copy of FastReID's file.
        different: keys with another value.
    """
    recipe = ROOT / path
    content = dict(FILES[path])
    if "_BASE_" in content:
        content["_BASE_"] = str((recipe.parent / content["_BASE_"]).resolve())
    copy = folder / recipe.name
    copy.write_text(yaml.safe_dump(content))
    project = recipe.parts[len(ROOT.parts) + 1]
    values, expected = (
        {key.path: value for key, value in cfg.keys_below()}
        for cfg in (read_config(str(recipe)), read_config(str(copy), plugin=project))
    )
    assert {path for path, value in values.items() if value != expected[path]} == set(different)
