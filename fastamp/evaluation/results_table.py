"""The table of results that ends an evaluation."""

import logging
from typing import Any

from tabulate import tabulate

logger = logging.getLogger(__name__)


def print_results(results: dict[str, dict[str, Any]], *, protocol: str) -> None:
    """Log one table for all test sets, with the floors under each set that has them.

    Args:
        results: data set name -> what ``ReidEvaluator.evaluate`` returned.
        protocol: one line that says how was measured.
    """
    columns = _columns(results)
    rows = []
    for name, metrics in results.items():
        for title, values in ((name, metrics), *((f"  floor: {k}", v) for k, v in metrics.get("floors", {}).items())):
            rows.append([title, *(f"{values[column]:.2f}" if column in values else "" for column in columns)])
    table = tabulate(rows, headers=["data set", *columns], tablefmt="github", disable_numparse=True)
    notes = "\n".join(f"{name}: {text}" for name, metrics in results.items() if (text := _notes(metrics)))
    logger.info("evaluation results in percent (%s)\n%s\n%s", protocol, table, notes)


def _columns(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names of the columns: ranks, ascending, mAP, mINP, metric, rates; then an evaluator's own metrics.

    ``ReidEvaluator``'s come from ``fastamp.evaluation.metrics.EvaluationResult.metrics``; any further float is shown.
    """
    names = {name for metrics in results.values() for name in metrics}
    ranks = sorted((name for name in names if name.startswith("Rank-")), key=lambda name: int(name[5:]))
    rates = sorted((name for name in names if name.startswith("TAR@FAR=")), key=lambda name: float(name[8:]))
    known = [*ranks, *(name for name in ("mAP", "mINP", "metric") if name in names), *rates]
    own = {name: None for metrics in results.values() for name, value in metrics.items() if isinstance(value, float)}
    return [*known, *(name for name in own if name not in known)]


def _notes(metrics: dict[str, Any]) -> str:
    if "num_query" not in metrics:  # another evaluator's
        return ""
    text = (
        f"{metrics['num_query']} queries, {metrics['num_gallery']} gallery images, "
        f"{metrics['num_query_without_match']} queries without a match (left out)"
    )
    if metrics.get("num_indistinct"):
        text += f", {metrics['num_indistinct']} images with a feature equal to another identity's (see the warning)"
    for name, (low, high) in metrics.get("intervals", {}).items():
        text += f"; {name} {low:.2f} to {high:.2f}"
    return text + (" in 95 % of resamples of the queries" if metrics.get("intervals") else "")
