"""Tests of the command that adds a column split: roles, groups, validation identities, leaks and invalid tables."""

import csv
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastamp.cli import main
from fastamp.data.build import build_dataset
from fastamp.data.split_table import SplitOptions, split_table
from fastamp.utils.errors import ConfigError, DataError

REFERENCE = json.loads((Path(__file__).parents[1] / "reference/methods/animals_splits1.json").read_text())


@pytest.fixture
def table(tmp_path):
    file = tmp_path / "animals.csv"
    rows = zip(REFERENCE["index"], REFERENCE["identity"], REFERENCE["date"], strict=True)
    lines = [f"{number}.png,{name},{day or ''},{name}-{number % 5},{'LR'[number % 2]}" for number, name, day in rows]
    file.write_text("\n".join(["Path,pid,date,encounter,side", *lines]))
    return file


def rows_of(file):
    with file.open() as stream:
        return list(csv.DictReader(stream))


def split(table, method, **options):
    out = table.with_name("out.csv")
    out.unlink(missing_ok=True)
    report = split_table(table, out, replace(SplitOptions(method), **options))
    return rows_of(out), report


def names(rows, *roles):
    return {row["pid"] for row in rows if row["split"] in roles}


@pytest.mark.parametrize(
    "method, options, reference",
    [
        ("closed", {"train": 0.8}, "closed_0.8"),
        ("open", {"train": 0.8, "unknown": 0.1}, "open_0.8_samples0.1"),
        ("time", {"train": 0.5}, "time_proportion_0.5"),
        ("year", {"year": 2018}, "time_cutoff_2018_and_after"),
    ],
)
def test_database_and_query_images_are_those_of_the_reference_split(table, method, options, reference):
    rows, _ = split(table, method, **options)
    found = defaultdict(set)
    for row in rows:
        found[row["split"]].add(int(Path(row["path"]).stem))
    expected = REFERENCE["splits"][reference]
    assert found == {"database": set(expected["train"]), "query": set(expected["test"])}


def test_disjoint_split_has_query_and_gallery_images_of_other_identities(table):
    rows, report = split(table, "disjoint", unknown=0.3)
    expected = REFERENCE["splits"]["disjoint_0.3"]
    assert {int(row["path"][:-4]) for row in rows if row["split"] == "train"} == set(expected["train"])
    assert names(rows, "train").isdisjoint(names(rows, "query", "gallery"))
    assert names(rows, "query") <= names(rows, "gallery")
    assert [role for role, *_ in report.rows] == ["train", "gallery", "query"]
    assert sum(count for _, count, _ in report.rows) == len(rows) == 112
    rows, report = split(table, "disjoint", unknown=0.3, group="encounter")
    assert not any(report.leaks.values())


@pytest.mark.parametrize("method", ["closed", "open", "time"])
def test_groups_stay_on_one_side(table, method):
    _, report = split(table, method)
    assert any(report.leaks.values())
    rows, report = split(table, method, group="encounter")
    assert not any(report.leaks.values())
    sides = defaultdict(set)
    for row in rows:
        sides[row["encounter"]].add(row["split"] == "query")
    assert all(len(side) == 1 for side in sides.values())
    assert any("moved to training" in note for note in report.notes)


@pytest.mark.parametrize("method", ["closed", "encounter", "disjoint"])
def test_validation_identities_are_held_out_from_training(table, method):
    rows, report = split(table, method, validation=0.4)
    held_out = {row["pid"] for row in rows if row["validation"] == "1"}
    assert len(held_out) >= 2
    assert held_out.isdisjoint(row["pid"] for row in rows if row["validation"] == "0")
    assert held_out == names([row for row in rows if row["validation"] == "1"], "query")
    assert held_out.isdisjoint(names(rows, "train", "database"))
    assert names(rows, "query") > held_out
    assert split(table, method, validation=0.4) == (rows, report)
    assert split(table, method, validation=0.4, seed=1)[0] != rows


@pytest.mark.parametrize("method", ["time", "encounter"])
def test_unknown_identities_are_only_queries(table, method):
    rows, report = split(table, method, unknown=0.2)
    unknown = names(rows, "query") - names(rows, "database")
    assert len([row for row in rows if row["pid"] in unknown]) >= 0.2 * 107
    assert any("unknown identities" in note for note in report.notes)
    if method == "encounter":
        assert not any(report.leaks.values())
        known = [row for row in split(table, method)[0] if row["pid"] not in unknown]
        assert [row for row in rows if row["pid"] not in unknown] == known


def test_identity_of_several_columns(table):
    rows, report = split(table, "closed", identity=("pid", "side"))
    sides = defaultdict(set)
    for row in rows:
        sides[row["pid"], row["side"]].add(row["split"])
    assert sum(count for _, _, count in report.rows[:1]) == len(sides) > len({pid for pid, _ in sides})
    assert all("database" in side for side in sides.values())
    dataset = build_dataset(f"csv:{table.with_name('out.csv')}", cfg_with_identity("pid", "side"))
    assert len({item.pid for item in dataset.train}) == len(sides)
    assert {dataset.identity(item.pid) for item in dataset.gallery} == {"/".join(names) for names in sides}


def cfg_with_identity(*columns):
    from fastamp.config import get_cfg

    cfg = get_cfg()
    cfg.DATASETS.CSV.IDENTITY = columns
    return cfg


def test_near_duplicates_stay_on_one_side(tmp_path):
    rng, lines = np.random.default_rng(0), []
    for identity in range(3):
        for scene in range(4):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            for frame in range(3):
                noisy = np.asarray(Image.fromarray(pixels).resize((64, 64))) + rng.integers(0, 4, (64, 64, 3))
                name = f"{identity}_{scene}_{frame}.png"
                Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(tmp_path / name)
                lines.append(f"{name},{identity}")
    table = tmp_path / "bursts.csv"
    table.write_text("\n".join(["path,pid", *lines]))
    rows, report = split(table, "closed", train=0.3)
    sides = defaultdict(set)
    for row in rows:
        sides[row["path"][:3]].add(row["split"])
    assert any(len(side) > 1 for side in sides.values())
    rows, report = split(table, "closed", train=0.3, near_duplicates=True)
    sides = defaultdict(set)
    for row in rows:
        sides[row["path"][:3]].add(row["split"])
    assert all(len(splits) == 1 for splits in sides.values())
    assert report.leaks["near-duplicates on both sides: 0"] is False
    (tmp_path / "0_0_0.png").write_bytes(b"broken")
    with pytest.raises(DataError, match="0_0_0.png"):
        split(table, "closed", near_duplicates=True)


def test_command_prints_the_summary_and_returns_1_for_a_leak(table, capsys):
    out = table.with_name("by_encounter.csv")
    assert main(["split", str(table), "--by", "encounter", "--out", str(out)]) == 0
    assert "encounters on both sides: 0" in capsys.readouterr().out
    assert main(["split", str(table), "--by", "closed", "--out", str(table.with_name("closed.csv"))]) == 1
    assert "LEAK encounters" in capsys.readouterr().out
    assert main(["split", str(table), "--by", "year", "--out", str(table.with_name("no.csv"))]) == 2
    assert main(["split", str(table), "--by", "closed", "--out", str(out)]) == 2


@pytest.mark.parametrize("method, train", [("closed", "0.8"), ("open", "0.8"), ("time", "0.5"), ("encounter", "0.5")])
def test_default_fraction_for_training_depends_on_the_method(table, method, train):
    default, explicit = table.with_name("default.csv"), table.with_name("explicit.csv")
    main(["split", str(table), "--by", method, "--out", str(default)])
    main(["split", str(table), "--by", method, "--train", train, "--out", str(explicit)])
    assert rows_of(default) == rows_of(explicit)


def test_paths_are_relative_to_the_folder_of_the_output(table):
    out = table.parent / "sub/out.csv"
    split_table(table, out, SplitOptions("closed"))
    paths = {row["path"] for row in rows_of(out)}
    assert all(Path(path).is_absolute() and Path(path).parent == table.parent for path in paths)


@pytest.mark.parametrize(
    "text, options, error",
    [
        ("path,pid,split\na,1,train", {}, DataError),
        ("path,name\na,1", {}, DataError),
        ("path,pid\na,1,3", {}, DataError),
        ("path,pid\n", {}, DataError),
        ("path,pid\na,\nb,2", {}, DataError),
        ("path,pid\na,unknown\nb,-1", {}, DataError),
        ("path,pid\na,1\nb,2", {}, DataError),  # one image per identity
        ("path,pid,date\na,1,31.7.2021\nb,1,2021-01-01", {"method": "time"}, DataError),
        ("path,pid,date\na,1,\nb,1,", {"method": "time"}, DataError),
        ("path,pid\na,1\nb,1", {"method": "time"}, DataError),
        ("path,pid\na,1\nb,1", {"method": "encounter"}, DataError),
        ("path,pid\na,1\nb,1", {"group": "day"}, DataError),
        ("path,pid\na,1\nb,1", {"train": 2}, ConfigError),
        ("path,pid\na,1\nb,1", {"validation": 0.5}, ConfigError),
    ],
)
def test_invalid_tables_and_options_are_errors(tmp_path, text, options, error):
    table = tmp_path / "table.csv"
    table.write_text(text)
    with pytest.raises(error):
        split(table, **{"method": "closed", **options})
    assert not (tmp_path / "out.csv").exists()


def test_existing_output_is_not_overwritten(table):
    with pytest.raises(ConfigError, match=r"--out .*animals\.csv"):
        split_table(table, table, SplitOptions("closed"))
