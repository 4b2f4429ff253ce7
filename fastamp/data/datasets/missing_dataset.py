"""Error message for a missing dataset."""

from collections.abc import Iterable
from pathlib import Path

from fastamp.utils.errors import DataError


def missing_dataset_error(name: str, looked_for: Iterable[Path], *, found: str = "", fix: str) -> DataError:
    """Create the error for a missing dataset.

    Args:
        name (str): name of the dataset in DATASETS.NAMES or DATASETS.TESTS.
        looked_for (Iterable[Path]): missing files and folders.
        found (str): lines that describe what was found instead, each with a newline. Default "".
        fix (str): what to change.
    """
    paths = "\n".join(f"    {path.absolute()}" for path in dict.fromkeys(looked_for))
    return DataError(f"dataset {name} not found; looked for\n{paths}\n{found}  fix: {fix}")
