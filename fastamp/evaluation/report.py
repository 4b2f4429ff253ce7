"""The table of results that ends an evaluation."""

import logging
from typing import Any

from tabulate import tabulate

logger = logging.getLogger(__name__)

_COLUMNS = ("Rank-1", "Rank-5", "Rank-10", "mAP", "mINP", "metric")


def print_results(results: dict[str, dict[str, Any]], *, protocol: str) -> None:
    """Log one table for all test sets, with the floors under each set that has them.

    Args:
        results: data set name -> what ``ReidEvaluator.evaluate`` returned.
        protocol: one line that says how was measured.
    """
    rows = []
    for name, metrics in results.items():
        rows.append([name, *(f"{metrics[column]:.2f}" for column in _COLUMNS)])
        for floor, values in metrics.get("floors", {}).items():
            rows.append([f"  floor: {floor}", *(f"{values[column]:.2f}" for column in _COLUMNS)])
    table = tabulate(rows, headers=["data set", *_COLUMNS], tablefmt="github", disable_numparse=True)
    counts = "\n".join(
        f"{name}: {m['num_query']} queries, {m['num_gallery']} gallery images, "
        f"{m['num_query_without_match']} queries without a match (left out)"
        for name, m in results.items()
    )
    logger.info("evaluation results in percent (%s)\n%s\n%s", protocol, table, counts)
