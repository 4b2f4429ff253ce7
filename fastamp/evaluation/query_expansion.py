"""Query expansion: replace each feature by a weighted mean of its nearest neighbors."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fastamp.amp.tf32 import without_tf32
from fastamp.config import CfgNode
from fastamp.evaluation.neighbors import nearest_neighbors
from fastamp.utils.errors import ConfigError, check_choice

TARGETS = ("both", "query", "gallery")
# Number of features whose neighbors are gathered at once.
_BLOCK_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class QueryExpansion:
    """Settings of alpha-weighted query expansion (alpha-QE).

    Attributes:
        k: number of features in each mean, including the feature to expand. Default: 5.
        alpha: exponent of the cosine similarity in the weight of a neighbor. Default: 3; with 0, all weights are equal.
        times: number of rounds; each round expands the result of the previous round. Default: 1.
        target: features to expand. ``"both"`` (default), as in FastReID: queries and gallery, with neighbors from both.
            ``"query"``: only queries, with neighbors from the gallery. ``"gallery"``: only the gallery, with neighbors
            from the gallery. With ``"query"`` and ``"gallery"``, the result for a query does not depend on other
            queries.

    Raises:
        ConfigError: if a value is unknown or out of range.
    """

    k: int = 5
    alpha: float = 3.0
    times: int = 1
    target: str = "both"

    def __post_init__(self) -> None:
        check_choice("TEST.AQE.TARGET", self.target, TARGETS)
        if min(self.k, self.times) < 1:
            raise ConfigError(
                f"TEST.AQE: QE_K and QE_TIME must be at least 1; got QE_K={self.k} and QE_TIME={self.times}.\n"
                "  fix: set them to at least 1; TEST.AQE.ENABLED False disables query expansion"
            )

    @classmethod
    def from_config(cls, cfg: CfgNode) -> "QueryExpansion":
        """Build the settings from ``cfg.TEST.AQE``."""
        keys = cfg.TEST.AQE
        return cls(k=keys.QE_K, alpha=keys.ALPHA, times=keys.QE_TIME, target=keys.TARGET)

    def __str__(self) -> str:
        targets = {"both": "queries and gallery", "query": "queries", "gallery": "gallery"}
        return f"expansion of {targets[self.target]} (k {self.k}, alpha {self.alpha:g}, {self.times} x)"


@without_tf32()
def expand(
    query_features: torch.Tensor,
    gallery_features: torch.Tensor,
    options: QueryExpansion,
    *,
    backend: str = "auto",
    memory_budget_mb: float = 256,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand query and gallery features.

    Each feature is replaced by the mean of its nearest neighbors, each multiplied by its cosine similarity to the power
    of alpha (Radenovic et al. 2019, arXiv:1711.02512, section 3.3; Chum et al. 2007 for alpha 0). Features are not
    normalized before the mean. Negative similarities have weight 0, except if alpha is a non-negative integer.

    Args:
        query_features: (Q, D) float, any precision; converted to float32.
        gallery_features: (G, D) float, on the same device.
        options: settings of the expansion.
        backend: backend of ``nearest_neighbors``. Default: ``"auto"``.
        memory_budget_mb: memory for distances in MiB. Default: 256.

    Returns:
        Expanded (Q, D) query and (G, D) gallery features, float32.

    Raises:
        ConfigError: if the weights overflow.
    """
    query_features, gallery_features = query_features.float(), gallery_features.float()
    search: dict[str, Any] = {"backend": backend, "memory_budget_mb": memory_budget_mb}
    for _ in range(options.times):
        if options.target == "both":
            union = torch.cat((query_features, gallery_features))
            expanded = _expand(union, union, options, **search)
            query_features, gallery_features = expanded[: len(query_features)], expanded[len(query_features) :]
        elif options.target == "query":
            query_features = _expand(query_features, gallery_features, options, with_itself=True, **search)
        else:
            gallery_features = _expand(gallery_features, gallery_features, options, **search)
        if not all(
            torch.isfinite(torch.stack(torch.aminmax(side))).all() for side in (query_features, gallery_features)
        ):
            raise ConfigError(
                f"TEST.AQE.ALPHA {options.alpha:g} is out of range: similarities raised to this power overflow in "
                "float32.\n"
                "  fix: reduce the absolute value of TEST.AQE.ALPHA"
            )
    return query_features, gallery_features


def _expand(
    features: torch.Tensor, pool: torch.Tensor, options: QueryExpansion, *, with_itself: bool = False, **search: Any
) -> torch.Tensor:
    """Expand (N, D) features with neighbors from ``pool``; ``with_itself`` adds each feature to its own mean."""
    unit = F.normalize(features, dim=1)
    unit_pool = unit if pool is features else F.normalize(pool, dim=1)
    neighbors = nearest_neighbors(unit, unit_pool, options.k - with_itself, **search).indices
    nearest = torch.from_numpy(neighbors).to(features.device)
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
