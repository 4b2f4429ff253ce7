"""`fastamp reproduce`: a file that a run has trained, published by a local server, and a recipe with seeds."""

import functools
import http.server
import itertools
import json
import statistics
import threading

import pytest
import torch
from dataset_trees import MARKET_FILES
from PIL import Image

from fastamp.cli import main
from fastamp.data import random_splits
from fastamp.zoo import Entry, catalog

OPTS = (
    *("INPUT.SIZE_TRAIN", "(32, 16)", "INPUT.SIZE_TEST", "(32, 16)"),
    *("MODEL.DEVICE", "cpu", "DATALOADER.NUM_WORKERS", "0"),
)
SMALL = {
    "MODEL.BACKBONE.DEPTH": "18x",
    "MODEL.BACKBONE.FEAT_DIM": 512,
    "SOLVER.MAX_EPOCH": 1,
    "SOLVER.AMP.ENABLED": False,
}
TRAINED = [*OPTS, *(str(word) for pair in SMALL.items() for word in pair)]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Working folder, with a data root in which the demo set is generated."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FASTAMP_ZOO", str(tmp_path / "zoo"))
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path


@pytest.fixture
def server(place):
    """Address of a server of the files in the folder ``published``."""
    (place / "published").mkdir()
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=place / "published")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.fixture
def publish(place, server, monkeypatch):
    """Function that publishes the weights of a checkpoint, and makes them the first of few entries of the catalog."""

    def publish(checkpoint, name, classes, result, others=()):
        torch.save({"state_dict": torch.load(checkpoint, weights_only=True)["model"]}, place / f"published/{name}.pth")
        entry = Entry(
            name=name,
            program="test",
            url=f"{server}/{name}.pth",
            recipe="Demo/bagtricks_R50",
            keys=SMALL | {"MODEL.HEADS.NUM_CLASSES": classes},
            loads="yes",
            results=[result],
        )
        monkeypatch.setattr(catalog, "list_entries", lambda: (entry, *others))
        monkeypatch.setattr("fastamp.zoo.list_entries", catalog.list_entries)

    return publish


def rows(place):
    return [json.loads(file.read_text()) for file in sorted((place / "rows").glob("*.json"))]


@pytest.mark.integration
def test_published_file_of_a_run_reproduces_its_metrics(place, publish, capsys):
    train = ["reproduce", "Demo/bagtricks_R50", "--data", "data", "--results", "rows", "--seeds", "3"]
    assert main([*train, *TRAINED]) == 0
    (trained,) = rows(place)
    assert (trained["kind"], trained["seeds"], trained["published"]) == ("training", [3], [])
    assert trained["data"]["Demo train"]["images"] == 1800
    assert trained["settings"]["SOLVER.MAX_EPOCH"] == "1"

    measured = trained["measured"]
    figures = {"test_set": "Demo", "mAP": measured["mAP"]["value"], "rank1": measured["Rank-1"]["value"] - 1}
    absent = [figures | {"test_set": "Market-1501"}]
    other = Entry(name="other", program="test", url="", recipe="Demo/bagtricks_R50", loads="yes", results=absent)
    checkpoint = place / "logs/reproduce/Demo-bagtricks_R50/seed3/model_final.pth"
    publish(checkpoint, "test_demo", 180, figures | {"protocol": "no re-ranking", "source": "test"}, (other,))
    assert main(["reproduce", "test_demo", "--data", "data", "--results", "rows", *OPTS]) == 0
    evaluated = next(row for row in rows(place) if row["kind"] == "evaluation")
    assert evaluated["difference"]["mAP"] == pytest.approx(0, abs=1e-3)
    assert evaluated["difference"]["Rank-1"] == pytest.approx(1, abs=1e-3)
    assert evaluated["sha256"]
    assert evaluated["data"] == {name: trained["data"][name] for name in ("Demo query", "Demo gallery")}

    capsys.readouterr()
    (place / "zoo/test_demo.pth").write_bytes(b"not read again")
    assert main(["reproduce", "--all", "--data", "data", "--results", "rows", *OPTS]) == 0
    assert len(rows(place)) == 2
    assert "1 published file" in capsys.readouterr().out  # without a test set
    assert main(["reproduce", "--all", "--data", "data", "--results", "new", *OPTS]) == 1
    assert "test_demo" in capsys.readouterr().out
    assert not (place / "new").exists()


def write_viper(place, people=8):
    for person, camera in itertools.product(range(people), "ab"):
        folder = place / f"data/VIPeR/cam_{camera}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 32), (30 * person, 100, 90 + 60 * (camera == "b"))).save(folder / f"{person:03d}_0.bmp")


@pytest.mark.integration
def test_recipe_and_file_are_measured_on_all_random_splits(place, publish, monkeypatch):
    write_viper(place)
    all_values = random_splits._values
    first = lambda cfg, path: {key: found[:2] for key, found in all_values(cfg, path).items()}  # noqa: E731
    monkeypatch.setattr(random_splits, "_values", first)
    sets = ("DATASETS.NAMES", "VIPeR", "DATASETS.TESTS", "VIPeR", "TEST.ALL_SPLITS", "on", "SOLVER.IMS_PER_BATCH", "4")
    opts = [*TRAINED, *sets, "DATALOADER.NUM_INSTANCE", "2"]
    assert main(["reproduce", "Demo/bagtricks_R50", "--data", "data", "--results", "rows", *opts]) == 0
    (trained,) = rows(place)
    runs = [place / f"logs/reproduce/Demo-bagtricks_R50/seed0_split{split}" for split in (0, 1)]
    last = [json.loads((run / "metrics.json").read_text().splitlines()[-1]) for run in runs]
    values = [metrics[f"VIPeR, query cam_{camera}/mAP"] for metrics in last for camera in "ab"]
    mean, deviation = statistics.fmean(values), statistics.stdev(values)
    assert trained["measured"]["mAP"] == pytest.approx(
        {"value": mean, "low": mean - deviation, "high": mean + deviation}
    )
    assert "4 splits" in trained["interval"] and trained["data"]["VIPeR query"]["cameras"] == 2
    identities = [
        {line.strip() for line in (run / "config.yaml").read_text().splitlines() if "SPLIT:" in line} for run in runs
    ]
    assert identities[0] != identities[1]

    publish(runs[0] / "model_final.pth", "test_viper", 4, {"test_set": "VIPeR", "rank1": 27.2, "source": "test"})
    assert main(["reproduce", "test_viper", "--data", "data", "--results", "rows", *OPTS]) == 0
    (evaluated,) = (row for row in rows(place) if row["kind"] == "evaluation")
    assert "4 splits" in evaluated["interval"] and evaluated["difference"].keys() == {"Rank-1"}
    assert main(["train", "Demo/bagtricks_R50", "--all-splits", "OUTPUT_DIR", "logs/no", *OPTS]) == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--data", "data"), "NAME"),
        (("fastreid_sbs_r50_market1501", "--all", "--data", "data"), "NAME"),
        (("fastreid_sbs_r50_market1501", "--data", "missing"), "missing"),
        (("fastreid_sbs_r50_market1501", "--data", "data"), "Market-1501-v15.09.15"),
        (("zoo:fastreid_sbs_r50_market1501", "--data", "data"), "Market-1501-v15.09.15"),
        (("fastreid_sbs_r50_market1502", "--data", "data"), "fastreid_sbs_r50_market1501"),
        (("megadescriptor_t_224", "--data", "data"), "ATRW"),
        (("Market1501/sbs_R50", "--data", "data"), "Market-1501-v15.09.15"),
        (("Market1501/sbs_R50", "--data", "data", "--seeds", "-1"), "-1"),
        (("--all", "--data", "data"), "--data data"),
    ],
)
def test_invalid_input_is_refused(place, capsys, words, named):
    try:
        code = main(["reproduce", *words])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert named in capsys.readouterr().err


def test_published_file_needs_no_device_in_the_config(place, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in MARKET_FILES:
        file = place / "data/Market-1501-v15.09.15" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert main(["reproduce", "fastreid_sbs_r50_market1501", "--data", "data"]) == 2
    assert str(place / "zoo") in capsys.readouterr().err  # the file is missing, not a device
