"""FastReID's table of metrics."""

import logging
from collections.abc import Mapping, MutableMapping
from typing import Any

from tabulate import tabulate

logger = logging.getLogger(__name__)


def flatten_results_dict(results: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested metrics: ``{"a": {"b": 1}}`` becomes ``{"a/b": 1}``."""
    flat: dict[str, Any] = {}
    for name, value in results.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": metric for inner, metric in flatten_results_dict(value).items()}
        else:
            flat[name] = value
    return flat


def print_csv_format(results: MutableMapping[str, Any]) -> None:
    """Log a table of metrics, one row per dataset.

    Args:
        results: dataset name -> metrics; or the metrics of one dataset, with its name as ``dataset``, which is removed
            as in FastReID.
    """
    if not all(isinstance(metrics, Mapping) for metrics in results.values()):
        results = {results.pop("dataset", ""): results}
    columns = {
        name: None for metrics in results.values() for name, value in metrics.items() if isinstance(value, int | float)
    }
    rows = [[dataset, *(metrics.get(name, "") for name in columns)] for dataset, metrics in results.items()]
    table = tabulate(rows, headers=["dataset", *columns], tablefmt="github", floatfmt=".2f")
    logger.info("evaluation results:\n%s", table)
