"""Commands of a first hour with a custom CSV file and folder, in order: names, lines and files are kept throughout."""

import csv
import html
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny

from fastamp.cli import main
from fastamp.demo import generate_demo

pytestmark = pytest.mark.integration

CAMERAS = ("door", "車庫", "lobby-2")
NAMES = ("Anna", "Ben", "Chloé", "Дмитрий", "Εύα", "فاطمة", "李雷", "佐藤", "Mary Ann", "O'Neil")
IDENTITIES = [f"{name}{suffix}" for suffix in ("", " 2", " 3") for name in NAMES]
# Lines of mine.csv with planted problems.
MISSING, CORRUPT, REPEATED = (5, 42), 72, (12, 22)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Current folder with images/CAMERA/FILE, people/IDENTITY/FILE, mine.csv without splits, and a recipe."""
    monkeypatch.chdir(tmp_path)
    demo = tmp_path / "demo"
    generate_demo(
        demo,
        train_identities=len(IDENTITIES),
        test_identities=1,
        images_per_identity=6,
        distractors=0,
        cameras=len(CAMERAS),
        image_size=(64, 32),
        workers=1,
    )
    with (demo / "attributes.csv").open(encoding="utf-8") as file:
        shots = [row for row in csv.DictReader(file) if row["split"] == "train"]
    people = sorted({int(row["pid"]) for row in shots})
    rows, seen = [], dict.fromkeys(IDENTITIES, 0)
    for shot in shots:
        name, camera = IDENTITIES[people.index(int(shot["pid"]))], CAMERAS[int(shot["camid"])]
        if name == IDENTITIES[-1] and seen[name]:
            continue  # one image of this identity
        seen[name] += 1
        image = Path("images", camera, f"{name}_{seen[name]}.jpg")
        copy = Path("people", name, f"{camera}_{seen[name]}.jpg")
        for path in (image, copy):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(demo / shot["path"], path)
        rows.append((str(image), name, camera))
    rows += [rows[line - 2] for line in REPEATED]
    shutil.rmtree(demo)
    with open("mine.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("path", "pid", "camid"), *rows])
    for line in MISSING:
        Path(rows[line - 2][0]).unlink()
    Path(rows[CORRUPT - 2][0]).write_text("not an image")
    recipe = tiny.tiny_config(
        Path("logs/mine"),
        "SOLVER.MAX_EPOCH", "2", "SOLVER.STEPS", "(1,)", "TEST.EVAL_PERIOD", "1", "TEST.BASELINES", "True",
        "TEST.REPORT", "True", "TEST.PER_QUERY", "True",
    )  # fmt: skip
    Path("recipe.yml").write_text(recipe.dump())
    return tmp_path


def rows_of(path, delimiter=","):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter=delimiter))


def test_first_hour_with_own_cameras(folder, capfd, caplog):
    def run(*words, code=0):
        """Run a command and return its output and error output."""
        assert main([str(word) for word in words]) == code, capfd.readouterr().err
        return capfd.readouterr()

    mine = rows_of("mine.csv")
    bad = [f"{mine[line - 2]['path']} (line {line})" for line in (*MISSING, CORRUPT)]

    # Check the data: the planted problems are listed with their lines.
    said = run("check-data", "csv:mine.csv", "--config-file", "recipe.yml", code=1)
    assert [line.strip().partition("): ")[0] + ")" for line in said.out.splitlines() if " (line " in line][:3] == bad
    assert f"{bad[2]}: cannot identify the image format" in said.out and "3 unreadable images" in said.out
    for line, copy in zip(REPEATED, (177, 178), strict=True):
        assert re.search(rf"line {line}\) = {re.escape(mine[line - 2]['path'])} \(.*line {copy}\)", said.out)
    assert "1 identity with a single training image\n    O'Neil 3\n" in said.out
    assert "column split is missing: split by identity, 15 of 30 identities for testing" in said.out
    assert Path("logs/check_data/contact_sheet.png").stat().st_size > 10_000

    # Training on this file stops before the model is built, and names the lines and the command that helps.
    names = ("DATASETS.NAMES", "csv:mine.csv", "DATASETS.TESTS", "csv:mine.csv")
    said = run("train", "--config-file", "recipe.yml", *names, code=2)
    assert all(f"{mine[line - 2]['path']} (mine.csv, line {line})" in said.err for line in MISSING)
    assert "fastamp check-data csv:mine.csv --write-clean OUT.csv" in said.err and "parameters" not in said.out
    for line in MISSING:
        shutil.copy(mine[0]["path"], mine[line - 2]["path"])
    said = run("train", "--config-file", "recipe.yml", *names, code=2)
    corrupt = mine[CORRUPT - 2]["path"]
    assert f"{corrupt} (mine.csv, line {CORRUPT}): cannot identify the image format" in said.err
    assert "parameters" not in said.out
    for line in MISSING:
        Path(mine[line - 2]["path"]).unlink()

    # The clean file has the split and the names, and passes the check.
    said = run("check-data", "csv:mine.csv", "--write-clean", "clean.csv", code=1)
    assert "wrote clean.csv: 172 images; excluded 5 images and 0 invalid lines" in said.out
    clean = rows_of("clean.csv")
    assert {row["pid"] for row in clean} == set(IDENTITIES) and {row["camid"] for row in clean} == set(CAMERAS)
    assert {row["split"] for row in clean} == {"train", "query", "gallery"}
    assert len({row["path"] for row in clean}) == 172 and all(Path(row["path"]).is_file() for row in clean)
    said = run("check-data", "csv:clean.csv", "--config-file", "recipe.yml")
    assert "ERROR" not in said.out

    # Train.
    names = ("DATASETS.NAMES", "csv:clean.csv", "DATASETS.TESTS", "csv:clean.csv")
    said = run("train", "--config-file", "recipe.yml", *names)
    assert "training finished" in said.out and "epoch 2/2" in said.out
    history = [json.loads(line) for line in Path("logs/mine/metrics.json").read_text().splitlines()]
    results = [row for row in history if "csv:clean.csv/mAP" in row]
    assert len(results) == 2 and all(0 < row["csv:clean.csv/mAP"] <= 100 for row in results)

    # The worst query of the report is a file on disk.
    queries = rows_of(next(Path("logs/mine/evaluation").rglob("queries.csv")))
    report = html.unescape(Path("logs/mine/report.html").read_text(encoding="utf-8"))
    assert f"mAP {results[-1]['csv:clean.csv/mAP']:.1f}" in report.replace("<b>", "").replace("</b>", "")
    worst = re.search(r"Worst queries.*?<code>(.*?)</code>", report, re.DOTALL)[1]
    (row,) = [row for row in clean if row["path"] == worst]
    assert [queries[0][name] for name in ("path", "pid", "camid")] == [row["path"], row["pid"], row["camid"]]
    assert Path(worst).is_file() and row["split"] == "query"
    tested = {row["pid"] for row in clean if row["split"] == "query"}
    assert all(name in report for name in CAMERAS) and sum(name in report for name in tested) > 5

    # Evaluate the checkpoint again.
    weights = "logs/mine/model_best.pth"
    run("eval", "MODEL.WEIGHTS", weights, "OUTPUT_DIR", "logs/again")
    metrics = json.loads(Path("logs/again/metrics_eval.json").read_text())["metrics"]["csv:clean.csv"]
    best = max(results, key=lambda row: row["csv:clean.csv/metric"])
    assert metrics["mAP"] == pytest.approx(best["csv:clean.csv/mAP"], abs=1e-3)

    # Extract: names of identities and cameras.
    for out in ("gallery.npz", "gallery.csv"):
        said = run("extract", weights, "csv:clean.csv", "-o", out, "--device", "cpu")
        assert f"wrote {out}: 172 features of dimension {tiny.WIDTH}" in said.out
    with np.load("gallery.npz", allow_pickle=False) as content:
        found = list(zip(*(content[name].tolist() for name in ("paths", "pids", "cameras", "split")), strict=True))
    expected = sorted((row["path"], row["pid"], row["camid"], row["split"]) for row in clean)
    assert sorted(found) == expected
    table = rows_of("gallery.csv")
    assert sorted((row["path"], row["pid"], row["camid"], row["split"]) for row in table) == expected
    said = run("extract", weights, "csv:mine.csv", "-o", "mine.npz", "--device", "cpu", "--skip-corrupt")
    assert "skipped 3 unreadable images" in said.out and f"listed in mine.csv, line {CORRUPT}" in said.out

    # Search a folder, and the extraction.
    query = clean[0]
    copy = Path("people", query["pid"], f"{query['camid']}_{Path(query['path']).stem.rpartition('_')[2]}.jpg")
    words = ("search", weights, query["path"], "--device", "cpu", "--top", "3", "--json")
    (found,) = json.loads(run(*words, "--gallery", "people").out.splitlines()[-1])
    first = found["found"][0]
    assert Path(first["path"]) == copy.absolute() and first["score"] == pytest.approx(1, abs=1e-3)
    ((first, *_),) = [
        entry["found"] for entry in json.loads(run(*words, "--gallery", "gallery.npz").out.splitlines()[-1])
    ]
    assert (first["path"], first["pid"], first["camera"]) == (query["path"], query["pid"], query["camid"])
    said = run(*words, "--gallery", "csv:clean.csv", code=2)
    assert "fastamp extract CHECKPOINT csv:clean.csv -o gallery.npz" in said.err

    # Compare two images, and draw figures.
    said = run("compare", weights, clean[0]["path"], clean[1]["path"], "--device", "cpu")
    assert "cosine similarity" in said.out and "of genuine pairs" in said.out
    run("visualize", "logs/mine", "--kind", "rank-lists", "--num", "1", "--length", "3", "--device", "cpu")
    assert (folder / "logs/mine/pictures/csv_clean.csv/rank_list_worst.png").stat().st_size > 10_000

    # The folder with one subfolder per identity, with cameras from file names.
    said = run("check-data", "folder:people", "--config-file", "recipe.yml", "DATASETS.FOLDER.CAMERA", r"(.+)_\d")
    assert "O'Neil 3" in said.out and "ERROR" not in said.out
    said = run("train", "--config-file", "recipe.yml", "DATASETS.NAMES", "folder:people", "DATASETS.TESTS",
               "folder:people", "DATASETS.FOLDER.CAMERA", r"(.+)_\d", "OUTPUT_DIR", "logs/people",
               "SOLVER.MAX_EPOCH", "1")  # fmt: skip
    assert "training finished" in said.out and "| folder:people" in said.out


def test_line_without_identity_stops_training_and_is_excluded_from_the_clean_file(folder, input_error, capfd):
    with open("mine.csv", "a", encoding="utf-8") as file:
        file.write("images/door/Anna_1.jpg,,door\n")
    names = ("DATASETS.NAMES", "csv:mine.csv", "DATASETS.TESTS", "csv:mine.csv")
    error = input_error(main, ["train", "--config-file", "recipe.yml", *names])
    assert "mine.csv, line 179: no value for pid" in error and "--write-clean" in error
    assert main(["check-data", "csv:mine.csv", "--write-clean", "clean.csv"]) == 1
    assert "wrote clean.csv: 172 images; excluded 5 images and 1 invalid line" in capfd.readouterr().out
