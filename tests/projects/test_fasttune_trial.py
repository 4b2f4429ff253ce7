"""FastTune trials: reports, resume from a checkpoint, and failures."""

import io
import json
import sys
from types import SimpleNamespace

import pytest
import tiny
import torch
from autotuner.settings import Search
from autotuner.space import Space
from autotuner.split import register_split
from autotuner.trial import ray_trial, run_dir, run_trial
from file_tracker import read_calls

from fastamp.config import get_cfg, read_config

pytestmark = pytest.mark.integration


def config(output, *opts):
    return read_config("", tiny.tiny_options(output, "SOLVER.MAX_EPOCH", "4", "TEST.EVAL_PERIOD", "2", *opts))


class Reports(list):
    def __call__(self, metrics, checkpoint):
        assert checkpoint.is_file()
        self.append((metrics, checkpoint.read_bytes()))


def test_trial_reports_each_evaluation_once(demo, tmp_path):
    reports = Reports()
    cfg = config(tmp_path / "one")
    names = register_split(cfg, 0.25, 0)
    cfg = cfg.with_values({"DATASETS.NAMES": (names[0],), "DATASETS.TESTS": (names[1],)})
    assert run_trial(cfg, reports) == ""
    assert [metrics["epoch"] for metrics, _ in reports] == [2, 4]
    for metrics, _ in reports:
        assert metrics["score"] == pytest.approx((metrics["mAP"] + metrics["Rank-1"]) / 2)
        assert 0 < metrics["mAP"] <= 100 and metrics["images_per_second"] > 1 and metrics["peak_memory_mb"] > 1
        assert metrics["skipped_steps"] == 0


def test_trial_resumes_from_checkpoint_with_learning_rate_of_new_config(demo, tmp_path):
    full, rest = Reports(), Reports()
    run_trial(config(tmp_path / "full"), full)
    path = tmp_path / "middle.pth"
    path.write_bytes(full[0][1])
    run_trial(config(tmp_path / "rest"), rest, checkpoint=path)
    assert [metrics["epoch"] for metrics, _ in rest] == [4]
    assert rest[0][0]["mAP"] == full[1][0]["mAP"]
    run_trial(config(tmp_path / "other", "SOLVER.BASE_LR", "1e-5"), rest, checkpoint=path)
    rows = [json.loads(line) for line in (tmp_path / "other/metrics.json").read_text().splitlines()]
    assert 0 < rows[-2]["lr"] <= 1e-5


def test_trial_returns_first_line_of_error_if_training_diverges(demo, tmp_path):
    reports = Reports()
    cfg = config(tmp_path / "bad", "SOLVER.BASE_LR", "1e30", "SOLVER.AMP", "off", "SOLVER.WARMUP_ITERS", "0")
    failure = run_trial(cfg, reports)
    assert failure and "\n" not in failure and len(reports) == 0


def test_trial_with_other_values_resets_best_score_of_checkpoint(demo, tmp_path):
    full, rest = Reports(), Reports()
    run_trial(config(tmp_path / "full"), full)
    middle = torch.load(io.BytesIO(full[0][1]), weights_only=True)
    path = tmp_path / "middle.pth"
    path.write_bytes(full[0][1])
    assert "best" in str(middle)
    folder = tmp_path / "rest"
    run_trial(config(folder, "SOLVER.BASE_LR", "1e-8"), rest, checkpoint=path, with_other_values=True)
    best = torch.load(folder / "model_best.pth", weights_only=True)["model"]
    last = torch.load(io.BytesIO(rest[-1][1]), weights_only=True)["model"]
    assert all(torch.equal(best[name], last[name]) for name in best)


@pytest.mark.parametrize("asked", [False, True])
def test_trial_is_tracked_only_if_asked(demo, tmp_path, monkeypatch, asked):
    """Ray is replaced: a trial receives its ID and reports its metrics."""
    context = SimpleNamespace(get_trial_id=lambda: "abc_00001")
    tune = SimpleNamespace(
        get_context=lambda: context,
        get_checkpoint=lambda: None,
        report=lambda *args, **kwargs: None,
        Checkpoint=SimpleNamespace(from_directory=str),
    )
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(tune=tune))
    monkeypatch.chdir(tmp_path)
    options = ("SOLVER.MAX_EPOCH", "1", "LOGGERS", "('tensorboard', 'file')", "TRACKING.TRIALS", str(asked))
    cfg = config(tmp_path, *options)
    search = Search(title="search", folder=tmp_path / "study/search", cfg=cfg, space=Space([]), fraction=0.25)
    ray_trial({}, search, here=str(tmp_path), resumed=False)
    folder = run_dir(search.folder / "trial_abc_00001")
    calls = read_calls(folder)
    assert (folder / "model_best.pth").exists() and bool(calls) == asked
    assert list(folder.glob("events.out.tfevents.*"))
    if asked:
        assert (calls[0][1]["name"], calls[0][1]["group"]) == ("study-abc_00001", "study")
        assert calls[-1] == ("finish", "finished")
    # The winner can be trained with the trackers of the recipe.
    stored = torch.load(folder / "model_best.pth", weights_only=True)["config"]
    assert get_cfg().load_cfg(stored).LOGGERS[1] == "file"
