"""Query expansion: replace a feature by a weighted mean of its nearest neighbours."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fastamp.evaluation.neighbors import nearest_neighbors
from fastamp.layers.distance import without_tf32
from fastamp.utils.errors import ConfigError, check_choice
from fastamp.utils.moved import moved_names, renamed_arguments, renamed_attribute

__getattr__ = moved_names(
    __name__,
    {
        "SIDES": "fastamp.evaluation.query_expansion.TARGETS",
    },
)

TARGETS = ("both", "query", "gallery")
# Features whose neighbours are held at once.
_BLOCK_ROWS = 64


@renamed_arguments(sides="target")
@dataclass(frozen=True, kw_only=True)
class QueryExpansion:
    """How to expand.

    Attributes:
        k: features in the mean, the expanded one itself among them.
        alpha: exponent of the cosine similarity that weighs a neighbour; 0 weighs all alike.
        times: rounds, each on the features of the one before.
        target: what is expanded. ``"both"`` is FastReID's: neighbours are sought among queries and gallery together.
            ``"query"`` expands the queries, by the query itself and the gallery; ``"gallery"`` the gallery, by the
            gallery. Then no query depends on another query.

    Raises:
        ConfigError: a value that is not among these.
    """

    k: int = 5
    alpha: float = 3.0
    times: int = 1
    target: str = "both"
    sides = renamed_attribute("sides", "target")

    def __post_init__(self) -> None:
        check_choice("TEST.AQE.TARGET", self.target, TARGETS)
        if min(self.k, self.times) < 1:
            raise ConfigError(f"TEST.AQE: QE_K {self.k} and QE_TIME {self.times} must be at least 1")

    @classmethod
    def from_config(cls, cfg: Any) -> "QueryExpansion":
        """Return what ``cfg.TEST.AQE`` describes."""
        keys = cfg.TEST.AQE
        return cls(k=keys.QE_K, alpha=keys.ALPHA, times=keys.QE_TIME, target=keys.TARGET)

    def __str__(self) -> str:
        targets = {"both": "queries and gallery", "query": "queries", "gallery": "gallery"}
        return f"expansion of {targets[self.target]} (k {self.k}, alpha {self.alpha:g}, {self.times} x)"


@renamed_arguments(queries="query_features", gallery="gallery_features")
@without_tf32()
def expand(
    query_features: torch.Tensor,
    gallery_features: torch.Tensor,
    options: QueryExpansion,
    *,
    backend: str = "auto",
    memory_budget_mb: float = 256,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return new features of queries and gallery.

    The mean is of the features as they are, weighed by the cosine similarities to the power of alpha (Radenovic et al.
    2019, arXiv:1711.02512, section 3.3; Chum et al. 2007 for alpha 0). A negative similarity weighs nothing, unless
    alpha is a whole number from 0 on.

    Args:
        query_features: (Q, D) float, any precision; computed in float32.
        gallery_features: (G, D) float, on the same device.
        options: the kind of expansion.
        backend: of the neighbour search, see ``nearest_neighbors``.
        memory_budget_mb: MiB of distances held at once.

    Returns:
        (Q, D) and (G, D) float32.

    Raises:
        ConfigError: the weights overflow.
    """
    query_features, gallery_features = query_features.float(), gallery_features.float()
    search = {"backend": backend, "memory_budget_mb": memory_budget_mb}
    for _ in range(options.times):
        if options.target == "both":
            union = torch.cat((query_features, gallery_features))
            expanded = _expand(union, union, options, search)
            query_features, gallery_features = expanded[: len(query_features)], expanded[len(query_features) :]
        elif options.target == "query":
            query_features = _expand(query_features, gallery_features, options, search, with_itself=True)
        else:
            gallery_features = _expand(gallery_features, gallery_features, options, search)
        if not all(
            torch.isfinite(torch.stack(torch.aminmax(side))).all() for side in (query_features, gallery_features)
        ):
            raise ConfigError(f"TEST.AQE.ALPHA {options.alpha:g}: similarities to this power overflow in float32")
    return query_features, gallery_features


def _expand(
    features: torch.Tensor, pool: torch.Tensor, options: QueryExpansion, search: dict, *, with_itself: bool = False
) -> torch.Tensor:
    """Return (N, D): the weighted mean of each feature's nearest in the pool, and of itself where it is not there."""
    unit = F.normalize(features, dim=1)
    unit_pool = unit if pool is features else F.normalize(pool, dim=1)
    found = nearest_neighbors(unit, unit_pool, options.k - with_itself, **search).indices
    nearest = torch.from_numpy(found).to(features.device)
    size = nearest.shape[1] + with_itself
    result = torch.empty_like(features)
    for rows in torch.arange(len(features), device=features.device).split(_BLOCK_ROWS):
        indices = nearest[rows]
        weights = _power(torch.einsum("nd,nkd->nk", unit[rows], unit_pool[indices]), options.alpha)
        mean = torch.einsum("nk,nkd->nd", weights, pool[indices])
        if with_itself:
            mean += features[rows]
        result[rows] = mean / size
    return result


def _power(similarities: torch.Tensor, alpha: float) -> torch.Tensor:
    similarities = similarities.clamp(-1, 1)
    if float(alpha).is_integer() and alpha >= 0:
        return similarities**alpha
    return torch.where(similarities > 0, similarities.clamp_min(1e-12) ** alpha, 0.0)
