"""projects/PlantedOverflow: plugin, config, and the commands of its README."""

import shlex
from pathlib import Path

import amp_doctor
import amp_replay
import pytest
import train_net
import yaml

FOLDER = Path(__file__).parents[2] / "projects/PlantedOverflow"
SMALL = (
    "INPUT.SIZE_TRAIN", "(64, 32)", "INPUT.SIZE_TEST", "(64, 32)", "SOLVER.IMS_PER_BATCH", "16",
    "DATALOADER.NUM_WORKERS", "0", "MODEL.DEVICE", "cpu",
)  # fmt: skip


def command(tool):
    """Return the arguments of the README command for ``tool``."""
    lines = (FOLDER / "README.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"python tools/{tool}.py")]
    return shlex.split(line)[2:]


@pytest.mark.integration
def test_doctor_suggests_float32_for_layer_with_planted_overflow(demo, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    assert amp_doctor.cli([*command("amp_doctor"), "OUTPUT_DIR", str(tmp_path), *SMALL]) == 1
    out = capfd.readouterr().out
    assert "forward overflow in backbone.4 (Times)" in out
    suggestion = yaml.safe_load(out.split("Recommended config:\n")[1].split("\n\n")[0])
    assert suggestion["SOLVER"]["AMP"]["FORCE_FP32"] == ["backbone.4"]


def test_doctor_reports_no_problem_without_planted_overflow(demo, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    arguments = [*command("amp_doctor"), "OUTPUT_DIR", str(tmp_path), *SMALL, "MODEL.BACKBONE.PLANTED", "1"]
    assert amp_doctor.cli(arguments) == 0
    assert "SOLVER.AMP (float16)" in capfd.readouterr().out


@pytest.mark.integration
def test_planted_overflow_stops_training_and_is_reproduced_by_replay(demo, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    assert train_net.cli([*command("train_net"), "OUTPUT_DIR", str(tmp_path), *SMALL]) == 2
    assert "forward overflow in backbone.4 (Times)" in capfd.readouterr().err
    crash = str(tmp_path / "amp_crash")
    assert amp_replay.cli(["--plugin", str(FOLDER / "plugin.py"), crash]) == 1
    fix = ["SOLVER.AMP.FORCE_FP32", "['backbone.4']"]
    assert amp_replay.cli(["--plugin", str(FOLDER / "plugin.py"), crash, *fix]) == 0
