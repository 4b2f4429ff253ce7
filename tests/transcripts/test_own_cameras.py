"""An engineer with their own cameras: a CSV file with faults, from the first check to the worst query on disk."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastamp.cli import main

RECIPE = Path(__file__).parents[2] / "configs/Market1501/bagtricks_R50.yml"
SMALL = (
    "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.PRETRAIN", "False", "MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM",
    "512", "INPUT.SIZE_TRAIN", "(64, 32)", "INPUT.SIZE_TEST", "(64, 32)", "SOLVER.MAX_EPOCH", "1",
    "SOLVER.IMS_PER_BATCH", "16", "SOLVER.AMP", "off", "TEST.EVAL_PERIOD", "1", "DATALOADER.NUM_WORKERS", "0",
    "TEST.PER_QUERY", "True", "TEST.REPORT", "True", "TEST.BASELINES", "True",
)  # fmt: skip


@pytest.fixture
def cameras(tmp_path, monkeypatch):
    """Folder with images of 16 turtles at three beaches, and a CSV file with faults."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    rows = ["path,pid,camid,note"]
    (tmp_path / "photos").mkdir()
    for turtle in range(16):
        shell = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        for number in range(6):
            pixels = np.asarray(Image.fromarray(shell).resize((48, 64)), float) + rng.normal(0, 40, (64, 48, 3))
            name = f"photos/turtle{turtle:02d}_{number}.jpg"
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(tmp_path / name)
            rows.append(f"{name},Черепаха {turtle},{('north bay', 'süd', 'pier')[number % 3]},n{turtle}")
    (tmp_path / "photos/turtle03_1.jpg").write_bytes(b"")
    (tmp_path / "photos/turtle04_2.jpg").unlink()
    rows += [rows[1], "photos/turtle05_0.jpg,,pier,n"]
    (tmp_path / "turtles.csv").write_text("\n".join(rows), encoding="utf-8")
    return tmp_path


def test_own_cameras_from_the_check_to_the_worst_query(cameras, capsys):
    def run(*words, code=0):
        assert main([str(word) for word in words]) == code
        return "".join(capsys.readouterr())

    data = ("DATASETS.NAMES", "csv:clean.csv", "DATASETS.TESTS", "csv:clean.csv", *SMALL)
    broken = [word.replace("clean.csv", "turtles.csv") for word in data]
    text = run("train", "--config-file", RECIPE, *broken, code=2)
    assert "turtles.csv, line 99: no value for pid" in text and "--write-clean" in text
    text = run("check-data", "csv:turtles.csv", "--config-file", RECIPE, "--write-clean", "clean.csv", *SMALL, code=1)
    for words in ("turtle03_1.jpg (line 21)", "turtle04_2.jpg (line 28)", "(line 98)", "split by identity",
                  "8 of 16 identities", "wrote clean.csv: 94 images"):  # fmt: skip
        assert words in text, words
    text = run("train", "--config-file", RECIPE, *data, "OUTPUT_DIR", "logs/turtles")
    (table,) = Path("logs/turtles/evaluation").glob("*/queries.csv")
    with table.open(encoding="utf-8", newline="") as file:
        worst = next(csv.DictReader(file))
    assert Path(worst["path"]).is_file() and worst["camid"] in ("north bay", "süd", "pier")
    assert re.fullmatch(r"Черепаха \d+", worst["pid"]) and float(worst["ap"]) <= 100
    report = Path("logs/turtles/report.html").read_text(encoding="utf-8")
    assert re.search(r"identity Черепаха \d+: AP", report) and "north bay" in report and "photos/turtle" in report
    weights = "logs/turtles/model_best.pth"
    run("extract", weights, "csv:clean.csv", "-o", "features.csv", "--device", "cpu")
    with open("features.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 94 and {row["camid"] for row in rows} == {"north bay", "süd", "pier"} and "f511" in rows[0]
    text = run("search", weights, worst["path"], "--gallery", "photos", "--top", 2, "--device", "cpu")
    assert "turtle03_1.jpg" in text and Path(worst["path"]).name in text.rpartition("score")[2]
    pytest.importorskip("matplotlib")
    text = run("visualize", "logs/turtles", "--kind", "rank-lists", "--num", 1, "--format", "pdf", "--device", "cpu")
    assert all(Path(line.removeprefix("wrote ")).is_file() for line in text.splitlines() if line.startswith("wrote"))
