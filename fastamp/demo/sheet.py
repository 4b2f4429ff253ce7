"""Contact sheet of the demo dataset: one row per person, with images from alternating cameras."""

import re
from collections import defaultdict
from pathlib import Path

from PIL import Image

_NAME = re.compile(r"(\d+)_c(\d+)")
_GAP = 4
_PAPER = (255, 255, 255)


def contact_sheet(
    folder: str | Path,
    path: str | Path,
    *,
    split: str = "test",
    identities: int = 9,
    columns: int = 8,
    scale: int = 2,
) -> None:
    """Write a PNG with one row of images for each of the first ``identities`` people.

    Lookalikes have adjacent identities and therefore adjacent rows, at the top. A row cycles through the cameras.

    Args:
        folder: complete demo dataset.
        path: PNG file to write.
        split: ``"train"``, or ``"test"`` for queries and gallery together. Default "test".
        identities: number of rows, at least 1; identities 0 and -1 are excluded. Default 9.
        columns: images per row, at least 1. Default 8.
        scale: enlargement factor, at least 1. Default 2.

    Raises:
        ValueError: if the split is unknown, or contains no image of a person.
    """
    splits = {"train": ("bounding_box_train",), "test": ("query", "bounding_box_test")}
    if split not in splits:
        raise ValueError(f"unknown split {split!r}; choices: {', '.join(splits)}")
    by_person: dict[str, dict[int, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for part in splits[split]:
        for picture in sorted((Path(folder) / part).glob("*.jpg")):
            match = _NAME.match(picture.name)
            if match and int(match[1]) > 0:
                by_person[match[1]][int(match[2])].append(picture)
    rows = [_interleave_cameras(by_person[pid])[:columns] for pid in sorted(by_person)[:identities]]
    if not rows:
        raise ValueError(f"the split {split!r} of {folder} contains no image of a person")

    with Image.open(rows[0][0]) as first:
        width, height = first.width * scale, first.height * scale
    step_x, step_y = width + _GAP, height + _GAP
    sheet = Image.new("RGB", (columns * step_x + _GAP, len(rows) * step_y + _GAP), _PAPER)
    for row, pictures in enumerate(rows):
        for column, picture in enumerate(pictures):
            with Image.open(picture) as image:
                enlarged = image.resize((width, height), Image.Resampling.BICUBIC)
            sheet.paste(enlarged, (_GAP + column * step_x, _GAP + row * step_y))
    sheet.save(path, format="PNG")


def _interleave_cameras(by_camera: dict[int, list[Path]]) -> list[Path]:
    """Return the first image of each camera, then the second of each, and so on."""
    longest = max(map(len, by_camera.values()))
    return [by_camera[c][turn] for turn in range(longest) for c in sorted(by_camera) if turn < len(by_camera[c])]
