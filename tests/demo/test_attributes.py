"""Attributes of the demo images, and SHA-256 digests of the generated files."""

import csv
import hashlib
import re
from dataclasses import asdict, fields
from typing import get_args, get_type_hints

import numpy as np
import PIL
import pytest

from fastamp.data.datasets.custom import CsvDataset
from fastamp.data.datasets.demo import Demo
from fastamp.demo import VALUES, ImageAttributes, generate_demo, image_attributes, is_complete
from fastamp.demo.attributes import describe_person
from fastamp.demo.wardrobe import draw_appearance
from fastamp.utils.errors import DataError

SMALL = {
    "train_identities": 6,
    "test_identities": 4,
    "images_per_identity": 6,
    "distractors": 10,
    "image_size": (64, 32),
}
# Versions of the digests; other versions may draw, compress or round differently.
VERSIONS = ("2.4.6", "13.0.0")
same_versions = pytest.mark.skipif(
    (np.__version__, PIL.__version__) != VERSIONS,
    reason=f"digests are for NumPy {VERSIONS[0]}, Pillow {VERSIONS[1]}",
)
# SHA-256 of images and manifest.
DIGESTS = {
    "small": "d58e6dd175daf4ec0aabe12fea2a4fdf22c7e7124be779e64bf7f59d71de9c84",
    "default": "a758d7f0cac68dc16ab6d22a7bb9a76bee2ed99129b6c7fb7e64a499481314c1",
}
# SHA-256 of attributes.csv of the small dataset.
ATTRIBUTES = "1808f50a60e040492ff3ff43a051c20049a981623951a8fce7b35e84e87f3ed6"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "root" / Demo.folder
    generate_demo(folder, **SMALL)
    return folder


@same_versions
@pytest.mark.parametrize("size", ["small", pytest.param("default", marks=pytest.mark.integration)])
def test_demo_images_and_manifest_match_the_recorded_digest(size, small, tmp_path):
    folder = small
    if size == "default":
        folder = tmp_path / "set"
        generate_demo(folder)
    digest = hashlib.sha256()
    for path in sorted([*folder.rglob("*.jpg"), folder / "demo.json"]):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    assert digest.hexdigest() == DIGESTS[size]


@same_versions
def test_demo_attributes_csv_matches_the_recorded_digest(small):
    assert hashlib.sha256((small / "attributes.csv").read_bytes()).hexdigest() == ATTRIBUTES


def test_image_attributes_returns_one_row_per_demo_image(small):
    rows = image_attributes(small)
    assert sorted(row.path for row in rows) == sorted(
        path.relative_to(small).as_posix() for path in small.rglob("*.jpg")
    )
    splits = {"bounding_box_train": "train", "query": "query", "bounding_box_test": "gallery"}
    for row in rows:
        folder, pid, camera, sequence = re.match(r"(\w+)/(-?\d+)_c(\d)s(\d)", row.path).groups()
        assert (row.split, row.pid, row.camid) == (splits[folder], int(pid), int(camera) - 1)
        assert row.sequence == int(sequence)
        assert row.person in {0: ("lookalike", "stranger", "none")}.get(row.pid, ("identity",))
        assert row.box == ("partial" if row.pid == -1 else "empty" if row.person == "none" else "full")
    assert len({row.person for row in rows}) == 4


def test_demo_attribute_values_match_declared_types_and_choices(small):
    types = get_type_hints(ImageAttributes)
    texts = {name for name, kind in types.items() if str in (kind, *get_args(kind))}
    assert set(VALUES) == texts - {"path"}
    for row in map(asdict, image_attributes(small)):
        is_empty = row["person"] == "none"
        for name, value in row.items():
            assert isinstance(value, types[name])
            assert value is None or name not in VALUES or value in VALUES[name]
            assert value is None or not is_empty or type(None) not in get_args(types[name])
        assert is_empty or (row["yaw"] is not None and row["height"] is not None)
        assert (row["hat_color"] is None) == (row["hat"] in ("none", None))
        assert (row["bag_color"] is None) == (row["bag"] in ("none", None))
        assert is_empty or (row["pattern_color"] is None) == (row["upper_pattern"] == "plain")


def test_person_attributes_are_equal_in_all_images_of_an_identity(small):
    names = describe_person(draw_appearance(np.random.default_rng(0)))
    looks = {}
    for row in image_attributes(small):
        if row.pid > 0:
            looks.setdefault(row.pid, set()).add(tuple(getattr(row, name) for name in names))
    assert len(looks) == 10 and all(len(seen) == 1 for seen in looks.values())


def test_every_person_attribute_value_occurs_among_1000_random_people():
    rng = np.random.default_rng(0)
    people = [describe_person(draw_appearance(rng)) for _ in range(1000)]
    for name in set(people[0]) & set(VALUES):
        assert {person[name] for person in people} - {None} == set(VALUES[name]), name


def test_view_attribute_matches_the_quadrant_of_yaw(small):
    middle = {"front": 0, "right": 90, "back": 180, "left": -90}
    for row in image_attributes(small):
        if row.yaw is not None:
            assert abs((row.yaw - middle[row.view] + 180) % 360 - 180) <= 45


def test_attributes_csv_equals_image_attributes(small):
    with (small / "attributes.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    names = [field.name for field in fields(ImageAttributes)]
    assert list(lines[0]) == names
    for line, row in zip(lines, image_attributes(small), strict=True):
        values = [getattr(row, name) for name in names]
        values = [int(value) if isinstance(value, bool) else value for value in values]
        assert list(line.values()) == ["" if value is None else str(value) for value in values]


def test_demo_dataset_without_attributes_csv_is_complete(small, tmp_path):
    folder = tmp_path / "set"
    generate_demo(folder, **SMALL)
    (folder / "attributes.csv").unlink()
    assert is_complete(folder)
    generate_demo(folder, **SMALL, progress=lambda done, total: pytest.fail("images were drawn again"))
    assert not (folder / "attributes.csv").exists()


def test_image_attributes_raises_if_folder_is_not_a_demo_dataset(tmp_path):
    with pytest.raises(DataError, match=str(tmp_path)):
        image_attributes(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_demo_attributes_csv_can_be_loaded_as_csv_dataset(small):
    demo, listed = Demo(small.parent), CsvDataset(small / "attributes.csv")
    for split in ("train", "query", "gallery"):
        images, rows = getattr(demo, split), getattr(listed, split)
        assert sorted((item.path, item.camid) for item in images) == sorted((item.path, item.camid) for item in rows)
