"""Console of a training run: differences from the defaults, counting from 1, summary, and comparison with baselines."""

import json
import logging
import shlex

import pytest
import tiny

from fastamp.cli import main
from fastamp.engine.summary import warn_below_baselines

pytestmark = pytest.mark.integration


def test_console_shows_differences_and_log_file_the_full_config(demo, tmp_path, capsys):
    assert main(["train", *tiny.tiny_options(tmp_path, "SOLVER.MAX_EPOCH", "2", "TEST.REPORT", "True")]) == 0
    out = capsys.readouterr().out
    log = (tmp_path / "log.txt").read_text()
    for text in ("SOLVER.GAMMA", "WEIGHT_DECAY_BIAS", "environment:", "arguments:"):
        assert text not in out, text
    for text in ("GAMMA: ", "environment:", "arguments:"):
        assert text in log, text
    order = ("differences from the defaults", "SOLVER.MAX_EPOCH: 2", "| train ", "| gallery ", "model: ", "precision: ")
    places = [out.index(text) for text in (*order, "epoch 1/2 iter 2/12", "epoch 2/2 iter 12/12", "training finished")]
    assert places == sorted(places)
    assert "epoch 0" not in out and "iter 0" not in out
    assert len(out.splitlines()) < 100


def test_metrics_file_and_checkpoint_names_count_epochs_from_0(demo, tmp_path):
    tiny.train(tmp_path, "SOLVER.MAX_EPOCH", "2")
    rows = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert {row["epoch"] for row in rows} == {0, 1} and max(row["iteration"] for row in rows) == 11
    assert (tmp_path / "model_0000.pth").exists() and not (tmp_path / "model_0001.pth").exists()


@pytest.mark.parametrize("plugin", [False, True])
def test_summary_names_best_model_and_commands_that_work(plugin, demo, tmp_path, capsys, monkeypatch):
    folder, flags = tmp_path / "a run", []
    if plugin:
        (tmp_path / "a plugin.py").write_text(
            "from fastamp.config import Key\nKEYS = (Key('MODEL.MINE', 1, 'A number.'),)\n"
        )
        flags = ["--plugin", str(tmp_path / "a plugin.py")]
    assert main(["train", *flags, *tiny.tiny_options(folder, "SOLVER.MAX_EPOCH", "1", "TEST.REPORT", "True")]) == 0
    out = capsys.readouterr().out
    summary = out[out.index("training finished in ") :]
    assert f"best:   {folder}/model_best.pth" in summary and "after iteration 6" in summary
    assert f"last:   {folder}/model_final.pth (Demo: mAP" in summary and f"report: {folder}/report.html" in summary
    commands = [shlex.split(line.removeprefix("  next:"))[1:] for line in summary.splitlines() if "fastamp " in line]
    monkeypatch.chdir(tmp_path)
    images = next(demo.glob("fastamp-demo-*")) / "query"
    for command in commands:
        assert ("--plugin" in command) == plugin
        words = [str(images) if word == "FOLDER" else word for word in command]
        assert main(words) == 0, words
    assert (tmp_path / "features.npz").exists() and len(commands) == 2


@pytest.mark.parametrize("score, warns", [(12.0, True), (13.5, False), (90.0, False)])
def test_result_below_the_best_baseline_is_a_warning(score, warns, caplog):
    baselines = {"raw pixels": {"mAP": 13.5, "Rank-1": 23.0}, "color histogram": {"mAP": 11.7, "Rank-1": 17.0}}
    with caplog.at_level(logging.WARNING, "fastamp"):
        warn_below_baselines({"A": {"mAP": score, "baselines": baselines}, "B": {"mAP": 1.0}, "C": {"other": 1.0}})
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == warns
    assert all(text in found[0] for text in ("A", "12.00", "raw pixels", "13.50", "fix:")) if warns else True


def test_training_and_evaluation_warn_below_baselines(demo, tmp_path, capsys):
    options = tiny.tiny_options(tmp_path, "SOLVER.MAX_EPOCH", "1", "TEST.BASELINES", "True", "SOLVER.BASE_LR", "1e-6")
    assert main(["train", *options]) == 0
    assert capsys.readouterr().out.count("below the baseline raw pixels") == 1
    assert main(["eval", *options, "MODEL.WEIGHTS", str(tmp_path / "model_best.pth")]) == 0
    assert "below the baseline raw pixels" in capsys.readouterr().out
