"""Predictions of identities for the protocols of animals: the identity of the nearest image, or *new*.

BAKS, BAUS and the AUC are those of ``identification``; the threshold is chosen on identities that are neither in the
training set nor in the test.
"""

from typing import Any

import numpy as np
import torch

from fastamp.evaluation import identification
from fastamp.evaluation.identities import Identities
from fastamp.evaluation.rank import MISS, RankingResult
from fastamp.evaluation.ranking_rule import Ranker, RankingRule
from fastamp.utils.errors import DataError

# Columns of ``RankingResult.extra``.
_PID, _PREDICTED, _SIMILARITY, _OTHER, _KNOWN, _VALIDATION = range(6)


class AnimalRanker(Ranker):
    """Ranker that also records the nearest image of each query.

    ``RankingResult.extra`` has the columns identity, identity of the nearest image, similarity of the nearest image and
    of the nearest image of another identity (minus infinity if there is none), 1 if the database has an image of the
    identity, and 1 for validation. Validation queries do not count for CMC and mAP.

    Args:
        identities: identities and columns of the images.
        rule: rule, whose junk is the gallery images that a query does not search.
        metric: metric of the distances.
        validation: column of the validation identities, whose gallery images test queries do not search; "" for none.
        missing_is_wrong: if True, a query without a match counts as wrong in CMC and mAP, as in MiewID, instead of
            being excluded.
    """

    num_extra = 6

    def __init__(
        self, identities: Identities, rule: RankingRule, *, metric: str, validation: str, missing_is_wrong: bool
    ) -> None:
        super().__init__(identities, rule)
        self.offset = 1.0 if metric == "cosine" else 0.0
        self.validation = np.zeros(len(self.matches.query_pids), dtype=bool)
        if validation:
            self.validation = self.matches.query_columns[validation] > 0
            self.num_gallery -= int((self.matches.gallery_columns[validation] > 0).sum())
        self.missing_is_wrong = missing_is_wrong

    def rank(self, start: int, distances: torch.Tensor) -> tuple[np.ndarray, ...]:
        """Rank the gallery, see ``Ranker.rank``; also return the extra columns, (B, 6) float64."""
        ap, inp, first_match = super().rank(start, distances)
        pids = self.matches.query_pids[start : start + len(distances)]
        validation = self.validation[start : start + len(distances)]
        searched = distances.nan_to_num(nan=torch.inf)
        same = torch.from_numpy(pids[:, None] == self.matches.gallery_pids).to(distances.device)
        nearest, other = searched.amin(1), searched.masked_fill(same, torch.inf).amin(1)
        # Of equally near images, the first in the gallery, as in the ranking.
        first = (searched == nearest[:, None]).to(torch.uint8).argmax(1)
        predicted, known = self.matches.gallery_pids[first.cpu().numpy()], first_match[:, 0] >= 0
        similarities = (self.offset - side.double().cpu().numpy() for side in (nearest, other))
        extra = np.stack((pids, predicted, *similarities, known, validation), axis=1)
        if self.missing_is_wrong:
            first_match[first_match < 0] = MISS
        ap[validation], inp[validation], first_match[validation] = 0, 0, -1
        return ap, inp, first_match, extra


def choose_threshold(ranking: RankingResult) -> float:
    """Choose the similarity below which a query is *new*, so that the geometric mean of BAKS and BAUS is largest.

    Each validation query is a known animal once, and an unknown one once: without the images of its identity.

    Returns:
        The middle of the range of the best thresholds, which lie between two of the similarities.

    Raises:
        DataError: if no validation query is known.
    """
    rows = _extra(ranking)
    rows = rows[rows[:, _VALIDATION] > 0]
    similarities, others, pids = rows[:, _SIMILARITY], rows[:, _OTHER], rows[:, _PID].astype(np.int64)
    right, known = rows[:, _PID] == rows[:, _PREDICTED], rows[:, _KNOWN] > 0
    if not known.any():
        raise DataError(
            f"the threshold for new animals cannot be chosen: none of the {len(known)} validation queries, whose value "
            "in the column of TEST.ANIMALS.VALIDATION is 1, has an image of its identity in the gallery.\n"
            "  fix: hold out identities with fastamp split --validation, or set TEST.ANIMALS.THRESHOLD"
        )
    accepted = similarities[known & right]
    accepted_weights = (_class_weights(pids[known]))[right[known]]
    values = np.unique(np.concatenate((accepted, others)))
    values = values[np.isfinite(values)]
    candidates = np.concatenate((values[:1] - 1, (values[:-1] + values[1:]) / 2, values[-1:] + 1))
    baks = accepted_weights.sum() - _cumulative(accepted, accepted_weights, candidates)
    baus = _cumulative(others, _class_weights(pids), candidates)
    scores = np.sqrt(baks.clip(0) * baus)
    best = np.flatnonzero(scores >= scores.max() - 1e-12)
    # The first run of equally good candidates; another one may lie elsewhere.
    best = best[: int(np.argmax(np.append(np.diff(best) > 1, True))) + 1]
    return float(candidates[best[len(best) // 2]])


def _class_weights(pids: np.ndarray) -> np.ndarray:
    """Return the weight of each image in the mean over identities of the mean over the images of an identity."""
    _, inverse, counts = np.unique(pids, return_inverse=True, return_counts=True)
    return np.asarray(1 / (counts[inverse] * len(counts)))


def _cumulative(scores: np.ndarray, weights: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return the sum of the weights of the scores below each threshold."""
    order = np.argsort(scores)
    sums = np.concatenate(([0.0], np.cumsum(weights[order])))
    return np.asarray(sums[np.searchsorted(scores[order], thresholds, side="left")])


def identification_metrics(
    ranking: RankingResult, every: RankingResult, *, threshold: float | None, has_new: bool
) -> dict[str, Any]:
    """Compute BAKS, BAUS, their geometric mean and the AUC of new animals, in percent.

    Args:
        ranking: queries of a group, or all queries.
        every: all queries, on whose validation queries the threshold is chosen if it is None.
        threshold: similarity below which a query is new; None chooses it.
        has_new: if False, no query is called new, and only BAKS is computed.

    Returns:
        Name -> value. Metrics that are not defined, e.g. BAUS without unknown animals, are listed in ``not_defined``.
    """
    rows = _extra(ranking)
    test = rows[rows[:, _VALIDATION] == 0]
    pids, predicted = test[:, _PID].astype(np.int64), test[:, _PREDICTED].astype(np.int64)
    called_new = np.isneginf(test[:, _SIMILARITY])  # the database has no image
    held_out = num_validation(ranking)
    metrics: dict[str, Any] = {"num_validation": held_out} if held_out else {}
    if has_new:
        threshold = choose_threshold(every) if threshold is None else threshold
        called_new |= test[:, _SIMILARITY] < threshold
        metrics["new_threshold"] = {"similarity": threshold}
    known = test[:, _KNOWN] > 0
    unknown = set(pids[~known].tolist()) - set(pids[known].tolist())
    labels = [identification.NEW if new else pid for new, pid in zip(called_new, predicted.tolist(), strict=True)]
    values = {"BAKS": identification.baks(pids, labels, unknown)}
    if has_new:
        values["BAUS"] = identification.baus(pids, labels, unknown)
        values["BAKS-BAUS"] = identification.geometric_mean(values["BAKS"], values["BAUS"])
        values["AUC-new"] = identification.auc_new([pid in unknown for pid in pids.tolist()], test[:, _SIMILARITY])
    metrics |= {name: 100 * value for name, value in values.items() if not np.isnan(value)}
    missing = [name for name, value in values.items() if np.isnan(value)]
    return metrics | ({"not_defined": missing} if missing else {})


def _extra(ranking: RankingResult) -> np.ndarray:
    assert ranking.extra is not None
    return np.asarray(ranking.extra.numpy())


def num_validation(ranking: RankingResult) -> int:
    """Count the validation queries."""
    return int(_extra(ranking)[:, _VALIDATION].sum())
