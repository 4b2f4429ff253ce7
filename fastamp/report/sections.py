"""The parts of a report's page: test sets, training, mixed precision, data, config, environment."""

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from fastamp.data.datasets.base import ImageItem
from fastamp.evaluation.details import CameraMatrix, Details, RankList
from fastamp.evaluation.protocol import Protocol
from fastamp.report.curves import (
    cmc_panel,
    health_panels,
    roc_panel,
    score_name,
    score_panel,
    scores,
    training_panels,
)
from fastamp.report.history import History
from fastamp.report.markup import Markup, join, tag
from fastamp.report.run import EvaluatedSet, Run, config_changes, data_counts, environment
from fastamp.report.svg import chart
from fastamp.report.thumbnails import data_address, thumbnail

# Pictures of all test sets together weigh some 2.5 KB each.
_MOST_LISTS = 48
_SHADES = 10


def results_section(each: EvaluatedSet, number: int, count: int) -> Markup:
    """Return the section of one of ``count`` test sets."""
    metrics, judgement = each.metrics, each.judgement
    parts = [_tiles(metrics), tag("p", _counts(metrics), class_="note"), *_further(metrics)]
    if judgement is not None and judgement.details is not None:
        details, protocol = judgement.details, judgement.protocol
        panels = [cmc_panel(judgement), roc_panel(details), score_panel(details, protocol)]
        parts.append(_charts([panel for panel in panels if panel is not None]))
        if details.cameras is not None:
            parts += _camera_matrix(details)
        parts += _rank_lists(each, details, protocol, most=max(1, _MOST_LISTS // (2 * count)))
    return tag("section", tag("h2", f"Results on {each.name}"), *parts, id=f"set-{number}")


def _tiles(metrics: dict[str, Any]) -> Markup:
    tiles = []
    for name in ("mAP", "Rank-1", "Rank-5", "Rank-10", "mINP"):
        if name in metrics:
            interval = metrics.get("intervals", {}).get(name)
            below = [tag("span", f"{interval[0]:.1f} to {interval[1]:.1f}", class_="interval")] if interval else []
            value = tag("dd", f"{metrics[name]:.1f}", tag("span", " %", class_="unit"), *below)
            tiles.append(tag("div", tag("dt", name), value))
    return tag("dl", *tiles, class_="tiles")


def _counts(metrics: dict[str, Any]) -> str:
    names = ("num_query", "num_gallery", "num_query_without_match")
    if not all(name in metrics for name in names):
        return ""
    queries, gallery, unmatched = (metrics[name] for name in names)
    text = f"{queries:,} queries, {gallery:,} gallery images, {unmatched:,} queries without a match (left out)."
    if metrics.get("intervals"):
        text += " The small numbers are the interval in 95 % of resamples of the queries."
    return text


def _further(metrics: dict[str, Any]) -> list[Markup]:
    """Return the table of floors and the accept rates, where they were asked for."""
    parts = []
    rates = {name: value for name, value in metrics.items() if name.startswith("TAR@FAR=")}
    if rates:
        rows = [(f"false accept rate {name[8:]}", f"{value:.2f} %") for name, value in rates.items()]
        parts.append(_table("True accept rates", ("at", "true accept rate"), rows))
    if metrics.get("floors"):
        rows = [("this model", *_scores_of(metrics))]
        rows += [(f"floor: {name}", *_scores_of(floor)) for name, floor in metrics["floors"].items()]
        parts.append(_table("Beside rankings that learned nothing", ("ranked by", "mAP %", "Rank-1 %"), rows))
    return parts


def _scores_of(metrics: dict[str, Any]) -> tuple[str, str]:
    return f"{metrics['mAP']:.1f}", f"{metrics['Rank-1']:.1f}"


def _camera_matrix(details: Details) -> list[Markup]:
    """Return the table of mAP for each pair of cameras."""
    matrix: CameraMatrix = details.cameras
    head = [tag("th", "query camera", scope="col")]
    head += [tag("th", f"{camera}", scope="col") for camera in matrix.gallery_cameras]
    body = []
    for row, camera in enumerate(matrix.query_cameras):
        cells = [tag("th", f"{camera}", scope="row")]
        for value, count in zip(matrix.mean_ap[row], matrix.queries[row], strict=True):
            if count:
                shade = min(_SHADES - 1, int(value * _SHADES))
                cells.append(tag("td", f"{100 * value:.0f}", class_=f"h{shade}", title=f"{count} queries"))
            else:
                cells.append(tag("td", "\u2013", title="no query has a match"))
        body.append(tag("tr", *cells))
    note = "mAP in percent when the gallery has the images of one camera alone."
    if details.sampled < details.queries:
        note += f" Of {details.sampled:,} of the {details.queries:,} queries, drawn at random."
    if matrix.left_out:
        note += f" {matrix.left_out} cameras with fewer images are left out."
    title = "Camera pairs: queries of a row's camera, gallery of a column's"
    table = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body), class_="matrix")
    return [tag("h3", title), tag("p", note, class_="note"), _scrolling(table, title)]


def _rank_lists(each: EvaluatedSet, details: Details, protocol: Protocol, *, most: int) -> list[Markup]:
    """Return the rank lists, as rows of pictures."""
    queries, gallery = (each.images, each.images) if protocol.draws_queries else (each.query, each.gallery)
    if not gallery:
        return []
    parts = []
    for kind, lists in details.lists.items():
        if lists:
            parts.append(tag("h3", f"{kind.capitalize()} queries"))
            rows = [_rank_list(one, queries, gallery, protocol) for one in lists[:most]]
            parts.append(tag("div", *rows, class_="lists"))
    if parts:
        note = (
            f"Below each image: {score_name(protocol)}, and its camera. \u2713 in green is the query's identity, "
            "\u2717 in red is not."
        )
        parts.insert(0, tag("p", note, class_="note"))
    return [tag("h3", "Rank lists", class_="over"), *parts] if parts else []


def _rank_list(one: RankList, queries: Sequence[ImageItem], gallery: Sequence[ImageItem], protocol: Protocol) -> Markup:
    query = queries[one.query]
    title = f"identity {query.pid}: AP {100 * one.ap:.1f} %, first match at rank {one.first_match}"
    pictures = [_picture(query, f"query, identity {query.pid}, camera {query.camid}", ("query", f"cam {query.camid}"))]
    for rank, (number, score, match) in enumerate(
        zip(one.gallery.tolist(), scores(one.distances, protocol).tolist(), one.matches.tolist(), strict=True), start=1
    ):
        item = gallery[number]
        word = "correct" if match else "wrong"
        alt = f"rank {rank}, {word}: identity {item.pid}, camera {item.camid}"
        mark = tag("span", ("\u2713" if match else "\u2717"), f" {score:.2f}", class_=word)
        pictures.append(_picture(item, alt, (mark, f"cam {item.camid}"), kind=word))
    row = _scrolling(tag("ol", *pictures, class_="ranks"), f"rank list of {title}")
    return tag("figure", tag("figcaption", title), row, class_="list")


def _picture(item: ImageItem, alt: str, below: Sequence[object], kind: str = "query") -> Markup:
    small = thumbnail(item)
    name = PurePath(item.path).name
    if small is None:
        image = tag("div", "cannot be read", class_="missing", role="img", aria_label=f"{alt}; cannot be read")
    else:
        image = tag("img", src=data_address(small), alt=alt, width=small.width, height=small.height, title=name)
    return tag("li", tag("div", image, class_=f"frame {kind}"), join(tag("span", line) for line in below))


def training_section(history: History) -> Markup:
    """Return the charts of a training."""
    return tag("section", tag("h2", "Training"), _charts(training_panels(history)), id="training")


def health_section(run: Run) -> Markup:
    """Return what there is to say on mixed precision: the policy, skipped steps, loss scale, gradient norm."""
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
    panels = health_panels(history)
    charts = (_charts(panels),) if panels else ()
    return tag("section", tag("h2", "Mixed precision"), _facts(facts), *charts, id="precision")


def data_section(run: Run) -> Markup:
    """Return how many images, identities and cameras each split has."""
    rows = [(name, split, *(f"{count:,}" for count in counts)) for name, split, *counts in data_counts(run)]
    table = _table("", ("data set", "split", "images", "identities", "cameras"), rows)
    return tag("section", tag("h2", "Data"), table, id="data")


def config_section(run: Run) -> Markup:
    """Return what the config changes from the defaults."""
    rows = []
    for path, value, default, meaning in config_changes(run.cfg):
        rows.append((tag("span", tag("code", path), tag("small", meaning)), tag("code", value), tag("code", default)))
    table = _table("", ("key", "value", "default"), rows) if rows else tag("p", "Nothing: all values are the defaults.")
    return tag("section", tag("h2", "Config: what differs from the defaults"), table, id="config")


def environment_section(run: Run) -> Markup:
    """Return what the run was made with."""
    return tag("section", tag("h2", "Environment"), _facts(environment(run)), id="environment")


def _charts(panels: Sequence[Any]) -> Markup:
    return tag("div", *(chart(panel) for panel in panels), class_="charts")


def _facts(facts: dict[str, str]) -> Markup:
    rows = (tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items())
    return tag("dl", *rows, class_="facts")


def _table(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", header, scope="col") for header in headers)))
    body = tag("tbody", *(tag("tr", *(tag("td", cell) for cell in row)) for row in rows))
    caption = (tag("caption", title),) if title else ()
    return _scrolling(tag("table", *caption, head, body), title or ", ".join(headers))


def _scrolling(content: Markup, label: str) -> Markup:
    """Return a box that scrolls by itself where its content is wider than the page, by keyboard too."""
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)
