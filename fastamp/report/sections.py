"""Prepare the values for the templates of the report."""

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from fastamp.config import CfgNode
from fastamp.data.datasets.base import ImageItem
from fastamp.data.thumbnails import data_address, thumbnail
from fastamp.evaluation.protocol import Protocol
from fastamp.evaluation.report_section import CountMatrix, ImageExample, ReportSection, Table
from fastamp.evaluation.retrieval_examples import CameraMatrix, RankList, RetrievalExamples
from fastamp.report.curves import cmc_panel, roc_panel, score_name, score_panel, scores
from fastamp.report.history import History
from fastamp.report.open_set import open_set_section
from fastamp.report.run import EvaluatedSet, Run, data_counts
from fastamp.report.svg import draw_panels
from fastamp.report.verdict import previous_run, verdict
from fastamp.utils.plural import plural

# Over all test sets. An image takes about 2.5 KB.
_MAX_LISTS = 48
_SHADES = 10
_SCALE = [f"{100 * shade // _SHADES}" for shade in range(_SHADES)]
_MAX_TILES = 6


def results(test_set: EvaluatedSet, count: int, cfg: CfgNode) -> dict[str, Any]:
    """Prepare the values for the section of one test set; ``count`` is the number of test sets in the report."""
    metrics, result = test_set.metrics, test_set.result
    section: dict[str, Any] = {
        "name": test_set.name,
        "verdict": verdict(metrics, previous_run(cfg, test_set.name)),
        "tiles": _tiles(metrics),
        "counts": _counts(metrics),
        "tables": _tables(metrics),
        "charts": None,
        "cameras": None,
        "lists": {},
        "open_set": open_set_section(test_set.calibration_check),
        "further": [_further_section(section, test_set) for section in test_set.sections],
    }
    if result is not None and result.examples is not None:
        examples, protocol = result.examples, result.protocol
        panels = [cmc_panel(result), roc_panel(examples), score_panel(examples, protocol)]
        section["charts"] = draw_panels([panel for panel in panels if panel is not None])
        section["cameras"] = _camera_matrix(examples, test_set)
        section["lists"] = _rank_lists(test_set, examples, protocol, most=max(1, _MAX_LISTS // (2 * count)))
        section["score_name"] = score_name(protocol)
    return section


def _tiles(metrics: dict[str, Any]) -> list[dict[str, str]]:
    tiles = []
    shown: list[str] = [name for name in ("mAP", "Rank-1", "Rank-5", "Rank-10", "mINP") if name in metrics]
    shown = shown or [name for name, value in metrics.items() if isinstance(value, float) and name != "metric"]
    for name in shown[:_MAX_TILES]:
        interval = metrics.get("intervals", {}).get(name)
        text = f"{interval[0]:.1f} to {interval[1]:.1f}" if interval else ""
        tiles.append({"name": name, "value": f"{metrics[name]:.1f}", "interval": text})
    return tiles


def _counts(metrics: dict[str, Any]) -> str:
    names = ("num_query", "num_gallery", "num_query_without_match")
    if not all(name in metrics for name in names):
        return ""
    queries, gallery, unmatched = (metrics[name] for name in names)
    unit = "tracklets" if "num_frames" in metrics else "images"
    text = f"{queries:,} queries, {gallery:,} gallery {unit}, {unmatched:,} queries without a match (excluded)."
    if metrics.get("intervals"):
        text += " Small numbers: 95 % bootstrap confidence intervals over resampled queries."
    return text


def _tables(metrics: dict[str, Any]) -> list[Table]:
    """Prepare the tables of true accept rates, baselines and groups of queries, if they were computed."""
    tables: list[Table] = []
    rates = {name: value for name, value in metrics.items() if name.startswith("TAR@FAR=")}
    if rates:
        rows = [(f"false accept rate {name[8:]}", f"{value:.2f} %") for name, value in rates.items()]
        tables.append(Table("True accept rates", ("at", "true accept rate"), rows))
    tables += _baseline_tables(metrics)
    if "splits" in metrics:
        splits = {"mean": metrics, "standard deviation": metrics["std"], **metrics["splits"]}
        names = [name for name in ("mAP", "Rank-1") if name in metrics]
        rows = [(title, *(f"{values[name]:.1f}" for name in names)) for title, values in splits.items()]
        tables.append(Table("Random splits", ("split", *(f"{name} %" for name in names)), rows))
    if metrics.get("groups"):
        groups = [
            (name, f"{group['num_query']:,}", *(_scores_of(group) if "mAP" in group else ("", "")))
            for name, group in metrics["groups"].items()
        ]
        groups.append(("mean over groups", "", *_scores_of(metrics["mean_over_groups"])))
        tables.append(Table("Groups of queries", ("group", "queries", "mAP %", "Rank-1 %"), groups))
    return tables


def _baseline_tables(metrics: dict[str, Any]) -> list[Table]:
    """Prepare one table for the baselines of each kind: those that rank the gallery, and others, e.g. of attributes."""
    kinds: dict[tuple[str, ...], dict[str, Any]] = {}
    for title, baseline in metrics.get("baselines", {}).items():
        names = [name for name in baseline if name in metrics and name != "metric"]
        names = ["mAP", "Rank-1"] if "mAP" in names else names[:_MAX_TILES]
        kinds.setdefault(tuple(names), {"this model": metrics})[f"baseline: {title}"] = baseline
    return [
        Table(
            "Comparison with the baselines",
            ("ranked by" if "mAP" in names else "predicted by", *(f"{name} %" for name in names)),
            [(title, *(f"{scores[name]:.1f}" for name in names)) for title, scores in rows.items()],
        )
        for names, rows in kinds.items()
    ]


def _scores_of(metrics: dict[str, Any]) -> tuple[str, str]:
    return f"{metrics['mAP']:.1f}", f"{metrics['Rank-1']:.1f}"


def _camera_matrix(examples: RetrievalExamples, test_set: EvaluatedSet) -> dict[str, Any] | None:
    """Prepare the table of mAP for each pair of cameras; None if fewer than two cameras are known."""
    matrix: CameraMatrix | None = examples.cameras
    if matrix is None:
        return None
    queries, gallery = (list(map(test_set.camera, side)) for side in (matrix.query_cameras, matrix.gallery_cameras))
    if len({*queries, *gallery} - {""}) < 2:
        return None
    rows = []
    for row, camera in enumerate(queries):
        cells = []
        for value, count in zip(matrix.mean_ap[row], matrix.queries[row], strict=True):
            cells.append(_cell(value, f"{count} queries") if count else _cell(None, "no query has a match"))
        rows.append((camera, cells))
    note = "mAP in percent if the gallery contains only the images of one camera."
    if examples.sampled < examples.queries:
        note += f" Random sample of {examples.sampled:,} of {examples.queries:,} queries."
    if matrix.num_omitted:
        note += f" {plural(matrix.num_omitted, 'camera')} with fewer images omitted."
    title = "Camera pairs: query camera in rows, gallery camera in columns"
    return {
        "title": title,
        "note": note,
        "unit": "mAP",
        "corner": "query camera",
        "columns": gallery,
        "rows": rows,
        "scale": _SCALE,
    }


def _cell(value: float | None, tip: str) -> dict[str, Any]:
    """Prepare the cell of a matrix with a value in 0..1, or None for an empty cell."""
    if value is None:
        return {"percent": "", "tip": tip}
    return {"percent": f"{100 * value:.0f}", "shade": min(_SHADES - 1, int(value * _SHADES)), "tip": tip}


def _further_section(section: ReportSection, test_set: EvaluatedSet) -> dict[str, Any]:
    """Prepare a section of the evaluator; images are shown if the images of the test set are known."""
    images = test_set.images if section.examples else []
    pictures = [_image(images[example.index], example, test_set) for example in section.examples[:_MAX_LISTS] if images]
    return {
        "title": section.title,
        "note": section.note,
        "tables": section.tables,
        "matrix": None if section.matrix is None else _count_matrix(section.matrix),
        "pictures": pictures,
        "pictures_title": section.examples_title,
    }


def _image(item: ImageItem, example: ImageExample, test_set: EvaluatedSet) -> dict[str, Any]:
    kind = "correct" if example.correct else "wrong"
    return _picture(item, f"{kind}: {', '.join(example.lines)}", kind, test_set) | {"lines": example.lines}


def _count_matrix(matrix: CountMatrix) -> dict[str, Any]:
    """Prepare a matrix of counts as percentages of its rows."""
    rows = []
    for name, counts in zip(matrix.rows, matrix.counts.tolist(), strict=True):
        total = sum(counts)
        rows.append((name, [_cell(count / total if count else None, f"{count:,} of {total:,}") for count in counts]))
    return {
        "title": matrix.title,
        "note": matrix.note,
        "unit": "images of the row",
        "corner": matrix.corner,
        "columns": matrix.columns,
        "rows": rows,
        "scale": _SCALE,
    }


def _rank_lists(
    test_set: EvaluatedSet, examples: RetrievalExamples, protocol: Protocol, *, most: int
) -> dict[str, list[Any]]:
    """Prepare the rank lists of each kind."""
    queries, gallery = images_of(test_set)
    if not gallery:
        return {}
    return {
        kind: [_rank_list(rank_list, queries, gallery, protocol, test_set) for rank_list in lists[:most]]
        for kind, lists in examples.lists.items()
        if lists
    }


def images_of(test_set: EvaluatedSet) -> tuple[Sequence[ImageItem], Sequence[ImageItem]]:
    """Return the images that the queries and the gallery indices of the rank lists of a test set refer to."""
    all_images = test_set.result is not None and test_set.result.protocol.rule.all_images
    return (test_set.images, test_set.images) if all_images else (test_set.query, test_set.gallery)


def _rank_list(
    rank_list: RankList,
    queries: Sequence[ImageItem],
    gallery: Sequence[ImageItem],
    protocol: Protocol,
    test_set: EvaluatedSet,
) -> dict[str, Any]:
    query = queries[rank_list.query]
    name = test_set.identity(query.pid)
    match_text = f"first match at rank {rank_list.first_match}" if rank_list.first_match else "no match"
    title = f"identity {name}: AP {100 * rank_list.ap:.1f} %, {match_text}"
    pictures = [_picture(query, f"query, identity {name}", "query", test_set)]
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
        alt = f"rank {rank}, {kind}: identity {test_set.identity(item.pid)}"
        pictures.append(_picture(item, alt, kind, test_set, score))
    return {"title": title, "path": query.path, "pictures": pictures}


def _picture(
    item: ImageItem, alt: str, kind: str, test_set: EvaluatedSet, score: float | None = None
) -> dict[str, Any]:
    """Prepare an image in a rank list, with an empty ``address`` if the image cannot be read."""
    small, camera = thumbnail(item), test_set.camera(item.camid)
    return {
        "kind": kind,
        "alt": f"{alt}, camera {camera}" if camera else alt,
        "path": item.path,
        "name": PurePath(item.path).name,
        "identity": test_set.identity(item.pid),
        "camera": f"cam {camera}" if camera.isdecimal() else camera,
        "score": "" if score is None else f"{score:.2f}",
        "address": "" if small is None else data_address(small),
        "size": (0, 0) if small is None else small.size,
    }


def precision_facts(run: Run) -> dict[str, str]:
    """Summarize the policy, skipped steps, loss scale and gradient norm, if recorded."""
    history = run.history or History()
    facts = {"Precision": run.policy.describe()}
    skipped, iterations = history.latest("skipped_total"), history.series.get("skipped_total")
    if skipped is not None and iterations:
        total = iterations[-1][0] + 1
        facts["Skipped steps"] = f"{skipped:,.0f} of {total:,} ({100 * skipped / total:.2g} %)"
    scale = [value for _, value in history.series.get("loss_scale", []) if math.isfinite(value)]
    if scale:
        constant = f"{scale[0]:g}, constant"
        facts["Loss scale"] = (
            constant if len(set(scale)) == 1 else f"{min(scale):g} to {max(scale):g}, {scale[-1]:g} last"
        )
    norms = [value for _, value in history.series.get("grad_norm", []) if math.isfinite(value)]
    if norms:
        facts["Gradient norm"] = f"{min(norms):.3g} to {max(norms):.3g}, {norms[-1]:.3g} last"
    return facts


def data_rows(run: Run) -> list[tuple[str, ...]]:
    """List the numbers of images, identities and cameras in each split."""
    return [(name, split, *(f"{count:,}" for count in counts)) for name, split, *counts in data_counts(run)]
