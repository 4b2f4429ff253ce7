"""Error message for a missing dataset."""

from collections.abc import Iterable
from pathlib import Path

from fastamp.utils.errors import DataError


def missing_dataset_error(name: str, looked_for: Iterable[Path], *, description: str = "", fix: str) -> DataError:
    """Return the error to raise if a dataset is missing.

    Args:
        name: name of the dataset in DATASETS.NAMES or DATASETS.TESTS.
        looked_for: missing files and folders.
        description: lines of the message about the files that were found, each with a final newline. Default "".
        fix: what the user should do, as an imperative.
    """
    paths = "\n".join(f"    {path.absolute()}" for path in dict.fromkeys(looked_for))
    return DataError(f"dataset {name} not found; looked for\n{paths}\n{description}  fix: {fix}")
