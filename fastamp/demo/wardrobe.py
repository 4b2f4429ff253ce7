"""Appearance of the generated people and their lookalikes: build, hair, clothes, shoes and bag."""

from dataclasses import dataclass, replace

import numpy as np

Color = tuple[int, int, int]

SKINS: tuple[Color, ...] = ((241, 205, 180), (224, 178, 145), (190, 138, 105), (141, 94, 66), (92, 60, 44))
HAIR_COLOR_NAMES: dict[str, Color] = {
    "black": (28, 24, 24),
    "dark_brown": (66, 44, 30),
    "brown": (122, 84, 48),
    "blond": (196, 160, 96),
    "gray": (150, 146, 142),
}
HAIR_COLORS: tuple[Color, ...] = tuple(HAIR_COLOR_NAMES.values())
HAIR_STYLES = ("short", "bald", "long", "tail", "bun", "cap", "beanie", "hood")
FABRIC_NAMES: dict[str, Color] = {
    "black": (32, 32, 36),
    "white": (234, 232, 228),
    "gray": (130, 130, 132),
    "red": (192, 40, 44),
    "blue": (30, 64, 146),
    "light_blue": (104, 168, 228),
    "green": (36, 112, 60),
    "lime": (158, 190, 64),
    "yellow": (234, 196, 54),
    "orange": (228, 120, 40),
    "purple": (120, 60, 146),
    "pink": (234, 144, 178),
    "brown": (108, 72, 46),
}
FABRICS: tuple[Color, ...] = tuple(FABRIC_NAMES.values())
TROUSER_COLOR_NAMES: dict[str, Color] = {
    "black": (26, 26, 30),
    "blue": (36, 58, 128),
    "light_blue": (118, 150, 204),
    "gray": (130, 128, 126),
    "beige": (204, 178, 130),
    "brown": (100, 68, 42),
    "green": (66, 102, 54),
    "white": (230, 226, 218),
    "red": (168, 40, 46),
    "yellow": (222, 160, 56),
    "purple": (120, 66, 128),
}
TROUSER_COLORS: tuple[Color, ...] = tuple(TROUSER_COLOR_NAMES.values())
PATTERNS = (
    "plain",
    "stripes",
    "wide_stripes",
    "pinstripes",
    "checks",
    "two_tone",
    "chest_band",
    "logo",
    "dots",
    "sash",
    "open_jacket",
    "side_panels",
)
SLEEVES = ("short", "long", "none")
SLEEVE_STYLES = ("same", "contrast")
UPPER_LENGTHS = (0.49, 0.455, 0.36)
LOWERS = ("trousers", "shorts", "skirt", "long_skirt", "side_stripe")
SHOE_COLOR_NAMES: dict[str, Color] = {
    "black": (24, 24, 26),
    "white": (236, 236, 234),
    "red": (190, 46, 44),
    "brown": (112, 72, 42),
    "blue": (60, 110, 190),
}
SHOE_COLORS: tuple[Color, ...] = tuple(SHOE_COLOR_NAMES.values())
SHOE_STYLES = ("shoe", "boot")
BAGS = ("none", "backpack", "handbag", "cross_body", "carrier", "big_backpack")

# Probabilities of choices that are not uniform.
_HAIR_STYLE_ODDS = (0.3, 0.06, 0.2, 0.12, 0.08, 0.1, 0.07, 0.07)
_PATTERN_ODDS = (0.16, 0.1, 0.1, 0.05, 0.1, 0.11, 0.1, 0.08, 0.05, 0.05, 0.06, 0.04)
_LOWER_ODDS = (0.58, 0.14, 0.09, 0.09, 0.1)
_BAG_ODDS = (0.34, 0.2, 0.12, 0.12, 0.12, 0.1)
_SLEEVE_ODDS = (0.4, 0.52, 0.08)


@dataclass(frozen=True)
class Appearance:
    """Appearance of a person, constant across images. Lengths are in body heights."""

    height: float
    breadth: float
    skin: Color
    hair: str
    hair_color: Color
    hat_color: Color
    pattern: str
    upper: Color
    accent: Color
    sleeve: str
    sleeve_style: str
    upper_hem: float
    lower: str
    lower_color: Color
    shoe: str
    shoe_color: Color
    bag: str
    bag_color: Color


_LOOKALIKE_DETAILS = ("pattern", "bag", "lower", "hair", "accent", "lower_color", "sleeve", "shoe_color")


def draw_appearance(rng: np.random.Generator) -> Appearance:
    """Sample the appearance of a person. The accent color always contrasts with the color of the upper garment."""
    upper = _pick(rng, FABRICS)
    return Appearance(
        height=rng.uniform(0.92, 1.06),
        breadth=rng.uniform(0.84, 1.28),
        skin=_pick(rng, SKINS),
        hair=_pick(rng, HAIR_STYLES, _HAIR_STYLE_ODDS),
        hair_color=_pick(rng, HAIR_COLORS),
        hat_color=_pick(rng, FABRICS),
        pattern=_pick(rng, PATTERNS, _PATTERN_ODDS),
        upper=upper,
        accent=_contrasting(rng, upper),
        sleeve=_pick(rng, SLEEVES, _SLEEVE_ODDS),
        sleeve_style=_pick(rng, SLEEVE_STYLES, (0.8, 0.2)),
        upper_hem=_pick(rng, UPPER_LENGTHS, (0.45, 0.4, 0.15)),
        lower=_pick(rng, LOWERS, _LOWER_ODDS),
        lower_color=_pick(rng, TROUSER_COLORS),
        shoe=_pick(rng, SHOE_STYLES, (0.8, 0.2)),
        shoe_color=_pick(rng, SHOE_COLORS),
        bag=_pick(rng, BAGS, _BAG_ODDS),
        bag_color=_contrasting(rng, upper),
    )


def draw_lookalike(rng: np.random.Generator, person: Appearance) -> Appearance:
    """Return ``person`` with three details changed."""
    order = rng.permutation(len(_LOOKALIKE_DETAILS))
    return _with_changed(rng, person, [_LOOKALIKE_DETAILS[index] for index in order[:3]])


def draw_body(rng: np.random.Generator) -> Appearance:
    """Sample a person without hat, whose build, skin and hair vary more than in ``draw_appearance``."""
    person = draw_appearance(rng)
    light, dark = np.array(SKINS[0]), np.array(SKINS[-1])
    skin = light + (dark - light) * rng.random()
    brown = np.array(_pick(rng, HAIR_COLORS)) * rng.uniform(0.75, 1.15)
    return replace(
        person,
        height=rng.uniform(0.88, 1.06),
        breadth=rng.uniform(0.76, 1.4),
        skin=_as_color(skin),
        hair=_pick(rng, ("short", "bald", "long", "tail", "bun")),
        hair_color=_as_color(brown),
    )


def change_clothes(person: Appearance, outfit: Appearance) -> Appearance:
    """Return ``person`` in the clothes, shoes and bag of ``outfit``; height, breadth, skin and hair are unchanged."""
    return replace(
        outfit,
        height=person.height,
        breadth=person.breadth,
        skin=person.skin,
        hair=person.hair,
        hair_color=person.hair_color,
    )


def in_infrared(rng: np.random.Generator, person: Appearance) -> Appearance:
    """Return ``person`` with gray colors as under near-infrared light.

    The reflectance of a fabric depends mostly on its dye, i.e. on which color it is rather than on how bright that is.
    The rest is the material, which differs between people. Patterns lose most of their contrast; all skin is bright.

    Args:
        rng: generator of the materials; the same for all images of a person in one outfit.
        person: appearance in visible light.
    """

    def reflect(color: Color, low: float, high: float) -> Color:
        dye = np.random.default_rng(color).random()  # the same for each color, but unrelated to its brightness
        share = 0.75 * float(dye) + 0.25 * rng.random()
        return (round(low + (high - low) * share),) * 3

    upper = reflect(person.upper, 70, 225)
    contrast = rng.uniform(18, 60) * (-1 if upper[0] > 150 else 1)
    return replace(
        person,
        skin=reflect(person.skin, 175, 215),
        hair_color=reflect(person.hair_color, 60, 150),
        hat_color=reflect(person.hat_color, 70, 220),
        upper=upper,
        accent=(round(upper[0] + contrast),) * 3,
        lower_color=reflect(person.lower_color, 60, 210),
        shoe_color=reflect(person.shoe_color, 50, 200),
        bag_color=reflect(person.bag_color, 50, 200),
    )


def draw_people(rng: np.random.Generator, count: int, group_size: int, grouped: float) -> list[Appearance]:
    """Draw different people at random; lookalikes are adjacent.

    Args:
        rng: random generator.
        count: number of people, at least 0.
        group_size: people per group of lookalikes.
        grouped: fraction of the people in such groups, in 0..1; the others are independent.

    Returns:
        ``count`` appearances; groups come first, ``group_size`` consecutive people each.
    """
    people: list[Appearance] = []
    group_count = int(count * grouped) // group_size
    for _ in range(group_count):
        first = draw_appearance(rng)
        group = [first]
        while len(group) < group_size:
            candidate = draw_lookalike(rng, first)
            if all(_visibly_different(candidate, member) for member in group):
                group.append(candidate)
        people += group
    people += [draw_appearance(rng) for _ in range(count - len(people))]
    return people


def _visibly_different(first: Appearance, second: Appearance) -> bool:
    """Return True if two people differ in two or more details that are visible at a distance.

    The accent color is compared only if both garments have a pattern.
    """
    names = ["pattern", "bag", "lower", "hair", "lower_color"]
    if first.pattern != "plain" and second.pattern != "plain":
        names.append("accent")
    return sum(vars(first)[name] != vars(second)[name] for name in names) >= 2


def _with_changed(rng: np.random.Generator, person: Appearance, names: list[str]) -> Appearance:
    """Return a copy of ``person`` with a new, different value for each of the named fields."""
    changes = {}
    for name in names:
        while True:
            value = vars(draw_appearance(rng))[name]
            if name == "accent":
                value = _contrasting(rng, person.upper)
            if value != vars(person)[name]:
                break
        changes[name] = value
    return replace(person, **changes)


def _contrasting(rng: np.random.Generator, color: Color) -> Color:
    """Draw a fabric color that is far from ``color`` in RGB."""
    distances = np.abs(np.array(FABRICS) - np.array(color)).sum(axis=1)
    far = np.flatnonzero(distances > 170)
    return FABRICS[far[rng.integers(len(far))]]


def _as_color(values: np.ndarray) -> Color:
    red, green, blue = np.clip(values, 0, 255).round().astype(int).tolist()
    return red, green, blue


def _pick(rng: np.random.Generator, choices: tuple, odds: tuple[float, ...] | None = None):
    """Draw one of ``choices`` with the given relative odds; None means uniform."""
    if odds is None:
        return choices[rng.integers(len(choices))]
    return choices[int(np.searchsorted(np.cumsum(odds), rng.random() * sum(odds), side="right"))]
