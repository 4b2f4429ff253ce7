"""The one place where distances between features are computed, always in float32 or better."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F

from fastamp.amp import force_fp32, to_float32
from fastamp.utils.errors import ConfigError, did_you_mean
from fastamp.utils.moved import renamed_arguments

METRICS = ("euclidean", "cosine")
# Rows of a block beyond which the matrix product gains nothing.
_MAX_BLOCK_ROWS = 1024
_MIN_NORM = 1e-12  # as torch.nn.functional.normalize has it
# Pairs whose difference is held at once: it stays in the cache.
_PAIRS_PER_CHUNK = 256


def check_metric(metric: str) -> str:
    """Return ``metric`` if it is one of ``METRICS``.

    Raises:
        ConfigError: it is not.
    """
    if metric not in METRICS:
        raise ConfigError(
            f"TEST.METRIC: {metric!r} is no distance; choices: {', '.join(METRICS)}.{did_you_mean(metric, METRICS)}"
        )
    return metric


@force_fp32
def squared_euclidean_distance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return |x_i - y_j|^2 by one matrix product, not below 0.

    The mean of ``y`` is subtracted from both first: |x|^2 + |y|^2 - 2 x y loses distances that are small compared with
    |x|, and features after a ReLU or of an untrained model are near each other and far from 0.

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
    """Return the distance of every row of ``x`` to every row of ``y``.

    Args:
        x: (M, D) float features.
        y: (N, D) float features.
        metric: ``"euclidean"``, or ``"cosine"`` for 1 - cosine similarity.

    Returns:
        (M, N) float32 (float64 for float64 input); Euclidean at least 1e-6, so that its gradient is finite;
        cosine in 0..2.

    Raises:
        ConfigError: another metric.
    """
    if check_metric(metric) == "euclidean":
        return squared_euclidean_distance(x, y).clamp_min(1e-12).sqrt()
    return 1 - F.normalize(x, dim=1) @ F.normalize(y, dim=1).t()


class DistanceBlocks:
    """Distances of (Q) queries to a gallery of (G), computed a block of query rows at a time, never as a whole.

    Attributes:
        shape: (Q, G).
        dtype: of the distances, float32 or float64.
        device: where they are computed.
        limit: no distance lies above it; None where that is not known. None lies below 0, but for rounding.
        memory_budget_mb: MiB that a block may take; it has one row at least.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    limit: float | None
    memory_budget_mb: float

    def rows(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Write the distances of the queries from ``start`` up to, not including, ``stop`` into ``out``: (B, G)."""
        raise NotImplementedError

    @property
    def block_rows(self) -> int:
        """How many queries make a block."""
        fitting = int(self.memory_budget_mb * 2**20 / (self.shape[1] * self.dtype.itemsize))
        return max(1, min(fitting // 64 * 64 or fitting, _MAX_BLOCK_ROWS))

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of the first query and the (B, G) distances of each block, all in the same memory.

        A block is the consumer's to write into, until the next one is asked for.

        Args:
            start: first query.
            stop: the query after the last; None is all.
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
    """Distances of query features to gallery features: 1 - cosine similarity, or the squared Euclidean distance.

    The square has the order of the Euclidean distance, of which float32 would make equal what differs. A large gallery
    is not copied: cosine similarities are divided by its norms after the product. With ``"euclidean"``, its squared
    norms are ``gallery_squares``: (G,).

    Args:
        query_features: (Q, D) float; float16 and bfloat16 are cast to float32.
        gallery_features: (G, D) float, on the same device.
        metric: ``"cosine"`` or ``"euclidean"``.
        memory_budget_mb: see ``DistanceBlocks``.

    Raises:
        ConfigError: another metric.
    """

    @renamed_arguments(queries="query_features", gallery="gallery_features")
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
        """See ``DistanceBlocks``."""
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
    """Return the (N,) squared Euclidean norms of (N, D) features, in their dtype and without a copy of them."""
    if features.device.type == "cpu":
        return torch.from_numpy(np.einsum("nd,nd->n", features.detach().numpy(), features.detach().numpy()))
    with without_tf32():
        return torch.linalg.vecdot(features, features)


def pair_distances(
    x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the squared Euclidean distance of pairs of features, computed pair by pair and so the same in any block.

    Args:
        x: (M, D) float32.
        y: (N, D) float32.
        rows: (P,) int64, into ``x``.
        columns: (P,) int64, into ``y``.
        dtype: to compute in.

    Returns:
        (P,) of ``dtype``.
    """
    # New memory for each part would cost as much as the arithmetic.
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
    """Write the inner products of the rows of (M, D) ``x`` and (N, D) ``y`` into (M, N) ``out``, in full precision.

    On a CPU by NumPy, whose OpenBLAS was 1.5 times as fast as the MKL of PyTorch (512 x 2048 x 82161 float32, two cores
    of an AMD EPYC: 197 and 132 GFLOP/s; with 64 rows 129 and 93). On CUDA without TF32, whatever training uses.
    """
    if out.device.type == "cpu":
        np.matmul(x.detach().numpy(), y.detach().numpy().T, out=out.numpy())
        return
    with without_tf32():
        torch.mm(x.detach(), y.detach().t(), out=out)


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute float32 products on CUDA in float32 inside, whatever ``SOLVER.TF32`` allows to training."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
