"""projects/PlantedOverflow: its parts, its config, and the doctor's command in its README."""

import shlex
from pathlib import Path

import amp_doctor
import amp_replay
import train_net
import yaml

FOLDER = Path(__file__).parents[2] / "projects/PlantedOverflow"
SMALL = (
    "INPUT.SIZE_TRAIN", "(64, 32)", "INPUT.SIZE_TEST", "(64, 32)", "SOLVER.IMS_PER_BATCH", "16",
    "DATALOADER.NUM_WORKERS", "0", "MODEL.DEVICE", "cpu",
)  # fmt: skip


def command(tool):
    """Return the arguments of the README's command of that tool."""
    lines = (FOLDER / "README.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"python tools/{tool}.py")]
    return shlex.split(line)[2:]


def test_the_doctor_suggests_the_planted_layer(demo, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    assert amp_doctor.cli([*command("amp_doctor"), "OUTPUT_DIR", str(tmp_path), *SMALL]) == 1
    out = capfd.readouterr().out
    assert "forward overflow in backbone.4 (Times)" in out
    suggestion = yaml.safe_load(out.split("To paste into the config:\n")[1].split("\n\n")[0])
    assert suggestion["SOLVER"]["AMP"]["FORCE_FP32"] == ["backbone.4"]


def test_without_it_nothing_is_suggested(demo, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    arguments = [*command("amp_doctor"), "OUTPUT_DIR", str(tmp_path), *SMALL, "MODEL.BACKBONE.PLANTED", "1"]
    assert amp_doctor.cli(arguments) == 0
    assert "SOLVER.AMP (float16) is sound for this model" in capfd.readouterr().out


def test_training_stops_and_a_replay_finds_its_parts(demo, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    assert train_net.cli([*command("train_net"), "OUTPUT_DIR", str(tmp_path), *SMALL]) == 2
    assert "forward overflow in backbone.4 (Times)" in capfd.readouterr().err
    crash = str(tmp_path / "amp_crash")
    assert amp_replay.cli(["--plugin", str(FOLDER / "plugin.py"), crash]) == 1
    cure = ["SOLVER.AMP.FORCE_FP32", "['backbone.4']"]
    assert amp_replay.cli(["--plugin", str(FOLDER / "plugin.py"), crash, *cure]) == 0
