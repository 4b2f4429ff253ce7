"""Index of a gallery that changes."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fastamp.retrieval.gallery import Gallery
from fastamp.retrieval.gallery_store import Item
from fastamp.retrieval.index_file import read_index
from fastamp.retrieval.indices import ProductCodes
from fastamp.retrieval.model_id import ModelId
from fastamp.utils.errors import DataError

logger = logging.getLogger(__name__)


class Candidates(ProductCodes):
    """Index of numbered features. Features are not removed from it: searches ignore their numbers.

    Args:
        codes: index of features under their numbers.
        row_of_number: rows of the features in the gallery, which changes them.

    Attributes:
        numbers: numbers of the features in the index, including those that were removed from the gallery.
    """

    def __init__(self, codes: ProductCodes, row_of_number: Mapping[int, int]) -> None:
        import faiss

        super().__init__(codes.faiss, codes.effort, codes.recall)
        self.numbers, self._row_of_number, lists = set[int](), row_of_number, codes.faiss.invlists
        for place in range(lists.nlist):
            self.numbers.update(faiss.rev_swig_ptr(lists.get_ids(place), lists.list_size(place)).tolist())

    @classmethod
    def train(cls, sample: np.ndarray, count: int, model: ModelId, row_of_number: Mapping[int, int]) -> "Candidates":
        """Train an empty index for ``count`` features on a sample (M, D) float32 of them, see ``normalized``."""
        codes = ProductCodes.create(count, model.width, model.metric)
        codes.faiss.train(sample)
        return cls(codes, row_of_number)

    def add(self, items: Sequence[Item], features: np.ndarray) -> None:
        """Add those of the features (N, D) whose numbers are not in the index."""
        new = {item.number: row for row, item in enumerate(items) if item.number not in self.numbers}
        if new:
            self.faiss.add_with_ids(features[[*new.values()]], np.array([*new]))
            self.numbers.update(new)

    def propose(self, queries: np.ndarray, k: int, effort: int | None = None) -> np.ndarray:
        numbers = super().propose(queries, k, effort)
        rows = [self._row_of_number.get(number, -1) for number in numbers.reshape(-1).tolist()]
        return np.array(rows, dtype=np.int64).reshape(numbers.shape)

    @classmethod
    def read(cls, path: Path, gallery: Gallery, row_of_number: Mapping[int, int]) -> "Candidates | None":
        """Read the index of a gallery.

        None, with a warning, if the file is damaged or of another gallery, because exact search does not need it.
        """
        try:
            index = read_index(path, gallery, mapped=False)
            if not isinstance(index, ProductCodes) or math.isnan(index.recall):
                raise DataError(f"{path} is not an index of a mutable gallery.\n  fix: delete the file")
        except DataError as error:
            logger.warning("the approximate index is not used, and the search is exact: %s", error)
            return None
        return cls(index, row_of_number)
