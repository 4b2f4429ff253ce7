"""Error rates of open-set decisions: same, different or unknown for pairs, accepted or unknown for searches."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastamp.evaluation.error_rates import ErrorRate, identity_error_rate, pair_error_rate
from fastamp.evaluation.identities import SAME_CAMERA, Identities, Junk, Matches
from fastamp.evaluation.metrics import check_finite_features
from fastamp.evaluation.probability import ProbabilityCurve
from fastamp.layers.distance import pairwise_distance
from fastamp.utils.errors import DataError

# Images of a set that are compared with each other: 100 MB of scores. More images per identity add little, because the
# intervals depend on the number of identities.
_MAX_IMAGES = 5000
_RELIABILITY_BINS = 10


@dataclass(frozen=True)
class OpenSetRates:
    """Error rates of open-set decisions on one set of identities.

    Attributes:
        far: impostor pairs declared the same (false accept rate).
        frr: genuine pairs declared different (false reject rate).
        undecided_impostor, undecided_genuine: impostor and genuine pairs that remain unknown.
        fpir: queries without a match whose best gallery image is accepted (false-positive identification rate).
        fnir: queries with a match of which no match is accepted (false-negative identification rate).
        gallery_size: mean number of gallery images that a query was compared with.
    """

    far: ErrorRate
    frr: ErrorRate
    undecided_impostor: ErrorRate
    undecided_genuine: ErrorRate
    fpir: ErrorRate
    fnir: ErrorRate
    gallery_size: int

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "OpenSetRates":
        """Restore the rates from the dict of ``dataclasses.asdict``."""
        rates = {name: ErrorRate(**rate) for name, rate in state.items() if name != "gallery_size"}
        return cls(**rates, gallery_size=state["gallery_size"])


@dataclass(frozen=True)
class Reliability:
    """Observed fraction of genuine pairs for pairs of similar predicted probability, at a prior of 0.5.

    Attributes:
        predicted, observed: (B,) float64 in 0..1, mean prediction and observed fraction in each non-empty bin.
        error: mean absolute difference of both over all pairs (expected calibration error).
    """

    predicted: np.ndarray
    observed: np.ndarray
    error: float


class SetScores:
    """Similarities of all pairs of the images of some identities; higher is more similar.

    Args:
        features: (N, D) float features.
        identities: identities and cameras of the N images as queries and as gallery.
        metric: ``"cosine"`` or ``"euclidean"``, whose distances are negated.
        junk: pairs to exclude; None for no junk.
        only: identities to use. Default: None, all that are not negative.
        seed: seed of the selection of images, if there are more than 5,000.

    Attributes:
        rows: (M,) int64, indices of the used images.
        pids: (M,) int64, their identities, ascending.

    Raises:
        DataError: if features are not finite, or there are no genuine or no impostor pairs.
    """

    def __init__(
        self,
        features: Tensor,
        identities: Identities,
        *,
        metric: str,
        junk: Junk | None = SAME_CAMERA,
        only: np.ndarray | None = None,
        seed: int = 0,
    ) -> None:
        all_pids = identities.query_pids.cpu().numpy()
        self.rows = rows = _sampled_rows(all_pids, all_pids[all_pids >= 0] if only is None else only, seed)
        self.pids = all_pids[rows]
        chosen = features[torch.from_numpy(rows).to(features.device)].float().cpu()
        if len(rows):
            check_finite_features("compared", chosen, torch.float32)
        distances = pairwise_distance(chosen, chosen, metric).numpy()
        self._scores = 1 - distances if metric == "cosine" else -distances
        self._same = self.pids[:, None] == self.pids
        if junk is not None:
            matches = Matches(identities, junk=junk)
            excluded = junk.test(matches, rows[:, None], rows)
            self._scores[excluded & self._same if junk.same_identity_only else excluded] = np.nan
        np.fill_diagonal(self._scores, np.nan)
        _, self._starts, self._identity = np.unique(self.pids, return_index=True, return_inverse=True)
        if not len(self.genuine) or not len(self.impostor):
            raise DataError(
                f"{len(self._starts)} identities with {len(rows)} images have no genuine or no impostor pairs.\n"
                "  fix: use a dataset with several identities, and with images of each from several cameras"
            )

    def by_values(self, values: np.ndarray, limit: int) -> "dict[tuple[str, str], SetScores]":
        """Divide the pairs by the values of a column of both images.

        Args:
            values: (M,) str, value of each used image.
            limit: maximum number of results, those with the most genuine pairs.

        Returns:
            Pair of values, in ascending order -> the scores of the pairs of images that have them. Two different values
            without a genuine pair of images are excluded, and so are values without an impostor pair.
        """
        names, numbers = np.unique(values, return_inverse=True)
        numbers = numbers.astype(np.int32)
        low, high = np.minimum.outer(numbers, numbers), np.maximum.outer(numbers, numbers)
        codes = low * len(names) + high
        counts = np.bincount(codes[self._same & ~np.isnan(self._scores)], minlength=len(names) ** 2)
        rates = {}
        on_diagonal = np.arange(len(counts)) % (len(names) + 1) == 0
        used = np.flatnonzero((counts > 0) | on_diagonal)
        used = used[np.argsort(-counts[used], kind="stable")][:limit]
        for code in np.sort(used).tolist():
            part = copy.copy(self)
            for name in ("genuine", "impostor"):
                vars(part).pop(name, None)
            part._scores = np.where(codes == code, self._scores, np.nan)
            if len(part.impostor):
                rates[str(names[code // len(names)]), str(names[code % len(names)])] = part
        return rates

    @property
    def max_gallery_size(self) -> int:
        """Mean number of images of other identities per image."""
        return round(len(self.pids) * (1 - 1 / len(self._starts)))

    def draw_gallery(self, size: int, seed: int) -> np.ndarray:
        """Draw identities at random, so that a query is compared with about ``size`` images of other identities.

        Returns:
            (M,) bool, True for the images of these identities.
        """
        order = np.random.default_rng(seed).permutation(len(self._starts))
        sizes = np.bincount(self._identity)
        kept = order[: max(2, int((np.cumsum(sizes[order]) <= size + sizes.mean() + 0.5).sum()))]
        return np.asarray(np.isin(self._identity, kept))

    @cached_property
    def genuine(self) -> np.ndarray:
        """Scores of the pairs of the same identity, (G,) float32, each pair once."""
        return self._pairs(self._same)

    @cached_property
    def impostor(self) -> np.ndarray:
        """Scores of the pairs of different identities, (I,) float32, each pair once."""
        return self._pairs(~self._same)

    def _pairs(self, chosen: np.ndarray) -> np.ndarray:
        scores = self._scores[np.triu(chosen, 1)]
        return np.asarray(scores[~np.isnan(scores)])

    def best(self, gallery: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find the most similar gallery image of another identity for each image.

        Args:
            gallery: (M,) bool, True for gallery images.

        Returns:
            Its score, (M,) float32, -inf if there is none; and its index, (M,) int64.
        """
        others = np.where(self._same | ~gallery | np.isnan(self._scores), -np.inf, self._scores)
        columns = others.argmax(1)
        return others[np.arange(len(columns)), columns], columns

    def rates(self, same: float, different: float, search: float, gallery: np.ndarray) -> OpenSetRates:
        """Compute the error rates of three thresholds of similarity.

        Args:
            same, different, search: see ``Calibration``, as similarities.
            gallery: (M,) bool, True for gallery images. All images are queries, each compared with the gallery images
                of other identities for ``fpir``, and with those of its own identity for ``fnir``.
        """
        known, scores = ~np.isnan(self._scores), self._scores
        genuine, impostor = self._same & known, ~self._same & known
        undecided = (scores < same) & (scores >= different)
        trials, genuine_counts = self._by_pair(impostor), np.diag(self._by_pair(genuine))

        def pairs_of_others(chosen: np.ndarray) -> ErrorRate:
            return pair_error_rate(self._by_pair(impostor & chosen) / 2, trials / 2)

        def pairs_of_one(chosen: np.ndarray) -> ErrorRate:
            return identity_error_rate(np.diag(self._by_pair(genuine & chosen)) / 2, genuine_counts / 2)

        best, columns = self.best(gallery)
        false, errors = best >= search, np.zeros_like(trials)
        np.add.at(errors, (self._identity[false], self._identity[columns[false]]), 1)
        # Each query is one trial, distributed over the identities that it was compared with.
        compared = np.add.reduceat(impostor & gallery, self._starts, axis=1, dtype=np.float64)
        sizes = compared.sum(1)
        searches = np.add.reduceat(compared / np.maximum(sizes, 1)[:, None], self._starts, axis=0)
        matches = genuine & gallery
        matched, missed = matches.any(1), ~(matches & (scores >= search)).any(1)
        count = len(self._starts)
        return OpenSetRates(
            far=pairs_of_others(scores >= same),
            frr=pairs_of_one(scores < different),
            undecided_impostor=pairs_of_others(undecided),
            undecided_genuine=pairs_of_one(undecided),
            fpir=pair_error_rate(errors, searches),
            fnir=identity_error_rate(
                np.bincount(self._identity[matched & missed], minlength=count),
                np.bincount(self._identity[matched], minlength=count),
            ),
            gallery_size=round(float(sizes.sum() / max(1, (sizes > 0).sum()))),
        )

    def _by_pair(self, values: np.ndarray) -> np.ndarray:
        """Sum (M, M) values over the images of each pair of identities: (n, n) float64."""
        rows = np.add.reduceat(values, self._starts, axis=0, dtype=np.float64)
        return np.asarray(np.add.reduceat(rows, self._starts, axis=1))

    def reliability(self, curve: ProbabilityCurve) -> Reliability:
        """Compare predicted probabilities with the observed fractions of genuine pairs."""
        counts, sums = np.zeros((2, _RELIABILITY_BINS)), np.zeros(_RELIABILITY_BINS)
        for number, scores in enumerate((self.genuine, self.impostor)):
            predicted = curve.at(scores)
            bins = np.minimum((predicted * _RELIABILITY_BINS).astype(np.int64), _RELIABILITY_BINS - 1)
            counts[number] = np.bincount(bins, minlength=_RELIABILITY_BINS) / len(bins)
            sums += np.bincount(bins, predicted, minlength=_RELIABILITY_BINS) / len(bins)
        weight = counts.sum(0)
        used = weight > 0
        mean, observed = sums[used] / weight[used], counts[0, used] / weight[used]
        return Reliability(mean, observed, float((np.abs(mean - observed) * weight[used]).sum() / weight.sum()))


def _sampled_rows(pids: np.ndarray, only: np.ndarray, seed: int) -> np.ndarray:
    """Return up to 5,000 images of the identities ``only``, sorted by identity, evenly over the identities."""
    rows = np.flatnonzero(np.isin(pids, only))
    rows = rows[np.random.default_rng(seed).permutation(len(rows))]
    rows = rows[np.argsort(pids[rows], kind="stable")]
    _, starts, counts = np.unique(pids[rows], return_index=True, return_counts=True)
    number = np.arange(len(rows)) - np.repeat(starts, counts)  # of each image within its identity
    most = int(np.searchsorted(np.cumsum(np.bincount(number)), _MAX_IMAGES, side="right")) if len(rows) else 0
    return rows[number < max(most, 2)]
