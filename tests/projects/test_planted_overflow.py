"""projects/PlantedOverflow: its parts, its config, and the doctor's command in its README."""

import shlex
from pathlib import Path

import amp_doctor
import yaml

FOLDER = Path(__file__).parents[2] / "projects/PlantedOverflow"
SMALL = (
    "INPUT.SIZE_TRAIN", "(64, 32)", "INPUT.SIZE_TEST", "(64, 32)", "SOLVER.IMS_PER_BATCH", "16",
    "DATALOADER.NUM_WORKERS", "0", "MODEL.DEVICE", "cpu",
)  # fmt: skip


def doctors_command():
    (line,) = [
        line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("python tools/amp_doc")
    ]
    return shlex.split(line)[2:]


def test_the_doctor_suggests_the_planted_layer(demo, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    assert amp_doctor.cli([*doctors_command(), "OUTPUT_DIR", str(tmp_path), *SMALL]) == 1
    out = capfd.readouterr().out
    assert "forward overflow in backbone.4 (Times)" in out
    suggestion = yaml.safe_load(out.split("To paste into the config:\n")[1].split("\n\n")[0])
    assert suggestion["SOLVER"]["AMP"]["FORCE_FP32"] == ["backbone.4"]


def test_without_it_nothing_is_suggested(demo, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    command = [*doctors_command(), "OUTPUT_DIR", str(tmp_path), *SMALL, "MODEL.BACKBONE.PLANTED", "1"]
    assert amp_doctor.cli(command) == 0
    assert "SOLVER.AMP (float16) is sound for this model" in capfd.readouterr().out
