"""What a checkpoint holds is compared with what a run would write, in types and shapes."""

import pytest
import torch

from fastamp.utils.structure import structure_mismatch

OWN = {
    "iteration": 3,
    "best": None,
    "rate": 0.5,
    "name": "Adam",
    "on": True,
    "random": (3, (1, 2), None),
    "others": [{"x": 1}],
    "state": {0: {"mean": torch.zeros(2, 3)}},
}


def test_the_same_form():
    same = {**OWN, "iteration": 10**9, "best": 0.5, "rate": 7, "others": [], "state": {0: {"mean": torch.ones(2, 3)}}}
    assert (
        structure_mismatch(OWN, OWN) == "" and structure_mismatch(OWN, same) == "" and structure_mismatch(OWN, {}) == ""
    )


@pytest.mark.parametrize(
    "key, value, told",
    [
        ("iteration", -1, "iteration: expected a count, found -1"),
        ("iteration", 2.0, "iteration: expected a count, found 2.0"),
        ("iteration", 10**400, "iteration: expected a count, found int"),
        ("best", [1], "best: expected a plain value, found list"),
        ("rate", float("inf"), "rate: expected a number, found inf"),
        ("rate", float("nan"), "rate: expected a number"),
        ("name", 3, "name: expected str"),
        ("on", 1, "on: expected bool"),
        ("random", (3, (1,), None), r"random\[1\]: expected 2 values"),
        ("others", [{"x": "y"}], r"others\[0\].x: expected a count, found str"),
        ("others", {}, "others: expected a list, found dict"),
        ("state", [], "state: expected a dict, found list"),
        ("state", {0: {"mean": torch.zeros(3, 2)}}, r"state.0.mean: expected torch.float32 \(2, 3\)"),
        ("state", {0: {"mean": torch.zeros(2, 3).to_sparse()}}, "state.0.mean: expected a tensor"),
        ("state", {0: {"mean": torch.zeros(2, 3, device="meta")}}, "state.0.mean: expected a tensor"),
    ],
)
def test_another_form(key, value, told):
    with pytest.raises(AssertionError, match=told):
        assert structure_mismatch(OWN, OWN | {key: value}) == "", structure_mismatch(OWN, OWN | {key: value})
