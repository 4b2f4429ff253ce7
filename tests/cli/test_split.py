"""From a table of photographs to a report: fastamp split, training with a sampler of species, and evaluation."""

import csv
import json

import pytest
from tiny import tiny_options

from fastamp.cli import main
from fastamp.config import get_cfg
from fastamp.data.build import build_dataset
from fastamp.engine import DefaultTrainer

pytestmark = pytest.mark.integration

TRAINING = [
    "DATALOADER.SAMPLER_TRAIN", "GroupIdentitySampler",
    "MODEL.HEADS.CLS_LAYER", "SubCenterArcSoftmax",
    "MODEL.HEADS.MARGIN", "0.5",
    "MODEL.HEADS.SCALE", "30",
    "SOLVER.MAX_EPOCH", "1",
    "TEST.GROUP_BY", "species",
    "TEST.REPORT", "True",
    "TEST.BASELINES", "True",
]  # fmt: skip


@pytest.fixture
def table(demo, tmp_path):
    """Table of the demo's images, as photographs of two species, each camera as an encounter."""
    dataset = build_dataset("Demo")
    file = tmp_path / "animals.csv"
    rows = [("path", "name", "species", "encounter", "date")]
    for items in (dataset.train, dataset.query, dataset.gallery):
        for number, item in enumerate(items):
            name = dataset.identity(item.pid)
            day = f"202{item.camid % 4}-0{number % 9 + 1}-01"
            species = ["zebra", "giraffe"][int(name) % 2]
            rows.append((item.path, f"{species} {name}", species, f"{name} {item.camid}", day))
    with file.open("w") as stream:
        csv.writer(stream).writerows(rows)
    return file


@pytest.mark.parametrize(
    "protocol, arguments",
    [
        ("animals_open", ["--by", "encounter", "--unknown", "0.2", "--validation", "0.3"]),
        ("animals_closed", ["--by", "encounter"]),
        ("animals_disjoint", ["--by", "disjoint", "--unknown", "0.4"]),
    ],
)
def test_split_train_and_evaluate(table, protocol, arguments, tmp_path, capsys):
    out = tmp_path / "split.csv"
    main(["split", str(table), *arguments, "--identity", "name", "--out", str(out)])
    names = ["DATASETS.NAMES", f"('csv:{out}',)", "DATASETS.TESTS", f"('csv:{out}',)"]
    options = ["TEST.PROTOCOL", protocol, "DATASETS.CSV.IDENTITY", "('name',)", *names]
    cfg = get_cfg()
    cfg.merge_from_list(tiny_options(tmp_path / "run", *TRAINING, *options))
    cfg.freeze()
    metrics = DefaultTrainer(cfg).train()
    expected = {"Rank-1", "mAP", "BAKS"} | ({"BAUS", "BAKS-BAUS", "AUC-new"} if protocol == "animals_open" else set())
    assert expected <= metrics.keys()
    assert set(metrics["groups"]) == {"zebra", "giraffe"}
    assert expected <= metrics["mean_over_groups"].keys() and expected <= metrics["baselines"]["raw pixels"].keys()
    assert (tmp_path / "run/report.html").exists()
    json.dumps(metrics, allow_nan=False)
    capsys.readouterr()
    check = [f"csv:{out}", "--output", str(tmp_path / "check")]
    main(["check-data", *check, *options[:4]])
    printed = capsys.readouterr().out
    assert "ERROR" not in printed.replace("ERROR: 2 identities with", "")
