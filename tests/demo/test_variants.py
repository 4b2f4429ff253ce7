"""Variants of the demo dataset: reproducible, complete or absent, with the promised splits and columns."""

import csv
import hashlib
from collections import defaultdict

import numpy as np
import pytest
from PIL import Image

from fastamp.demo.variants import VARIANTS, generate_variant, is_complete_variant
from fastamp.utils.errors import DataError

SIZES = {"train_identities": 3, "test_identities": 3, "image_size": (64, 32)}


@pytest.fixture(scope="module", params=VARIANTS)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("variants") / request.param
    generate_variant(request.param, folder, **SIZES)
    with (folder / "attributes.csv").open(encoding="utf-8") as file:
        return request.param, folder, list(csv.DictReader(file))


def digest(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_variant_with_same_arguments_writes_identical_files(made, tmp_path):
    variant, folder, _ = made
    generate_variant(variant, tmp_path / "again", **SIZES)
    assert digest(tmp_path / "again") == digest(folder)


def test_variant_has_disjoint_identities_and_a_match_for_every_query(made):
    _, folder, rows = made
    assert is_complete_variant(folder)
    pids = defaultdict(set)
    for row in rows:
        pids[row["split"]].add(row["pid"])
        assert (folder / row["path"]).is_file()
    assert not pids["train"] & (pids["query"] | pids["gallery"])
    gallery = {(row["pid"], row["camid"]) for row in rows if row["split"] == "gallery"}
    for row in rows:
        if row["split"] == "query":
            assert any(pid == row["pid"] and camid != row["camid"] for pid, camid in gallery)


def test_variant_columns(made):
    variant, folder, rows = made
    queries = [row for row in rows if row["split"] == "query"]
    gallery = [row for row in rows if row["split"] == "gallery"]
    if variant == "infrared":
        assert {row["modality"] for row in queries} == {"infrared"}
        assert {row["modality"] for row in gallery} == {"visible"}
        assert {row["camid"] for row in queries} == {"2", "5"}
        image = np.asarray(Image.open(folder / queries[0]["path"]))
        assert np.array_equal(image[..., 0], image[..., 1]) and np.array_equal(image[..., 0], image[..., 2])
    elif variant == "clothes":
        worn = {row["clothes"] for row in gallery}
        assert {row["clothes"] in worn for row in queries} == {True, False}
        assert all(row["clothes"].split("_")[0] == row["pid"] for row in rows)
    elif variant == "video":
        tracklets = defaultdict(list)
        for row in rows:
            tracklets[row["tracklet"]].append(row)
        assert all(len(frames) == 8 for frames in tracklets.values())
        assert all(
            len({(row["pid"], row["camid"], row["split"]) for row in tracklet}) == 1 for tracklet in tracklets.values()
        )
    else:
        assert {row["platform"] for row in queries} == {"aerial"}
        assert {row["platform"] for row in gallery} == {"ground"}
        assert {row["altitude"] for row in queries} == {"0", "1", "2"}


@pytest.mark.parametrize("wrong", [{"variant": "sonar"}, {"train_identities": 0}, {"image_size": (8, 8)}])
def test_variant_raises_if_an_argument_is_out_of_range(tmp_path, wrong):
    with pytest.raises(ValueError):
        generate_variant(**{"variant": "video", "folder": tmp_path / "set", **SIZES, **wrong})
    assert not list(tmp_path.iterdir())


def test_variant_does_not_overwrite_other_files(tmp_path):
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(DataError):
        generate_variant("clothes", tmp_path, **SIZES)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_interrupted_variant_generation_leaves_no_files(tmp_path):
    def interrupt(done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_variant("infrared", tmp_path / "set", **SIZES, progress=interrupt)
    assert not list(tmp_path.iterdir())
