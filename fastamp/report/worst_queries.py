"""Image of rank lists, for programs that show images but not the HTML report."""

from PIL import Image, ImageOps

from fastamp.data.datasets.base import ImageItem
from fastamp.report.run import EvaluatedSet
from fastamp.report.sections import images_of
from fastamp.report.thumbnails import SIZE, thumbnail

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
    width, height = (side + 2 * _BORDER + _GAP for side in SIZE)
    columns = 1 + max(len(rank_list.gallery) for rank_list in lists)
    sheet = Image.new("RGB", (columns * width, len(lists) * height), "white")
    for row, ranked in enumerate(lists):
        cells = [(queries[ranked.query], _GRAY)]
        for number, match in zip(ranked.gallery.tolist(), ranked.matches.tolist(), strict=True):
            cells.append((gallery[number], _GREEN if match else _RED))
        for column, (item, color) in enumerate(cells):
            sheet.paste(_framed(item, color), (column * width, row * height))
    return sheet


def _framed(item: ImageItem, color: str) -> Image.Image:
    """Return the thumbnail of an image with a border; an empty frame if the image cannot be read."""
    return ImageOps.expand(thumbnail(item) or Image.new("RGB", SIZE, "white"), _BORDER, color)
