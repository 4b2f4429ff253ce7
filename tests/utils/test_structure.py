"""Comparison of the structure of a saved state with the state of the current run."""

import re

import torch

from fastamp.utils.structure import structure_mismatch

STATE = {
    "iteration": 3,
    "best": None,
    "rate": 0.5,
    "name": "Adam",
    "on": True,
    "random": (3, (1, 2), None),
    "others": [{"x": 1}],
    "state": {0: {"mean": torch.zeros(2, 3)}},
}


def test_structure_mismatch_is_empty_for_states_with_equal_structure():
    same = {**STATE, "iteration": 10**9, "best": 0.5, "rate": 7, "others": [], "state": {0: {"mean": torch.ones(2, 3)}}}
    assert [structure_mismatch(STATE, state) for state in (STATE, same, {})] == ["", "", ""]


def test_structure_mismatch_names_the_key_and_the_expected_type(subtests):
    cases = [
        ("iteration", -1, "iteration: expected a non-negative integer, got -1"),
        ("iteration", 2.0, "iteration: expected a non-negative integer, got 2.0"),
        ("iteration", 10**400, "iteration: expected a non-negative integer, got int"),
        ("best", [1], "best: expected a plain value, got list"),
        ("rate", float("inf"), "rate: expected a number, got inf"),
        ("rate", float("nan"), "rate: expected a number"),
        ("name", 3, "name: expected str"),
        ("on", 1, "on: expected bool"),
        ("random", (3, (1,), None), r"random\[1\]: expected 2 values"),
        ("others", [{"x": "y"}], r"others\[0\].x: expected a non-negative integer, got str"),
        ("others", {}, "others: expected a list, got dict"),
        ("state", [], "state: expected a dict, got list"),
        ("state", {0: {"mean": torch.zeros(3, 2)}}, r"state.0.mean: expected torch.float32 \(2, 3\)"),
        ("state", {0: {"mean": torch.zeros(2, 3).to_sparse()}}, "state.0.mean: expected a tensor"),
        ("state", {0: {"mean": torch.zeros(2, 3, device="meta")}}, "state.0.mean: expected a tensor"),
    ]
    for key, value, expected in cases:
        with subtests.test(expected):
            assert re.match(expected, structure_mismatch(STATE, STATE | {key: value}))
