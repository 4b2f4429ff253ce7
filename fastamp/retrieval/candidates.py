"""Approximate search that proposes candidates for exact comparison: inverted lists of product codes (IVF-PQ)."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from fastamp.retrieval.features_file import open_arrays, read_array, write_arrays
from fastamp.utils.errors import DataError, writing
from fastamp.utils.files import write_atomically

logger = logging.getLogger(__name__)

# Fractions of the lists that are tried, and the recall at which the search for more ends.
_FRACTIONS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
WANTED_RECALL = 0.98
# Candidates per result, at least _LEAST.
_CANDIDATES, _LEAST = 10, 200
_TRAINED_ON = 40  # features per list


class Candidates:
    """IVF-PQ index of numbered features (Jégou, Douze and Schmid 2011, "Product quantization for nearest neighbor
    search").

    Codes have 4 bits for up to 4 dimensions. With 60,000 features of dimension 512, their training took 7 s instead of
    390 s for codes of 8 bits for 8 dimensions, with the same recall. Features are not removed: their numbers are
    ignored in results.

    Attributes:
        numbers: numbers of the features in the index, including those that were removed from the gallery.
        built: number of features when it was trained.
        probed: number of lists that a search compares with.
        recall: measured fraction in 0..1 of the 10 nearest features that are found; NaN if not measured.
    """

    def __init__(self, index: Any, numbers: set[int], built: int, probed: int = 1, recall: float = math.nan) -> None:
        self._index, self.numbers, self.built, self.probed, self.recall = index, numbers, built, probed, recall

    @classmethod
    def train(cls, features: np.ndarray, count: int) -> "Candidates":
        """Train an empty index for ``count`` features on a sample (M, D) float32 of them, normalized for cosine."""
        import faiss

        width = features.shape[1]
        part = next(size for size in (4, 2, 1) if width % size == 0)
        index = faiss.index_factory(width, f"IVF{trained_on(count) // _TRAINED_ON},PQ{width // part}x4fs")
        index.cp.min_points_per_centroid = 1
        index.train(features)
        return cls(index, set(), count)

    @property
    def fractions(self) -> list[int]:
        """Numbers of lists to try for ``probed``, in ascending order."""
        return sorted({max(1, round(fraction * self._index.nlist)) for fraction in _FRACTIONS})

    def choose(self, probed: int, recall: float) -> None:
        """Set the number of lists of a search, and its measured recall."""
        self.probed, self.recall = probed, recall

    def add(self, numbers: list[int], features: np.ndarray) -> None:
        """Add features (N, D)."""
        if numbers:
            self._index.add_with_ids(features, np.array(numbers, dtype=np.int64))
            self.numbers.update(numbers)

    def search(self, features: np.ndarray, k: int, probed: int | None = None) -> np.ndarray:
        """Return the numbers (Q, C) of candidates for the k nearest features; -1 where there are fewer."""
        import faiss

        parameters = faiss.SearchParametersIVF(nprobe=min(probed or self.probed, self._index.nlist))
        _, numbers = self._index.search(features, max(_CANDIDATES * k, _LEAST), params=parameters)
        candidates: np.ndarray = numbers
        return candidates

    def write(self, path: Path, token: str) -> None:
        """Write the index atomically, with the token of its gallery."""
        import faiss

        arrays = {
            "index": faiss.serialize_index(self._index),
            "numbers": np.fromiter(self.numbers, np.int64, len(self.numbers)),
            "built": np.array(self.built),
            "probed": np.array(self.probed),
            "recall": np.array(self.recall),
            "token": np.array(token),
        }
        with writing(path):
            write_atomically(path, lambda file: write_arrays(file, arrays))

    @classmethod
    def read(cls, path: Path, token: str, width: int) -> "Candidates | None":
        """Read the index of a gallery with this token and dimension of features.

        None, with a warning, if the file is damaged or of another gallery, because exact search does not need it.
        """
        import faiss

        names = ("numbers", "built", "probed", "recall")
        try:
            with open_arrays(path, "index", fix="delete the file; the search is exact without it") as archive:
                if record := archive.testzip():  # faiss crashes on invalid data
                    raise ValueError(f"checksum mismatch in {record}")
                if str(read_array(archive, "token")) != token:
                    raise ValueError("it is of another gallery")
                index = faiss.deserialize_index(read_array(archive, "index").view(np.uint8))
                numbers, built, probed, recall = (read_array(archive, name) for name in names)
                if not isinstance(index, faiss.IndexIVFPQFastScan) or index.d != width:
                    raise ValueError("it is for other features")
                if numbers.dtype != np.int64 or numbers.shape != (index.ntotal,) or {built.shape, probed.shape} != {()}:
                    raise ValueError("wrong number of features")
                candidates = cls(index, set(numbers.tolist()), int(built), int(probed), float(recall))
                if candidates.built < 1 or not 1 <= candidates.probed <= index.nlist or not 0 <= candidates.recall <= 1:
                    raise ValueError("invalid numbers")
        except DataError as error:
            logger.warning("the approximate index is not used, and the search is exact: %s", error)
            return None
        return candidates


def trained_on(count: int) -> int:
    """Return the number of features to train an index of ``count`` features on: 40 for each of sqrt(count) lists."""
    return min(count, int(2 ** round(math.log2(count) / 2) * _TRAINED_ON))
