"""Query expansion: replace a feature by a weighted mean of its nearest neighbours."""

from dataclasses import dataclass

import torch

from fastamp.evaluation.neighbours import nearest_neighbours
from fastamp.layers.distance import squared_norms

SIDES = ("both", "query", "gallery")
# Features whose neighbours are held at once.
_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class QueryExpansion:
    """How to expand.

    Attributes:
        k: features in the mean, the expanded one itself among them.
        alpha: exponent of the cosine similarity that weighs a neighbour; 0 weighs all alike.
        times: rounds, each on the features of the one before.
        sides: what is expanded. ``"both"`` is FastReID's: neighbours are sought among queries and gallery together.
            ``"query"`` expands the queries, by the query itself and the gallery; ``"gallery"`` the gallery, by the
            gallery. Then no query depends on another query.
    """

    k: int = 5
    alpha: float = 3.0
    times: int = 1
    sides: str = "both"

    def __str__(self) -> str:
        what = "queries and gallery" if self.sides == "both" else {"query": "queries"}.get(self.sides, self.sides)
        return f"expansion of {what} (k {self.k}, alpha {self.alpha:g}, {self.times} x)"


def expand(
    queries: torch.Tensor,
    gallery: torch.Tensor,
    options: QueryExpansion,
    *,
    backend: str = "auto",
    memory_budget_mb: float = 256,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return new features of queries and gallery.

    The mean is of the features as they are, weighed by the cosine similarities to the power of alpha (Radenovic et al.
    2019, arXiv:1711.02512, section 3.3; Chum et al. 2007 for alpha 0). A negative similarity under a power that is not
    whole weighs nothing.

    Args:
        queries: (Q, D) float, any precision; computed in float32.
        gallery: (G, D) float, on the same device.
        options: the kind of expansion.
        backend: of the neighbour search, see ``nearest_neighbours``.
        memory_budget_mb: MiB of distances held at once.

    Returns:
        (Q, D) and (G, D) float32.
    """
    queries, gallery = queries.float(), gallery.float()
    search = {"backend": backend, "memory_budget_mb": memory_budget_mb}
    for _ in range(options.times):
        if options.sides == "both":
            union = torch.cat((queries, gallery))
            expanded = _expand(union, union, options, search)
            queries, gallery = expanded[: len(queries)], expanded[len(queries) :]
        elif options.sides == "query":
            queries = _expand(queries, gallery, options, search, with_itself=True)
        else:
            gallery = _expand(gallery, gallery, options, search)
    return queries, gallery


def _expand(
    features: torch.Tensor, pool: torch.Tensor, options: QueryExpansion, search: dict, *, with_itself: bool = False
) -> torch.Tensor:
    """Return (N, D): the weighted mean of each feature's nearest in the pool, and of itself where it is not there."""
    unit = _normalized(features)
    unit_pool = unit if pool is features else _normalized(pool)
    found = nearest_neighbours(unit, unit_pool, options.k - with_itself, **search).indices
    nearest = torch.from_numpy(found).to(features.device)
    size = nearest.shape[1] + with_itself
    result = torch.empty_like(features)
    for rows in torch.arange(len(features), device=features.device).split(_ROWS):
        near = nearest[rows]
        weights = _power(torch.einsum("nd,nkd->nk", unit[rows], unit_pool[near]), options.alpha)
        mean = torch.einsum("nk,nkd->nd", weights, pool[near])
        if with_itself:
            mean += features[rows]
        result[rows] = mean / size
    return result


def _normalized(features: torch.Tensor) -> torch.Tensor:
    return features / squared_norms(features).sqrt().clamp_min(1e-12)[:, None]


def _power(similarities: torch.Tensor, alpha: float) -> torch.Tensor:
    if float(alpha).is_integer() and alpha >= 0:
        return similarities ** int(alpha)
    return torch.where(similarities > 0, similarities.clamp_min(1e-12) ** alpha, 0.0)
