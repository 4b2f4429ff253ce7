"""Exact nearest neighbors by lower bounds from projections: most pairs are excluded without their full distance.

Rotated to its principal axes, a feature is a head of d values and a rest, of which only the norm r is kept. The squared
distance between two (head, r) is a lower bound of that between the features (Cauchy-Schwarz), and needs d + 1 products
instead of D. Features whose lower bound exceeds the exact distances of enough others need no further work.
"""

from collections.abc import Iterator

import torch

from fastamp.layers.distance import FeatureDistances, matrix_product, squared_norms

# Smaller searches do not repay the projection.
MIN_GALLERY = 100_000
# The axes contain this fraction of the squared norms of the features, and are at most D / 4; with a rest of more than
# _LARGEST_REST at D / 4, the bounds exclude too few pairs.
_HEAD, _WIDEST, _LARGEST_REST = 0.99, 4, 0.03
# Images from which the principal axes are computed; any orthonormal axes give exact neighbors.
_SAMPLE = 8192
# Images that are projected at once.
_ROWS = 1024
# Candidates by lower bound for each neighbor. If more are needed, all distances of the query are computed.
_CANDIDATES = 8
# Columns of which first only the minimum is looked at.
_GROUP = 64


def principal_axes(features: torch.Tensor) -> torch.Tensor | None:
    """Compute the principal axes of features whose mean is near 0, from a sample.

    Args:
        features: (N, D) float32.

    Returns:
        (D, d) float32, orthonormal; None if no d up to D / 4 gives useful lower bounds.
    """
    sample = features[:: -(-len(features) // _SAMPLE)].double()
    values, vectors = torch.linalg.eigh(sample.t() @ sample)
    fractions = values.flip(0).clamp_min(0).cumsum(0) / values.clamp_min(0).sum().clamp_min(1e-300)
    width = min(int((fractions < _HEAD).sum()) + 1, features.shape[1] // _WIDEST)
    if width == 0 or fractions[width - 1] < 1 - _LARGEST_REST:
        return None
    axes: torch.Tensor = vectors.flip(1)[:, :width].float().contiguous()
    return axes


def project(features: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
    """Project (N, D) features to their d values along ``axes`` and the norm of the rest: (N, d + 1) float32.

    Distances between projections are at most those between the features.
    """
    width = axes.shape[1]
    projected = features.new_empty(len(features), width + 1)
    for first in range(0, len(features), _ROWS):
        part = features[first : first + _ROWS]
        head, rest = part.new_empty(len(part), width), torch.empty_like(part)
        matrix_product(part, axes.t(), head)
        # The norm of the difference; the difference of the squared norms would be less exact.
        matrix_product(head, axes, rest)
        projected[first : first + _ROWS, :width] = head
        projected[first : first + _ROWS, width] = (part - rest).norm(dim=1)
    return projected


def projected_candidates(
    distances: FeatureDistances, axes: torch.Tensor, count: int, start: int, stop: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Find the nearest gallery features of queries ``start`` to ``stop`` (exclusive), up to rounding errors.

    Args:
        distances: squared Euclidean distances, on the CPU.
        axes: result of ``principal_axes``.
        count: number of features to find, at most that of the gallery.
        start, stop: range of queries.

    Yields:
        Query indices (B,) int64; gallery indices of the nearest features (B, count) int64; their squared distances (B,
        count) float32, ascending.
    """
    queries, gallery = distances.query_features, distances.gallery_features
    bounds = FeatureDistances(
        project(queries[start:stop], axes),
        project(gallery, axes),
        metric="euclidean",
        memory_budget_mb=distances.memory_budget_mb,
    )
    for first, block in bounds.blocks():
        rows = torch.arange(start + first, start + first + len(block))
        bound, candidates = smallest(block, min(_CANDIDATES * count, len(gallery)))
        values = _squared_distances(distances, rows, candidates[:, :count])
        limit = values.amax(1)
        needed = (bound <= (limit + _rounding(distances, rows, limit))[:, None]).sum(1)
        is_complete = needed < bound.shape[1] if bound.shape[1] < len(gallery) else torch.ones_like(needed).bool()
        complete, others = is_complete.nonzero().flatten(), (~is_complete).nonzero().flatten()
        nearest = candidates[:, :count].clone()
        if len(complete):
            last = max(count, int(needed[complete].max()))
            more = _squared_distances(distances, rows[complete], candidates[complete, count:last])
            values[complete], order = torch.cat((values[complete], more), dim=1).topk(count, dim=1, largest=False)
            nearest[complete] = candidates[complete].gather(1, order)
        if len(others):
            full = FeatureDistances(queries[rows[others]], gallery, metric="euclidean")
            full.rows(0, len(others), block[: len(others)])
            values[others], nearest[others] = smallest(block[: len(others)], count)
        yield rows, nearest, values


def smallest(block: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``count`` smallest values of each row of (B, G), ascending, and their columns (B, count) int64.

    They are in the ``count`` groups of columns with the smallest minima, which are found faster.
    """
    groups = block.shape[1] // _GROUP
    if groups < 4 * count:
        values, columns = torch.topk(block, count, dim=1, largest=False)
        return values, columns
    whole = groups * _GROUP
    chosen = block[:, :whole].view(len(block), groups, _GROUP).amin(2).topk(count, dim=1, largest=False).indices
    inside = (chosen[:, :, None] * _GROUP + torch.arange(_GROUP)).flatten(1)
    rest = torch.arange(whole, block.shape[1]).expand(len(block), -1)
    columns = torch.cat((inside, rest), dim=1)
    values, order = torch.topk(block.gather(1, columns), count, dim=1, largest=False)
    return values, columns.gather(1, order)


def _squared_distances(distances: FeatureDistances, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Compute the squared distances (B, c) of queries (B,) to gallery features (B, c)."""
    queries = distances.query_features[rows]
    values = distances.gallery_squares[columns] + squared_norms(queries)[:, None]
    # Chunks that fit into the CPU cache.
    size = max(1, 2**20 // max(1, columns.shape[1] * queries.shape[1]))
    for first in range(0, len(rows), size):
        part = slice(first, first + size)
        values[part] -= 2 * torch.bmm(distances.gallery_features[columns[part]], queries[part, :, None])[:, :, 0]
    return values.clamp_min_(0)


def _rounding(distances: FeatureDistances, rows: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Bound the rounding errors of distances and lower bounds that are up to ``limit`` (B,)."""
    # The squared norm of a feature at this distance is at most twice that of the query plus twice ``limit``.
    norms = 3 * squared_norms(distances.query_features[rows]) + 2 * limit
    rounding: torch.Tensor = norms * (4 * torch.finfo(torch.float32).eps * distances.query_features.shape[1] ** 0.5)
    return rounding
