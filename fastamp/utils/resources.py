"""Folders outside the Python package that are installed with it: recipes, FastTune and benchmarks."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def resource_folder(name: str) -> Path:
    """Return the path of a folder that is installed with the package.

    Args:
        name: path of the folder in the repository, e.g. ``"configs"``. A wheel has the same folder below ``fastamp/``.
    """
    installed = _PACKAGE / name
    return installed if installed.is_dir() else _PACKAGE.parent / name
