"""Tests of the generated photographs of animals."""

import csv

import numpy as np
import pytest
from PIL import Image

from fastamp.data.build import build_dataset
from fastamp.demo.animals import animals_are_complete, generate_animals
from fastamp.utils.errors import DataError


def rows_of(folder):
    with (folder / "animals.csv").open() as file:
        return list(csv.DictReader(file))


def pixels(folder, row):
    return np.asarray(Image.open(folder / row["path"]), dtype=float)


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "animals"
    generate_animals(folder, individuals=2, image_size=32)
    return folder


def test_table_has_encounters_of_both_flanks_on_one_day_each(animals):
    rows = rows_of(animals)
    assert {row["species"] for row in rows} == {"giraffe", "leopard", "zebra"} and len({r["pid"] for r in rows}) == 6
    by_encounter = {}
    for row in rows:
        by_encounter.setdefault(row["encounter"], []).append(row)
    for frames in by_encounter.values():
        assert len(frames) == 2 and len({(row["date"], row["side"], row["pid"]) for row in frames}) == 1
    for name in {row["pid"] for row in rows}:
        sides = [frames[0]["side"] for frames in by_encounter.values() if frames[0]["pid"] == name]
        assert min(sides.count("left"), sides.count("right")) >= 4


def test_images_depend_only_on_the_seed(animals, tmp_path):
    for seed, equal in ((0, True), (1, False)):
        other = tmp_path / str(seed)
        generate_animals(other, individuals=2, image_size=32, seed=seed)
        same = [
            (animals / row["path"]).read_bytes() == (other / row["path"]).read_bytes()
            for row in rows_of(animals)
            if (other / row["path"]).exists()
        ]
        assert all(same) == equal


def test_frames_of_an_encounter_are_more_similar_than_encounters(animals):
    rows = [row for row in rows_of(animals) if row["pid"] == "zebra 00"]
    images = [pixels(animals, row) for row in rows]
    within = np.abs(images[0] - images[1]).mean()
    assert rows[0]["encounter"] == rows[1]["encounter"]
    assert within < min(np.abs(images[0] - image).mean() for image in images[2:])


def test_incomplete_folder_is_written_again_and_other_folders_are_an_error(animals, tmp_path):
    folder = tmp_path / "animals"
    generate_animals(folder, individuals=2, image_size=32)
    next((folder / "images").iterdir()).unlink()
    assert not animals_are_complete(folder)
    generate_animals(folder, individuals=2, image_size=32)
    assert animals_are_complete(folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(DataError):
        generate_animals(tmp_path / "other")
    with pytest.raises(ValueError, match="individuals"):
        generate_animals(tmp_path / "few", individuals=1)


def test_dataset_is_an_open_set_without_leaks(tmp_path, datasets_root, monkeypatch):
    monkeypatch.setattr("fastamp.demo.animals._draw", lambda *args: np.zeros((8, 8, 3), dtype=np.uint8))
    dataset = build_dataset("DemoAnimals")
    assert dataset.title == "DemoAnimals"
    query, gallery = list(dataset.query), list(dataset.gallery)
    known = {item.pid for item in gallery}
    assert {"species", "side", "date", "encounter", "validation"} <= set(query[0].columns)
    assert any(item.pid not in known for item in query)
    held_out = {dataset.identity(item.pid) for item in gallery if item.columns["validation"] == 1}
    assert held_out and held_out.isdisjoint(dataset.identity(item.pid) for item in dataset.train)
    pairs = [{(i.columns["encounter"], i.columns["side"]) for i in items} for items in (query, gallery)]
    assert pairs[0].isdisjoint(pairs[1])
