"""Exact comparison of queries with features: with all, with a selection, or with the proposals of an index."""

from functools import cached_property

import numpy as np
import torch

from fastamp.layers.distance import squared_norms
from fastamp.utils.errors import DataError

# Features compared at once, so that they and their copy fit into the CPU cache.
_COMPARED_ROWS = 4096
_SCORED = 2048  # features that are compared with their own query at once
_TINY = 1e-12  # least norm by which a feature is divided, as in torch.nn.functional.normalize


class Vectors:
    """Features (N, D) of a gallery, which queries are compared with.

    Args:
        matrix: (N, D) float32, in memory or memory-mapped.
        metric: ``"cosine"`` or ``"euclidean"``.
        source: name of the features in error messages.
        is_normalized: if True, the features are already as they are compared. Default: False.
    """

    def __init__(self, matrix: np.ndarray, metric: str, source: object, *, is_normalized: bool = False) -> None:
        self.matrix, self.metric, self._source, self._is_normalized = matrix, metric, source, is_normalized

    def block(self, rows: slice | np.ndarray) -> np.ndarray:
        """Return features as they are compared, see ``normalized``, in memory.

        Raises:
            DataError: if a feature is not finite.
        """
        features = np.array(self.matrix[rows])
        if not np.isfinite(features).all():
            raise DataError(
                f"the features in {self._source} are not finite.\n  fix: create the file with fastamp extract"
            )
        return features if self._is_normalized else normalized(features, self.metric)

    @cached_property
    def _squared_norms(self) -> torch.Tensor:
        """Squared norms (N,) of the features; computed once, so that a search does not normalize all features again."""
        norms = torch.empty(len(self.matrix))
        for start in range(0, len(norms), _COMPARED_ROWS):
            rows = slice(start, start + _COMPARED_ROWS)
            norms[rows] = squared_norms(torch.from_numpy(np.array(self.matrix[rows])))
            if not torch.isfinite(norms[rows]).all():
                self.block(rows)  # raises unless only the squares are infinite
        return norms

    def nearest(self, queries: np.ndarray, k: int, rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Compare queries with all features, by matrix products of blocks.

        Compared to matrix products, the flat search of faiss took 3 to 18 times as long for 8 to 64 queries and
        50,000 features of dimension 512.

        Args:
            queries: (Q, D) float32, see ``normalized``.
            k: number of results, at most that of the features.
            rows: (M,) int64, the features to compare with. Default: None, all.

        Returns:
            (Q, k) float32, scores, the most similar first; (Q, k) int64, their rows.
        """
        count = len(self.matrix) if rows is None else len(rows)
        sought, buffer = torch.from_numpy(queries), np.empty((min(_COMPARED_ROWS, count), queries.shape[1]), np.float32)
        best, found = torch.empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
        for start in range(0, count, _COMPARED_ROWS):
            stop = min(start + _COMPARED_ROWS, count)
            chosen = slice(start, stop) if rows is None else rows[start:stop]
            block = buffer[: stop - start]
            block[:] = self.matrix[chosen]  # copy, because the data in the file may be unaligned
            values = sought @ torch.from_numpy(block).T
            if self.metric == "euclidean":
                values = 2 * values - self._squared_norms[chosen]
            elif not self._is_normalized:
                values /= self._squared_norms[chosen].sqrt().clamp(min=_TINY)
            values, indices = values.topk(min(k, stop - start), dim=1)
            best, found = torch.cat((best, values), 1), torch.cat((found, indices + start), 1)
            best, order = best.topk(min(k, best.shape[1]), dim=1)
            found = found.gather(1, order)
        numbers = found.numpy() if rows is None else rows[found.numpy()]
        return self.nearest_of(queries, k, numbers)  # avoids cancellation in the difference of large squares

    def nearest_of(self, queries: np.ndarray, k: int, proposals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compare each query with its proposals, or with all features if it has fewer than k; see ``nearest``.

        Args:
            queries: (Q, D) float32, see ``normalized``.
            k: number of results, at most that of the features.
            proposals: (Q, C) int64, rows; -1 for none.
        """
        is_row = (proposals >= 0) & (proposals < len(self.matrix))
        scores, rows = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        step = max(1, _SCORED // max(1, proposals.shape[1]))
        for start in range(0, len(queries), step):
            part = slice(start, start + step)
            near = np.where(is_row[part], proposals[part], 0)
            values = np.where(is_row[part], self._similarities(queries[part], near), -np.inf)
            order = np.argsort(-values, axis=1, kind="stable")[:, :k]
            if order.shape[1] == k:
                scores[part], rows[part] = np.take_along_axis(values, order, 1), np.take_along_axis(near, order, 1)
        few = np.flatnonzero(is_row.sum(1) < k)
        if self.metric == "euclidean":
            scores = -scores
        if len(few):
            scores[few], rows[few] = self.nearest(queries[few], k)
        return scores, rows

    def _similarities(self, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Compute the similarities (Q, C) float64 of queries and ``rows`` (Q, C): cosines, or negative distances."""
        features = self.block(rows.reshape(-1)).reshape(*rows.shape, queries.shape[1]).astype(np.float64)
        if self.metric == "cosine":
            return np.asarray((features @ queries[:, :, None].astype(np.float64))[..., 0].clip(-1, 1))
        return np.asarray(-np.linalg.norm(features - queries[:, None], axis=2))


def normalized(features: np.ndarray, metric: str) -> np.ndarray:
    """Return features (N, D) as they are compared: of length 1 for ``cosine``, unchanged for ``euclidean``."""
    if metric != "cosine":
        return features
    unit: np.ndarray = torch.nn.functional.normalize(torch.from_numpy(features), dim=1).numpy()
    return unit


def as_features(features: torch.Tensor | np.ndarray, width: int, count: int | None = None) -> np.ndarray:
    """Return features (N, D) as float32 in memory.

    Args:
        features: (N, D) float, not normalized.
        width: expected D, that of the gallery.
        count: expected N. Default: None, any number.

    Raises:
        DataError: if they have another shape or are not finite.
    """
    if isinstance(features, torch.Tensor):
        features = features.float().cpu().numpy()
    values = np.array(features, dtype=np.float32)  # a copy: those of a file cannot be written
    fits = values.ndim == 2 and values.shape[1] == width and count in (None, len(values))
    if not fits or not np.isfinite(values).all():
        raise DataError(
            f"features must be finite and have shape ({count or 'N'}, {width}); got shape {values.shape} with "
            f"{np.count_nonzero(~np.isfinite(values))} non-finite values.\n"
            "  fix: extract them with the model of the gallery"
        )
    return values
