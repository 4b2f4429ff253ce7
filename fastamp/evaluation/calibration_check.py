"""Error rates of a calibrated model on a test set."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fastamp.evaluation.calibration import Calibration
from fastamp.evaluation.identities import Identities
from fastamp.evaluation.open_set import OpenSetRates, Reliability, SetScores
from fastamp.evaluation.protocol import Protocol
from fastamp.evaluation.thresholds import split_identities
from fastamp.utils.errors import DataError
from fastamp.utils.table import format_table

logger = logging.getLogger(__name__)

_BINS = 60
# Groups of pairs whose error rates are computed, those with the most genuine pairs.
_MAX_GROUPS = 30
GROUP_HEADERS = ("pairs", "false accepts", "false rejects", "false-positive identification", "gallery images")


@dataclass(frozen=True)
class CalibrationCheck:
    """Open-set decisions of a calibrated model on the identities of a test set that did not choose the thresholds.

    Attributes:
        calibration: the thresholds.
        rates: error rates on this test set.
        reliability: predicted and observed fraction of genuine pairs.
        edges: (B + 1,) float64, edges of the bins of the score, ascending.
        genuine, impostor: (B,) float64, fraction of the genuine and of the impostor pairs in each bin.
        excluded: number of identities that chose the thresholds, if the calibration is of the same dataset.
        groups: value of ``TEST.GROUP_BY``, or two values, e.g. ``"infrared, visible"`` -> error rates of the pairs of
            images that have them. Default: no groups.
    """

    calibration: Calibration
    rates: OpenSetRates
    reliability: Reliability
    edges: np.ndarray
    genuine: np.ndarray
    impostor: np.ndarray
    excluded: int = 0
    groups: Mapping[str, OpenSetRates] = field(default_factory=dict)

    def group_rows(self) -> list[tuple[str, ...]]:
        """Return the rows of a table of the error rates of each group, with the columns ``GROUP_HEADERS``."""
        return [
            (
                name,
                *(str(rate) if rate.num_trials else "" for rate in (rates.far, rates.frr, rates.fpir)),
                f"{rates.gallery_size:,}",
            )
            for name, rates in self.groups.items()
        ]

    def describe(self) -> str:
        """Describe the error rates as text."""
        rates, rows = self.rates, self.group_rows()
        text = (
            f"false accepts {rates.far}, false rejects {rates.frr}, false-positive identification {rates.fpir} with "
            f"{rates.gallery_size:,} gallery images, false-negative identification {rates.fnir} (95 % confidence "
            f"intervals over {rates.far.num_identities:,} identities)"
        )
        return f"{text}\n{format_table(rows, GROUP_HEADERS)}" if rows else text


@torch.no_grad()
def check_calibration(
    features: Tensor, identities: Identities, protocol: Protocol, calibration: Calibration, *, dataset: str
) -> CalibrationCheck | None:
    """Measure the error rates of the decisions of a calibrated model on a test set.

    Args:
        features: (Q + G, D) float features, queries first.
        identities: identities of the Q query and G gallery images.
        protocol: protocol, which defines the metric, the junk and the groups.
        calibration: calibration of the model.
        dataset: name of the test set. The identities of ``calibration.source`` that chose the thresholds are excluded.

    Returns:
        The error rates; None, with a warning, if the metric differs or there are no pairs.
    """
    if calibration.metric != protocol.metric:
        logger.warning(
            "open-set decisions are not evaluated: the calibration is for TEST.METRIC %s, but the metric is %s.\n"
            "  fix: evaluate with TEST.METRIC %s, or calibrate the model again with fastamp calibrate",
            calibration.metric,
            protocol.metric,
            calibration.metric,
        )
        return None
    everyone = identities.all_images()
    pids = everyone.query_pids.cpu().numpy()
    only, excluded = np.unique(pids[protocol.rule.images_with_query(identities).numpy()]), 0
    if dataset == calibration.source:
        before = calibration.chosen.far.num_identities + calibration.measured.far.num_identities
        if len(only) != before:
            logger.warning(
                "%s has %d identities, but had %d when its identities chose the thresholds: some of these may now be "
                "among those that measure the error rates, which are then too low.\n  fix: calibrate the model again",
                dataset,
                len(only),
                before,
            )
        chosen, only = split_identities(only, calibration.fraction, calibration.seed)
        excluded = len(chosen)
    try:
        scores = SetScores(features, everyone, metric=protocol.metric, junk=protocol.rule.junk, only=only)
    except DataError as error:
        logger.warning("open-set decisions on %s are not evaluated: %s", dataset, error)
        return None
    sign = 1 if protocol.metric == "cosine" else -1
    same, different = sign * calibration.same_threshold, sign * calibration.different_threshold
    search = sign * calibration.search_threshold
    gallery, groups = scores.draw_gallery(calibration.gallery_size, calibration.seed), {}
    if protocol.group_by:
        values = everyone.query_texts(protocol.group_by)[scores.rows]
        groups = {
            ", ".join(dict.fromkeys(names)): part.rates(same, different, search, gallery)
            for names, part in scores.by_values(values, _MAX_GROUPS).items()
        }
    pairs = [sign * part for part in (scores.genuine, scores.impostor)]
    edges = np.linspace(min(pair.min() for pair in pairs), max(pair.max() for pair in pairs), _BINS + 1)
    genuine, impostor = (np.histogram(pair, edges)[0] / len(pair) for pair in pairs)
    rates, reliability = scores.rates(same, different, search, gallery), scores.reliability(calibration.curve)
    return CalibrationCheck(calibration, rates, reliability, edges, genuine, impostor, excluded, groups)
