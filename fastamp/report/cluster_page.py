"""Contact sheets of clusters and of the outliers, as an HTML page, a section of the report, and an image."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from fastamp.data.datasets.base import ImageItem
from fastamp.data.thumbnails import data_address, grid, thumbnail
from fastamp.evaluation.clustering import OUTLIER
from fastamp.report.page import embedded_style, templates
from fastamp.report.run import ClusterSheets, SheetGroup, SheetImage
from fastamp.utils.errors import writing
from fastamp.utils.files import write_atomically
from fastamp.utils.plural import plural

# Rows of the image of the sheets.
_ROWS = 12


def cluster_sheets(
    labels: np.ndarray,
    items: Sequence[ImageItem],
    *,
    summary: str,
    identities: np.ndarray | None = None,
    clusters: int = 100,
    images: int = 12,
) -> ClusterSheets:
    """Read the images of the largest clusters, of outliers, and of split identities. Images that cannot be read are
    skipped.

    Args:
        labels: (N,) int64, clusters 0, 1, ..., and ``OUTLIER``.
        items: N images.
        summary: line above the sheets.
        identities: (N,) str, known identities, "" where unknown; clusters with several identities are listed first, and
            identities in several clusters have sheets of their own. Default None: unknown.
        clusters: number of clusters to show; a fifth of it is the number of split identities. Default: 100.
        images: images per cluster; twice as many outliers are shown. Default: 12.
    """
    names, sizes = np.unique(labels[labels != OUTLIER], return_counts=True)
    counts = [_identities_in(identities, labels == name) for name in names]
    # Merged identities first, then large clusters.
    order = sorted(range(len(names)), key=lambda number: (-min(len(counts[number]), 2), -sizes[number]))
    groups = []
    for number in order[:clusters]:
        shown = _images(items, np.flatnonzero(labels == names[number])[:images])
        note = _count(int(sizes[number]), len(shown))
        if counts[number]:
            note += f"; {plural(len(counts[number]), 'identity', 'identities')}: "
            note += ", ".join(f"{name} ({count})" for name, count in counts[number].most_common(5))
        groups.append(SheetGroup(f"Cluster {names[number]}", note, shown))
    outliers = np.flatnonzero(labels == OUTLIER)
    if len(outliers):
        shown = _images(items, outliers[: 2 * images])
        groups.append(SheetGroup("Outliers", _count(len(outliers), len(shown)), shown))
    if identities is not None:
        groups += _split_identities(labels, items, identities, most=-(-clusters // 5), images=images)
    if len(names) > clusters:
        summary += f"; the page shows {clusters} of {len(names)} clusters"
    return ClusterSheets(summary, groups)


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
    """Write a self-contained HTML page of clusters; see ``cluster_sheets``.

    Args:
        path: HTML file.
        labels, items, summary, identities, clusters, images: see ``cluster_sheets``.
        title: heading.

    Raises:
        ConfigError: if the file cannot be written.
    """
    sheets = cluster_sheets(labels, items, summary=summary, identities=identities, clusters=clusters, images=images)
    page = templates().get_template("clusters.html")
    content = page.render(title=title, sheets=sheets, **embedded_style()).encode()
    with writing(path):
        write_atomically(path, lambda file: file.write(content))


def sheet_image(sheets: ClusterSheets) -> Image.Image | None:
    """Draw the first sheets as rows of an RGB image; None if there are no images."""
    rows = [[image.picture for image in group.images] for group in sheets.groups if group.images][:_ROWS]
    return grid(rows) if rows else None


def _split_identities(
    labels: np.ndarray, items: Sequence[ImageItem], identities: np.ndarray, *, most: int, images: int
) -> list[SheetGroup]:
    """Return a group for each identity in several clusters, those in the most clusters first."""
    known = (identities != "") & (labels != OUTLIER)
    clusters_of = {}
    for name in np.unique(identities[known]).tolist():
        clusters, counts = np.unique(labels[known & (identities == name)], return_counts=True)
        if len(clusters) > 1:
            clusters_of[name] = dict(zip(clusters.tolist(), counts.tolist(), strict=True))
    groups = []
    for name in sorted(clusters_of, key=lambda name: -len(clusters_of[name]))[:most]:
        counts_of = clusters_of[name]
        count = max(1, images // len(counts_of))
        rows = [np.flatnonzero((identities == name) & (labels == cluster))[:count] for cluster in counts_of]
        note = f"in {len(counts_of)} clusters: " + ", ".join(
            f"{cluster} ({count})" for cluster, count in counts_of.items()
        )
        groups.append(SheetGroup(f"Split identity {name}", note, _images(items, np.concatenate(rows)[:images])))
    return groups


def _count(images: int, shown: int) -> str:
    return plural(images, "image") + (f", {shown} of them shown" if shown < images else "")


def _identities_in(identities: np.ndarray | None, chosen: np.ndarray) -> "Counter[str]":
    return Counter() if identities is None else Counter(name for name in identities[chosen].tolist() if name)


def _images(items: Sequence[ImageItem], rows: np.ndarray) -> list[SheetImage]:
    images = []
    for row in rows.tolist():
        picture = thumbnail(items[row])
        if picture is not None:
            images.append(SheetImage(os.fspath(items[row].path), picture, data_address(picture)))
    return images
