"""Calibration of a model for open-set decisions: thresholds, probabilities and error rates, stored in a checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch

from fastamp.checkpoint.entries import damaged_entry_error
from fastamp.evaluation.error_rates import ErrorRate
from fastamp.evaluation.open_set import OpenSetRates
from fastamp.evaluation.probability import ProbabilityCurve

SAME, DIFFERENT, UNKNOWN = "same", "different", "unknown"


@dataclass(frozen=True)
class Calibration:
    """Thresholds and probabilities of a model, and the error rates that they give on other identities.

    Scores are cosine similarities or Euclidean distances, as in ``Comparison.score`` and ``SearchResult.scores``.

    Attributes:
        metric: ``"cosine"`` or ``"euclidean"``.
        method: method of the probabilities: ``"isotonic"`` or ``"logistic"``.
        same_threshold: pairs with this score or a more similar one show the same identity.
        different_threshold: pairs with a less similar score show different identities; scores in between are unknown.
        search_threshold: best matches with this score or a more similar one are accepted; others are unknown.
        far, frr, fpir: stated rates in 0..1 for which the thresholds were chosen, see ``OpenSetRates``.
        gallery_size: number of gallery images for which ``fpir`` holds.
        curve: probability of the same identity.
        chosen: rates on the identities that chose the thresholds.
        measured: rates on other identities of the same dataset.
        source: dataset.
        fraction, seed: fraction of its identities that chose the thresholds, and seed of their selection.
        config_hash: hash of the model, see ``Predictor.config_hash``.
    """

    metric: str
    method: str
    same_threshold: float
    different_threshold: float
    search_threshold: float
    far: float
    frr: float
    fpir: float
    gallery_size: int
    curve: ProbabilityCurve
    chosen: OpenSetRates
    measured: OpenSetRates
    source: str = ""
    fraction: float = 0.5
    seed: int = 0
    config_hash: str = ""

    @property
    def stated_frr(self) -> str:
        """Stated false reject rate as text; an upper limit if ``different_threshold`` was lowered."""
        return f"{'at most ' * (self.same_threshold == self.different_threshold)}{percent(self.frr)}"

    def decide(self, score: float) -> str:
        """Decide whether a pair shows the ``"same"`` or ``"different"`` identities, or ``"unknown"``."""
        similarity = self._similarity(score)
        if similarity >= self._similarity(self.same_threshold):
            return SAME
        return DIFFERENT if similarity < self._similarity(self.different_threshold) else UNKNOWN

    def accepts(self, scores: np.ndarray) -> np.ndarray:
        """Return True for the scores of best matches that are accepted, of any shape; others are unknown."""
        return np.asarray(self._similarity(scores) >= self._similarity(self.search_threshold))

    def probability(self, score: float | np.ndarray, *, prior: float = 0.5) -> np.ndarray:
        """Compute the probability of the same identity; see ``ProbabilityCurve.at``."""
        return self.curve.at(self._similarity(score), prior=prior)

    def expected_fpir(self, gallery_size: int) -> float:
        """Compute the expected false-positive identification rate with a gallery of another size.

        This is ``1 - (1 - fpir) ** (size / calibrated size)``, as if all queries had the same probability of a false
        match per gallery image. For larger galleries it is an upper bound, by Jensen's inequality, if the images are
        comparable to those of the calibration.
        """
        return float(1 - (1 - self.fpir) ** (gallery_size / self.gallery_size))

    def _similarity(self, score: Any) -> Any:
        return score if self.metric == "cosine" else -score

    def state_dict(self) -> dict[str, Any]:
        """Return a dict of plain values and tensors from which ``from_state`` restores the calibration."""
        state = asdict(self)
        return state | {name: torch.from_numpy(values) for name, values in state.pop("curve").items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Calibration":
        """Restore a calibration from ``state_dict``; lists instead of tensors are possible.

        Raises:
            ValueError: if an entry is missing, unknown or of a wrong type, or a value is not finite.
        """
        try:
            values = dict(state)
            scores, probabilities = (np.asarray(values.pop(name), np.float64) for name in ("scores", "probabilities"))
            values |= {name: OpenSetRates.from_state(values[name]) for name in ("chosen", "measured")}
            calibration = cls(curve=ProbabilityCurve(scores, probabilities), **values)
            _check_state(calibration)
        except (KeyError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return calibration

    def describe(self) -> str:
        """Describe the thresholds and their rates as text."""
        name, unit = ("similarity", "at least") if self.metric == "cosine" else ("distance", "at most")
        lines = [
            f"same:      {name} {unit} {self.same_threshold:.4f}; stated false accept rate {percent(self.far)}, "
            f"measured {self.measured.far}",
            f"different: {name} {'below' if self.metric == 'cosine' else 'above'} {self.different_threshold:.4f}; "
            f"stated false reject rate {self.stated_frr}, measured {self.measured.frr}",
            f"search:    unknown unless the best {name} is {unit} {self.search_threshold:.4f}; stated false-positive "
            f"identification rate {percent(self.fpir)} with {self.gallery_size:,} gallery images, measured "
            f"{self.measured.fpir}",
            f"({self.source}: thresholds from {self.chosen.far.num_identities:,} identities, measured on "
            f"{self.measured.far.num_identities:,} others; 95 % confidence intervals over identities)",
        ]
        return "\n".join(lines)


def read_calibration(entries: Mapping[str, Any], checkpoint: str | PathLike[str]) -> Calibration | None:
    """Restore the calibration of a checkpoint.

    Args:
        entries: entries of the checkpoint.
        checkpoint: path of the checkpoint, for messages.

    Returns:
        The calibration; None if the checkpoint contains none.

    Raises:
        WeightsError: if the calibration does not have the expected structure.
    """
    state = entries.get("calibration")
    if state is None:
        return None
    try:
        return Calibration.from_state(state)
    except ValueError as error:
        raise damaged_entry_error(checkpoint, f"calibration: {error}") from error


def percent(rate: float) -> str:
    """Format a rate in percent."""
    return f"{100 * rate:.3g} %"


def _check_state(calibration: Calibration) -> None:
    """Raise TypeError or ValueError if a value has a wrong type or range."""
    values = vars(calibration)
    wrong = [name for name in ("metric", "method", "source", "config_hash") if type(values[name]) is not str]
    thresholds = ("same_threshold", "different_threshold", "search_threshold")
    wrong += [name for name in thresholds if not _is_finite(values[name])]
    rates = ("far", "frr", "fpir", "fraction")
    wrong += [name for name in rates if not (_is_finite(values[name]) and 0 < values[name] < 1)]
    wrong += [name for name in ("gallery_size", "seed") if type(values[name]) is not int]
    if "gallery_size" not in wrong and calibration.gallery_size < 1:
        wrong.append("gallery_size")
    curve = calibration.curve
    x, y = curve.scores, curve.probabilities
    if x.ndim != 1 or x.shape != y.shape or not len(x) or not np.isfinite(x).all():
        wrong.append("scores")
    elif not ((np.diff(x) >= 0).all() and (np.diff(y) >= 0).all() and (y > 0).all() and (y < 1).all()):
        wrong.append("probabilities")
    for name, part in (("chosen", calibration.chosen), ("measured", calibration.measured)):
        rates_of_part = [value for rate, value in vars(part).items() if rate != "gallery_size"]
        if type(part.gallery_size) is not int or not all(map(_is_valid, rates_of_part)):
            wrong.append(name)
    if wrong:
        raise ValueError(f"invalid {', '.join(wrong)}")


def _is_finite(value: Any) -> bool:
    return type(value) is float and math.isfinite(value)


def _is_valid(rate: ErrorRate) -> bool:
    """Return True if the values of a rate have the expected types and ranges."""
    bounds, counts = (rate.low, rate.high), (rate.num_errors, rate.num_trials, rate.num_identities)
    return all(_is_finite(bound) and 0 <= bound <= 1 for bound in (rate.rate, *bounds)) and all(
        type(bound) is int and bound >= 0 for bound in counts
    )
