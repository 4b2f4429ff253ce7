"""Test sets that cannot be evaluated, and identities in training and test: errors before the model is built."""

import re

import pytest
import tiny
from PIL import Image

from fastamp.cli import main
from fastamp.data.build import build_dataset
from fastamp.data.datasets import DATASET_REGISTRY, SenseReID, VIPeR
from fastamp.data.datasets.base import ImageDataset
from fastamp.data.training_images import leaked_identities, training_items
from fastamp.diagnostics.data_check import check_dataset
from fastamp.engine import DefaultTrainer
from fastamp.engine.dry_run import dry_run
from fastamp.evaluation import Protocol
from fastamp.fastreid.data.datasets.bases import ImageDataset as FastReIDDataset
from fastamp.utils.errors import DataError, NoMatchError

TRAIN = [("train", pid, camera) for pid in ("a", "b", "c", "d") for camera in (1, 2, 1, 2)]


def write_set(folder, rows):
    lines = ["path,pid,camid,split"]
    for number, (split, pid, camera) in enumerate(rows):
        Image.new("RGB", (32, 64), (number, 0, 0)).save(folder / f"{number}.jpg")
        lines.append(f"{number}.jpg,{pid},{camera},{split}")
    (folder / "set.csv").write_text("\n".join(lines))
    return f"csv:{folder / 'set.csv'}"


def config(folder, name, *options):
    return tiny.tiny_config(folder / "run", "DATASETS.NAMES", name, "DATASETS.TESTS", name, *options)


@pytest.fixture
def without_model(monkeypatch):
    def build_model(*args):
        raise AssertionError("the model is built")

    monkeypatch.setattr(DefaultTrainer, "build_model", build_model)


CASES = {
    "one camera": ([("query", "x", 1), ("gallery", "x", 1), ("gallery", "y", 2)], NoMatchError, "no_camera"),
    "no common identity": ([("query", "x", 1), ("gallery", "y", 2)], NoMatchError, "name or number"),
    "leak": ([("query", "a", 1), ("gallery", "a", 2)], DataError, "database"),
}


@pytest.mark.parametrize("case", CASES)
def test_labels_are_checked_before_the_model_is_built(tmp_path, case, without_model):
    rows, kind, fix = CASES[case]
    name = write_set(tmp_path, [*TRAIN, *rows])
    cfg = config(tmp_path, name, "MODEL.WEIGHTS", "missing.pth")
    found = []
    for run in (
        lambda: DefaultTrainer(cfg),
        lambda: DefaultTrainer.test_weights(cfg),
        lambda: dry_run(cfg, str(tmp_path / "scratch")),
    ):
        with pytest.raises(kind) as error:
            run()
        fixes = str(error.value).partition("fix:")[2]
        assert fix in fixes and ("no_camera" in fixes) == (case == "one camera")
        found.append(str(error.value))
    assert len(set(found)) == 1
    report = check_dataset(build_dataset(name, cfg), protocol=Protocol.from_config(cfg))
    assert report.has_errors


def test_labels_that_the_rule_cannot_rank_are_errors_before_the_model_is_built(tmp_path, without_model):
    name = write_set(tmp_path, [*TRAIN, ("query", "x", 1), ("gallery", "x", 2)])
    file = tmp_path / "set.csv"
    lines = file.read_text().splitlines()
    labels = {"clothes": ["", "red"], "red": ["red", "red"], "blue": ["red", "blue"]}
    errors = {"clothes": DataError, "red": NoMatchError}
    for case, clothes in labels.items():
        column = ["clothes", *["red"] * len(TRAIN), *clothes]
        file.write_text("\n".join(f"{line},{value}" for line, value in zip(lines, column, strict=True)))
        cfg = config(tmp_path, name, "TEST.PROTOCOL", "cloth_changing")
        with pytest.raises(errors.get(case, AssertionError)) as error:
            DefaultTrainer(cfg)
        assert case == "blue" or "cloth" in str(error.value)
        report = check_dataset(build_dataset(name, cfg), protocol=Protocol.from_config(cfg))
        faults = {finding.fault for finding in report.findings}
        assert ("problems that would stop a run" in faults) == (case == "clothes")
        assert any("cloth_changing" in fault for fault in faults) == (case == "red")


def test_check_data_finds_the_same_leak(tmp_path):
    name = write_set(tmp_path, [*TRAIN, *CASES["leak"][0]])
    assert main(["check-data", name, "--output", str(tmp_path / "out")]) == 1
    text = (tmp_path / "out/findings.txt").read_text()
    assert re.search("ERROR: 1 identity in both training and test\n *a\n *fix: .*database", text)


def test_intended_overlaps_are_no_errors(tmp_path):
    leak = [*TRAIN, *CASES["leak"][0]]
    name = write_set(tmp_path, leak)
    DefaultTrainer(config(tmp_path, name, "DATASETS.COMBINEALL", "True"))
    DefaultTrainer(config(tmp_path, name, "TEST.PROTOCOL", "animals_closed", "TEST.ANIMALS.DATABASE", ""))
    cfg = config(tmp_path, name, "DATASETS.NAMES", "Demo")
    tests = DefaultTrainer._build_test_loaders(cfg)  # trained on another dataset
    DefaultTrainer.test(cfg, DefaultTrainer.build_model(cfg.with_values({"MODEL.HEADS.NUM_CLASSES": 4})), loaders=tests)
    database = [("database", pid, camera) for _, pid, camera in TRAIN]
    DefaultTrainer(config(tmp_path, write_set(tmp_path, [*database, ("query", "a", 3)])))


def test_the_same_file_by_another_path_is_the_same_dataset(tmp_path, monkeypatch):
    name = write_set(tmp_path, [*TRAIN, *CASES["leak"][0]])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"csv:set\.csv"):
        DefaultTrainer(config(tmp_path, name, "DATASETS.TESTS", "csv:set.csv"))


def test_unrelated_numbers_are_no_leak():
    class Plain(ImageDataset):
        def __init__(self, root=""):
            super().__init__([("a.jpg", 1, 0)], [("b.jpg", 1, 0)], [("c.jpg", 1, 1), ("d.jpg", 0, 0)])

    class Ported(FastReIDDataset):
        def __init__(self, root=""):
            super().__init__([("a.jpg", "p_1", 0)], [("b.jpg", 1, 0)], [("c.jpg", 1, 1)])

    assert leaked_identities(Plain()) == {"1"}
    assert leaked_identities(Ported()) == set()
    assert VIPeR.related_identities is False and SenseReID.is_closed_set
    assert "VIPeR" in DATASET_REGISTRY


def test_one_person_has_one_label_if_test_images_are_used_for_training(tmp_path):
    rows = [*TRAIN, ("query", "a", 1), ("gallery", "a", 2), ("gallery", "x", 2), ("database", "y", 1)]
    name = write_set(tmp_path, rows)
    items = training_items([build_dataset(name)], combine_all=True)
    assert len(items) == len(rows) and len({item.pid for item in items}) == 6
    assert len({item.pid for item in items if item.path.endswith(("/0.jpg", "/16.jpg", "/17.jpg"))}) == 1


def test_dry_run_evaluates_queries_for_validation(tmp_path, capsys):
    """The only queries for validation are the last ones of many."""
    rows = [("database", pid, camera) for _, pid, camera in TRAIN]
    rows += [("query", "abcd"[number % 4], 1) for number in range(20)] + [("query", "v", 1), ("gallery", "v", 2)]
    name = write_set(tmp_path, rows)
    file = tmp_path / "set.csv"
    header, *lines = file.read_text().splitlines()
    file.write_text("\n".join([f"{header},validation", *(f"{line},{int(',v,' in line)}" for line in lines)]))
    options = ("TEST.PROTOCOL", "animals_open", "TEST.ANIMALS.DATABASE", "", "TEST.IMS_PER_BATCH", "6")
    dry_run(config(tmp_path, name, *options), str(tmp_path / "scratch"))
    assert "3 of 21 queries" in capsys.readouterr().out
