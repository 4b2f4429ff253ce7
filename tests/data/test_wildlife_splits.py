"""Tests of the splits of animals, against those of wildlife-datasets and by their properties."""

import json
from datetime import date
from pathlib import Path

import pytest

from fastamp.data.wildlife_splits import (
    LinearCongruentialGenerator,
    closed_split,
    disjoint_split,
    draw_identities,
    encounter_split,
    keep_together,
    open_split,
    parse_day,
    random_resplit,
    time_cutoff_split,
    time_proportion_split,
)
from fastamp.utils.errors import ConfigError, DataError

REFERENCE = json.loads((Path(__file__).parents[1] / "reference/methods/animals_splits1.json").read_text())
ROWS = [number for number, name in enumerate(REFERENCE["identity"]) if name != "unknown"]
NAMES = [REFERENCE["identity"][number] for number in ROWS]
DATES = [parse_day(REFERENCE["date"][number]) for number in ROWS]


def test_generator_equals_reference_numbers():
    generator = LinearCongruentialGenerator(666)
    assert [generator.draw() for _ in range(10)] == REFERENCE["splits"]["lcg_seed666_first10"]
    expected = REFERENCE["splits"]["lcg_seed666_permutation_of_12"]
    assert LinearCongruentialGenerator(666).permutation(12) == expected


SPLITS = {
    "closed_0.8": lambda: closed_split(NAMES, 0.8),
    "closed_0.5_seed1": lambda: closed_split(NAMES, 0.5, seed=1),
    "open_0.8_samples0.1": lambda: open_split(NAMES, 0.8, test_fraction=0.1),
    "open_0.5_n3_seed7": lambda: open_split(NAMES, 0.5, num_test=3, seed=7),
    "disjoint_0.3": lambda: disjoint_split(NAMES, test_fraction=0.3),
    "disjoint_n4": lambda: disjoint_split(NAMES, num_test=4),
    "time_proportion_0.5": lambda: time_proportion_split(NAMES, DATES),
    "time_proportion_0.7": lambda: time_proportion_split(NAMES, DATES, 0.7),
    "time_cutoff_2018": lambda: time_cutoff_split(NAMES, DATES, 2018, and_later=False),
    "time_cutoff_2018_and_after": lambda: time_cutoff_split(NAMES, DATES, 2018),
    "random_resplit_of_time_proportion": lambda: random_resplit(NAMES, time_proportion_split(NAMES, DATES)),
}


@pytest.mark.parametrize("name", SPLITS)
def test_split_equals_reference_rows_in_their_order(name):
    split, expected = SPLITS[name](), REFERENCE["splits"][name]
    index = [REFERENCE["index"][number] for number in ROWS]
    assert [index[row] for row in split.train] == expected["train"]
    assert [index[row] for row in split.test] == expected["test"]


def test_all_reference_splits_are_tested():
    assert set(SPLITS) == {name for name in REFERENCE["splits"] if not name.startswith(("lcg", "value_counts"))}


def test_order_of_equal_counts_is_that_of_the_reference():
    order = [name for name, _ in REFERENCE["splits"]["value_counts_order"]]
    permuted = [order[number] for number in LinearCongruentialGenerator(3).permutation(len(order))]
    assert [draw_identities(NAMES, count=n, seed=3) for n in range(5)] == [set(permuted[:n]) for n in range(5)]


def test_open_split_with_drawn_identities_in_the_training_set():
    drawn = draw_identities(NAMES, count=3)
    train, test = open_split(NAMES, 0.8, num_test=3, unknown_in_test=False)
    assert drawn.isdisjoint(NAMES[row] for row in test)
    assert drawn < {NAMES[row] for row in train}
    assert sorted(train + test) == list(range(len(NAMES)))


def test_encounter_split_separates_no_encounter():
    encounters = [f"{name}-{number // 4}" if number % 7 else None for number, name in enumerate(NAMES)]
    train, test = encounter_split(NAMES, encounters, 0.5)
    assert sorted(train + test) == list(range(len(NAMES)))
    pairs = [{(NAMES[row], encounters[row]) for row in rows if encounters[row]} for rows in (train, test)]
    assert pairs[0].isdisjoint(pairs[1])
    assert {NAMES[row] for row in test} <= {NAMES[row] for row in train}
    assert encounter_split(NAMES, encounters, 0.5) == (train, test) != encounter_split(NAMES, encounters, 0.5, seed=1)


def test_groups_stay_together_in_training():
    split = closed_split(["a"] * 6 + ["b"] * 4, 0.5)
    groups = [0, 0, 0, 1, 1, None, 0, 0, None, None]
    train, test = keep_together(split, ["a"] * 6 + ["b"] * 4, groups)
    assert sorted(train + test) == list(range(10))
    for members in ((0, 1, 2), (3, 4), (6, 7)):
        assert set(members) <= set(train) or set(members) <= set(test)
    separate = closed_split(["a"] * 6, 0.5)
    assert keep_together(separate, ["a"] * 6, [None] * 6) == separate


def test_identities_with_one_image_or_one_day_are_for_training():
    assert closed_split(["a", "b", "b"], 0.1).train[0] == 0
    assert time_proportion_split(["a", "a", "b"], [date(2020, 1, 1)] * 2 + [None]) == ([0, 1], [])
    assert encounter_split(["a", "a"], ["e", "e"]) == ([0, 1], [])
    assert closed_split([], 0.5) == open_split([], 0.5, num_test=0) == ([], [])


def test_days_are_parsed_without_their_hours():
    assert (
        parse_day("2021-07-31 14:05:00") == parse_day("2021-07-31T23:59") == parse_day("2021-7-31") == date(2021, 7, 31)
    )
    assert parse_day("") is None and parse_day(None) is None


@pytest.mark.parametrize("text", ["31.07.2021", "2021-13-01", "2021", "unknown", "2021-07-31 noon"])
def test_other_dates_are_an_error(text):
    with pytest.raises(DataError, match=text):
        parse_day(text)


def test_invalid_fractions_and_numbers_are_an_error():
    for call in (
        lambda: closed_split(NAMES, 1.5),
        lambda: open_split(NAMES, 0.8),
        lambda: disjoint_split(NAMES, num_test=99),
        lambda: disjoint_split(NAMES, test_fraction=-1),
    ):
        with pytest.raises(ConfigError):
            call()
