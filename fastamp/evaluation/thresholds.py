"""Choice of thresholds for wanted error rates, on identities other than those that measure the rates."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastamp.evaluation.calibration import Calibration
from fastamp.evaluation.error_rates import required_identities, required_trials
from fastamp.evaluation.identities import SAME_CAMERA, Identities, Junk
from fastamp.evaluation.open_set import SetScores
from fastamp.evaluation.probability import fit_probability
from fastamp.layers.distance import check_metric
from fastamp.utils.choices import PROBABILITY_METHODS
from fastamp.utils.errors import ConfigError, DataError, check_choice


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """Wanted error rates, and how to choose the thresholds.

    Attributes:
        far, frr, fpir: wanted rates in (0, 1), see ``OpenSetRates``. Default: 0.001, 0.05 and 0.05.
        method: method of the probabilities, see ``fit_probability``. Default: ``"isotonic"``.
        fraction: fraction in (0, 1) of the identities that chooses the thresholds. Default: 0.5.
        gallery_size: number of gallery images for ``fpir``. Default: None, as many as both parts have.
        seed: seed of the selection of identities. Default: 0.

    Raises:
        ConfigError: if a value is out of range, or the method is unknown.
    """

    far: float = 1e-3
    frr: float = 0.05
    fpir: float = 0.05
    method: str = "isotonic"
    fraction: float = 0.5
    gallery_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("method", self.method, PROBABILITY_METHODS)
        for name in ("far", "frr", "fpir", "fraction"):
            value = vars(self)[name]
            if not 0 < value < 1:
                raise ConfigError(f"{name} must be above 0 and below 1; got {value:g}.\n  fix: choose e.g. {name} 0.01")

    def split(self, pids: np.ndarray, source: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Split identities with ``split_identities``, and check their numbers.

        Args:
            pids: (N,) int64, see ``split_identities``.
            source: dataset, for messages.

        Returns:
            The identities that choose the thresholds, and the others.

        Raises:
            DataError: if there are too few identities for a rate, or to measure the rates.
        """
        first, second = split_identities(pids, self.fraction, self.seed)
        chosen, others, counts, fixes = len(first), len(second), [], []
        pairs = chosen * (chosen - 1) // 2
        for name, rate, trials in (("far", self.far, pairs), ("frr", self.frr, chosen), ("fpir", self.fpir, chosen)):
            needed = required_trials(rate)
            if trials < needed:
                unit = (
                    f"pairs of identities ({required_identities(rate):,} identities)" if name == "far" else "identities"
                )
                counts.append(f"{name}={rate:g} needs {needed:,} {unit}")
                if trials > 3:
                    fixes.append(f"{name} of at least {_round_up(3 / trials)}")
        if counts:
            fix = f", or choose {', '.join(fixes)}" if fixes else ""
            raise DataError(
                f"{source or 'the dataset'} has too few identities: {chosen:,} of {chosen + others:,} choose the "
                f"thresholds (fraction {self.fraction:g}), which have {pairs:,} pairs.\n  needed: {'; '.join(counts)}\n"
                f"  fix: use a dataset with more identities{fix}"
            )
        if others < 2:
            raise DataError(
                f"{others} of {chosen + others} identities remain to measure the error rates; at least 2 are needed.\n"
                f"  fix: choose a fraction below {self.fraction:g}"
            )
        return first, second


@torch.no_grad()
def calibrate(
    features: Tensor,
    identities: Identities,
    *,
    metric: str,
    junk: Junk | None = SAME_CAMERA,
    source: str = "",
    config_hash: str = "",
    **options: Any,
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
        junk: pairs to exclude, see ``Matches``; None for no junk. Default: the junk of Market-1501.
        source, config_hash: see ``Calibration``.
        options: see ``CalibrationOptions``.

    Returns:
        The calibration.

    Raises:
        ConfigError: if an option is out of range, or the metric is unknown.
        DataError: if features are not finite, or there are too few identities for a wanted rate.
    """
    check_metric(metric)
    wanted = CalibrationOptions(**options)
    halves = wanted.split(identities.query_pids.numpy(), source)
    parts = [SetScores(features, identities, metric=metric, junk=junk, only=pids, seed=wanted.seed) for pids in halves]
    size, largest = wanted.gallery_size, min(part.max_gallery_size for part in parts)
    if size is not None and not 1 <= size <= largest:
        raise ConfigError(
            f"the gallery size must be in 1..{largest}, the number of images of other identities in either part; got "
            f"{size}.\n  fix: choose a smaller gallery size, or a dataset with more images"
        )
    galleries = [part.draw_gallery(size or largest, wanted.seed) for part in parts]
    genuine, impostor, (best, _) = parts[0].genuine, parts[0].impostor, parts[0].best(galleries[0])
    same = _upper_threshold(impostor, wanted.far)
    different = min(-_upper_threshold(-genuine, wanted.frr), same)
    search = _upper_threshold(best[np.isfinite(best)], wanted.fpir)
    curve = fit_probability(genuine, impostor, method=wanted.method, num_identities=len(halves[0]))
    chosen, measured = (
        part.rates(same, different, search, drawn) for part, drawn in zip(parts, galleries, strict=True)
    )
    sign = 1 if metric == "cosine" else -1
    stated = {name: float(vars(wanted)[name]) for name in ("far", "frr", "fpir", "fraction")}
    return Calibration(
        metric=metric,
        same_threshold=sign * same,
        different_threshold=sign * different,
        search_threshold=sign * search,
        gallery_size=chosen.gallery_size,
        curve=curve,
        chosen=chosen,
        measured=measured,
        source=source,
        config_hash=config_hash,
        method=wanted.method,
        seed=int(wanted.seed),
        **stated,
    )


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
    identities = np.unique(pids[pids >= 0])
    digests = [hashlib.blake2b(f"{seed}:{pid}".encode(), digest_size=8).digest() for pid in identities]
    order = np.array(sorted(range(len(identities)), key=digests.__getitem__), dtype=np.int64)
    count = round(fraction * len(identities))
    return np.sort(identities[order[:count]]), np.sort(identities[order[count:]])


def _upper_threshold(scores: np.ndarray, rate: float) -> float:
    """Return a threshold that at most the fraction ``rate`` of (N,) float32 scores reaches, exact in float32."""
    ordered = np.sort(scores)[::-1]
    count = math.floor(rate * len(ordered) + 1e-9)
    limit = ordered[count]
    if not count or ordered[count - 1] == limit:
        return float(np.nextafter(limit, np.float32(np.inf)))
    middle = (ordered[count - 1] + limit) / 2
    return float(middle if middle > limit else ordered[count - 1])


def _round_up(rate: float) -> str:
    """Format a rate rounded up to two significant digits."""
    step = 10.0 ** (math.floor(math.log10(rate)) - 1)
    return f"{math.ceil(rate / step - 1e-9) * step:.2g}"
