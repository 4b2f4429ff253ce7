"""Table of all queries with their results, the worst first."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastamp.data.datasets.base import ImageDataset, ImageItem
from fastamp.evaluation.rank import MISS, RankingResult
from fastamp.utils.errors import writing
from fastamp.utils.files import write_csv


def write_queries(
    path: Path, ranking: RankingResult, queries: Sequence[ImageItem], source: ImageDataset | None
) -> None:
    """Write a CSV file with one line per query: its file, identity, camera, average precision (%) and first match.

    Queries are sorted by average precision, and those without a match are last, with empty values. If the protocol
    counts a query without a match as wrong, only its ``first_match`` is empty.

    Args:
        path: file to write; its folder is created if necessary.
        ranking: result of each query.
        queries: images of the queries, in the order of ``ranking``.
        source: dataset that names identities and cameras; None writes their numbers.

    Raises:
        WriteError: if the file cannot be written.
    """
    valid, first = ranking.valid.numpy(), ranking.first_match.numpy()
    rows: list[tuple[Any, ...]] = [("path", "pid", "camid", "ap", "first_match")]
    for number in ranking.worst_first().tolist():
        item = queries[number]
        names = (source.identity(item.pid), source.camera(item.camid)) if source else (item.pid, item.camid)
        values = ("", "")
        if valid[number]:
            # With random galleries, the mean over the trials.
            ranks = first[number][(first[number] >= 0) & (first[number] != MISS)]
            values = (f"{100 * ranking.ap[number]:.2f}", f"{1 + ranks.mean():g}" if len(ranks) else "")
        rows.append((item.path, *names, *values))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_csv(path, rows)
