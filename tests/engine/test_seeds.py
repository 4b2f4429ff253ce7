"""`fastamp train --seeds`: one run per seed, the same as separate runs, and a summary of the metrics."""

import json
import re
import statistics

import numpy as np
import pytest
import tiny
import torch

from fastamp.cli import main
from fastamp.engine.seeds import summarize_seeds


def options(folder, *opts):
    return tiny.tiny_options(folder, "SOLVER.MAX_EPOCH", "1", *opts)


def assert_same_weights(first, second):
    first, second = tiny.weights(first), tiny.weights(second)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.integration
def test_each_seed_is_the_same_run_as_a_separate_one(demo, tmp_path, capsys):
    assert main(["train", "--seeds", "3", "4", "--resume", *options(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert main(["train", *options(tmp_path / "alone", "SEED", "4")]) == 0
    assert_same_weights(tmp_path / "seed4/model_final.pth", tmp_path / "alone/model_final.pth")
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "seed3/model_final.pth", tmp_path / "alone/model_final.pth")
    summary = json.loads((tmp_path / "seeds.json").read_text())
    rows = [json.loads((tmp_path / f"seed{n}/metrics.json").read_text().splitlines()[-1]) for n in (3, 4)]
    values = [row["Demo/mAP"] for row in rows]
    found = summary["metrics"]["Demo/mAP"]
    assert summary["seeds"] == [3, 4] and found["values"] == {"3": values[0], "4": values[1]}
    assert found["mean"] == pytest.approx(statistics.mean(values)) and found["min"] == min(values)
    table = out[out.index("results of 2 seeds") :]
    for text in ("| seed 3 ", "| seed 4 ", "| mean ", "| std ", "| range ", "Demo/mAP", f"{found['mean']:.2f}"):
        assert text in table, text
    assert "results of 2 seeds" in (tmp_path / "log.txt").read_text()


@pytest.mark.integration
def test_resume_continues_with_the_missing_seeds(demo, tmp_path, capsys):
    assert main(["train", *options(tmp_path), "--seeds", "1"]) == 0
    before = (tmp_path / "seed1/metrics.json").read_bytes(), (tmp_path / "seed1/model_final.pth").read_bytes()
    assert json.loads((tmp_path / "seeds.json").read_text())["metrics"]["Demo/mAP"]["std"] is None
    capsys.readouterr()
    assert main(["train", "--seeds", "1", "2", "--resume", *options(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "training is already complete" in out and len(re.findall("epochs? of ", out)) == 1  # of seed 2
    assert before == ((tmp_path / "seed1/metrics.json").read_bytes(), (tmp_path / "seed1/model_final.pth").read_bytes())
    assert json.loads((tmp_path / "seeds.json").read_text())["seeds"] == [1, 2]


def test_summary_of_seeds_skips_values_that_are_not_numbers():
    results = {
        seed: {"A": {"mAP": 1.0 + seed, "Rank-1": float("nan"), "intervals": {}, "num_query": 8}, "B": {"mAP": 5.0}}
        for seed in (0, 2)
    }
    summary = summarize_seeds(results)
    assert summary.keys() == {"A/mAP", "B/mAP"}
    expected = {"values": {"0": 1.0, "2": 3.0}, "mean": 2.0, "std": pytest.approx(2**0.5), "min": 1.0, "max": 3.0}
    assert summary["A/mAP"] == expected and summary["B/mAP"]["std"] == 0.0


def test_summary_of_seeds_contains_numpy_floats_but_no_counts_and_booleans():
    results = {
        seed: {"A": {"mAP": np.float32(0.5 + seed), "num": np.int64(3), "flag": True, "other": np.bool_(True)}}
        for seed in (0, 2)
    }
    summary = summarize_seeds(results)
    assert summary.keys() == {"A/mAP"} and json.loads(json.dumps(summary))["A/mAP"]["mean"] == 1.5


@pytest.mark.integration
def test_test_set_that_is_listed_twice_is_summarized_once(demo, tmp_path):
    assert main(["train", "--seeds", "1", "2", *options(tmp_path, "DATASETS.TESTS", "('Demo', 'Demo')")]) == 0
    summary = json.loads((tmp_path / "seeds.json").read_text())
    assert summary["seeds"] == [1, 2] and "Demo/mAP" in summary["metrics"]


@pytest.mark.parametrize(
    "arguments", [["--seeds", "1", "1", "--resume"], ["--seeds", "1", "--dry-run"], ["--seeds", "1", "--eval-only"]]
)
def test_invalid_combinations_exit_with_2(arguments, demo, tmp_path, input_error):
    assert "--seeds" in input_error(main, ["train", *arguments, *options(tmp_path)]) and list(tmp_path.iterdir()) == []
