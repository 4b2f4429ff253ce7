"""Reports (TEST.REPORT) of training runs and evaluations."""

import logging
import shutil

import pytest
import tiny

from fastamp.engine import DefaultTrainer
from fastamp.utils.errors import ConfigError


def test_training_and_evaluation_write_reports(demo, tmp_path, capfd):
    options = ("TEST.REPORT", "True", "TEST.EVAL_PERIOD", "1", "SOLVER.MAX_EPOCH", "2")
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path, *options))
    trainer.train()
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    # The curves include the last evaluation, the counts the training images.
    for words in (
        "after epoch 2 of 2",
        "Demo: from",
        "<td>train</td><td>96</td><td>16</td>",
        "TEST.REPORT",
        ">Losses<",
    ):
        assert words in text, words
    weights = str(tmp_path / "model_best.pth")
    training = {path: path.read_bytes() for path in tmp_path.glob("*.*") if path.name != "log.txt"}
    other = tmp_path / "other"
    for folder, name in ((tmp_path, "report_eval.html"), (other, "report.html")):
        metrics = DefaultTrainer.test_weights(tiny.tiny_config(folder, *options, "MODEL.WEIGHTS", weights))
        text = (folder / name).read_text(encoding="utf-8")
        assert weights in text and f"{metrics['mAP']:.1f}" in text and ">Losses<" in text, folder
    assert all(path.read_bytes() == content for path, content in training.items())
    assert sorted(path.name for path in other.glob("*.*")) == ["metrics_eval.json", "report.html"]
    # Curves are omitted for weights from another folder.
    strange = tmp_path / "other" / "model.pth"
    shutil.copy(weights, strange)
    DefaultTrainer.test_weights(tiny.tiny_config(tmp_path, *options, "MODEL.WEIGHTS", str(strange)))
    text = (tmp_path / "report_eval.html").read_text(encoding="utf-8")
    assert str(strange) in text and ">Losses<" not in text


def test_failed_report_write_keeps_training_and_evaluation_results(demo, tmp_path, caplog):
    for name in ("report.html", "report_eval.html"):
        (tmp_path / name / "in_the_way").mkdir(parents=True)
    cfg = tiny.tiny_config(tmp_path, "TEST.REPORT", "True", "SOLVER.MAX_EPOCH", "1")
    with caplog.at_level(logging.INFO, "fastamp"):
        metrics = DefaultTrainer(cfg).train()
        assert metrics["mAP"] > 0 and (tmp_path / "model_final.pth").exists()
        assert "report.html cannot be written" in caplog.text
        caplog.clear()
        cfg.MODEL.WEIGHTS = str(tmp_path / "model_final.pth")
        with pytest.raises(ConfigError, match=r"report_eval.html cannot be written"):
            DefaultTrainer.test_weights(cfg)
    assert "evaluation results in percent" in caplog.text


def test_training_writes_no_report_by_default(run_folder):
    assert not (run_folder / "report.html").exists()
