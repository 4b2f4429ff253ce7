"""Splits of photographs of individual animals: closed, open and disjoint sets, by time, and by encounter.

The rules and the random generator of wildlife-datasets (Čermák et al. 2024, arXiv:2311.09118), so that a split with
the same seed and the same order of rows is the same there and on any machine. All functions are pure: they get one
identity per image and return row numbers.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from datetime import date, datetime
from typing import NamedTuple

import numpy as np

from fastamp.utils.errors import ConfigError, DataError

SEED = 666
_DAY = re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})([T ].*)?")


class Split(NamedTuple):
    """Row numbers of training and test images, sorted by identity.

    Attributes:
        train, test: rows; rows in neither are not used.
    """

    train: list[int]
    test: list[int]


class LinearCongruentialGenerator:
    """Generator ``state = (1103515245 state + 12345) mod 2^31``, independent of machine and library version.

    Args:
        seed: first state.
    """

    def __init__(self, seed: int = SEED) -> None:
        self.state = seed

    def draw(self) -> int:
        """Return the next state, in 0 .. 2^31 - 1."""
        self.state = (self.state * 1103515245 + 12345) & 0x7FFFFFFF
        return self.state

    def permutation(self, count: int) -> list[int]:
        """Return the order that sorts ``count`` drawn numbers."""
        return np.argsort([self.draw() for _ in range(count)], kind="stable").tolist() if count else []


def closed_split(identities: Sequence[str], train_fraction: float, *, seed: int = SEED) -> Split:
    """Split the images of each identity, so that all test identities are in the training set.

    Args:
        identities: identity of each image.
        train_fraction: fraction of each identity's images for training, in 0..1, rounded to even. At least one image is
            for training and, if there are two, one for testing.
        seed: seed of the generator. Default 666.

    Returns:
        Rows; within an identity in the order drawn.

    Raises:
        ConfigError: if ``train_fraction`` is not in 0..1.
    """
    _check_fraction("train", train_fraction)
    return _split_each(rows_by_identity(identities), train_fraction, LinearCongruentialGenerator(seed))


def open_split(
    identities: Sequence[str],
    train_fraction: float,
    *,
    test_fraction: float | None = None,
    num_test: int | None = None,
    unknown_in_test: bool = True,
    seed: int = SEED,
) -> Split:
    """Split so that some identities are only in the test set, i.e. unknown, and the others in both sets.

    Args:
        identities: identity of each image.
        train_fraction: fraction of all images for training. The fraction of the known identities' images is raised to
            reach it.
        test_fraction, num_test: which identities are unknown; see ``draw_identities``.
        unknown_in_test: if False, the drawn identities are only in the training set. Default True.
        seed: seed of the generator, for the identities and again for the images. Default 666.

    Raises:
        ConfigError: if a fraction is not in 0..1, or not one of ``test_fraction`` and ``num_test`` is given.
    """
    _check_fraction("train", train_fraction)
    drawn = draw_identities(identities, fraction=test_fraction, count=num_test, seed=seed)
    groups = rows_by_identity(identities)
    alone = [row for name, rows in groups.items() if name in drawn for row in rows]
    shared = {name: rows for name, rows in groups.items() if name not in drawn}
    remaining = len(identities) - len(alone)
    target = train_fraction * len(identities) - (0 if unknown_in_test else len(alone))
    fraction = min(1.0, max(0.0, target / remaining)) if remaining else 0.0
    train, test = _split_each(shared, fraction, LinearCongruentialGenerator(seed))
    groups_of = {row: name for name, rows in groups.items() for row in rows}
    extended = sorted([*(test if unknown_in_test else train), *alone], key=groups_of.__getitem__)
    return Split(train, extended) if unknown_in_test else Split(extended, test)


def disjoint_split(
    identities: Sequence[str], *, test_fraction: float | None = None, num_test: int | None = None, seed: int = SEED
) -> Split:
    """Split the identities: those drawn are for testing, all others for training; see ``draw_identities``."""
    drawn = draw_identities(identities, fraction=test_fraction, count=num_test, seed=seed)
    groups = rows_by_identity(identities)
    return Split(
        [row for name, rows in groups.items() if name not in drawn for row in rows],
        [row for name, rows in groups.items() if name in drawn for row in rows],
    )


def time_proportion_split(
    identities: Sequence[str], dates: Sequence[date | None], train_fraction: float = 0.5
) -> Split:
    """Split the days of each identity: the first ones are for training, the later ones for testing.

    Args:
        identities: identity of each image.
        dates: day of each image; images without a day are not used.
        train_fraction: fraction of each identity's different days for training, rounded to even, at most all but one.
            Identities with a single day are for training. Default 0.5.
    """
    _check_fraction("train", train_fraction)
    split = Split([], [])
    for rows in rows_by_identity(identities).values():
        day_of = {row: day for row in rows if (day := dates[row]) is not None}
        ordered = sorted(day_of, key=lambda row: day_of[row])
        days = sorted(set(day_of.values()))
        first = set(days[: min(round(train_fraction * len(days)), len(days) - 1)] if len(days) > 1 else days)
        for row in ordered:
            split[dates[row] not in first].append(row)
    return split


def time_cutoff_split(
    identities: Sequence[str], dates: Sequence[date | None], year: int, *, and_later: bool = True
) -> Split:
    """Split at a year: earlier images are for training, those of the year for testing.

    Args:
        identities: identity of each image.
        dates: day of each image; images without a day are not used.
        year: first year of the test set.
        and_later: if True (default), later years are also for testing; if False, they are not used.
    """
    dated = [(row, day.year) for row, day in enumerate(dates) if day is not None]
    return Split(
        [row for row, of in dated if of < year],
        [row for row, of in dated if of == year or (and_later and of > year)],
    )


def random_resplit(identities: Sequence[str], split: Split, *, seed: int = SEED) -> Split:
    """Draw a random split with the same number of training and test images of each identity as ``split``.

    The difference between the results of both measures what a split that ignores time flatters.
    """
    generator, training, used = LinearCongruentialGenerator(seed), set(split.train), {*split.train, *split.test}
    result = Split([], [])
    for rows in rows_by_identity(identities).values():
        rows = [row for row in rows if row in used]
        _deal(rows, sum(row in training for row in rows), generator, result)
    return result


def encounter_split(
    identities: Sequence[str], encounters: Sequence[Hashable | None], train_fraction: float = 0.5, *, seed: int = SEED
) -> Split:
    """Split the encounters of each identity, so that the frames of a burst are never on both sides.

    Args:
        identities: identity of each image.
        encounters: encounter of each image; an image with None is an encounter by itself.
        train_fraction: fraction of each identity's encounters for training, rounded to even; at least one and at most
            all but one. Identities with a single encounter are for training. Default 0.5.
        seed: seed of the generator. Default 666.
    """
    _check_fraction("train", train_fraction)
    generator, result = LinearCongruentialGenerator(seed), Split([], [])
    for rows in rows_by_identity(identities).values():
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for row in rows:
            groups[("row", row) if encounters[row] is None else encounters[row]].append(row)
        drawn = Split([], [])
        _deal(list(range(len(groups))), _count(train_fraction, len(groups)), generator, drawn)
        members = list(groups.values())
        for side, numbers in zip(result, drawn, strict=True):
            side += [row for number in numbers for row in members[number]]
    return result


def keep_together(split: Split, identities: Sequence[str], groups: Sequence[Hashable | None]) -> Split:
    """Move test images to the training set if an image of the same identity and group is in it.

    Args:
        split: split to change.
        identities: identity of each image.
        groups: group of each image, e.g. its encounter, or its set of near-duplicates; None for no group.
    """
    training = {(identities[row], groups[row]) for row in split.train if groups[row] is not None}
    moved = [row for row in split.test if (identities[row], groups[row]) in training]
    kept = set(split.test).difference(moved)
    train = sorted([*split.train, *moved], key=identities.__getitem__) if moved else split.train
    return Split(train, [row for row in split.test if row in kept])


def draw_identities(
    identities: Sequence[str], *, fraction: float | None = None, count: int | None = None, seed: int = SEED
) -> set[str]:
    """Draw identities at random.

    They are taken from a permutation of the identities sorted by their number of images, the largest first and equal
    ones in the order of their first image.

    Args:
        identities: identity of each image.
        fraction: identities are drawn until they have at least this fraction of all images, rounded to even.
        count: number of identities to draw.
        seed: seed of the generator. Default 666.

    Raises:
        ConfigError: if not exactly one of ``fraction`` and ``count`` is given, or it is out of range.
    """
    counts = Counter(identities)
    if (fraction is None) == (count is None):
        raise ConfigError(
            f"draw_identities: expected either fraction or count, got fraction {fraction} and count {count}.\n"
            "  fix: pass either a fraction of the images or a number of identities"
        )
    ordered = [name for name, _ in counts.most_common()]
    permuted = [ordered[number] for number in LinearCongruentialGenerator(seed).permutation(len(ordered))]
    if count is not None:
        if not 0 <= count <= len(ordered):
            raise ConfigError(
                f"cannot draw {count} of {len(ordered)} identities.\n  fix: choose a number in 0..{len(ordered)}"
            )
        return set(permuted[:count])
    assert fraction is not None
    _check_fraction("unknown", fraction)
    drawn: set[str] = set()
    images = 0
    for name in permuted:
        if images >= round(fraction * len(identities)):
            break
        drawn.add(name)
        images += counts[name]
    return drawn


def rows_by_identity(identities: Sequence[str]) -> dict[str, list[int]]:
    """Group the rows by identity, in the sorted order of the identities."""
    groups: dict[str, list[int]] = defaultdict(list)
    for row, name in enumerate(identities):
        groups[name].append(row)
    return {name: groups[name] for name in sorted(groups)}


def parse_day(text: str | None) -> date | None:
    """Parse a day in ISO format, ``2021-07-31`` with or without a time; None for an empty text.

    Raises:
        DataError: if the text is not such a date.
    """
    if not text:
        return None
    match = _DAY.fullmatch(text.strip())
    try:
        if match:
            if match[4]:
                datetime.fromisoformat(text.strip())
            return date(int(match[1]), int(match[2]), int(match[3]))
    except ValueError:
        pass
    raise DataError(
        f"date {text!r} is invalid; expected an ISO date such as 2021-07-31 or 2021-07-31 14:05.\n"
        "  fix: convert the dates, or leave the cell empty"
    )


def _split_each(groups: dict[str, list[int]], fraction: float, generator: LinearCongruentialGenerator) -> Split:
    result = Split([], [])
    for rows in groups.values():
        _deal(rows, _count(fraction, len(rows)), generator, result)
    return result


def _count(fraction: float, count: int) -> int:
    """Return the number of ``count`` elements for training: at least one, and at most all but one of several."""
    return min(max(1, round(fraction * count)), max(1, count - 1))


def _deal(rows: list[int], count: int, generator: LinearCongruentialGenerator, result: Split) -> None:
    """Add the first ``count`` rows of a permutation to the training rows of ``result``, the others to the test rows."""
    permuted = [rows[number] for number in generator.permutation(len(rows))]
    result.train.extend(permuted[:count])
    result.test.extend(permuted[count:])


def _check_fraction(option: str, value: float) -> None:
    if not 0 <= value <= 1:
        kind = {"train": "for training", "unknown": "of unknown identities"}[option]
        raise ConfigError(
            f"the fraction {kind} is {value:g}; expected a number in 0..1.\n  fix: change --{option} of fastamp split"
        )
