"""The message for a data set that is missing, whatever kind it is of."""

from collections.abc import Iterable
from pathlib import Path

from fastamp.utils.errors import DataError


def missing_dataset_error(name: str, looked_for: Iterable[Path], *, found: str = "", fix: str) -> DataError:
    """Return the error of a data set that is missing.

    Args:
        name: the data set's name in ``DATASETS.NAMES`` or ``TESTS``.
        looked_for: files and folders that were not found.
        found: lines about what is there instead, each ending in a newline.
        fix: what to change.
    """
    paths = "\n".join(f"    {path.absolute()}" for path in dict.fromkeys(looked_for))
    return DataError(f"the data set {name} is not there; looked for\n{paths}\n{found}  fix: {fix}")
