"""Charts of evaluation results and of training metrics."""

import math

import numpy as np

from fastamp.evaluation import EvaluationResult
from fastamp.evaluation.protocol import Protocol
from fastamp.evaluation.retrieval_examples import RetrievalExamples
from fastamp.evaluation.roc import RocCurve
from fastamp.report.history import History
from fastamp.report.panel import Line, Panel

_RANKS = 50
# Range of all axes that show a rate in percent, so that charts and reports can be compared.
_PERCENT = (0.0, 100.0)
_BINS = 60
# Maximum number of lines per chart; MGN has 13 losses.
_MAX_LINES = 6


def score_name(protocol: Protocol) -> str:
    """Return the name of the score that a protocol ranks by."""
    if protocol.re_ranking:
        return "re-ranked distance"
    return "cosine similarity" if protocol.metric == "cosine" else "squared Euclidean distance"


def scores(distances: np.ndarray, protocol: Protocol) -> np.ndarray:
    """Convert distances to the scores named by ``score_name``."""
    return 1 - distances if score_name(protocol) == "cosine similarity" else distances


def cmc_panel(result: EvaluationResult) -> Panel:
    """Plot the CMC curve: fraction of queries with a match within each rank."""
    ranking = result.ranking
    last = max(10, min(_RANKS, result.num_gallery))
    ranks = np.arange(1, last + 1)
    values = np.array([100 * ranking.cmc(int(rank)) for rank in ranks])
    return Panel(
        "Cumulative matching characteristic",
        "rank",
        "queries with a match, %",
        [Line("CMC", ranks.astype(float), values)],
        x_range=(1, last),
        y_range=_PERCENT,
    )


def roc_panel(examples: RetrievalExamples) -> Panel | None:
    """Plot the ROC curve; None if there are no pairs."""
    curve = examples.roc
    if curve is None:
        return None
    low = max(1e-7, min(0.1, 1 / curve.num_impostor))
    # Between two points of the curve, use the value of the lower false accept rate.
    far = np.logspace(math.log10(low), 0, 200)
    tar = np.maximum.accumulate(curve.tar)[np.searchsorted(curve.far, far * (1 + 1e-9), side="right") - 1]
    return Panel(
        "Verification (ROC)",
        "false accept rate",
        "true accept rate, %",
        [Line("ROC", far, 100 * tar, steps=True)],
        x_log=True,
        x_range=(low, 1),
        y_range=_PERCENT,
        note=pairs_note(examples),
    )


def score_panel(examples: RetrievalExamples, protocol: Protocol) -> Panel | None:
    """Plot histograms of the scores of genuine and impostor pairs; None if there are no pairs."""
    curve = examples.roc
    if curve is None:
        return None
    low, high = _central_range(curve)
    edges = np.linspace(low, high, _BINS + 1)
    lines = []
    for name, rates in (("genuine pairs", curve.tar), ("impostor pairs", curve.far)):
        fraction = 100 * np.diff(rates[np.searchsorted(curve.thresholds, edges, side="right") - 1])
        positions = scores(np.append(edges[:-1], edges[-1]), protocol)
        values = np.append(fraction, fraction[-1])
        if positions[0] > positions[-1]:
            positions, values = scores(edges[::-1], protocol), np.append(fraction[::-1], fraction[0])
        lines.append(Line(name, positions, values, steps=True, filled=True))
    return Panel(
        "Scores of genuine and impostor pairs",
        score_name(protocol),
        "fraction of pairs, %",
        lines,
        x_range=(float(lines[0].x[0]), float(lines[0].x[-1])),
        y_range=(0, 1.06 * max(line.y.max() for line in lines)),
        note=pairs_note(examples),
    )


def pairs_note(examples: RetrievalExamples) -> str:
    """Describe the pairs that the ROC curve is computed from."""
    curve = examples.roc
    assert curve is not None
    pairs = f"{curve.num_genuine:,} genuine and {curve.num_impostor:,} impostor pairs"
    if examples.roc_uses_all_pairs or examples.sampled == examples.queries:
        return pairs
    return f"{pairs}, from a random sample of {examples.sampled:,} of {examples.queries:,} queries"


def _central_range(curve: RocCurve) -> tuple[float, float]:
    """Compute the range of distances that contains 99.9 % of the pairs."""
    finite = np.isfinite(curve.thresholds)
    ends: list[float] = []
    for rates in (curve.tar, curve.far):
        first = curve.thresholds[max(0, np.searchsorted(rates, 5e-4) - 1)]
        last = curve.thresholds[finite][min(finite.sum() - 1, np.searchsorted(rates[finite], 1 - 5e-4))]
        ends += (float(first), float(last))
    low, high = min(ends[::2]), max(ends[1::2])
    return low, high if high > low else low + 1e-6


def training_panels(history: History) -> list[Panel]:
    """Plot losses, learning rate, speed and metrics over the iterations; quantities without records are omitted."""
    names = history.names(prefix="loss_")
    losses = [name for name in ("total_loss", *names) if name in history.series and name != "loss_scale"]
    panels = [_over_iterations(history, "Losses", "loss", losses[:_MAX_LINES])]
    for title, suffix in (("mAP on test sets", "/mAP"), ("Rank-1 on test sets", "/Rank-1")):
        names = [name for name in history.names(suffix=suffix) if "/baseline " not in name and "/floor " not in name]
        titles = {name: name.removesuffix(suffix) for name in names[:_MAX_LINES]}
        panels.append(_over_iterations(history, title, "%", list(titles), titles=titles, dots=True, y_range=_PERCENT))
    panels.append(_over_iterations(history, "Clusters", "number", ["clusters", "outliers"], dots=True))
    panels.append(_over_iterations(history, "Clusters and identities", "agreement", ["purity", "nmi"], dots=True))
    panels.append(_over_iterations(history, "Learning rate", "rate", ["lr"]))
    panels.append(_over_iterations(history, "Speed", "images/s", ["images_per_second"]))
    return [panel for panel in panels if panel.lines]


def health_panels(history: History) -> list[Panel]:
    """Plot the gradient norm, loss scale, skipped steps and other precision metrics over the iterations."""
    panels = [_over_iterations(history, "Gradient norm", "norm", ["grad_norm"], y_log=True)]
    scale = [value for _, value in history.series.get("loss_scale", [])]
    if len(set(scale)) > 1:
        panels.append(_over_iterations(history, "Loss scale", "scale", ["loss_scale"], y_log=True, steps=True))
    if history.latest("skipped_total"):
        panels.append(_over_iterations(history, "Skipped steps", "total", ["skipped_total"], steps=True))
    for name, title, label in (
        ("zero_gradients", "Zero gradients", "fraction"),
        ("clip_coefficient", "Gradient clipping", "factor"),
        ("activation_limit_share", "Largest activation", "fraction of the dtype's maximum"),
    ):
        panels.append(_over_iterations(history, title, label, [name]))
    return [panel for panel in panels if panel.lines]


def _over_iterations(
    history: History,
    title: str,
    y_label: str,
    names: list[str],
    *,
    titles: dict[str, str] | None = None,
    y_log: bool = False,
    steps: bool = False,
    dots: bool = False,
    y_range: tuple[float, float] | None = None,
) -> Panel:
    """Plot metrics; all panels of a run have the same range of iterations."""
    last = 1 + max((series[-1][0] for series in history.series.values()), default=0)
    lines = []
    for name in names:
        if name in history.series:
            x, y = np.array(history.series[name], dtype=np.float64).T
            lines.append(Line((titles or {}).get(name, name), x + 1, y, steps=steps, dots=dots))
    x_range = (0.0, float(last))
    return Panel(title, "iteration", y_label, lines, y_log=y_log, x_range=x_range, y_range=y_range)
