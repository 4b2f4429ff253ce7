"""`fastamp compare-models`: metrics of `fastamp eval`, paired intervals of `compare-runs`, exported files, failures."""

import json

import pytest
import tiny
import torch

from fastamp.cli import main
from fastamp.evaluation.run_comparison import compare_runs
from fastamp.modeling import build_model


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Paths of two checkpoints of different random weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path))
    tiny.make_demo(tmp_path)
    cfg = tiny.tiny_config(tmp_path, "MODEL.HEADS.NUM_CLASSES", "16", "DATALOADER.NUM_WORKERS", "0")
    for seed in (0, 1):
        torch.manual_seed(seed)
        torch.save({"model": build_model(cfg).state_dict(), "config": cfg.dump()}, tmp_path / f"m{seed}.pth")
    return "m0.pth", "m1.pth"


def compared(models, *words):
    code = main(
        ["compare-models", *models, "--data", "Demo", "--rounds", "2", "--batch", "4", "--output", "out", *words]
    )
    return code, json.loads(open("out/models.json").read())


@pytest.mark.integration
def test_metrics_and_intervals_are_those_of_evaluated_runs(models, tmp_path, capsys):
    code, content = compared(models)
    assert code == 0
    for path in models:
        assert main(["eval", path, "TEST.PER_QUERY=on", f"OUTPUT_DIR={path[:-4]}"]) == 0
    found = {model["name"]: model for model in content["models"]}
    for path in models:
        lines = (tmp_path / path[:-4] / "metrics_eval.json").read_text()
        assert found[path]["metrics"]["mAP"] == pytest.approx(json.loads(lines)["metrics"]["Demo"]["mAP"], abs=1e-3)
        assert 0 < found[path]["latency_ms"][0] <= found[path]["latency_ms"][2]
        assert found[path]["images_per_s"] > 0
        weights = torch.load(path, weights_only=True)["model"]
        size = sum(tensor.nbytes for name, tensor in weights.items() if name != "heads.weight")  # of the classifier
        assert found[path]["size_mib"] == pytest.approx(size / 2**20)
    (pair,) = content["differences"]
    assert found[pair["better"]]["metrics"]["mAP"] >= found[pair["worse"]]["metrics"]["mAP"]
    (expected,) = compare_runs(pair["worse"][:-4], pair["better"][:-4])
    for row, other in zip(pair["metrics"], expected.differences, strict=True):
        assert row == pytest.approx(vars(other), abs=1e-3)
    assert (tmp_path / "out/models.png").stat().st_size > 1000

    assert main(["export", models[0], "m.onnx"]) == 0
    code, content = compared((models[0], "m.onnx", "missing.pth"))
    assert code == 1
    assert list(content["failures"]) == ["missing.pth"]
    (pair,) = content["differences"]
    mean_precision = next(row for row in pair["metrics"] if row["metric"] == "mAP")
    assert mean_precision["low"] <= 0 <= mean_precision["high"]
    assert abs(mean_precision["difference"]) < 0.5


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("m0.pth", "--data", "Demo"), "m0.pth"),
        (("m0.pth", "m0.pth", "--data", "Demo"), "m0.pth"),
        (("m0.pth", "m1.pth", "--data", "Demoo"), "Demo"),
        (("m0.pth", "m1.pth", "--data", "Demo", "--opts", "MODEL.DEVICE=cpu"), "MODEL.DEVICE"),
        (("m0.pth", "m1.pth"), "--data"),
        (("a.pth", "b.pth", "--data", "Demo"), "a.pth"),
        (("a.pth", "b.pth", "--data", "Demo"), "b.pth"),
    ],
)
def test_invalid_input_is_refused(models, capsys, words, named):
    try:
        code = main(["compare-models", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert named in capsys.readouterr().err


def test_published_weights_are_called_by_their_name(models, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FASTAMP_ZOO", str(tmp_path / "zoo"))
    name = "fastreid_sbs_r50_market1501"
    (tmp_path / "zoo").mkdir()
    (tmp_path / f"zoo/{name}.pth").write_bytes(b"damaged")
    assert main(["compare-models", "sbs_r50_market1501", "missing.pth", "--data", "Demo"]) == 2
    assert f"\n{name}: " in capsys.readouterr().err
