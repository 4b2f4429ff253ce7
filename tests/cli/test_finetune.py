"""Command `fastamp finetune`: the model of a weights file, the recipe for small sets, the evaluation at the start."""

import json

import pytest
import torch

from fastamp.cli import main
from fastamp.config import read_config

SMALL = ("MODEL.DEVICE", "cpu", "DATALOADER.NUM_WORKERS", "0", "SOLVER.IMS_PER_BATCH", "16", "SOLVER.AMP", "off")


@pytest.fixture
def source(run_folder, tmp_path):
    """Weights of the tiny model."""
    return run_folder / "model_final.pth"


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


@pytest.mark.integration
def test_model_and_image_size_are_those_of_the_file_and_the_rest_of_the_recipe(demo, source, tmp_path, caplog):
    out = tmp_path / "tuned"
    assert main(["finetune", str(source), "Demo", "--always", *SMALL, "SOLVER.MAX_EPOCH=5", f"OUTPUT_DIR={out}"]) == 0
    cfg = read_config(str(out / "config.yaml"))
    before = read_config(str(source.parent / "config.yaml"))
    recipe = read_config("finetune/small_set")
    assert cfg.MODEL.BACKBONE.NAME == "build_tiny_backbone" and cfg.INPUT.SIZE_TRAIN == before.INPUT.SIZE_TRAIN
    assert cfg.MODEL.HEADS.WITH_BNNECK == before.MODEL.HEADS.WITH_BNNECK
    assert (cfg.SOLVER.SCHED, cfg.SOLVER.BASE_LR) == (recipe.SOLVER.SCHED, recipe.SOLVER.BASE_LR)
    assert cfg.DATASETS.NAMES == cfg.DATASETS.TESTS == ("Demo",) and not cfg.SOLVER.SWA.ENABLED
    assert not [
        record for record in caplog.records if "scheduled event" in record.getMessage()
    ]  # 5 instead of 30 epochs
    evaluated = [row for row in rows_of(out) if "Demo/mAP" in row]
    assert [row["iteration"] for row in evaluated] == [-1, rows_of(out)[-1]["iteration"]]
    assert evaluated[0]["Demo/mAP"] == pytest.approx(start_of(source, tmp_path), abs=1e-3)
    best = torch.load(out / "model_best.pth", weights_only=True)["best"]
    assert best["value"] >= (evaluated[0]["Demo/mAP"] + evaluated[0]["Demo/Rank-1"]) / 2 - 1e-6


@pytest.mark.integration
def test_initial_weights_are_the_result_if_held_out_identities_choose_them(demo, source, tmp_path, monkeypatch):
    out, calls = tmp_path / "tuned", []
    monkeypatch.setattr("fastamp.engine.held_out.keeps_initial_weights", lambda cfg: not calls.append(cfg))
    command = ["finetune", str(source), "Demo", *SMALL, "SOLVER.MAX_EPOCH=2", f"OUTPUT_DIR={out}"]
    assert main(command) == 0
    first, last = (row for row in rows_of(out) if "Demo/mAP" in row)
    assert [last[key] for key in ("Demo/mAP", "Demo/mINP")] == [first[key] for key in ("Demo/mAP", "Demo/mINP")]
    start, final = (torch.load(path, weights_only=True) for path in (source, out / "model_final.pth"))
    names = [name for name, value in start["model"].items() if name[:9] == "backbone." and value.is_floating_point()]
    assert names and all(torch.equal(final["average"]["model"][name], start["model"][name]) for name in names)
    assert any(not torch.equal(final["model"][name], start["model"][name]) for name in names)
    assert main([*command, "--resume"]) == 0  # the choice is that of the run
    assert len(calls) == 1
    assert read_config(str(out / "config.yaml")).SOLVER.SWA.INITIAL_WEIGHT == 1


def start_of(source, folder):
    assert (
        main(["eval", str(source), "DATASETS.TESTS", "Demo", *SMALL[:4], *SMALL[-2:], f"OUTPUT_DIR={folder / 'eval'}"])
        == 0
    )
    return json.loads((folder / "eval/metrics_eval.json").read_text())["metrics"]["Demo"]["mAP"]


def test_model_of_a_file_without_config_is_inferred(tmp_path):
    from torchvision.models import resnet18

    from fastamp.cli.finetune import model_keys

    path = tmp_path / "net.pth"
    torch.save(
        {f"backbone.{name}": value for name, value in resnet18().state_dict().items() if "fc." not in name}, path
    )
    keys = dict(zip(*[iter(model_keys(str(path), ""))] * 2, strict=True))
    assert keys["MODEL.BACKBONE.DEPTH"] == "18x" and "MODEL.HEADS.NUM_CLASSES" not in keys


def test_config_instead_of_weights_is_refused(input_error):
    assert "Demo/quickstart" in input_error(main, ["finetune", "Demo/quickstart", "Demo"])
