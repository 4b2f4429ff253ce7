"""Tables of published weights for a reader's choice, from the catalog."""

import re
from collections.abc import Mapping
from typing import Any

from markdown_text import escape, table

from fastamp.zoo.catalog import Entry, list_entries

MARKER = re.compile(r"<!-- published weights by (accuracy|size|license) -->")
_HEADER = (
    "name",
    "model",
    "license of the weights",
    "size",
    "test set",
    "mAP",
    "Rank-1",
    "protocol",
    "source of the figures",
)
TEST_SETS = ("Market-1501", "MSMT17", "VeRi-776")
_MAX_ROWS = 5


def insert_models_tables(markdown: str) -> str:
    """Replace the markers of a page by tables, each in the order of its name."""
    return MARKER.sub(lambda match: models_table(match[1]), markdown)


def models_table(order: str) -> str:
    """Return published weights with an address that fastamp reads according to the catalog, as Markdown.

    Args:
        order: ``accuracy``: for each of three test sets, the highest published mAP without
            re-ranking; ``size``: the smallest published
            file first; ``license``: those whose license states that commercial use is allowed, in the order of the
            catalog.
    """
    rows = [
        (entry, result)
        for entry in list_entries()
        if entry.recipe and not entry.withdrawn and entry.loads in ("yes", "likely")
        for result in entry.results
        if "mAP" in result and "with re-ranking" not in result.get("protocol", "")
    ]
    if order == "accuracy":
        chosen = []
        for name in TEST_SETS:
            of_set = [row for row in rows if row[1]["test_set"] == name]
            chosen += sorted(of_set, key=lambda row: -row[1]["mAP"])[:_MAX_ROWS]
    else:
        first = {entry.name: (entry, result) for entry, result in reversed(rows)}
        if order == "size":
            measured = [row for row in first.values() if row[0].size]
            chosen = sorted(measured, key=lambda row: row[0].size or 0)[: 2 * _MAX_ROWS]
        else:
            allowed = [row for row in first.values() if row[0].commercial_use == "yes"]
            chosen = sorted(allowed, key=lambda row: row[0].rank or len(rows))[: 2 * _MAX_ROWS]
    return table(_HEADER, [_row(entry, result) for entry, result in chosen])


def _row(entry: Entry, result: Mapping[str, Any]) -> tuple[str, ...]:
    size = f"{entry.size / 2**20:.0f} MiB" if entry.size else "not stated"
    source = escape(f"{result.get('source', 'not stated')} of {entry.repository}")
    return (
        f"`{entry.name}`",
        escape(entry.backbone),
        escape(entry.license or "not stated"),
        size,
        result["test_set"],
        f"{result['mAP']}",
        f"{result.get('rank1', '')}",
        escape(result.get("protocol", "not stated")),
        source,
    )
