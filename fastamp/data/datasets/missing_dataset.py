"""Error message for a missing dataset."""

from collections.abc import Iterable
from pathlib import Path

from fastamp.utils.errors import DataError


def missing_dataset_error(name: str, looked_for: Iterable[Path], *, found: str = "", fix: str) -> DataError:
    """Create the error for a missing dataset.

    ``file_utils.check_tree`` passes the lines "found", "hint" (from ``path_hints.path_hint``) and "expected" as
    ``found``, and ``base.ROOT_FIX`` as ``fix``.

    Args:
        name (str): name of the dataset in DATASETS.NAMES or DATASETS.TESTS.
        looked_for (Iterable[Path]): missing files and folders.
        found (str): additional lines of the message, each ending with a newline. Default "".
        fix (str): fix, as an imperative.
    """
    paths = "\n".join(f"    {path.absolute()}" for path in dict.fromkeys(looked_for))
    return DataError(f"dataset {name} not found; looked for\n{paths}\n{found}  fix: {fix}")
