"""A contact sheet of the demo data set: one row a person, one column a camera."""

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
    """Write one PNG with a row of pictures for each of the first ``identities`` people.

    Lookalikes have neighboring numbers, so they stand below each other; groups come first. A row goes through the
    cameras in turn, and then through them again.

    Args:
        folder: a complete demo set.
        path: the PNG to write.
        split: ``"train"``, or ``"test"`` for queries and gallery together.
        identities: rows, at least 1; distractors and junk boxes are left out.
        columns: pictures in a row, at least 1.
        scale: how many times larger than on disk, at least 1.

    Raises:
        ValueError: another split, or no picture of a person in it.
    """
    splits = {"train": ("bounding_box_train",), "test": ("query", "bounding_box_test")}
    if split not in splits:
        raise ValueError(f"split is {split!r}; choices: {', '.join(splits)}")
    by_person: dict[str, dict[int, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for part in splits[split]:
        for picture in sorted((Path(folder) / part).glob("*.jpg")):
            match = _NAME.match(picture.name)
            if match and int(match[1]) > 0:
                by_person[match[1]][int(match[2])].append(picture)
    rows = [_interleave_cameras(by_person[pid])[:columns] for pid in sorted(by_person)[:identities]]
    if not rows:
        raise ValueError(f"{folder} holds no picture of a person for split {split!r}")

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
    """Return one picture of each camera, then the second of each, and so on."""
    longest = max(map(len, by_camera.values()))
    return [by_camera[c][turn] for turn in range(longest) for c in sorted(by_camera) if turn < len(by_camera[c])]
