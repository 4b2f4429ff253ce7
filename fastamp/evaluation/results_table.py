"""Formatting of evaluation results as a table in the log."""

import logging
from collections.abc import Sequence
from typing import Any

from fastamp.evaluation.result import float_names
from fastamp.utils.plural import plural
from fastamp.utils.table import format_table

logger = logging.getLogger(__name__)

# Groups of queries in the table; the metrics contain all of them.
_NUM_GROUPS = 30


def print_results(results: dict[str, dict[str, Any]], *, protocol: str, trained_on: Sequence[str] = ()) -> None:
    """Log a table of the results of all test sets and their baselines, with a column for each float.

    Args:
        results: dataset name -> metrics returned by ``ReidEvaluator.evaluate``.
        protocol: one-line description of the evaluation, see ``Protocol.describe``.
        trained_on: names of the training sets. If they differ from the test sets, the table names them, and has a row
            with the mean over the test sets of other names, if there are several. Default: unknown.
    """
    columns = float_names(results)
    rows = []
    for name, metrics in results.items():
        for title, values in (
            (name, metrics),
            *_split_rows(metrics),
            *((f"  baseline: {k}", v) for k, v in metrics.get("baselines", {}).items()),
            *_group_rows(metrics),
        ):
            rows.append([title, *(f"{values[column]:.2f}" if column in values else "" for column in columns)])
    others = [name for name in results if name not in trained_on] if trained_on else []
    if others:
        protocol += f"; trained on {', '.join(trained_on)}"
    if len(others) > 1:
        values = {name: [results[other].get(name) for other in others] for name in columns}
        means = (f"{sum(value) / len(value):.2f}" if None not in value else "" for value in values.values())
        rows.append([f"mean of {len(others)} other datasets", *means])
    table = format_table(rows, ["dataset", *columns])
    notes = "\n".join(f"{name}: {text}" for name, metrics in results.items() if (text := _notes(metrics)))
    logger.info("evaluation results in percent (%s)\n%s\n%s", protocol, table, notes)


def _split_rows(metrics: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the title and the values of the standard deviation over the splits (``TEST.ALL_SPLITS``)."""
    return (
        [(f"  standard deviation of {plural(len(metrics['splits']), 'split')}", metrics["std"])]
        if "splits" in metrics
        else []
    )


def _group_rows(metrics: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the title and metrics of the first groups of queries (``TEST.GROUP_BY``) and of their mean."""
    groups = metrics.get("groups", {})
    rows = [(f"  group: {name}", values) for name, values in groups.items()][:_NUM_GROUPS]
    if len(groups) > _NUM_GROUPS:
        rows.append((f"  ({len(groups) - _NUM_GROUPS} more groups)", {}))
    valid = sum(values["num_query"] > values["num_query_without_match"] for values in groups.values())
    return [*rows, (f"  mean of {plural(valid, 'group')}", metrics["mean_over_groups"])] if groups else []


def _notes(metrics: dict[str, Any]) -> str:
    if "num_query" not in metrics:  # custom evaluator
        return ""
    unit = "tracklets" if "num_frames" in metrics else "images"
    text = (
        f"{metrics['num_query']} queries, {metrics['num_gallery']} gallery {unit}, "
        f"{metrics['num_query_without_match']} queries without a match (excluded)"
    )
    if "num_frames" in metrics:
        text += f", {metrics['num_frames']} frames"
    if metrics.get("num_indistinct"):
        text += f", {metrics['num_indistinct']} images with the same feature as another identity (see the warning)"
    if "new_threshold" in metrics:
        text += f"; new below a similarity of {metrics['new_threshold']['similarity']:.4g}"
    if metrics.get("not_defined"):
        text += f"; {', '.join(metrics['not_defined'])} not defined"
    for name, (low, high) in metrics.get("intervals", {}).items():
        text += f"; {name} {low:.2f} to {high:.2f}"
    return text + (" (95 % bootstrap CI)" if metrics.get("intervals") else "")
