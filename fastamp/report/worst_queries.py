"""Image of rank lists, for programs that show images but not the HTML report."""

from PIL import Image, ImageOps

from fastamp.data.datasets.base import ImageItem
from fastamp.data.thumbnails import SIZE, grid, thumbnail
from fastamp.report.run import EvaluatedSet
from fastamp.report.sections import images_of

_BORDER, _GAP = 3, 4
_GRAY, _GREEN, _RED = "#57606a", "#1a7f37", "#cf222e"


def rank_list_image(test_set: EvaluatedSet) -> Image.Image | None:
    """Draw the rank lists of the worst queries as rows: the query, then gallery images framed by correctness.

    The frame is green for images of the same identity, else red.

    Args:
        test_set: test set with its result.

    Returns:
        RGB image; None if the result contains no such rank lists.
    """
    examples = test_set.result.examples if test_set.result is not None else None
    lists = examples.lists.get("worst", []) if examples is not None else []
    queries, gallery = images_of(test_set)
    if not lists or not gallery:
        return None
    rows = []
    for ranked in lists:
        row = [_framed(queries[ranked.query], _GRAY)]
        for number, match in zip(ranked.gallery.tolist(), ranked.matches.tolist(), strict=True):
            row.append(_framed(gallery[number], _GREEN if match else _RED))
        rows.append(row)
    width, height = SIZE
    return grid(rows, (width + 2 * _BORDER + _GAP, height + 2 * _BORDER + _GAP))


def _framed(item: ImageItem, color: str) -> Image.Image:
    """Return the thumbnail of an image with a border; an empty frame if the image cannot be read."""
    return ImageOps.expand(thumbnail(item) or Image.new("RGB", SIZE, "white"), _BORDER, color)
