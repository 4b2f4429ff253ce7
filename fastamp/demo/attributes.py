"""Attributes of the generated pedestrians and images of the demo dataset."""

import csv
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fastamp.demo.camera import hour_gain, make_camera
from fastamp.demo.picture import OCCLUDERS, Composition
from fastamp.demo.wardrobe import (
    BAGS,
    FABRIC_NAMES,
    HAIR_COLOR_NAMES,
    PATTERNS,
    SHOE_COLOR_NAMES,
    SHOE_STYLES,
    SKINS,
    SLEEVES,
    TROUSER_COLOR_NAMES,
    UPPER_LENGTHS,
    Appearance,
)

# Hair style in ``wardrobe`` -> hair and hat.
_HAIR_AND_HAT = {
    "short": ("short", "none"),
    "bald": ("bald", "none"),
    "long": ("long", "none"),
    "tail": ("ponytail", "none"),
    "bun": ("bun", "none"),
    "cap": ("short", "cap"),
    "beanie": ("short", "beanie"),
    "hood": ("hidden", "hood"),
}
_LENGTHS = dict(zip(UPPER_LENGTHS, ("waist", "hip", "thigh"), strict=True))
_LOWERS = {name: name for name in ("trousers", "shorts", "skirt", "long_skirt")} | {"side_stripe": "trousers"}
_VIEWS = ("front", "right", "back", "left")
_FABRICS, _HAIR_COLORS, _LOWER_COLORS, _SHOE_COLORS = (
    {color: name for name, color in names.items()}
    for names in (FABRIC_NAMES, HAIR_COLOR_NAMES, TROUSER_COLOR_NAMES, SHOE_COLOR_NAMES)
)
# Minimum stride of walking, in radians.
_WALK = 0.1

VALUES: dict[str, tuple[str, ...]] = {
    "split": ("train", "query", "gallery"),
    "person": ("identity", "lookalike", "stranger", "none"),
    "box": ("full", "partial", "empty"),
    "hair": ("short", "long", "ponytail", "bun", "bald", "hidden"),
    "hair_color": tuple(HAIR_COLOR_NAMES),
    "hat": ("none", "cap", "beanie", "hood"),
    "hat_color": tuple(FABRIC_NAMES),
    "upper_color": tuple(FABRIC_NAMES),
    "upper_pattern": PATTERNS,
    "pattern_color": tuple(FABRIC_NAMES),
    "upper_length": tuple(_LENGTHS.values()),
    "sleeve": SLEEVES,
    "sleeve_color": tuple(FABRIC_NAMES),
    "lower": tuple(dict.fromkeys(_LOWERS.values())),
    "lower_color": tuple(TROUSER_COLOR_NAMES),
    "stripe_color": tuple(FABRIC_NAMES),
    "shoe": SHOE_STYLES,
    "shoe_color": tuple(SHOE_COLOR_NAMES),
    "bag": BAGS,
    "bag_color": tuple(FABRIC_NAMES),
    "view": _VIEWS,
    "posture": ("standing", "walking"),
    "occluder": ("none", *OCCLUDERS),
    "scene": tuple(make_camera(index, 0).scene for index in range(6)),
}
"""Text attribute -> possible values."""


@dataclass(frozen=True, kw_only=True)
class ImageAttributes:
    """Attributes of one image; ``VALUES`` lists the possible values of text attributes.

    None (empty in a CSV file) means not applicable.

    Attributes:
        path: image file relative to the dataset folder, with ``/``.
        pid: identity, as in the file name: 0 is a distractor, -1 is dropped at loading.
        camid: camera number from 0, as in ``ImageItem``; in file names, cameras are numbered from 1.
        split: split of the image.
        person: person in the box: a labeled identity, a distractor similar to an identity (``lookalike``), an unrelated
            distractor (``stranger``), or ``none``. The attributes from ``height`` to ``posture`` describe this person
            and are None for ``none``.
        box: ``full``, ``partial`` (identity -1: most of the person is outside of the box) or ``empty``.
        height: body height relative to the mean, 0.92..1.06.
        breadth: body breadth relative to the mean, 0.84..1.28.
        skin: skin tone, 1 (lightest) to 5.
        hair: hairstyle; ``hidden`` under a hood.
        hair_color: None if bald or hidden.
        hat: cap, beanie or hood; a hood is part of the upper garment.
        hat_color: None without a hat.
        upper_color: color of the upper garment.
        upper_pattern: pattern of the upper garment.
        pattern_color: second color of the pattern; None if plain.
        upper_length: length of the upper garment.
        sleeve: sleeve length.
        sleeve_color: ``pattern_color`` or a contrasting color; None without sleeves.
        lower: lower garment.
        lower_color: color of the lower garment.
        stripe_color: color of the side stripes of trousers; None without stripes.
        shoe, shoe_color: footwear.
        bag: bag; ``carrier`` is a shopping bag in the hand.
        bag_color: None without a bag.
        view: side of the person that faces the camera: front, back, left or right.
        yaw: direction of the person in degrees, -180..180: 0 faces the camera, 90 faces right in the image.
        posture: standing or walking.
        passer_by: True if another person is drawn behind the person, or off center in an empty box; this person may be
            partly or completely outside of the image.
        occluder: object that occludes part of the person.
        scene: background; different for each of the first six cameras.
        sequence: hour of the day, 1..3, as in the file name.
        light: gain of the camera at this hour; 1 is neutral. The gain of individual images varies by 10 %.
    """

    path: str
    pid: int
    camid: int
    split: str
    person: str
    box: str
    height: float | None = None
    breadth: float | None = None
    skin: int | None = None
    hair: str | None = None
    hair_color: str | None = None
    hat: str | None = None
    hat_color: str | None = None
    upper_color: str | None = None
    upper_pattern: str | None = None
    pattern_color: str | None = None
    upper_length: str | None = None
    sleeve: str | None = None
    sleeve_color: str | None = None
    lower: str | None = None
    lower_color: str | None = None
    stripe_color: str | None = None
    shoe: str | None = None
    shoe_color: str | None = None
    bag: str | None = None
    bag_color: str | None = None
    view: str | None = None
    yaw: float | None = None
    posture: str | None = None
    passer_by: bool
    occluder: str
    scene: str
    sequence: int
    light: float


def describe_person(person: Appearance) -> dict[str, Any]:
    """Return the attributes of a person that are the same in all images, as a dict."""
    hair, hat = _HAIR_AND_HAT[person.hair]
    contrast = person.sleeve_style == "contrast" or person.pattern == "side_panels"
    return {
        "height": round(person.height, 4),
        "breadth": round(person.breadth, 4),
        "skin": SKINS.index(person.skin) + 1,
        "hair": hair,
        "hair_color": None if hair in ("bald", "hidden") else _HAIR_COLORS[person.hair_color],
        "hat": hat,
        "hat_color": None if hat == "none" else _FABRICS[person.upper if hat == "hood" else person.hat_color],
        "upper_color": _FABRICS[person.upper],
        "upper_pattern": person.pattern,
        "pattern_color": None if person.pattern == "plain" else _FABRICS[person.accent],
        "upper_length": _LENGTHS[person.upper_hem],
        "sleeve": person.sleeve,
        "sleeve_color": None if person.sleeve == "none" else _FABRICS[person.accent if contrast else person.upper],
        "lower": _LOWERS[person.lower],
        "lower_color": _LOWER_COLORS[person.lower_color],
        "stripe_color": _FABRICS[person.accent] if person.lower == "side_stripe" else None,
        "shoe": person.shoe,
        "shoe_color": _SHOE_COLORS[person.shoe_color],
        "bag": person.bag,
        "bag_color": None if person.bag == "none" else _FABRICS[person.bag_color],
    }


def describe_picture(picture: Composition, camera: int, sequence: int, seed: int) -> dict[str, Any]:
    """Return the attributes of an image that do not describe the person, as a dict.

    Args:
        picture: composition of the image.
        camera: camera index, from 0.
        sequence: hour of the day, from 1.
        seed: seed of the dataset.
    """
    seen_by = make_camera(camera, seed)
    description: dict[str, str | int | float | None] = {
        "passer_by": picture.passer_by,
        "occluder": picture.occluder,
        "scene": seen_by.scene,
        "sequence": sequence,
        "light": round(seen_by.gain * hour_gain(sequence), 4),
    }
    if picture.pose is not None:
        yaw = round(math.degrees(math.remainder(picture.pose.yaw, 2 * math.pi)), 1)
        description |= {"view": _VIEWS[round(yaw / 90) % 4], "yaw": yaw}
        description["posture"] = "walking" if abs(picture.pose.stride) > _WALK else "standing"
    return description


def write_csv(rows: Iterable[ImageAttributes], path: Path) -> None:
    """Write a CSV file with a header of attribute names and one line per image; booleans are written as 0 and 1."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in fields(ImageAttributes))
        for row in rows:
            writer.writerow(int(value) if isinstance(value, bool) else value for value in asdict(row).values())
