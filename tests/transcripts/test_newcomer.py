"""Transcript of a newcomer in an empty folder: train the demo, evaluate, read the report, search, train again."""

import json
import re
import shlex
from pathlib import Path

import preloaded
import pytest

pytestmark = pytest.mark.integration

SMALL = (
    "MODEL.DEVICE", "cpu", "SOLVER.MAX_EPOCH", "2", "SOLVER.IMS_PER_BATCH", "32", "INPUT.SIZE_TRAIN", "(64, 32)",
    "INPUT.SIZE_TEST", "(64, 32)", "DATALOADER.NUM_WORKERS", "0", "SOLVER.AMP", "off", "LOG_PERIOD", "1",
)  # fmt: skip


@pytest.fixture
def fastamp(demo_root, tmp_path, monkeypatch):
    """Function that runs ``fastamp WORDS`` in an empty folder, checks for success, and returns stdout."""
    monkeypatch.chdir(tmp_path)

    def run(*words):
        done = preloaded.run("-m", "fastamp", *words, FASTAMP_DATASETS=str(demo_root), CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 0, f"{words}: {done.stderr}"
        # PyTorch warns about an NVIDIA driver that is too old, even if no device is visible.
        warnings = [
            line for line in done.stderr.splitlines() if "Warning" in line and "CUDA initialization" not in line
        ]
        assert "Traceback" not in done.stderr and not warnings, done.stderr
        return done.stdout

    return run


def test_newcomer_trains_evaluates_reads_the_report_and_searches(fastamp, demo_root, tmp_path):
    # Train: the console fits on a few screens, and leads to the next step.
    out = fastamp("train", "Demo/quickstart", *SMALL)
    assert len(out.splitlines()) < 120 and max(map(len, out.splitlines())) < 300
    order = ("differences from the defaults", "| train ", "model: ", "precision: ", "iter 6/6", "training finished in ")
    places = [out.index(text) for text in order]
    assert places == sorted(places)
    summary = out[places[-1] :]
    best, report = (re.search(rf"{name}: +(\S+)", summary)[1] for name in ("best", "report"))
    assert best == "logs/demo/model_best.pth" and Path(report).is_file()
    mean = float(re.search(r"Demo\): ([\d.]+)|Demo: ([\d.]+), after", summary)[2])

    # Evaluate and extract with the commands that the summary prints.
    images = next(demo_root.glob("fastamp-demo-*"))
    commands = [shlex.split(line.removeprefix("  next:")) for line in summary.splitlines()[1:6] if " fastamp " in line]
    evaluate, extract = [words[1:] for words in commands]
    assert "mAP" in fastamp(*evaluate)
    found = json.loads(Path("logs/metrics_eval.json").read_text())["metrics"]["Demo"]
    assert (found["mAP"] + found["Rank-1"]) / 2 == pytest.approx(mean, abs=0.01)
    fastamp(*[str(images / "bounding_box_test") if word == "FOLDER" else word for word in extract])

    # Read the report.
    text = Path(report).read_text(encoding="utf-8")
    assert "Demo" in text and "raw pixels" in text and "<script" not in text

    # Search for a query image.
    query = next((images / "query").iterdir())
    options = ("--gallery", "features.npz", "--top", "3", "--json", "--device", "cpu")
    rows = json.loads(fastamp("search", best, query, *options))
    assert rows[0]["query"] == str(query) and [row["rank"] for row in rows[0]["found"]] == [1, 2, 3]
    assert all((Path(images) / "bounding_box_test" / row["path"]).is_file() for row in rows[0]["found"])

    # Train again: the first run is kept.
    out = fastamp("train", "Demo/quickstart", *SMALL, "SEED=1")
    assert "moved its files to logs/demo/previous-1" in out
    assert (tmp_path / "logs/demo/previous-1/model_best.pth").is_file()
