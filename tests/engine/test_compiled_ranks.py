"""Compiled training under DDP in two gloo processes compared with eager training, in float64."""

import itertools
from pathlib import Path

import compiled_ranks
import preloaded
import pytest
import tiny
import torch

pytestmark = pytest.mark.export

HELPER = Path(__file__).parents[1] / "helpers/compiled_ranks.py"


@pytest.fixture(scope="module")
def folder(demo_root, made_once):
    with made_once("compiled_ranks") as (folder, missing):
        if missing:
            process = preloaded.start(HELPER, folder, FASTAMP_DATASETS=str(demo_root)).finish(timeout=900)
            assert process.returncode == 0, process.stderr
    return folder


def assert_close(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", compiled_ranks.COMPILED)
def test_compiled_ddp_training_matches_eager_training(name, folder):
    """The runs use batch norm, accumulation over two batches and a weight average; except for inductor also dropout
    and drop path."""
    if name == "inductor" and not (folder / name).exists():
        pytest.skip("inductor needs a C++ compiler")
    _, reference = compiled_ranks.COMPILED[name]
    (first, second), (eager, _) = (
        [torch.load(folder / f"{which}_{rank}.pth", weights_only=True) for rank in (0, 1)]
        for which in (name, reference)
    )
    assert first["graphs"] > 0 and eager["graphs"] == 0
    assert "fix: set MODEL.COMPILE" not in (folder / name / "log.txt").read_text()
    assert len(first["steps"]) == len(eager["steps"]) == 6
    for step, other_rank, expected in zip(first["steps"], second["steps"], eager["steps"], strict=True):
        assert_close(step, expected)
        assert all(torch.equal(step[key], value) for key, value in other_rank.items() if "running" not in key)
    # Each bucket is communicated once per step, not once per batch. Buckets are known after the first step.
    assert first["reduced"] == eager["reduced"]
    assert {now - before for before, now in itertools.pairwise(first["reduced"])} == {first["buckets"]}
    averages = [
        torch.load(folder / which / "model_final.pth", weights_only=True)["average"]["model"]
        for which in (name, reference)
    ]
    assert_close(*averages)
    final = tiny.weights(folder / name / "model_final.pth")
    assert not torch.equal(averages[0]["heads.weight"], final["heads.weight"])


def test_gathering_and_dropping_change_the_steps(folder):
    """Negative control: the comparison can fail."""
    eager, *others = (
        torch.load(folder / f"{name}_0.pth", weights_only=True)["steps"][-1] for name in compiled_ranks.EAGER
    )
    assert all((eager["heads.weight"] - other["heads.weight"]).abs().max() > 1e-6 for other in others)
    assert len(others) == 2
