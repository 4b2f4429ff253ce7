"""Values that the templates of a report show."""

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from fastamp.data.datasets.base import ImageItem
from fastamp.evaluation.details import CameraMatrix, Details, RankList
from fastamp.evaluation.protocol import Protocol
from fastamp.report.curves import cmc_panel, roc_panel, score_name, score_panel, scores
from fastamp.report.history import History
from fastamp.report.run import EvaluatedSet, Run, data_counts
from fastamp.report.svg import draw_panels
from fastamp.report.thumbnails import data_address, thumbnail

# Pictures of all test sets together weigh some 2.5 KB each.
_MAX_LISTS = 48
_SHADES = 10
Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""Title, headers and rows."""


def results(each: EvaluatedSet, count: int) -> dict[str, Any]:
    """Return the section of one of ``count`` test sets."""
    metrics, result = each.metrics, each.result
    section = {
        "name": each.name,
        "tiles": _tiles(metrics),
        "counts": _counts(metrics),
        "tables": _tables(metrics),
        "charts": None,
        "cameras": None,
        "lists": {},
    }
    if result is not None and result.details is not None:
        details, protocol = result.details, result.protocol
        panels = [cmc_panel(result), roc_panel(details), score_panel(details, protocol)]
        section["charts"] = draw_panels([panel for panel in panels if panel is not None])
        section["cameras"] = None if details.cameras is None else _camera_matrix(details)
        section["lists"] = _rank_lists(each, details, protocol, most=max(1, _MAX_LISTS // (2 * count)))
        section["score_name"] = score_name(protocol)
    return section


def _tiles(metrics: dict[str, Any]) -> list[dict[str, str]]:
    tiles = []
    for name in ("mAP", "Rank-1", "Rank-5", "Rank-10", "mINP"):
        if name in metrics:
            interval = metrics.get("intervals", {}).get(name)
            text = f"{interval[0]:.1f} to {interval[1]:.1f}" if interval else ""
            tiles.append({"name": name, "value": f"{metrics[name]:.1f}", "interval": text})
    return tiles


def _counts(metrics: dict[str, Any]) -> str:
    names = ("num_query", "num_gallery", "num_query_without_match")
    if not all(name in metrics for name in names):
        return ""
    queries, gallery, unmatched = (metrics[name] for name in names)
    text = f"{queries:,} queries, {gallery:,} gallery images, {unmatched:,} queries without a match (left out)."
    if metrics.get("intervals"):
        text += " The small numbers are the interval in 95 % of resamples of the queries."
    return text


def _tables(metrics: dict[str, Any]) -> list[Table]:
    """Return the accept rates and the table of floors, where they were asked for."""
    tables: list[Table] = []
    rates = {name: value for name, value in metrics.items() if name.startswith("TAR@FAR=")}
    if rates:
        rows = [(f"false accept rate {name[8:]}", f"{value:.2f} %") for name, value in rates.items()]
        tables.append(("True accept rates", ("at", "true accept rate"), rows))
    if metrics.get("floors"):
        rows = [("this model", *_scores_of(metrics))]
        rows += [(f"floor: {name}", *_scores_of(floor)) for name, floor in metrics["floors"].items()]
        tables.append(("Beside rankings that learned nothing", ("ranked by", "mAP %", "Rank-1 %"), rows))
    return tables


def _scores_of(metrics: dict[str, Any]) -> tuple[str, str]:
    return f"{metrics['mAP']:.1f}", f"{metrics['Rank-1']:.1f}"


def _camera_matrix(details: Details) -> dict[str, Any]:
    """Return the table of mAP for each pair of cameras."""
    matrix: CameraMatrix = details.cameras
    rows = []
    for row, camera in enumerate(matrix.query_cameras):
        cells = []
        for value, count in zip(matrix.mean_ap[row], matrix.queries[row], strict=True):
            cell = {"queries": int(count)}
            if count:
                cell |= {"percent": f"{100 * value:.0f}", "shade": min(_SHADES - 1, int(value * _SHADES))}
            cells.append(cell)
        rows.append((camera, cells))
    note = "mAP in percent when the gallery has the images of one camera alone."
    if details.sampled < details.queries:
        note += f" Of {details.sampled:,} of the {details.queries:,} queries, drawn at random."
    if matrix.left_out:
        note += f" {matrix.left_out} cameras with fewer images are left out."
    title = "Camera pairs: queries of a row's camera, gallery of a column's"
    return {"title": title, "note": note, "gallery": matrix.gallery_cameras, "rows": rows}


def _rank_lists(each: EvaluatedSet, details: Details, protocol: Protocol, *, most: int) -> dict[str, list[Any]]:
    """Return the rank lists of each kind, as rows of pictures."""
    queries, gallery = (each.images, each.images) if protocol.draws_queries else (each.query, each.gallery)
    if not gallery:
        return {}
    return {
        kind: [_rank_list(rank_list, queries, gallery, protocol) for rank_list in lists[:most]]
        for kind, lists in details.lists.items()
        if lists
    }


def _rank_list(
    rank_list: RankList, queries: Sequence[ImageItem], gallery: Sequence[ImageItem], protocol: Protocol
) -> dict[str, Any]:
    query = queries[rank_list.query]
    title = f"identity {query.pid}: AP {100 * rank_list.ap:.1f} %, first match at rank {rank_list.first_match}"
    pictures = [_picture(query, f"query, identity {query.pid}, camera {query.camid}", "query")]
    for rank, (number, score, match) in enumerate(
        zip(
            rank_list.gallery.tolist(),
            scores(rank_list.distances, protocol).tolist(),
            rank_list.matches.tolist(),
            strict=True,
        ),
        start=1,
    ):
        item = gallery[number]
        kind = "correct" if match else "wrong"
        alt = f"rank {rank}, {kind}: identity {item.pid}, camera {item.camid}"
        pictures.append(_picture(item, alt, kind, score))
    return {"title": title, "pictures": pictures}


def _picture(item: ImageItem, alt: str, kind: str, score: float | None = None) -> dict[str, Any]:
    """Return an image of a rank list; ``address`` is empty where it cannot be read."""
    small = thumbnail(item)
    return {
        "kind": kind,
        "alt": alt,
        "name": PurePath(item.path).name,
        "camera": item.camid,
        "score": "" if score is None else f"{score:.2f}",
        "address": "" if small is None else data_address(small),
        "size": (0, 0) if small is None else small.size,
    }


def precision_facts(run: Run) -> dict[str, str]:
    """Return the policy, skipped steps, loss scale and gradient norm, as far as they are known."""
    history = run.history or History()
    facts = {"Precision": run.policy.describe()}
    skipped, iterations = history.latest("skipped_total"), history.series.get("skipped_total")
    if skipped is not None and iterations:
        total = iterations[-1][0] + 1
        facts["Skipped steps"] = f"{skipped:,.0f} of {total:,} ({100 * skipped / total:.2g} %)"
    scale = [value for _, value in history.series.get("loss_scale", []) if math.isfinite(value)]
    if scale:
        constant = f"{scale[0]:g}, all the time"
        facts["Loss scale"] = (
            constant if len(set(scale)) == 1 else f"{min(scale):g} to {max(scale):g}, {scale[-1]:g} last"
        )
    norms = [value for _, value in history.series.get("grad_norm", []) if math.isfinite(value)]
    if norms:
        facts["Gradient norm"] = f"{min(norms):.3g} to {max(norms):.3g}, {norms[-1]:.3g} last"
    return facts


def data_rows(run: Run) -> list[tuple[str, ...]]:
    """Return how many images, identities and cameras each split has."""
    return [(name, split, *(f"{count:,}" for count in counts)) for name, split, *counts in data_counts(run)]
