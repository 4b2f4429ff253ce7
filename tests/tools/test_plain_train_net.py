"""tools/plain_train_net.py: same results as train_net.py, resume, and unsupported keys."""

import re
import subprocess
import sys
from pathlib import Path

import plain_train_net
import pytest
import tiny
import torch
import train_net

from fastamp.engine import default_argument_parser, run_command_line
from fastamp.inference import Predictor

ROOT = Path(__file__).parents[2]


def run(*argv):
    args = default_argument_parser().parse_args([str(arg) for arg in argv])
    results = []
    code = run_command_line(lambda: results.append(plain_train_net.main(args)))
    return code, results


def test_plain_train_net_has_at_most_130_lines():
    assert len(Path(plain_train_net.__file__).read_text().splitlines()) <= 130


@pytest.mark.integration
@pytest.mark.parametrize("precision", ["off", "bf16", "fp16"])
def test_final_weights_of_plain_train_net_equal_those_of_train_net(demo, tmp_path, precision):
    options = ("SOLVER.AMP", precision, "SOLVER.CLIP_GRADIENTS", "True", "SOLVER.MAX_EPOCH", "2")
    assert train_net.cli(tiny.tiny_options(tmp_path / "hooks", *options)) == 0
    code, (results,) = run(*tiny.tiny_options(tmp_path / "plain", *options))
    assert code == 0 and results["mAP"] > 0
    first, second = (tiny.weights(tmp_path / f"{which}/model_final.pth") for which in ("hooks", "plain"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_resumed_plain_train_net_weights_equal_uninterrupted_training(demo, tmp_path):
    options = ("SOLVER.AMP", "bf16", "SOLVER.MAX_EPOCH", "2", "SOLVER.SCHED", "ConstantLR")
    run(*tiny.tiny_options(tmp_path / "straight", *options))
    run(*tiny.tiny_options(tmp_path / "resumed", *options, "SOLVER.MAX_EPOCH", "1"))
    assert run("--resume", *tiny.tiny_options(tmp_path / "resumed", *options))[0] == 0
    assert "SOLVER.MAX_EPOCH: 1 -> 2" in (tmp_path / "resumed/log.txt").read_text()
    assert Predictor(tmp_path / "resumed/model_final.pth").cfg.SOLVER.MAX_EPOCH == 2
    first, second = (tiny.weights(tmp_path / f"{which}/model_final.pth") for which in ("straight", "resumed"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    weights = ("MODEL.WEIGHTS", str(tmp_path / "straight/model_final.pth"))
    assert run("--eval-only", *tiny.tiny_options(tmp_path / "eval", *options, *weights))[0] == 0


def test_resume_of_finished_plain_training_evaluates_and_rejects_new_batch_size(demo, tmp_path, capfd):
    options = ("SOLVER.MAX_EPOCH", "1")
    run(*tiny.tiny_options(tmp_path, *options))
    code, (results,) = run("--resume", *tiny.tiny_options(tmp_path, *options))
    assert code == 0 and results["mAP"] > 0
    assert run("--resume", *tiny.tiny_options(tmp_path, *options, "SOLVER.IMS_PER_BATCH", "32"))[0] == 2
    assert "SOLVER.IMS_PER_BATCH" in capfd.readouterr().err
    assert run("--resume", *tiny.tiny_options(tmp_path / "nothing", *options))[0] == 0
    assert "no checkpoint found in" in (tmp_path / "nothing/log.txt").read_text()


def test_plain_train_net_rejects_unsupported_config_keys(demo, tmp_path, capfd, subtests):
    for name in plain_train_net.UNSUPPORTED:
        with subtests.test(name):
            values = {"SOLVER.ACCUM_STEPS": "2", "SOLVER.TRAINER": "AMPTrainer"}
            values |= {f"SOLVER.FREEZE_{unit}": "3" for unit in ("ITERS", "EPOCHS", "FC_ITERS")}
            values |= {f"SOLVER.CHECKPOINT_{unit}": "3" for unit in ("ITERS", "MINUTES", "KEEP")}
            values["SOLVER.AMP.ON_FAILURE"] = "float32"
            key, _, value = name.partition(" ")
            value = value or values.get(name, "True")
            assert run(*tiny.tiny_options(tmp_path, key, value))[0] == 2
            assert re.search(rf"{name} .*tools/train_net.py", capfd.readouterr().err, re.DOTALL)


@pytest.mark.integration
def test_plain_train_net_exits_with_2_if_config_file_is_missing():
    process = subprocess.run(
        [sys.executable, "tools/plain_train_net.py", "--config-file", "nowhere.yml"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert process.returncode == 2 and "nowhere.yml" in process.stderr and "Traceback" not in process.stderr
