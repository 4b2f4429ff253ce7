"""HTML page of clusters: a contact sheet of each cluster and of the outliers, with thumbnails in the page."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fastamp.data.datasets.base import ImageItem
from fastamp.evaluation.clustering import OUTLIER
from fastamp.report.page import embedded_style, templates
from fastamp.report.thumbnails import data_address, thumbnail
from fastamp.utils.errors import writing
from fastamp.utils.files import write_atomically
from fastamp.utils.plural import plural


@dataclass(frozen=True)
class _Image:
    path: str
    source: str


@dataclass(frozen=True)
class _Group:
    title: str
    note: str
    images: list[_Image]


def write_cluster_page(
    path: Path,
    labels: np.ndarray,
    items: Sequence[ImageItem],
    *,
    title: str,
    summary: str,
    identities: np.ndarray | None = None,
    clusters: int = 100,
    images: int = 12,
) -> None:
    """Write a self-contained HTML page of the largest clusters and of outliers. Images that cannot be read are skipped.

    Args:
        path: HTML file.
        labels: (N,) int64, clusters 0, 1, ..., and ``OUTLIER``.
        items: N images.
        title, summary: heading, and the line below it.
        identities: (N,) str, known identities, "" where unknown; clusters with several identities are listed first.
            Default None: unknown.
        clusters: number of clusters to show. Default: 100.
        images: images per cluster; twice as many outliers are shown. Default: 12.

    Raises:
        ConfigError: if the file cannot be written.
    """
    groups = []
    names, sizes = np.unique(labels[labels != OUTLIER], return_counts=True)
    counts = [_identities_in(identities, labels == name) for name in names]
    # Merged identities first, then large clusters.
    order = sorted(range(len(names)), key=lambda number: (-min(len(counts[number]), 2), -sizes[number]))
    for number in order[:clusters]:
        shown = _images(items, np.flatnonzero(labels == names[number])[:images])
        note = plural(int(sizes[number]), "image")
        if counts[number]:
            note += f"; {plural(len(counts[number]), 'identity', 'identities')}: "
            note += ", ".join(f"{name} ({count})" for name, count in counts[number].most_common(5))
        groups.append(_Group(f"Cluster {names[number]}", note, shown))
    outliers = np.flatnonzero(labels == OUTLIER)
    if len(outliers):
        shown = _images(items, outliers[: 2 * images])
        groups.append(_Group("Outliers", plural(len(outliers), "image"), shown))
    if len(names) > clusters:
        summary += f"; the page shows {clusters} of {len(names)} clusters"
    page = templates().get_template("clusters.html")
    content = page.render(title=title, summary=summary, groups=groups, **embedded_style()).encode()
    with writing(path):
        write_atomically(path, lambda file: file.write(content))


def _identities_in(identities: np.ndarray | None, chosen: np.ndarray) -> "Counter[str]":
    return Counter() if identities is None else Counter(name for name in identities[chosen].tolist() if name)


def _images(items: Sequence[ImageItem], rows: np.ndarray) -> list[_Image]:
    found = []
    for row in rows.tolist():
        picture = thumbnail(items[row])
        if picture is not None:
            found.append(_Image(os.fspath(items[row].path), data_address(picture)))
    return found
