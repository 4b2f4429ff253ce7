"""Search of a gallery: the nearest images of features, or the best scores, and decisions on unknown identities."""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from fastamp.evaluation.calibration import Calibration
from fastamp.retrieval.columns import ImageColumns
from fastamp.retrieval.gallery import Conditions, Gallery
from fastamp.retrieval.vectors import as_features, normalized
from fastamp.utils.errors import ConfigError

logger = logging.getLogger(__name__)

# A gallery this many times as large as that of the calibration causes a warning.
_MUCH_LARGER = 2


@dataclass(frozen=True)
class Decision:
    """Decisions of a calibrated model on a search.

    Attributes:
        known: (Q,) bool, True if the nearest gallery image is accepted, False if the identity of the query is unknown.
        threshold: score from which the nearest gallery image is accepted.
        fpir: expected false-positive identification rate in 0..1 with this gallery, see ``Calibration.expected_fpir``.
        probabilities: (Q, k) float64, probability in 0..1 of the same identity at a prior of 0.5.
    """

    known: np.ndarray
    threshold: float
    fpir: float
    probabilities: np.ndarray

    def of_query(self, query: int) -> dict[str, Any]:
        """Return the decision on one query, ``match`` or ``unknown``, with the threshold and the rate."""
        known = "match" if self.known[query] else "unknown"
        return {"decision": known, "threshold": self.threshold, "fpir": self.fpir}


@dataclass(frozen=True)
class SearchResult:
    """The k nearest gallery images for each of Q queries, nearest first.

    Attributes:
        scores: (Q, k) float32, cosine similarities in -1..1, Euclidean distances, or scores of search terms in 0..1.
        rows: (Q, k) int64, indices in the gallery.
        images: columns (Q, k) of the images.
        metric: ``"cosine"``, ``"euclidean"`` or the names of search terms.
        searched: number of gallery images that the queries were compared with.
        decision: decisions of a calibrated model, see ``decide``. Default: None.
    """

    scores: np.ndarray
    rows: np.ndarray
    images: ImageColumns
    metric: str
    searched: int
    decision: Decision | None = None


def search(
    features: Tensor | np.ndarray,
    gallery: Gallery,
    k: int = 10,
    *,
    effort: int | None = None,
    exact: bool = False,
    where: Conditions | np.ndarray | None = None,
) -> SearchResult:
    """Search for the nearest gallery images.

    The scores are always those of an exact comparison, also of the images that an index proposes.

    Args:
        features: (Q, D) float, features from the model of the gallery, not normalized.
        gallery: gallery to search.
        k: number of results per query; limited to the number of images. Default: 10.
        effort: number of lists to search for ``ivf`` and ``ivfpq`` (nprobe), or number of candidates for ``hnsw``
            (efSearch); larger values increase recall and search time. Default: that of the index,
            with which its recall was measured.
        exact: if True, compare with all images, regardless of the kind of index. Default: False.
        where: conditions on the images to compare with, or their rows (M,) int64; the comparison is exact.
            Default: None, all images.

    Raises:
        ConfigError: if ``k`` or ``effort`` is below 1, or the gallery has no values for a condition.
        DataError: if the features have a wrong dimension or are not finite.
    """
    _check_positive(k, effort)
    with gallery.reading():
        queries = normalized(as_features(features, gallery.model.width), gallery.model.metric)
        if isinstance(where, Conditions):
            where = gallery.rows_where(where) if where else None
        searched = len(gallery) if where is None else len(where)
        k = min(k, searched)
        if exact or where is not None or gallery.index is None:
            scores, found = gallery.vectors.nearest(queries, k, where)
        else:
            proposed = gallery.index.propose(queries, k, effort or gallery.index.effort)
            scores, found = gallery.vectors.nearest_of(queries, k, proposed)
        return SearchResult(scores, found, gallery.columns_of(found), gallery.model.metric, searched)


def search_by_scores(
    scores: np.ndarray, gallery: Gallery, k: int = 10, *, metric: str, rows: np.ndarray | None = None
) -> SearchResult:
    """Rank gallery images by given scores, such as the probability of an attribute.

    Args:
        scores: (N,) float, larger for better images.
        gallery: gallery to search.
        k: number of results; limited to the number of images. Default: 10.
        metric: name of the scores.
        rows: (M,) int64, images to rank. Default: None, all images.

    Returns:
        Result of one query.

    Raises:
        ConfigError: if ``k`` is below 1.
    """
    _check_positive(k, None)
    rows = np.arange(len(scores)) if rows is None else rows
    found = rows[np.argsort(-scores[rows], kind="stable")][None, :k]
    return SearchResult(scores[found].astype(np.float32), found, gallery.columns_of(found), metric, len(rows))


def decide(result: SearchResult, calibration: Calibration | None) -> Decision | None:
    """Decide with the calibration of a model whether the identities of the queries are known.

    Returns:
        The decisions; None without a calibration, or, with a warning, if it is for another metric.
    """
    if calibration is None:
        return None
    if result.metric != calibration.metric:
        logger.warning(
            "the search threshold is not used: it is for TEST.METRIC %s, but the gallery was extracted for %s.\n"
            "  fix: extract the gallery again with this model",
            calibration.metric,
            result.metric,
        )
        return None
    rate = calibration.expected_fpir(result.searched)
    if result.searched > _MUCH_LARGER * calibration.gallery_size:
        logger.warning(
            "the gallery has %d images, but the search threshold was chosen for %d: up to %.1f %% of the queries "
            "without a match are accepted, instead of %.3g %%.\n"
            "  fix: calibrate on a dataset with more images, or for a lower rate (fastamp calibrate --fpir)",
            result.searched,
            calibration.gallery_size,
            100 * rate,
            100 * calibration.fpir,
        )
    # An empty gallery has no match.
    known = np.asarray(calibration.accepts(result.scores[:, :1]).any(1))
    probabilities = calibration.probability(result.scores.astype(np.float64))
    return Decision(known, calibration.search_threshold, rate, probabilities)


def _check_positive(k: int, effort: int | None) -> None:
    if k < 1 or (effort is not None and effort < 1):
        raise ConfigError(
            f"k and effort must be at least 1; got k={k} and effort={effort}.\n"
            "  fix: increase k (--top) or effort (--effort)"
        )
