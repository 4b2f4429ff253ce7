"""Indices of features, which propose the rows that are compared exactly: inverted lists, a graph, product codes."""

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np

from fastamp.retrieval.vectors import Vectors
from fastamp.utils.choices import EF_SEARCH, PROBED
from fastamp.utils.registry import Registry

# Maximum number of features for exact search, and for HNSW; larger galleries use IVF.
FLAT_UP_TO = 50_000
HNSW_UP_TO = 200_000
WANTED_RECALL = 0.98
_NEIGHBORS, _EF_CONSTRUCTION = 16, 40
_TRAINED_ON = 40  # features per list
_RECALL_QUERIES, _RECALL_RANKS = 200, 10
# Proposals of product codes per result, at least _LEAST.
_PROPOSALS, _LEAST = 10, 200

INDEX_REGISTRY = Registry("index kind")
"""Kinds of indices; the search of kind ``flat`` has none and compares with all features."""


class Index(ABC):
    """faiss index of features, which proposes rows. It has neither the features' columns nor a file.

    Attributes:
        kind: name in ``INDEX_REGISTRY``.
        faiss_class: name of the class of ``faiss``, which is checked when an index is read from a file.

    Args:
        index: faiss index.
        effort: number of lists to search, or of candidates in the graph, of a search. Default: None, that of the class.
        recall: measured fraction in 0..1 of the 10 nearest features that are found with it; NaN if not measured.
    """

    kind: ClassVar[str]
    faiss_class: ClassVar[str]

    def __init__(self, index: Any, effort: int | None = None, recall: float = math.nan) -> None:
        self.faiss, self.effort, self.recall = index, effort, recall

    @classmethod
    @abstractmethod
    def create(cls, count: int, width: int, metric: str) -> "Index":
        """Create an empty index for ``count`` features; train it on ``sample_rows`` unless ``faiss.is_trained``."""

    @property
    def efforts(self) -> list[int | None]:
        """Efforts to try until the recall is sufficient, in ascending order."""
        return [None]

    @abstractmethod
    def propose(self, queries: np.ndarray, k: int, effort: int | None = None) -> np.ndarray:
        """Return the rows (Q, C) of the proposed features for each query, -1 for none.

        Args:
            queries: (Q, D) float32, normalized for the metric.
            k: number of results.
            effort: ``effort`` of the index or of the search. Default: None, that of the class.
        """

    def measure(self, vectors: Vectors) -> float:
        """Set the effort to the smallest tried one with the wanted recall, and measure the recall.

        Args:
            vectors: all features, at least 11.

        Returns:
            The recall, of the 10 nearest features of 200 of the features.
        """
        count = min(_RECALL_QUERIES, len(vectors.matrix))
        chosen = np.random.default_rng(1).choice(len(vectors.matrix), count, replace=False)
        queries, k = vectors.block(chosen), _RECALL_RANKS + 1  # the first is the query itself
        expected = vectors.nearest(queries, k)[1].tolist()
        for effort in self.efforts:
            found = vectors.nearest_of(queries, k, self.propose(queries, k, effort))[1].tolist()
            hits = sum(len({*near[1:]} & {*rows}) for near, rows in zip(expected, found, strict=True))
            self.effort, self.recall = effort, hits / (count * _RECALL_RANKS)
            if self.recall >= WANTED_RECALL:
                break
        return self.recall


@INDEX_REGISTRY.register("ivf")
class InvertedLists(Index):
    """Inverted lists of features; the search compares with the lists that are nearest to the query (IVF)."""

    kind, faiss_class = "ivf", "IndexIVFFlat"

    @classmethod
    def create(cls, count: int, width: int, metric: str) -> "InvertedLists":
        import faiss

        index = faiss.index_factory(width, f"IVF{_lists(count)},Flat", faiss_metric(metric))
        index.cp.spherical = metric == "cosine"
        index.cp.min_points_per_centroid = 1
        return cls(index)

    def propose(self, queries: np.ndarray, k: int, effort: int | None = None) -> np.ndarray:
        import faiss

        probed = min(effort or math.ceil(PROBED * self.faiss.nlist), self.faiss.nlist)
        return np.asarray(self.faiss.search(queries, k, params=faiss.SearchParametersIVF(nprobe=probed))[1])


@INDEX_REGISTRY.register("hnsw")
class NeighborGraph(Index):
    """Graph of near features, which the search follows (Malkov and Yashunin 2018, arXiv:1603.09320; HNSW)."""

    kind, faiss_class = "hnsw", "IndexHNSWFlat"

    @classmethod
    def create(cls, count: int, width: int, metric: str) -> "NeighborGraph":
        import faiss

        index = faiss.IndexHNSWFlat(width, _NEIGHBORS, faiss_metric(metric))
        index.hnsw.efConstruction = _EF_CONSTRUCTION
        return cls(index)

    def propose(self, queries: np.ndarray, k: int, effort: int | None = None) -> np.ndarray:
        import faiss

        parameters = faiss.SearchParametersHNSW(efSearch=max(effort or EF_SEARCH, k))
        return np.asarray(self.faiss.search(queries, k, params=parameters)[1])


@INDEX_REGISTRY.register("ivfpq")
class ProductCodes(InvertedLists):
    """Inverted lists of product codes (Jégou, Douze and Schmid 2011, "Product quantization for nearest neighbor
    search"; IVF-PQ).

    Codes have 4 bits for up to 4 dimensions. With 60,000 features of dimension 512, their training took 7 s instead of
    390 s for codes of 8 bits for 8 dimensions, with the same recall.
    """

    kind, faiss_class = "ivfpq", "IndexIVFPQFastScan"

    @classmethod
    def create(cls, count: int, width: int, metric: str) -> "ProductCodes":
        import faiss

        part = next(size for size in (4, 2, 1) if width % size == 0)
        index = faiss.index_factory(width, f"IVF{_lists(count)},PQ{width // part}x4fs")
        index.cp.min_points_per_centroid = 1
        return cls(index)

    @property
    def efforts(self) -> list[int | None]:
        fractions = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
        return [*sorted({max(1, round(fraction * self.faiss.nlist)) for fraction in fractions})]

    def propose(self, queries: np.ndarray, k: int, effort: int | None = None) -> np.ndarray:
        return super().propose(queries, max(_PROPOSALS * k, _LEAST), effort)


def choose_kind(count: int) -> str:
    """Choose the kind of index for the given number of features."""
    if count <= FLAT_UP_TO:
        return "flat"
    return "hnsw" if count <= HNSW_UP_TO else "ivf"


def sample_rows(count: int) -> np.ndarray:
    """Return the rows, in order, of the features to train an index of ``count`` features on: 40 for each list."""
    size = min(count, _lists(count) * _TRAINED_ON)
    return np.sort(np.random.default_rng(0).choice(count, size, replace=False))


def faiss_metric(metric: str) -> int:
    """Return faiss's number of a metric."""
    import faiss

    return int(faiss.METRIC_INNER_PRODUCT if metric == "cosine" else faiss.METRIC_L2)


def _lists(count: int) -> int:
    """Return the power of 2 nearest to sqrt(count). Twice as many lists would take four times as long to train."""
    return int(2 ** round(math.log2(count) / 2))
