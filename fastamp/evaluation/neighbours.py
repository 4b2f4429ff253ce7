"""The nearest neighbours of every feature, exactly, in blocks; the same whatever computes them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fastamp.layers.distance import FeatureDistances, squared_norms
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError
from fastamp.utils.progress import track

BACKENDS = ("auto", "torch", "faiss")
# Neighbours that are searched for beyond those wanted, so that the last place is not decided by a rounding error.
_MARGIN = 8
# Pairs whose difference is held at once: it stays in the cache.
_PAIRS = 256
# Queries of one call of faiss.
_FAISS_ROWS = 2048


@dataclass(frozen=True)
class Neighbours:
    """The nearest neighbours of (Q) features.

    Attributes:
        indices: (Q, k) int64, the nearest first; of equally near ones the first in the gallery's order.
        farthest: (Q,) float32, the squared Euclidean distance to the farthest of the gallery.
    """

    indices: np.ndarray
    farthest: np.ndarray


def nearest_neighbours(
    queries: torch.Tensor,
    gallery: torch.Tensor,
    k: int,
    *,
    backend: str = "auto",
    memory_budget_mb: float = 256,
) -> Neighbours:
    """Return the nearest gallery features of each query by Euclidean distance; several ranks share the queries.

    Products of float32 matrices are rounded differently by different programs, block sizes and devices. So neighbours
    whose distances differ by less than such an error are put in the order of their distances in float64, and those
    that are equal there in the order of the gallery.

    Args:
        queries: (Q, D) float32.
        gallery: (G, D) float32, on the same device.
        k: how many; no more than G are returned.
        backend: ``"torch"`` computes distances in blocks on the features' device, ``"faiss"`` on the CPU; ``"auto"``
            is torch, which needs one pass where faiss needs two, at the same speed (19281 x 2048, two cores of an
            AMD EPYC: both at 190 GFLOP/s).
        memory_budget_mb: MiB of distances held at once.

    Returns:
        The neighbours of all queries, on every rank.

    Raises:
        ConfigError: another backend.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"TEST.KNN_BACKEND: {backend!r}; choices: {', '.join(BACKENDS)}")
    k = min(k, len(gallery))
    wanted = min(k + _MARGIN, len(gallery))
    distances = FeatureDistances(queries, gallery, metric="euclidean", memory_budget_mb=memory_budget_mb)
    start, stop = comm.own_share(len(queries), distances.block_rows)
    if backend == "faiss":
        source = _faiss_candidates(queries, gallery, wanted, start, stop)
        size = _FAISS_ROWS
    else:
        source = _torch_candidates(distances, wanted, start, stop)
        size = distances.block_rows
    tolerance = _rounding_error(queries.shape[1]) * distances.limit
    indices, farthest = [], []
    for first, found, values, last in track(source, -(-(stop - start) // size), "nearest neighbours"):
        block = torch.arange(first, first + len(found), device=queries.device)
        indices.append(_settle(distances, block, found, values, k, tolerance).cpu())
        farthest.append(pair_distances(queries, gallery, block, last).cpu())
    empty = torch.empty(0, k, dtype=torch.int64), torch.empty(0)
    return Neighbours(
        comm.gather_rows(torch.cat([empty[0], *indices])).numpy(),
        comm.gather_rows(torch.cat([empty[1], *farthest])).numpy(),
    )


# First query, (B, c) candidates, (B, c) their squared distances ascending, (B,) the farthest.
_Candidates = Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]


def _torch_candidates(distances: FeatureDistances, wanted: int, start: int, stop: int) -> _Candidates:
    for first, block in distances.blocks(start, stop):
        values, found = torch.topk(block, wanted, dim=1, largest=False)
        yield first, found, values, block.argmax(1)


def _faiss_candidates(queries: torch.Tensor, gallery: torch.Tensor, wanted: int, start: int, stop: int) -> _Candidates:
    import faiss

    host_queries, host_gallery = queries.cpu().numpy(), gallery.cpu().numpy()
    device = queries.device
    # |q - g|^2 is largest where the product of (-2q, 1) and (g, |g|^2) is.
    extended = np.concatenate((host_gallery, squared_norms(gallery).cpu().numpy()[:, None]), axis=1)
    for first in range(start, stop, _FAISS_ROWS):
        block = host_queries[first : min(first + _FAISS_ROWS, stop)]
        values, found = faiss.knn(block, host_gallery, wanted, metric=faiss.METRIC_L2)
        opposite = np.concatenate((block * -2, np.ones((len(block), 1), dtype=np.float32)), axis=1)
        _, last = faiss.knn(opposite, extended, 1, metric=faiss.METRIC_INNER_PRODUCT)
        found, values, last = (torch.from_numpy(each).to(device) for each in (found, values, last))
        yield first, found.long(), values, last.long()[:, 0]


def _rounding_error(width: int) -> float:
    """Return how far apart two products of float32 vectors may be rounded, relative to the largest product."""
    return torch.finfo(torch.float32).eps * math.sqrt(width)


def _settle(
    distances: FeatureDistances,
    block: torch.Tensor,
    found: torch.Tensor,
    values: torch.Tensor,
    k: int,
    tolerance: float,
) -> torch.Tensor:
    """Return the (B, k) nearest of (B, c) candidates, in the order of float64 and of the gallery."""
    close = values[:, 1:] - values[:, :-1] <= tolerance
    # Where even the last candidate is as near as the k-th, others may be too.
    open_end = (values[:, -1] - values[:, k - 1] <= tolerance) & (found.shape[1] < distances.shape[1])
    result = found[:, :k].clone()
    unsettled = (close[:, :k].any(1) & ~open_end).nonzero().flatten()
    if len(unsettled):
        candidates = found[unsettled].sort(1).values  # so that a stable sort keeps the gallery's order
        exact = _exact_distances(distances, block[unsettled], candidates)
        order = exact.argsort(dim=1, stable=True)[:, :k]
        result[unsettled] = candidates.gather(1, order)
    row = distances.gallery.new_empty(1, distances.shape[1])
    for number in open_end.nonzero().flatten().tolist():
        query = int(block[number])
        distances.rows(query, query + 1, row)
        candidates = (row[0] <= values[number, k - 1] + 2 * tolerance).nonzero().flatten()[None]
        order = _exact_distances(distances, block[number : number + 1], candidates).argsort(dim=1, stable=True)[:, :k]
        result[number] = candidates.gather(1, order)[0]
    return result


def _exact_distances(distances: FeatureDistances, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the (n, c) squared distances of n queries to c gallery features each, in float64."""
    rows = rows.repeat_interleave(columns.shape[1])
    exact = pair_distances(distances.queries, distances.gallery, rows, columns.reshape(-1), dtype=torch.float64)
    return exact.view(columns.shape)


def pair_distances(
    x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the squared Euclidean distance of pairs of features, which no blocking rounds differently.

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
    size = min(_PAIRS, len(rows))
    some_x, some_y = x.new_empty(size, x.shape[1]), y.new_empty(size, y.shape[1])
    result = torch.empty(len(rows), dtype=dtype, device=x.device)
    for first in range(0, len(rows), _PAIRS):
        part = slice(first, min(first + _PAIRS, len(rows)))
        count = part.stop - first
        torch.index_select(x, 0, rows[part], out=some_x[:count])
        torch.index_select(y, 0, columns[part], out=some_y[:count])
        result[part] = squared_norms(some_x[:count].to(dtype).sub_(some_y[:count]))
    return result
