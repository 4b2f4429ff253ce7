"""Index of a gallery that changes, and its file."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fastamp.retrieval.index_file import read_index, write_index
from fastamp.retrieval.indices import ProductCodes
from fastamp.retrieval.model_id import ModelId
from fastamp.utils.errors import DataError

logger = logging.getLogger(__name__)


class Candidates(ProductCodes):
    """Index of numbered features. Features are not removed from it: searches ignore their numbers.

    Args:
        codes: index of the features with ``numbers``, in their order.
        built: number of features when it was trained.
        row_of_number: rows of the features in the gallery, which changes them.
        numbers: numbers of the features in the index, including those that were removed from the gallery.
    """

    def __init__(
        self, codes: ProductCodes, built: int, row_of_number: Mapping[int, int], numbers: Sequence[int] = ()
    ) -> None:
        super().__init__(codes.faiss, codes.effort, codes.recall)
        self.built, self.numbers, self._row_of_number = built, set(numbers), row_of_number

    @classmethod
    def train(cls, sample: np.ndarray, count: int, model: ModelId, row_of_number: Mapping[int, int]) -> "Candidates":
        """Train an empty index for ``count`` features on a sample (M, D) float32 of them, see ``normalized``."""
        codes = ProductCodes.create(count, model.width, model.metric)
        codes.faiss.train(sample)
        return cls(codes, count, row_of_number)

    def add(self, numbers: Sequence[int], features: np.ndarray) -> None:
        """Add features (N, D)."""
        if len(numbers):
            self.faiss.add_with_ids(features, np.array(numbers, dtype=np.int64))
            self.numbers.update(numbers)

    def propose(self, queries: np.ndarray, k: int, effort: int | None = None) -> np.ndarray:
        numbers = super().propose(queries, k, effort)
        rows = [self._row_of_number.get(number, -1) for number in numbers.reshape(-1).tolist()]
        return np.array(rows, dtype=np.int64).reshape(numbers.shape)

    def write(self, path: Path, token: str) -> None:
        """Write the index atomically, with the token of its gallery."""
        numbers = np.fromiter(self.numbers, np.int64, len(self.numbers))
        write_index(path, self, token, numbers=numbers, built=np.array(self.built))

    @classmethod
    def read(cls, path: Path, token: str, model: ModelId, row_of_number: Mapping[int, int]) -> "Candidates | None":
        """Read the index of a gallery with this token and model.

        None, with a warning, if the file is damaged or of another gallery, because exact search does not need it.
        """
        try:
            index, arrays = read_index(path, model, token, mapped=False)
            numbers, built = (arrays.get(name, np.empty(0)) for name in ("numbers", "built"))
            if (
                not isinstance(index, ProductCodes)
                or numbers.dtype != np.int64
                or numbers.shape != (index.faiss.ntotal,)
                or built.shape != ()
                or built.dtype.kind != "i"
                or built < 1
                or not 1 <= (index.effort or 0) <= index.faiss.nlist
                or not 0 <= index.recall <= 1
            ):
                raise DataError(f"{path} has invalid numbers of features.\n  fix: delete the file")
        except DataError as error:
            logger.warning("the approximate index is not used, and the search is exact: %s", error)
            return None
        return cls(index, int(built), row_of_number, numbers.tolist())
