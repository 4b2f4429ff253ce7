"""Training on custom images, as in the README."""

import json
from pathlib import Path

import check_data
import pytest
import tiny
import train_net

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pictures(tmp_path):
    """Folder of the tiny demo images."""
    return tiny.make_demo(tmp_path / "pictures")


def results(output):
    return json.loads((output / "metrics.json").read_text().splitlines()[-1])


def train(name, output, *opts):
    options = tiny.tiny_options(
        output, "DATASETS.NAMES", name, "DATASETS.TESTS", name, "DATALOADER.CACHE", "disk", *opts
    )
    assert train_net.cli(options) == 0
    return results(output)


@pytest.mark.end_to_end
def test_training_on_csv_dataset_gives_same_metrics_as_market1501(pictures, tmp_path, monkeypatch, capsys):
    lines = ["path,pid,camid,split"]
    for folder, split in (("bounding_box_train", "train"), ("query", "query"), ("bounding_box_test", "gallery")):
        for file in sorted((pictures / folder).glob("*.jpg")):
            pid, camera = file.name.split("_")[:2]
            if pid != "-1":
                lines.append(f"{file.relative_to(tmp_path)},{int(pid)},{camera[:2]},{split}")
    (tmp_path / "mine.csv").write_text("\n".join(lines))
    name = f"csv:{tmp_path / 'mine.csv'}"
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path / "root"))
    assert check_data.cli([name, "--output", str(tmp_path / "check")]) == 0
    assert "| train" in capsys.readouterr().out
    mine = train(name, tmp_path / "mine")
    (tmp_path / "root").mkdir(exist_ok=True)
    pictures.rename(tmp_path / "root/Market-1501-v15.09.15")
    market = train("Market1501", tmp_path / "market")
    assert mine[f"{name}/mAP"] == market["Market1501/mAP"] and mine[f"{name}/Rank-1"] == market["Market1501/Rank-1"]


@pytest.mark.integration
def test_training_on_folder_dataset_gives_nonzero_map(pictures, tmp_path, monkeypatch):
    for file in sorted(pictures.rglob("bounding_box_train/*.jpg")):
        person = tmp_path / "people" / f"person {file.name[:4]}"
        person.mkdir(parents=True, exist_ok=True)
        file.rename(person / file.name)
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path / "root"))
    name = f"folder:{tmp_path / 'people'}"
    found = train(
        name, tmp_path / "out", "DATASETS.FOLDER.CAMERA", r"_c(\d)", "DATASETS.FOLDER.TEST_FRACTION", "0.25",
        "SOLVER.IMS_PER_BATCH", "8",
    )  # fmt: skip
    assert found[f"{name}/mAP"] > 0


@pytest.mark.integration
def test_resume_fails_if_labels_in_csv_dataset_have_changed(pictures, tmp_path, monkeypatch, input_error):
    files = sorted(pictures.rglob("bounding_box_train/*.jpg"))
    rows = [f"{file},{file.name[:4]},train" for file in files]
    rows += [f"{file},{file.name[:4]},query" for file in sorted(pictures.rglob("query/*.jpg"))]
    rows += [f"{file},{file.name[:4]},gallery" for file in sorted(pictures.rglob("bounding_box_test/0*.jpg"))]
    table = tmp_path / "mine.csv"
    table.write_text("\n".join(["path,pid,split", *rows]))
    name, output = f"csv:{table}", tmp_path / "out"
    options = tiny.tiny_options(output, "DATASETS.NAMES", name, "DATASETS.TESTS", name)
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path / "root"))
    assert train_net.cli([*options, "SOLVER.MAX_EPOCH", "2"]) == 0
    # Renamed files with the same order of identities are the same data.
    table.write_text(table.read_text().replace(f",{files[0].name[:4]},train", ",0000a,train"))
    assert train_net.cli(["--resume", *options]) == 0
    table.write_text(table.read_text().replace(",0000a,train", ",zz,train"))
    assert "DATASETS" in input_error(train_net.cli, ["--resume", *options])
