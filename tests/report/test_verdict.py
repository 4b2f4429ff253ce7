"""Headline of a report: comparison with baselines and with the previous run."""

import json
import os

import pytest

from fastamp.config import get_cfg
from fastamp.report.verdict import PreviousRun, previous_run, verdict


def metrics(baseline=None, interval=(40.0, 60.0)):
    found = {"mAP": 50.0, "Rank-1": 62.5, "intervals": {"mAP": list(interval)} if interval else {}}
    if baseline is not None:
        found["baselines"] = {"raw pixels": {"mAP": baseline, "Rank-1": 1.0}, "color histogram": {"mAP": 1.0}}
    return found


@pytest.mark.parametrize(
    "baseline, interval, kind, words",
    [
        (13.0, (40, 60), "good", "37.0 points above the best baseline (raw pixels, 13.0 %)"),
        (45.0, (40, 60), "bad", "5.0 points above"),
        (55.0, (40, 60), "bad", "5.0 points below"),
        (45.0, None, "good", "5.0 points above"),
        (None, (40, 60), "open", "TEST.BASELINES True"),
    ],
)
def test_verdict_compares_the_interval_with_the_best_baseline(baseline, interval, kind, words):
    found = verdict(metrics(baseline, interval), None)
    text = " ".join(found.sentences)
    assert found.kind == kind and words in text and "mAP 50.0 %" in text and "Rank-1 62.5 %" in text
    assert ("40.0 to 60.0" in text) == (interval is not None)
    assert verdict({"score": 1.0}, None) is None


@pytest.mark.parametrize("value, words", [(45.0, "+5.0 points, within"), (70.0, "-20.0 points, outside")])
def test_verdict_compares_with_the_previous_run(tmp_path, value, words):
    text = " ".join(verdict(metrics(), PreviousRun(tmp_path / "old", "2026-01-02", value)).sentences)
    assert words in text and "Previous run (old, 2026-01-02)" in text


def write_run(folder, value, *options):
    folder.mkdir()
    cfg = get_cfg()
    cfg.OUTPUT_DIR = str(folder)
    cfg.merge_from_list([str(option) for option in options])
    (folder / "config.yaml").write_text(cfg.dump())
    (folder / "metrics.json").write_text(json.dumps({"iteration": 3, "Demo/mAP": value}) + "\n")
    return cfg


def test_previous_run_is_the_newest_run_with_the_same_evaluation(tmp_path):
    cfg = write_run(tmp_path / "now", 1.0)
    assert previous_run(cfg, "Demo") is None
    write_run(tmp_path / "a", 10.0)
    write_run(tmp_path / "b", 20.0)
    write_run(tmp_path / "other_protocol", 30.0, "TEST.PROTOCOL", "no_camera")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "metrics.json").write_text("{")
    for number, name in enumerate(("a", "b", "other_protocol", "broken")):
        os.utime(tmp_path / name / "metrics.json", (number, number))
    found = previous_run(cfg, "Demo")
    assert (found.folder.name, found.mean_ap) == ("b", 20.0)
    assert previous_run(cfg, "Market1501") is None
    cfg.MODEL.WEIGHTS = str(tmp_path / "b" / "model_best.pth")
    assert previous_run(cfg, "Demo").folder.name == "a"
    write_run(tmp_path / "now" / "previous-1", 5.0)
    assert previous_run(cfg, "Demo").mean_ap == 5.0
