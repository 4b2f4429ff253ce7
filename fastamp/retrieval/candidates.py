"""Index of a gallery that changes, whose features are numbered, and its file."""

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fastamp.retrieval.features import ModelId
from fastamp.retrieval.index_file import read_index, write_index
from fastamp.retrieval.indices import Index, ProductCodes
from fastamp.utils.errors import DataError

logger = logging.getLogger(__name__)


class Candidates:
    """Index of numbered features. Features are not removed from it: their numbers are ignored in searches.

    Attributes:
        index: index of the features, in the order in which they were added.
        numbers: numbers of the features in the index, including those that were removed from the gallery.
        built: number of features when it was trained.
    """

    def __init__(self, index: Index, built: int, numbers: set[int] | None = None) -> None:
        self.index, self.built, self.numbers = index, built, numbers or set()

    @classmethod
    def train(cls, sample: np.ndarray, count: int, model: ModelId) -> "Candidates":
        """Train an empty index for ``count`` features on a sample (M, D) float32 of them, see ``normalized``."""
        index = ProductCodes.create(count, model.width, model.metric)
        index.train(sample)
        return cls(index, count)

    def add(self, numbers: list[int], features: np.ndarray) -> None:
        """Add features (N, D)."""
        if numbers:
            self.index.faiss.add_with_ids(features, np.array(numbers, dtype=np.int64))
            self.numbers.update(numbers)

    def propose(self, queries: np.ndarray, k: int, effort: int | None, row_of_number: Mapping[int, int]) -> np.ndarray:
        """Return the rows (Q, C) of the features that the index proposes, -1 for removed ones; see ``Index``."""
        numbers = self.index.propose(queries, k, effort)
        rows = [row_of_number.get(number, -1) for number in numbers.reshape(-1).tolist()]
        return np.array(rows, dtype=np.int64).reshape(numbers.shape)

    def write(self, path: Path, token: str) -> None:
        """Write the index atomically, with the token of its gallery."""
        numbers = np.fromiter(self.numbers, np.int64, len(self.numbers))
        write_index(path, self.index, token, numbers=numbers, built=np.array(self.built))

    @classmethod
    def read(cls, path: Path, token: str, model: ModelId) -> "Candidates | None":
        """Read the index of a gallery with this token and model.

        None, with a warning, if the file is damaged or of another gallery, because exact search does not need it.
        """
        try:
            index, arrays = read_index(path, model, token, mapped=False)
            numbers, built = (arrays.get(name, np.empty(0)) for name in ("numbers", "built"))
            if (
                numbers.dtype != np.int64
                or numbers.shape != (index.faiss.ntotal,)
                or built.shape != ()
                or built.dtype.kind != "i"
                or built < 1
                or index.kind != ProductCodes.kind
                or not 1 <= (index.effort or 0) <= index.faiss.nlist
                or not 0 <= index.recall <= 1
            ):
                raise DataError(f"{path} has invalid numbers of features.\n  fix: delete the file")
        except DataError as error:
            logger.warning("the approximate index is not used, and the search is exact: %s", error)
            return None
        return cls(index, int(built), set(numbers.tolist()))
