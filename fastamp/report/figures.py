"""Matplotlib figures: charts, rank lists, similarity maps."""

import io
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import numpy as np

from fastamp.data.datasets.base import ImageItem
from fastamp.data.thumbnails import thumbnail
from fastamp.evaluation.protocol import Protocol
from fastamp.evaluation.retrieval_examples import RankList
from fastamp.report.curves import score_name, scores
from fastamp.report.panel import Panel
from fastamp.report.run import EvaluatedSet
from fastamp.report.similarity_map import SimilarityMap
from fastamp.utils.errors import optional_package, writing
from fastamp.utils.files import write_atomically
from fastamp.utils.fonts import drawable_text
from fastamp.utils.table import display_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GREEN, _RED, _GRAY = "#1a7f37", "#cf222e", "#57606a"
_IMAGE = (128, 256)
_DPI = 120
# Width of an image in a rank list, and in a similarity map, in the font of its text.
_RANK_LIST_WIDTH, _MAP_WIDTH = 15, 26


def new_figure(width: float, height: float) -> "Figure":
    """Create an empty figure with a size in inches, without opening a window.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    with optional_package("figures require matplotlib", "vis"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def write_figure(figure: "Figure", path: Path, *, dpi: int = _DPI) -> None:
    """Write a figure in the format of the file extension, and create the folder if necessary.

    Text is drawn with fonts that contain its characters; characters without a font are escaped. Letters of Arabic and
    other scripts that are joined, and text from right to left, require matplotlib 3.11 or later; earlier versions draw
    separate letters from left to right. PDF files contain their
    fonts, and SVG files contain text as paths.

    Args:
        figure: figure to write.
        path: file to write; its suffix is the format: .png, .pdf, .svg or another format of matplotlib.
        dpi: pixels per inch of a PNG file, and of the images in a PDF or SVG file. Default 120.

    Raises:
        ConfigError: if the file cannot be written.
    """
    import matplotlib

    _set_fonts(figure)
    buffer = io.BytesIO()
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.fonttype": "path"}):
        figure.savefig(buffer, format=path.suffix[1:], dpi=dpi)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(buffer.getvalue()))


def _set_fonts(figure: "Figure") -> None:
    """Set the font of text that is not ASCII, and escape characters without a font."""
    from matplotlib import font_manager
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        content = text.get_text()
        if content.isascii():
            continue
        lines = [drawable_text(line) for line in content.split("\n")]
        text.set_text("\n".join(line for line, _ in lines))
        families = ["DejaVu Sans"]
        for font in {font for _, font in lines if font is not None}:
            font_manager.fontManager.addfont(font)
            families.append(font_manager.FontProperties(fname=font).get_name())
        text.set_fontfamily(list(dict.fromkeys(families)))


def panel_figure(panels: Sequence[Panel]) -> "Figure":
    """Draw charts in a grid with three columns; empty charts are omitted.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    shown = [panel for panel in panels if not panel.empty]
    columns = min(3, max(1, len(shown)))
    rows = -(-max(1, len(shown)) // columns)
    figure = new_figure(5 * columns, 3.8 * rows)
    for number, panel in enumerate(shown, start=1):
        _draw(figure.add_subplot(rows, columns, number), panel)
    return figure


def _draw(axes: "Axes", panel: Panel) -> None:
    handles = []
    for line in panel.lines:
        fits = panel.drawable(line)
        y = np.where(fits, line.y, np.nan)
        handles += axes.plot(
            line.x, y, drawstyle="steps-post" if line.steps else "default",
            marker="o" if line.dots else None, markersize=4,
        )  # fmt: skip
        if line.filled:
            color = handles[-1].get_color()
            axes.fill_between(line.x, y, alpha=0.2, step="post" if line.steps else None, color=color, linewidth=0)
    x_range, y_range = panel.bounds()
    axes.set(xscale="log" if panel.x_log else "linear", yscale="log" if panel.y_log else "linear")
    axes.set(xlim=x_range, ylim=y_range, ylabel=_plain(panel.y_label))
    axes.set_title(_plain(panel.title))
    axes.set_xlabel(_plain(f"{panel.x_label}\n{panel.note}".strip()))
    axes.grid(alpha=0.3)
    if len(panel.lines) > 1:
        axes.legend(handles, [_plain(line.name) for line in panel.lines], fontsize="small")


def rank_list_figure(
    lists: Sequence[RankList],
    queries: Sequence[ImageItem],
    gallery: Sequence[ImageItem],
    protocol: Protocol,
    *,
    title: str = "",
    names: EvaluatedSet | None = None,
    dpi: int = _DPI,
) -> "Figure":
    """Draw rank lists as rows: the query, then gallery images framed in green (same identity) or red (other).

    Below each image are the score, the identity, the camera and the file name.

    Args:
        lists: at least one rank list.
        queries, gallery: images that the indices in ``lists`` refer to.
        protocol: evaluation protocol, which defines the scores.
        title: title of the figure.
        names: test set that names identities and cameras. Default: their numbers.
        dpi: resolution of the images. Default 120.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    columns = 1 + max(len(one.gallery) for one in lists)
    figure = new_figure(1.3 * columns, 3.2 * len(lists) + 0.6)
    size = (round(_IMAGE[0] * max(1.0, dpi / _DPI)), round(_IMAGE[1] * max(1.0, dpi / _DPI)))

    grid = figure.subplots(len(lists), columns, squeeze=False)
    for row, rank_list in zip(grid, lists, strict=True):
        for axes in row:
            axes.set_axis_off()
        query = queries[rank_list.query]
        _show(
            row[0],
            query,
            _GRAY,
            f"query, AP {100 * rank_list.ap:.1f} %\n{_describe_image(query, names, _RANK_LIST_WIDTH)}",
            size,
        )
        values = scores(rank_list.distances, protocol)
        for axes, number, value, match in zip(row[1:], rank_list.gallery, values, rank_list.matches, strict=False):
            item = gallery[int(number)]
            _show(
                axes,
                item,
                _GREEN if match else _RED,
                f"{value:.2f}\n{_describe_image(item, names, _RANK_LIST_WIDTH)}",
                size,
            )
    below = f"{title}; below: {score_name(protocol)}, identity, camera, file"
    figure.suptitle(_plain(below.lstrip("; ")), fontsize=13)
    return figure


def _describe_image(item: ImageItem, names: EvaluatedSet | None, width: int) -> str:
    """Return identity, camera and file name of an image, one line each, with at most ``width`` columns per line."""
    identity, camera = names.identity(item.pid) if names else str(item.pid), str(item.camid)
    if names:
        camera = names.camera(item.camid)
    file, camera = PurePath(item.path).name, f"cam {camera}" if camera.isdecimal() else camera
    lines = [_shortened(line, width) for line in (identity, camera) if line]
    return "\n".join([*lines, _shortened(file, width, keep_end=True)])  # the ends of file names differ


def _shortened(text: str, width: int, *, keep_end: bool = False) -> str:
    """Shorten text to ``width`` columns, after characters without a font are escaped, which makes it longer."""
    text, _ = drawable_text(text)
    if display_width(text) <= width:
        return text
    while display_width(text) >= width:
        text = text[1:] if keep_end else text[:-1]
    return f"…{text}" if keep_end else f"{text}…"


def _show(axes: "Axes", item: ImageItem, color: str, text: str, size: tuple[int, int]) -> None:
    picture = thumbnail(item, size)
    axes.set_axis_on()
    axes.set(xticks=[], yticks=[])
    if picture is None:
        axes.text(0.5, 0.5, "cannot\nread", ha="center", va="center", transform=axes.transAxes)
    else:
        axes.imshow(np.asarray(picture))
    for side in axes.spines.values():
        side.set(color=color, linewidth=3.5)
    axes.set_xlabel(_plain(text), fontsize=9, color=color)


def similarity_figure(
    pairs: Sequence[tuple[ImageItem, ImageItem, SimilarityMap]], names: EvaluatedSet | None = None
) -> "Figure":
    """Draw pairs of images as rows, each image next to its similarity map.

    Args:
        pairs: two images and their similarity map.
        names: test set that names identities and cameras. Default: their numbers.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    figure = new_figure(7.5, 3.6 * len(pairs) + 0.6)
    grid = figure.subplots(len(pairs), 4, squeeze=False)
    for row, (first, second, score) in zip(grid, pairs, strict=True):
        for number, item in enumerate((first, second)):
            image = score.images[number]
            plain, mapped = row[2 * number], row[2 * number + 1]
            for axes in (plain, mapped):
                axes.set_axis_off()
                axes.imshow(image, cmap="gray")
            height, width = image.shape[:2]
            extent = (-0.5, width - 0.5, height - 0.5, -0.5)
            mapped.imshow(
                score.maps[number], cmap="jet", alpha=0.5, vmin=0, vmax=1, extent=extent, interpolation="bicubic"
            )
            plain.set_title(_plain(_describe_image(item, names, _MAP_WIDTH)), fontsize=9)
        same = "same identity" if first.pid == second.pid else "different identities"
        row[3].set_title(f"similarity {score.similarity:.2f}\n{same}", fontsize=9)
    figure.suptitle("Similarity maps (Grad-CAM of the cosine similarity)", fontsize=13)
    return figure


def _plain(text: str) -> str:
    """Escape dollar signs, which matplotlib parses as math."""
    return text.replace("$", r"\$")
