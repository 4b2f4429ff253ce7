"""Command `fastamp eval`: the config in a checkpoint, and the metrics as JSON."""

import hashlib
import json

import pytest
import tiny
import torch
import train_net

from fastamp.cli import main
from fastamp.cli.eval import evaluation_config
from fastamp.config import CfgNode, get_cfg
from fastamp.utils.errors import ConfigError


@pytest.fixture
def weights(run_folder):
    """Checkpoint of a bfloat16 run with a non-default model."""
    return run_folder / "model_best.pth"


def test_eval_uses_the_config_in_the_checkpoint(demo, weights, tmp_path, capsys):
    words = ["MODEL.WEIGHTS", str(weights), "OUTPUT_DIR", str(tmp_path), "MODEL.DEVICE", "cpu"]
    before = {path.name: path.read_bytes() for path in weights.parent.iterdir() if path.is_file()}
    assert main(["eval", *words]) == 0
    content = json.loads((tmp_path / "metrics_eval.json").read_text())
    rows = [json.loads(line) for line in (weights.parent / "metrics.json").read_text().splitlines()]
    trained = next(row["Demo/mAP"] for row in reversed(rows) if "Demo/mAP" in row)
    assert content["datasets"] == ["Demo"] and content["metrics"]["Demo"]["mAP"] == pytest.approx(trained, abs=1e-3)
    assert content["weights"] == str(weights) and "bfloat16" in content["protocol"]
    cfg, source = evaluation_config("", words)
    assert content["config_sha256"] == hashlib.sha256(cfg.dump().encode()).hexdigest()
    assert source == f"from {weights}" and source in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in weights.parent.iterdir() if path.is_file()} == before


def test_eval_ignores_machine_specific_keys_of_the_checkpoint_config(weights, tmp_path):
    content = torch.load(weights, weights_only=True)
    cfg = CfgNode.load_cfg(content["config"])
    cfg.OUTPUT_DIR, cfg.MODEL.DEVICE = "/elsewhere", "cuda:3"
    cfg.DATALOADER.CACHE, cfg.DATALOADER.CACHE_DIR = "disk", "/elsewhere"
    torch.save(content | {"config": cfg.dump()}, tmp_path / "other.pth")
    found, _ = evaluation_config("", ["MODEL.WEIGHTS", str(tmp_path / "other.pth"), "TEST.FLIP", "True"])
    assert (found.OUTPUT_DIR, found.DATALOADER.CACHE, found.DATALOADER.CACHE_DIR) == ("logs/", "none", "")
    assert found.MODEL.DEVICE == "auto" and found.TEST.FLIP.ENABLED
    assert list(found.INPUT.SIZE_TEST) == list(cfg.INPUT.SIZE_TEST) != list(get_cfg().INPUT.SIZE_TEST)


def test_eval_config_file_replaces_checkpoint_config_and_bare_weights_use_defaults(weights, tmp_path):
    (tmp_path / "recipe.yml").write_text("SEED: 5\n")
    words = ["MODEL.WEIGHTS", str(weights)]
    cfg, source = evaluation_config(str(tmp_path / "recipe.yml"), words)
    assert cfg.SEED == 5 and source == str(tmp_path / "recipe.yml")
    assert cfg.INPUT.SIZE_TEST == get_cfg().INPUT.SIZE_TEST
    bare = tmp_path / "bare.pth"
    torch.save(torch.load(weights, weights_only=True)["model"], bare)
    cfg, source = evaluation_config("", ["MODEL.WEIGHTS", str(bare), "MODEL.BACKBONE.DEPTH", "18x", "SEED", "6"])
    assert cfg.SEED == 6 and cfg.INPUT.SIZE_TEST == get_cfg().INPUT.SIZE_TEST
    assert str(bare) in source
    with pytest.raises(ConfigError, match="bare.*\n.*--config-file"):
        evaluation_config("", ["MODEL.WEIGHTS", str(bare), "MODEL.DEVICE", "cpu", "SEED", "6"])
    with pytest.raises(ConfigError, match="SEDE"):
        evaluation_config("", [*words, "SEDE", "1"])


def test_eval_exits_with_2_if_weights_are_missing(input_error):
    assert "MODEL.WEIGHTS" in input_error(main, ["eval", "SEED", "1"])
    assert "/nowhere.pth" in input_error(main, ["eval", "MODEL.WEIGHTS", "/nowhere.pth"])


def test_eval_only_flag_writes_metrics_of_each_dataset(demo, weights, tmp_path):
    options = tiny.tiny_options(tmp_path, "MODEL.WEIGHTS", str(weights))
    assert train_net.cli(["--eval-only", *options]) == 0
    content = json.loads((tmp_path / "metrics_eval.json").read_text())
    assert content["metrics"]["Demo"]["Rank-1"] >= 0 and "intervals" in content["metrics"]["Demo"]


def test_eval_checks_all_image_files_before_it_builds_the_model(
    demo, weights, tmp_path, monkeypatch, input_error, capsys
):
    def build_model(cfg):
        raise AssertionError("the model was built first")

    monkeypatch.setattr("fastamp.engine.builders.build_model", build_model)
    (tmp_path / "empty.jpg").touch()
    rows = [f"{path},{number // 2},{number % 2}" for number, path in enumerate(sorted(demo.rglob("*.jpg"))[:8])]
    test = [f"{row},{('query', 'gallery')[number % 2]}" for number, row in enumerate(rows)]
    (tmp_path / "test.csv").write_text("\n".join(["path,pid,camid,split", *test, "empty.jpg,0,1,gallery"]))
    (tmp_path / "train.csv").write_text("\n".join(["path,pid,camid,split", "gone.jpg,8,0,train", *test]))
    words = ["eval", str(weights), "MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(tmp_path / "out")]
    assert main([*words, "DATASETS.TESTS", f"csv:{tmp_path}/test.csv"]) == 2
    assert f"empty.jpg ({tmp_path}/test.csv, line {len(rows) + 2})" in capsys.readouterr().err
    precise = ["TEST.PRECISE_BN.ENABLED", "True", "TEST.PRECISE_BN.DATASET", f"csv:{tmp_path}/train.csv"]
    assert f"gone.jpg ({tmp_path}/train.csv, line 2)" in input_error(main, [*words, "DATASETS.TESTS", "Demo", *precise])
