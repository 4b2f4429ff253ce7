"""The table of results that ends an evaluation."""

import logging
from typing import Any

from tabulate import tabulate

logger = logging.getLogger(__name__)


def print_results(results: dict[str, dict[str, Any]], *, protocol: str) -> None:
    """Log one table for all test sets, with the baselines under each set that has them.

    Args:
        results: data set name -> what ``ReidEvaluator.evaluate`` returned.
        protocol: one line that says how was measured.
    """
    columns = _columns(results)
    rows = []
    for name, metrics in results.items():
        for title, values in (
            (name, metrics),
            *((f"  baseline: {k}", v) for k, v in metrics.get("baselines", {}).items()),
        ):
            rows.append([title, *(f"{values[column]:.2f}" if column in values else "" for column in columns)])
    table = tabulate(rows, headers=["data set", *columns], tablefmt="github", disable_numparse=True)
    notes = "\n".join(f"{name}: {text}" for name, metrics in results.items() if (text := _notes(metrics)))
    logger.info("evaluation results in percent (%s)\n%s\n%s", protocol, table, notes)


def _columns(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names of the columns: each float that an evaluator returned, in its order.

    To add a column, compute it in ``fastamp.evaluation.metrics.EvaluationResult.metrics`` and name it in
    ``Protocol.metric_names``; ``fastamp.report.sections._tiles`` chooses those of a report.
    """
    return list({name: None for each in results.values() for name, value in each.items() if isinstance(value, float)})


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
