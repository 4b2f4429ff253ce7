"""CMC, mAP and mINP under the Market-1501 rule, as pure functions of features or distances."""

from dataclasses import dataclass

import torch

from fastamp.layers.distance import check_metric, pairwise_distance, squared_euclidean_distance
from fastamp.utils.errors import DataError


@dataclass(frozen=True)
class RankingResult:
    """Per-query results of a ranking, in query order.

    Attributes:
        ap: (Q,) float64, average precision in 0..1; 0 where not ``valid``.
        inp: (Q,) float64, inverse negative penalty in 0..1: the number of matches over the rank of the last one
            (Ye et al. 2021, arXiv:2001.04193, eq. 8); 0 where not ``valid``.
        first_match: (Q,) int64, rank of the first match from 0, junk left out; -1 where not ``valid``.
        valid: (Q,) bool, whether the query has a match; the others take no part in the means.
    """

    ap: torch.Tensor
    inp: torch.Tensor
    first_match: torch.Tensor
    valid: torch.Tensor

    @property
    def num_valid(self) -> int:
        """The number of queries that have a match."""
        return int(self.valid.sum())

    @property
    def mean_ap(self) -> float:
        """mAP in 0..1."""
        return self.ap[self.valid].mean().item()

    @property
    def mean_inp(self) -> float:
        """mINP in 0..1."""
        return self.inp[self.valid].mean().item()

    def cmc(self, rank: int) -> float:
        """Return the share of the valid queries that have a match among their first ``rank`` (from 1) images."""
        return (self.first_match[self.valid] < rank).double().mean().item()


@dataclass(frozen=True)
class Identities:
    """Who is on the query and gallery images: (Q,), (G,), (Q,), (G,) int64."""

    query_pids: torch.Tensor
    gallery_pids: torch.Tensor
    query_camids: torch.Tensor
    gallery_camids: torch.Tensor


def rank_distances(distances: torch.Tensor, ids: Identities) -> RankingResult:
    """Rank the gallery for each query by distance and judge it under the Market-1501 rule.

    Gallery images of the query's identity from the query's own camera are junk and left out (Zheng et al. 2015).
    Equal distances keep the gallery's order, so that the result does not depend on the sort. The AP is the mean of
    the precisions at the matches, as everybody reports it today.

    Args:
        distances: (Q, G) float.
        ids: of Q queries and G gallery images.

    Returns:
        Per-query results on the CPU.
    """
    order = torch.argsort(distances, dim=1, stable=True)
    same_pid = ids.query_pids[:, None] == ids.gallery_pids[None, :]
    junk = same_pid & (ids.query_camids[:, None] == ids.gallery_camids[None, :])
    match = (same_pid & ~junk).to(order.device).gather(1, order)
    kept = (~junk).to(order.device).gather(1, order)
    rank = kept.cumsum(1)  # from 1, junk left out
    found = match.cumsum(1)  # matches up to here
    count = match.sum(1)
    valid = count > 0
    precision = torch.where(match, found.double() / rank.clamp(min=1), 0.0)
    last_rank = torch.where(match, rank, 0).amax(1)
    first = torch.where(match, rank, rank.shape[1] + 1).amin(1) - 1
    divisor = count.clamp(min=1)
    return RankingResult(
        ap=(precision.sum(1) / divisor).cpu(),
        inp=torch.where(valid, count.double() / last_rank.clamp(min=1), 0.0).cpu(),
        first_match=torch.where(valid, first, -1).cpu(),
        valid=valid.cpu(),
    )


def rank_features(
    query_features: torch.Tensor,
    gallery_features: torch.Tensor,
    ids: Identities,
    *,
    metric: str = "cosine",
    block_elements: int = 4_000_000,
) -> RankingResult:
    """Rank the gallery for each query by the distance of their features, a block of queries at a time.

    Args:
        query_features: (Q, D) float, any precision.
        gallery_features: (G, D) float.
        ids: of the Q and G images.
        metric: see ``pairwise_distance``; distances are float32.
        block_elements: distances held at once.

    Raises:
        ConfigError: unknown metric.
        DataError: query or gallery is empty, shapes do not fit, or a feature is not finite.
    """
    check_metric(metric)
    _check(query_features, gallery_features, ids)
    rows = max(1, block_elements // len(gallery_features))
    parts = []
    for start in range(0, len(query_features), rows):
        block = slice(start, start + rows)
        if metric == "euclidean":
            # Same order; a float32 square root would make ties of distances that differ.
            distances = squared_euclidean_distance(query_features[block], gallery_features)
        else:
            distances = pairwise_distance(query_features[block], gallery_features, metric)
        parts.append(
            rank_distances(
                distances,
                Identities(ids.query_pids[block], ids.gallery_pids, ids.query_camids[block], ids.gallery_camids),
            )
        )
    return RankingResult(
        *(torch.cat([getattr(part, name) for part in parts]) for name in ("ap", "inp", "first_match", "valid"))
    )


def _check(query_features: torch.Tensor, gallery_features: torch.Tensor, ids: Identities) -> None:
    for name, features, pids, camids in (
        ("query", query_features, ids.query_pids, ids.query_camids),
        ("gallery", gallery_features, ids.gallery_pids, ids.gallery_camids),
    ):
        if len(features) == 0:
            raise DataError(f"the {name} set is empty: there is nothing to rank")
        if features.dim() != 2 or not len(features) == len(pids) == len(camids):
            raise DataError(
                f"{name}: features {tuple(features.shape)}, {len(pids)} identities and {len(camids)} cameras "
                "do not fit; expected (N, D) features and N of each"
            )
        bad = (~torch.isfinite(features).all(1)).nonzero().flatten().tolist()
        if bad:
            raise DataError(
                f"{len(bad)} of {len(features)} {name} features are NaN or infinite (the first: number "
                f"{', '.join(map(str, bad[:5]))} of the {name} set): they cannot be ranked.\n"
                "  cause: the training diverged, weights or normalization buffers are damaged, or float16 overflows.\n"
                "  fix: a lower SOLVER.BASE_LR or an earlier checkpoint; under float16, SOLVER.AMP.EVAL_DTYPE float32"
            )
    if query_features.shape[1] != gallery_features.shape[1]:
        raise DataError(
            f"query features are {query_features.shape[1]} wide, gallery features {gallery_features.shape[1]}: "
            "they are of two models"
        )
