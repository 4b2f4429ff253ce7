"""Open-set decisions: thresholds for wanted error rates, chosen and checked on different identities."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastamp.checkpoint.entries import damaged_entry_error
from fastamp.evaluation.error_rates import ErrorRate, required_identities, required_trials
from fastamp.evaluation.open_set import OpenSetRates, SetScores
from fastamp.evaluation.probability import METHODS, ProbabilityCurve, fit_probability
from fastamp.evaluation.protocol import SAME_CAMERA, Identities, Junk
from fastamp.layers.distance import check_metric
from fastamp.utils.errors import ConfigError, DataError, check_choice

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

    def decide(self, score: float) -> str:
        """Decide whether a pair shows the ``"same"`` or ``"different"`` identities, or ``"unknown"``."""
        similarity = self._similarity(score)
        if similarity >= self._similarity(self.same_threshold):
            return SAME
        return DIFFERENT if similarity < self._similarity(self.different_threshold) else UNKNOWN

    def accepts(self, scores: np.ndarray) -> np.ndarray:
        """Return True for the scores of best matches that are accepted, of any shape; others are unknown."""
        accepted: np.ndarray = self._similarity(scores) >= self._similarity(self.search_threshold)
        return accepted

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
        state = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "curve"}
        state |= {name: state[name].state_dict() for name in ("chosen", "measured")}
        curve = {"scores": self.curve.scores, "probabilities": self.curve.probabilities}
        return state | {name: torch.from_numpy(values.copy()) for name, values in curve.items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Calibration":
        """Restore a calibration from ``state_dict``.

        Raises:
            ValueError: if an entry is missing, unknown or of a wrong type, or a value is not finite.
        """
        try:
            values = dict(state)
            curve = ProbabilityCurve(*(values.pop(name).double().numpy() for name in ("scores", "probabilities")))
            values |= {name: OpenSetRates.from_state(values[name]) for name in ("chosen", "measured")}
            found = cls(curve=curve, **values)
            _check_state(found)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return found

    def describe(self) -> str:
        """Describe the thresholds and their rates as text."""
        name, unit = ("similarity", "at least") if self.metric == "cosine" else ("distance", "at most")
        lines = [
            f"same:      {name} {unit} {self.same_threshold:.4f}; stated false accept rate {percent(self.far)}, "
            f"measured {self.measured.far}",
            f"different: {name} {'below' if self.metric == 'cosine' else 'above'} {self.different_threshold:.4f}; "
            f"stated false reject rate {percent(self.frr)}, measured {self.measured.frr}",
            f"search:    unknown unless the best {name} is {unit} {self.search_threshold:.4f}; stated false-positive "
            f"identification rate {percent(self.fpir)} with {self.gallery_size:,} gallery images, measured "
            f"{self.measured.fpir}",
            f"({self.source}: thresholds from {self.chosen.far.num_identities:,} identities, measured on "
            f"{self.measured.far.num_identities:,} others; 95 % confidence intervals over identities)",
        ]
        return "\n".join(lines)


@torch.no_grad()
def calibrate(
    features: Tensor,
    identities: Identities,
    *,
    metric: str,
    far: float = 1e-3,
    frr: float = 0.05,
    fpir: float = 0.05,
    method: str = "isotonic",
    junk: Junk | None = SAME_CAMERA,
    fraction: float = 0.5,
    gallery_size: int | None = None,
    seed: int = 0,
    source: str = "",
    config_hash: str = "",
) -> Calibration:
    """Choose thresholds on some of the identities, and measure their error rates on the others.

    The thresholds are quantiles: ``far`` of the impostor pairs have a score of at least ``same_threshold``, ``frr`` of
    the genuine pairs one below ``different_threshold``, and ``fpir`` of the queries, each compared with the images of
    other identities only, a best match of at least ``search_threshold``. If ``different_threshold`` would be above
    ``same_threshold``, it is lowered to it, and no score is unknown.

    Args:
        features: (N, D) float features of images of identities that training did not use. Up to 5,000 images of either
            part are used, evenly over the identities.
        identities: identities and cameras of these images as queries and as gallery, see ``Identities.all_images``.
        metric: ``"cosine"`` or ``"euclidean"``.
        far, frr, fpir: wanted rates in (0, 1). Default: 0.001, 0.05 and 0.05.
        method: method of the probabilities, see ``fit_probability``. Default: ``"isotonic"``.
        junk: pairs to exclude, see ``Matches``; None for no junk. Default: the junk of Market-1501.
        fraction: fraction in (0, 1) of the identities that chooses the thresholds. Default: 0.5.
        gallery_size: number of gallery images for ``fpir``. Default: as many as both parts have.
        seed: seed of the selection of identities. Default: 0.
        source, config_hash: see ``Calibration``.

    Returns:
        The calibration.

    Raises:
        ConfigError: if a rate, the fraction or the gallery size is out of range, or the method or metric is unknown.
        DataError: if features are not finite, or there are too few identities for a wanted rate.
    """
    check_metric(metric)
    check_choice("method", method, METHODS)
    for name, value in {"far": far, "frr": frr, "fpir": fpir, "fraction": fraction}.items():
        if not 0 < value < 1:
            raise ConfigError(f"{name} must be above 0 and below 1; got {value:g}.\n  fix: choose e.g. {name} 0.01")
    first, second = split_identities(identities.query_pids.numpy(), fraction, seed)
    _check_count(len(first), len(second), far=far, frr=frr, fpir=fpir, source=source, fraction=fraction)
    parts = [
        SetScores(features, identities, metric=metric, junk=junk, only=part, seed=seed) for part in (first, second)
    ]
    largest = min(part.max_gallery_size for part in parts)
    if gallery_size is not None and not 1 <= gallery_size <= largest:
        raise ConfigError(
            f"the gallery size must be in 1..{largest}, the number of images of other identities in either part; got "
            f"{gallery_size}.\n  fix: choose a smaller gallery size, or a dataset with more images"
        )
    galleries = [part.draw_gallery(gallery_size or largest, seed) for part in parts]
    genuine, impostor, (best, _) = parts[0].genuine, parts[0].impostor, parts[0].best(galleries[0])
    same = _upper_threshold(impostor, far)
    different = min(-_upper_threshold(-genuine, frr), same)
    search = _upper_threshold(best[np.isfinite(best)], fpir)
    curve = fit_probability(genuine, impostor, method=method, num_identities=len(first))
    chosen, measured = (
        part.rates(same, different, search, gallery) for part, gallery in zip(parts, galleries, strict=True)
    )
    sign = 1 if metric == "cosine" else -1
    return Calibration(
        metric=metric,
        method=method,
        same_threshold=sign * same,
        different_threshold=sign * different,
        search_threshold=sign * search,
        far=far,
        frr=frr,
        fpir=fpir,
        gallery_size=chosen.gallery_size,
        curve=curve,
        chosen=chosen,
        measured=measured,
        source=source,
        fraction=fraction,
        seed=seed,
        config_hash=config_hash,
    )


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


def split_identities(pids: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Split the identities of images at random into two parts.

    The order of the images does not matter, so that a later evaluation of the same dataset finds the same parts.

    Args:
        pids: (N,) int64; negative identities are excluded.
        fraction: fraction of the identities in the first part, rounded.
        seed: seed of the selection.

    Returns:
        The identities in the first and in the second part, ascending.
    """
    found = np.unique(pids[pids >= 0])
    digests = [hashlib.blake2b(f"{seed}:{pid}".encode(), digest_size=8).digest() for pid in found]
    order = np.array(sorted(range(len(found)), key=digests.__getitem__), dtype=np.int64)
    count = round(fraction * len(found))
    return np.sort(found[order[:count]]), np.sort(found[order[count:]])


def _upper_threshold(scores: np.ndarray, rate: float) -> float:
    """Return a threshold that at most the fraction ``rate`` of (N,) float32 scores reaches, exact in float32."""
    ordered = np.sort(scores)[::-1]
    count = math.floor(rate * len(ordered) + 1e-9)
    limit = ordered[count]
    if not count or ordered[count - 1] == limit:
        return float(np.nextafter(limit, np.float32(np.inf)))
    middle = (ordered[count - 1] + limit) / 2
    return float(middle if middle > limit else ordered[count - 1])


def _check_count(
    chosen: int, others: int, *, far: float, frr: float, fpir: float, source: str, fraction: float
) -> None:
    """Raise DataError if there are too few identities for a rate."""
    pairs = chosen * (chosen - 1) // 2
    found, fixes = [], []
    for name, rate, trials in (("far", far, pairs), ("frr", frr, chosen), ("fpir", fpir, chosen)):
        needed = required_trials(rate)
        if trials < needed:
            unit = f"pairs of identities ({required_identities(rate):,} identities)" if name == "far" else "identities"
            found.append(f"{name}={rate:g} needs {needed:,} {unit}")
            if trials > 3:
                fixes.append(f"{name} of at least {_round_up(3 / trials)}")
    if found:
        fix = f", or choose {', '.join(fixes)}" if fixes else ""
        raise DataError(
            f"{source or 'the dataset'} has too few identities: {chosen:,} of {chosen + others:,} choose the "
            f"thresholds (fraction {fraction:g}), which have {pairs:,} pairs.\n  needed: {'; '.join(found)}\n"
            f"  fix: use a dataset with more identities{fix}"
        )
    if others < 2:
        raise DataError(
            f"{others} of {chosen + others} identities remain to measure the error rates; at least 2 are needed.\n"
            f"  fix: choose a fraction below {fraction:g}"
        )


def _round_up(rate: float) -> str:
    """Format a rate rounded up to two significant digits."""
    step = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return f"{math.ceil(rate / step - 1e-9) * step:.2g}"


def percent(rate: float) -> str:
    """Format a rate in percent."""
    return f"{100 * rate:.3g} %"


def _check_state(calibration: Calibration) -> None:
    """Raise TypeError or ValueError if a value has a wrong type or range."""
    check = calibration
    numbers = {each.name: getattr(check, each.name) for each in fields(check) if each.type is float}
    wrong = [name for name, value in numbers.items() if not isinstance(value, int | float) or not math.isfinite(value)]
    texts = ("metric", "method", "source", "config_hash")
    wrong += [name for name in texts if not isinstance(getattr(check, name), str)]
    wrong += [name for name in ("far", "frr", "fpir") if name not in wrong and not 0 < numbers[name] < 1]
    if not isinstance(check.gallery_size, int) or check.gallery_size < 1:
        wrong.append("gallery_size")
    curve = check.curve
    ascending = (np.diff(curve.scores) >= 0).all() and (np.diff(curve.probabilities) >= 0).all()
    inside = (curve.probabilities > 0).all() and (curve.probabilities < 1).all() and np.isfinite(curve.scores).all()
    if curve.scores.ndim != 1 or curve.scores.shape != curve.probabilities.shape or not (ascending and inside):
        wrong.append("probabilities")
    for part in (check.chosen, check.measured):
        rates = [getattr(part, each.name) for each in fields(part) if each.name != "gallery_size"]
        if not all(isinstance(rate, ErrorRate) and 0 <= rate.low <= rate.high <= 1 for rate in rates):
            wrong.append("rates")
    if wrong:
        raise ValueError(f"invalid {', '.join(dict.fromkeys(wrong))}")
