"""Sheet of sample images of a dataset with their identities."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from fastamp.data.datasets.base import ImageDataset, ImageItem
from fastamp.data.datasets.csv_table import SPLITS
from fastamp.data.thumbnails import thumbnail
from fastamp.utils.fonts import drawable_text, load_font
from fastamp.utils.plural import plural

logger = logging.getLogger(__name__)


def contact_sheet(dataset: ImageDataset, path: Path, *, identities: int = 8, columns: int = 12, seed: int = 0) -> None:
    """Write a PNG with sample images, one row per identity: training identities, then query identities.

    Each query row shows the query images of an identity, framed in blue, and then the gallery images of this identity.
    Names are drawn with a font that contains their characters; without such a font, the characters are escaped and a
    warning is logged.

    Args:
        dataset: dataset that contains the images.
        path: PNG file to write.
        identities: maximum number of rows for training identities, and for query identities. Default 8.
        columns: images per row. Default 12.
        seed: seed of the random choice of identities. Default 0.

    Raises:
        OSError: if the file cannot be written.
    """
    width, height, gap, line = 64, 128, 4, 16
    train, query, gallery = (_by_identity(dataset.images_in(split)) for split in SPLITS)
    rng = np.random.default_rng(seed)
    rows: list[tuple[str, list[ImageItem], int]] = []
    for title, groups in (("training", train), ("queries, gallery", query)):
        names = list(groups)
        for number in rng.permutation(len(names))[:identities].tolist():
            name = names[number]
            matches = gallery.get(name, []) if groups is query else []
            framed = len(groups[name][: columns // 3]) if groups is query else 0
            items = [*groups[name][: framed or columns], *matches][:columns]
            rows.append((f"{title}: {dataset.identity(name)}", items, framed))
    step = height + line + gap
    sheet = Image.new("RGB", (columns * (width + gap) + gap, max(1, len(rows)) * step + gap), "white")
    draw = ImageDraw.Draw(sheet)
    escaped: list[str] = []
    for row, (title, items, framed) in enumerate(rows):
        drawn, font = drawable_text(title)
        if drawn != title:
            escaped.append(title)
        draw.text((gap, gap + row * step), drawn, fill="black", font=load_font(font, 12))
        for column, item in enumerate(items):
            picture = thumbnail(item, (width, height))
            if picture is None:
                continue  # reported as a finding
            corner = (gap + column * (width + gap), gap + line + row * step)
            sheet.paste(picture, corner)
            if column < framed:
                end = (corner[0] + picture.width + 1, corner[1] + picture.height + 1)
                draw.rectangle(((corner[0] - 2, corner[1] - 2), end), outline="blue", width=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
    if escaped:
        logger.warning(
            "contact sheet: no font for %r (%s); these characters are written as codes\n"
            "  fix: install a font with these characters, e.g. Noto Sans CJK (apt-get install fonts-noto-cjk)",
            escaped[0],
            plural(len(escaped), "name"),
        )


def _by_identity(items: Sequence[ImageItem]) -> dict[int | str, list[ImageItem]]:
    groups: dict[int | str, list[ImageItem]] = defaultdict(list)
    for item in items:
        groups[item.pid].append(item)
    return groups
