"""tools/benchmark/step_overhead.py at toy size: same arithmetic in both loops, and the summary of the pairs."""

import json
import sys
from pathlib import Path

import pytest
from command import load_script

FOLDER = Path(__file__).parents[2] / "tools/benchmark"
TOY = [
    "--device",
    "cpu",
    "--network",
    "resnet18",
    "--size",
    "32",
    "16",
    "--batch",
    "8",
    "--warmup",
    "0",
    "--pairs",
    "2",
]


@pytest.fixture(scope="module")
def overhead():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield load_script("tools/benchmark/step_overhead.py")


CLIP = ("SOLVER.CLIP_GRADIENTS.ENABLED", "True")


@pytest.mark.integration
@pytest.mark.parametrize("opts", [(), CLIP, ("--dtype", "float16", *CLIP, "SOLVER.AMP.INIT_SCALE", "64")])
def test_both_loops_train_the_same_weights(overhead, monkeypatch, tmp_path, opts):
    models = []
    build = overhead.build_model
    for module in (overhead, sys.modules["train_step"]):
        monkeypatch.setattr(module, "build_model", lambda cfg: models.append(build(cfg)) or models[-1])
    result = overhead.main([*TOY, "--output", str(tmp_path / "result.json"), *opts])
    fastamp, bare = (model.state_dict() for model in models)
    assert all(value.equal(bare[name]) for name, value in fastamp.items())
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["pairs"] == 2 and {"wall", "cpu"} < result.keys()


def test_summary_is_the_mean_of_the_median_ratios_of_both_orders(overhead):
    # The true ratio is 1.1; the second step of a pair, which is fastamp in every other pair, is 10 % faster.
    pairs = [(1.1 * 0.9, 1.0), (1.1, 0.9)] * 10
    found = overhead.summarize(pairs)
    expected = (1.1 * 0.9 + 1.1 / 0.9) / 2
    assert found["ratio"] == pytest.approx(expected) and found["low"] == found["high"] == pytest.approx(expected)
