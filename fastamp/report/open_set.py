"""Section of the report on the open-set decisions of a calibrated model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastamp.evaluation.calibration import percent
from fastamp.evaluation.calibration_check import GROUP_HEADERS, CalibrationCheck
from fastamp.report.panel import Line, Panel
from fastamp.report.svg import draw_panels


def open_set_section(check: CalibrationCheck | None) -> dict[str, Any] | None:
    """Prepare the table and the charts; None without a calibration."""
    if check is None:
        return None
    calibration, rates = check.calibration, check.rates
    note = (
        f"Thresholds from {calibration.chosen.far.num_identities:,} identities of {calibration.source}; error rates of "
        f"{rates.far.num_identities:,} identities of this test set, with 95 % confidence intervals over identities."
    )
    if check.excluded:
        note += f" The {check.excluded:,} identities that chose the thresholds are excluded."
    rows = [
        (
            "same",
            f"{calibration.same_threshold:.4f}",
            "impostor pairs accepted",
            percent(calibration.far),
            str(rates.far),
        ),
        (
            "different",
            f"{calibration.different_threshold:.4f}",
            "genuine pairs rejected",
            calibration.stated_frr,
            str(rates.frr),
        ),
        ("unknown", "between both", "impostor pairs", "", str(rates.undecided_impostor)),
        ("", "", "genuine pairs", "", str(rates.undecided_genuine)),
        (
            f"search in {rates.gallery_size:,} images",
            f"{calibration.search_threshold:.4f}",
            "queries without a match accepted",
            percent(calibration.fpir),
            str(rates.fpir),
        ),
        ("", "", "queries with a match called unknown", "", str(rates.fnir)),
    ]
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = [
        ("", ("decision", "threshold", "errors", "stated rate", "measured rate"), rows)
    ]
    if check.groups:
        tables.append(("By group", GROUP_HEADERS, check.group_rows()))
    return {
        "note": note,
        "tables": tables,
        "charts": draw_panels([distribution_panel(check), reliability_panel(check)]),
    }


def distribution_panel(check: CalibrationCheck) -> Panel:
    """Plot the score histograms of genuine and impostor pairs, and the thresholds."""
    calibration = check.calibration
    histograms = {"genuine pairs": check.genuine, "impostor pairs": check.impostor}
    top = 106 * max(values.max() for values in histograms.values())
    lines = [
        Line(name, check.edges, 100 * np.append(values, values[-1]), steps=True, filled=True)
        for name, values in histograms.items()
    ]
    thresholds = {
        "different": calibration.different_threshold,
        "same": calibration.same_threshold,
        "search": calibration.search_threshold,
    }
    for name, threshold in thresholds.items():
        lines.append(Line(f"threshold: {name}", np.full(2, threshold), np.array([0.0, top])))
    x = [float(check.edges[0]), float(check.edges[-1]), *thresholds.values()]
    return Panel(
        "Scores and thresholds",
        "cosine similarity" if calibration.metric == "cosine" else "Euclidean distance",
        "fraction of pairs, %",
        lines,
        x_range=(min(x), max(x)),
        y_range=(0, top),
        note=f"{check.rates.frr.num_trials:,} genuine and {check.rates.far.num_trials:,} impostor pairs",
    )


def reliability_panel(check: CalibrationCheck) -> Panel:
    """Plot the observed fraction of genuine pairs over the predicted probability (reliability diagram)."""
    reliability = check.reliability
    return Panel(
        "Reliability of the probability",
        "predicted probability of the same identity",
        "fraction of genuine pairs",
        [
            Line(f"{check.calibration.method} calibration", reliability.predicted, reliability.observed, dots=True),
            Line("perfect", np.array([0.0, 1.0]), np.array([0.0, 1.0])),
        ],
        x_range=(0, 1),
        y_range=(0, 1),
        note=f"prior 50 %; mean absolute error {reliability.error:.3f}",
    )
