"""CUHK03: taken out of its .mat files once, whole or not at all."""

import json
import logging
import sys
import threading

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fastamp.config import get_cfg
from fastamp.data.build import build_dataset
from fastamp.data.datasets import CUHK03, cuhk03
from fastamp.utils.errors import ConfigError, DataError

KINDS = ("detected", "labeled")
# People in each pair of cameras, and which images (from 1) of each person there are.
PEOPLE, SHOTS = (3, 1, 2, 0, 1), (1, 2, 6, 10)
EVERYBODY = [(pair, person) for pair, count in enumerate(PEOPLE, 1) for person in range(1, count + 1)]
TESTED = ([(1, 2), (3, 1)], [(5, 1)])


def pixels(pair, person, shot, kind):
    """Return a picture whose first pixel tells what it is, twice as high as wide."""
    picture = np.zeros((4, 2, 3), np.uint8)
    picture[0, 0], picture[3, 0] = (pair, person, shot), (KINDS.index(kind), 0, 255)
    return picture


def write_mat(file, shots):
    """Write images and splits as MATLAB 7.3 lays them out: arrays the other way round, cells as references."""
    h5py = pytest.importorskip("h5py")
    file.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(file, "w") as mat:
        cells = mat.create_group("#refs#")

        def cell(data):
            return cells.create_dataset(str(len(cells)), data=data).ref

        for kind in KINDS:
            pairs = mat.create_dataset(kind, (1, len(PEOPLE)), h5py.ref_dtype)
            for pair, people in enumerate(PEOPLE, start=1):
                images = np.empty((10, people), object)
                for person in range(people):
                    for shot in range(10):
                        there = shot + 1 in shots
                        data = pixels(pair, person + 1, shot + 1, kind).T if there else np.zeros(2, np.uint64)
                        images[shot, person] = cell(data)
                name = str(len(cells))
                cells.create_dataset(name, (10, people), h5py.ref_dtype)[...] = images
                pairs[0, pair - 1] = cells[name].ref
        splits = mat.create_dataset("testsets", (1, len(TESTED)), h5py.ref_dtype)
        for number, tested in enumerate(TESTED):
            splits[0, number] = cell(np.array(tested, float).T)


@pytest.fixture
def place(root):
    """A data root's folder ``cuhk03`` as it is before the first use."""
    place = root / "cuhk03"
    write_mat(place / "cuhk03_release/cuhk-03.mat", SHOTS)
    files = [f"{pair}_{person:03d}_{1 + (shot > 5)}_{shot:02d}.png" for pair, person in EVERYBODY for shot in SHOTS]
    for kind in KINDS:
        gallery = (10, 12) if kind == "detected" else (12,)
        indices = {"train_idx": range(1, 9), "query_idx": (9, 11), "gallery_idx": gallery}
        savemat(
            place / f"cuhk03_new_protocol_config_{kind}.mat",
            {
                **{key: np.array([*values]).reshape(-1, 1) for key, values in indices.items()},
                "filelist": np.array(files, object).reshape(-1, 1),
                "labels": np.array([[number] for number in range(101, 101 + len(EVERYBODY)) for _ in SHOTS]),
                "camId": np.array([[int(name.split("_")[2])] for name in files]),
            },
        )
    return place


def build(**keys):
    cfg = get_cfg()
    cfg.merge_from_list([word for key, value in keys.items() for word in (f"DATASETS.CUHK03.{key}", str(value))])
    return build_dataset("CUHK03", cfg)


def seen(items):
    return [(item.path.rsplit("/", 1)[1], item.pid, item.camid) for item in items]


def test_the_new_protocol(place, caplog):
    with caplog.at_level(logging.INFO):
        dataset = build()
    assert "taking the images out of" in caplog.text and "images of 7 of 7 people" in caplog.text
    assert "detected images, split 0 of the new protocol" in caplog.text
    assert seen(dataset.train)[:3] == [
        ("1_001_1_01.png", "cuhk03_101", 0),
        ("1_001_1_02.png", "cuhk03_101", 0),
        ("1_001_2_06.png", "cuhk03_101", 1),
    ]
    assert len(dataset.train) == 8 and {item.pid for item in dataset.train} == {"cuhk03_101", "cuhk03_102"}
    assert seen(dataset.query) == [("1_003_1_01.png", 103, 0), ("1_003_2_06.png", 103, 1)]
    assert seen(dataset.gallery) == [("1_003_1_02.png", 103, 0), ("1_003_2_10.png", 103, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_images_are_the_file_s(kind, place):
    build(LABELED=kind == "labeled")
    images = place / f"images_{kind}"
    assert len(list(images.iterdir())) == len(EVERYBODY) * len(SHOTS)
    for name, (pair, person, shot) in {"1_003_2_10.png": (1, 3, 10), "5_001_1_02.png": (5, 1, 2)}.items():
        with Image.open(images / name) as image:
            np.testing.assert_array_equal(np.asarray(image), pixels(pair, person, shot, kind))
    assert {entry.name for entry in place.iterdir() if "_mat" not in entry.name and entry.suffix != ".mat"} == {
        "cuhk03_release",
        f"images_{kind}",
        f"splits_new_{kind}.json",
    }


def test_labeled_images_have_lists_of_their_own(place):
    assert [len(build(LABELED=labeled).gallery) for labeled in (False, True)] == [2, 1]


@pytest.mark.parametrize("split", [0, 1])
def test_classic_splits(split, place):
    dataset = build(CLASSIC=True, SPLIT=split)
    tested = {f"{pair}_{person:03d}" for pair, person in TESTED[split]}
    assert {item.path.rsplit("/", 1)[1][:5] for item in dataset.query} == tested
    assert seen(dataset.query) == seen(dataset.gallery)
    assert {item.pid for item in dataset.query} == set(range(1, len(tested) + 1))
    assert len(dataset.train) == (len(EVERYBODY) - len(tested)) * len(SHOTS)
    assert len({item.pid for item in dataset.train}) == len(EVERYBODY) - len(tested)
    assert not tested & {item.path.rsplit("/", 1)[1][:5] for item in dataset.train}


@pytest.mark.parametrize(("keys", "count"), [({"SPLIT": 1}, 1), ({"SPLIT": 2, "CLASSIC": True}, 2)])
def test_a_split_that_is_not_there(keys, count, place):
    with pytest.raises(ConfigError, match=rf"DATASETS\.CUHK03\.SPLIT is {keys['SPLIT']}; .* has {count} splits"):
        build(**keys)


def test_it_is_converted_once(place, monkeypatch, caplog):
    first = build()
    (place / "cuhk03_release/cuhk-03.mat").unlink()
    (place / "cuhk03_new_protocol_config_detected.mat").unlink()
    monkeypatch.setitem(sys.modules, "h5py", None)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        again = build()
    assert (first.train, first.query, first.gallery) == (again.train, again.query, again.gallery)
    assert "taking" not in caplog.text


def test_other_splits_of_images_that_are_there(place, caplog):
    build()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert len(build(CLASSIC=True).query) == 8
    assert "taking" not in caplog.text


class Killed(BaseException):
    pass


@pytest.mark.parametrize("name", ["write_images", "new_split", "write_atomically"])
@pytest.mark.parametrize("error", [Killed, OSError])
def test_an_interruption_leaves_nothing_half_made(name, error, place, monkeypatch):
    real = getattr(cuhk03, name)

    def stopped(*arguments):
        real(*arguments)
        raise error(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cuhk03, name, stopped)
        with pytest.raises(Killed if error is Killed else DataError):
            build()
    assert not (place / "images_detected").exists()
    assert not [entry for entry in place.iterdir() if entry.name.startswith(".images")]
    assert len(build().train) == 8 and len(list((place / "images_detected").iterdir())) == 28


def test_what_a_killed_process_leaves_is_not_taken(place):
    left = place / ".images_detected.building-0"
    left.mkdir()
    (left / "1_001_1_01.png").touch()
    (place / "splits_new_detected.json").write_text("[]")
    assert len(build().train) == 8 and len(list((place / "images_detected").iterdir())) == 28


def test_images_without_splits_are_refused(place):
    """A conversion by FastReID that was interrupted."""
    (place / "images_detected").mkdir()
    (place / "images_detected/1_001_1_01.png").touch()
    with pytest.raises(DataError, match="(?s)images_detected is there, but no splits_.*delete it"):
        build()


def test_of_two_at_once_the_second_takes_what_the_first_made(place, monkeypatch):
    real, both = cuhk03.write_images, threading.Barrier(2, timeout=60)

    def together(*arguments):
        real(*arguments)
        both.wait()

    monkeypatch.setattr(cuhk03, "write_images", together)
    made, threads = [], [threading.Thread(target=lambda: made.append(seen(build().train))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2 and made[0] == made[1]
    assert not [entry for entry in place.iterdir() if entry.name.startswith(".")]


def test_the_files_that_fastreid_wrote(root):
    place = root / "cuhk03"
    (place / "images_detected").mkdir(parents=True)
    split = {
        "train": [["/old/place/images_detected/1_001_1_01.png", 0, 0]],
        "query": [["C:\\old\\images_detected\\1_002_1_01.png", 2, 0]],
        "gallery": [["datasets/cuhk03/images_detected/1_002_2_06.png", 2, 1]],
        "num_train_pids": 1,
    }
    (place / "splits_new_detected.json").write_text(json.dumps([split]))
    dataset = CUHK03(root)
    assert seen(dataset.train) == [("1_001_1_01.png", "cuhk03_0", 0)]
    assert [item.path for item in dataset.query] == [str(place / "images_detected/1_002_1_01.png")]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[1]", '[{"train": []}]', '[{"train": [["a"]]}]'])
def test_splits_that_are_damaged(text, root):
    (root / "cuhk03/images_detected").mkdir(parents=True)
    (root / "cuhk03/splits_new_detected.json").write_text(text)
    with pytest.raises(DataError, match=r"splits_new_detected\.json cannot be read as splits\n  fix: delete it"):
        CUHK03(root)


def test_nothing_is_there(root):
    with pytest.raises(DataError) as raised:
        build()
    text = str(raised.value)
    assert str(root / "cuhk03/cuhk03_release/cuhk-03.mat") in text
    assert "cuhk03_new_protocol_config_detected.mat" in text and "FASTAMP_DATASETS" in text


def test_a_near_name(place):
    place.rename(place.with_name("CUHK03-NP"))
    with pytest.raises(DataError, match="CUHK03-NP; if it is this data set, rename it to"):
        build()


def test_without_h5py(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ConfigError, match="pip install h5py"):
        build()
    assert not [entry for entry in place.iterdir() if "images" in entry.name]


@pytest.mark.parametrize("file", ["cuhk03_release/cuhk-03.mat", "cuhk03_new_protocol_config_detected.mat"])
@pytest.mark.parametrize("damage", ["other", "cut", "empty"])
def test_damaged_mat_files(file, damage, place):
    content = (place / file).read_bytes()
    (place / file).write_bytes({"other": b"<html>", "cut": content[: len(content) // 2], "empty": b""}[damage])
    with pytest.raises(DataError, match=f"{file} is damaged, or another file"):
        build()
    assert not (place / "images_detected").exists()


def test_lists_of_other_images(place):
    write_mat(place / "cuhk03_release/cuhk-03.mat", SHOTS[1:])
    with pytest.raises(DataError, match=r"lists 3 images that are not in cuhk-03\.mat, such as 1_001_1_01\.png"):
        build()
