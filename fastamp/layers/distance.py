"""Distances between features, computed in float32 or float64. No other module computes distances itself."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from fastamp.amp import force_fp32, to_float32
from fastamp.amp.tf32 import without_tf32
from fastamp.utils.errors import ConfigError, did_you_mean

METRICS = ("euclidean", "cosine")
# More rows per block do not make the matrix product faster.
_MAX_BLOCK_ROWS = 1024
_MIN_NORM = 1e-12  # as in torch.nn.functional.normalize
# Pairs per chunk: their differences fit into the CPU cache.
_PAIRS_PER_CHUNK = 256


def check_metric(metric: str) -> str:
    """Return ``metric`` unchanged after checking that ``METRICS`` contains it.

    Raises:
        ConfigError: if the metric is unknown.
    """
    if metric not in METRICS:
        raise ConfigError(
            f"TEST.METRIC: unknown distance {metric!r}; choices: {', '.join(METRICS)}.{did_you_mean(metric, METRICS)}"
        )
    return metric


@force_fp32
def squared_euclidean_distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Compute max(0, |x_i - y_j|^2) with one matrix product.

    The mean of ``y`` is subtracted from both inputs first: |x|^2 + |y|^2 - 2 x y loses precision by cancellation if
    distances are small compared with |x|, which is common for features after a ReLU and for untrained models.

    Args:
        x: (M, D) float.
        y: (N, D) float.

    Returns:
        (M, N) float32 (float64 for float64 input).
    """
    center = y.detach().mean(0)
    x, y = x - center, y - center
    squares = x.square().sum(1, keepdim=True) + y.square().sum(1)
    return torch.addmm(squares, x, y.t(), beta=1, alpha=-2).clamp_min(0)


@force_fp32
def pairwise_distance(x: torch.Tensor, y: torch.Tensor, metric: str = "euclidean") -> torch.Tensor:
    """Compute the distances between all rows of ``x`` and all rows of ``y``.

    Args:
        x: (M, D) float features.
        y: (N, D) float features.
        metric: ``"euclidean"``, or ``"cosine"`` for 1 - cosine similarity. Default ``"euclidean"``.

    Returns:
        (M, N) float32 (float64 for float64 input). Euclidean distances are at least 1e-6, so that the gradient is
        finite; cosine distances are in 0..2.

    Raises:
        ConfigError: if the metric is unknown.
    """
    if check_metric(metric) == "euclidean":
        return squared_euclidean_distance(x, y).clamp_min(1e-12).sqrt()
    return 1 - F.normalize(x, dim=1) @ F.normalize(y, dim=1).t()


class DistanceBlocks:
    """Distances of Q queries to G gallery images, computed in blocks of query rows.

    Attributes:
        shape: (Q, G).
        dtype: dtype of the distances, float32 or float64.
        device: device of the computation.
        limit: upper bound of the distances; None if unknown. The lower bound is 0 up to rounding.
        memory_budget_mb: maximum size of a block in MiB. A single row may exceed it.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    limit: float | None
    memory_budget_mb: float

    def rows(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write the distances of queries ``start`` to ``stop`` (exclusive) into ``out`` of shape (B, G)."""
        raise NotImplementedError

    def row(self, query: int) -> torch.Tensor:
        """Compute the (G,) distances of one query."""
        out = torch.empty(1, self.shape[1], dtype=self.dtype, device=self.device)
        self.rows(query, query + 1, out)
        return out[0]

    @property
    def block_rows(self) -> int:
        """Number of queries in each block except the last, which may be smaller."""
        fitting = int(self.memory_budget_mb * 2**20 / (self.shape[1] * self.dtype.itemsize))
        return max(1, min(fitting // 64 * 64 or fitting, _MAX_BLOCK_ROWS))

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Iterate over blocks of queries.

        All blocks share one buffer: each block overwrites the previous one. The caller may modify a block in place.

        Args:
            start: first query.
            stop: end of the range, exclusive; None for all queries.

        Yields:
            Index of the first query in the block, and (B, G) distances.
        """
        stop = self.shape[0] if stop is None else stop
        size = min(self.block_rows, max(stop - start, 1))
        buffer = torch.empty(size, self.shape[1], dtype=self.dtype, device=self.device)
        for first in range(start, stop, size):
            last = min(first + size, stop)
            block = buffer[: last - first]
            self.rows(first, last, block)
            yield first, block


class FeatureDistances(DistanceBlocks):
    """Distances of query features to gallery features: 1 - cosine similarity, or squared Euclidean distance.

    Squared distances rank the gallery in the same order as distances, but with fewer ties: in float32, two different
    numbers can have the same square root. To avoid a normalized copy of a large gallery, cosine similarities are
    divided by the gallery norms after the matrix product. If ``metric`` is ``"euclidean"``, ``gallery_squares`` (G,)
    contains the squared norms of the gallery features.

    Args:
        query_features: (Q, D) float; float16 and bfloat16 are cast to float32.
        gallery_features: (G, D) float, on the same device.
        metric: ``"cosine"`` or ``"euclidean"``.
        memory_budget_mb: see ``DistanceBlocks``. Default 256.

    Raises:
        ConfigError: if the metric is unknown.
    """

    def __init__(
        self,
        query_features: torch.Tensor,
        gallery_features: torch.Tensor,
        *,
        metric: str,
        memory_budget_mb: float = 256,
    ) -> None:
        self.metric, self.memory_budget_mb = check_metric(metric), memory_budget_mb
        query_features, gallery_features = to_float32((query_features, gallery_features))
        self.dtype = torch.promote_types(query_features.dtype, gallery_features.dtype)
        self.device = gallery_features.device
        self.query_features, self.gallery_features = query_features.to(self.dtype), gallery_features.to(self.dtype)
        self.shape = (len(query_features), len(gallery_features))
        self._inverse_norms = None
        if metric == "euclidean":
            self.gallery_squares = squared_norms(self.gallery_features)
            self.limit = None
            return
        self.limit = 2.0
        if self.gallery_features.nbytes <= memory_budget_mb * 2**20 / 4:
            self.gallery_features = F.normalize(self.gallery_features, dim=1)
        else:
            self._inverse_norms = squared_norms(self.gallery_features).sqrt().clamp_min(_MIN_NORM).reciprocal()

    def rows(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write the distances of a range of queries into ``out``; see ``DistanceBlocks.rows``."""
        query_features = self.query_features[start:stop]
        if self.metric == "euclidean":
            matrix_product(query_features * -2, self.gallery_features, out)
            out.add_(self.gallery_squares).add_(squared_norms(query_features)[:, None]).clamp_min_(0)
            return
        matrix_product(F.normalize(query_features, dim=1), self.gallery_features, out)
        if self._inverse_norms is None:
            torch.sub(1, out, out=out)
        else:
            torch.addcmul(out.new_ones(()), out, self._inverse_norms, value=-1, out=out)


def squared_norms(features: torch.Tensor) -> torch.Tensor:
    """Compute the (N,) squared Euclidean norms of (N, D) features in their dtype, without a temporary copy."""
    if features.device.type == "cpu":
        return torch.from_numpy(np.einsum("nd,nd->n", features.detach().numpy(), features.detach().numpy()))
    with without_tf32():
        return torch.linalg.vecdot(features, features)


def pair_distances(
    x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Compute squared Euclidean distances of given pairs of features, independent of the chunk size.

    Args:
        x: (M, D) float32.
        y: (N, D) float32.
        rows: (P,) int64 indices into ``x``.
        columns: (P,) int64 indices into ``y``.
        dtype: dtype of the computation. Default float32.

    Returns:
        (P,) squared distances in ``dtype``.
    """
    # The buffers are reused: allocating memory for each chunk would take as long as the arithmetic.
    size = min(_PAIRS_PER_CHUNK, len(rows))
    x_chunk, y_chunk = x.new_empty(size, x.shape[1]), y.new_empty(size, y.shape[1])
    result = torch.empty(len(rows), dtype=dtype, device=x.device)
    for first in range(0, len(rows), _PAIRS_PER_CHUNK):
        part = slice(first, min(first + _PAIRS_PER_CHUNK, len(rows)))
        count = part.stop - first
        torch.index_select(x, 0, rows[part], out=x_chunk[:count])
        torch.index_select(y, 0, columns[part], out=y_chunk[:count])
        result[part] = squared_norms(x_chunk[:count].to(dtype).sub_(y_chunk[:count]))
    return result


def matrix_product(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    """Write the inner products of the rows of ``x`` (M, D) and ``y`` (N, D) into ``out`` (M, N), in full precision.

    On a CPU, NumPy computes the product, because NumPy's OpenBLAS was faster than PyTorch's MKL on two cores of an AMD
    EPYC: 197 and 132 GFLOP/s for float32 matrices of 512 x 2048 x 82161, 129 and 93 GFLOP/s with 64 rows. On CUDA, TF32
    is disabled.
    """
    if out.device.type == "cpu":
        np.matmul(x.detach().numpy(), y.detach().numpy().T, out=out.numpy())
        return
    with without_tf32():
        torch.mm(x.detach(), y.detach().t(), out=out)
