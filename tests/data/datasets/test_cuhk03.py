"""CUHK03: splits, and atomic one-time extraction of the images from the .mat files."""

import json
import sys
import threading

import h5py
import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fastamp.config import get_cfg
from fastamp.data.build import build_dataset
from fastamp.data.datasets import CUHK03, cuhk03
from fastamp.utils.errors import ConfigError, DataError

KINDS = ("detected", "labeled")
# Number of people per camera pair, and image numbers (from 1) of each person.
PEOPLE, IMAGE_NUMBERS = (3, 1, 2, 0, 1), (1, 2, 6, 10)
ALL_PEOPLE = [(pair, person) for pair, count in enumerate(PEOPLE, 1) for person in range(1, count + 1)]
TEST_PEOPLE = ([(1, 2), (3, 1)], [(5, 1)])


def pixels(pair, person, shot, kind):
    """Return an image of height 4 and width 2 whose first pixel encodes its labels."""
    picture = np.zeros((4, 2, 3), np.uint8)
    picture[0, 0], picture[3, 0] = (pair, person, shot), (KINDS.index(kind), 0, 255)
    return picture


def write_mat(file, shots):
    """Write images and splits in MATLAB 7.3 format, in which arrays are transposed and cells are references."""
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
        splits = mat.create_dataset("testsets", (1, len(TEST_PEOPLE)), h5py.ref_dtype)
        for number, tested in enumerate(TEST_PEOPLE):
            splits[0, number] = cell(np.array(tested, float).T)


@pytest.fixture
def dataset_dir(root):
    """Folder ``cuhk03`` with the published files, before the images are extracted."""
    dataset_dir = root / "cuhk03"
    write_mat(dataset_dir / "cuhk03_release/cuhk-03.mat", IMAGE_NUMBERS)
    files = [
        f"{pair}_{person:03d}_{1 + (shot > 5)}_{shot:02d}.png" for pair, person in ALL_PEOPLE for shot in IMAGE_NUMBERS
    ]
    for kind in KINDS:
        gallery = (10, 12) if kind == "detected" else (12,)
        indices = {"train_idx": range(1, 9), "query_idx": (9, 11), "gallery_idx": gallery}
        savemat(
            dataset_dir / f"cuhk03_new_protocol_config_{kind}.mat",
            {
                **{key: np.array([*values]).reshape(-1, 1) for key, values in indices.items()},
                "filelist": np.array(files, object).reshape(-1, 1),
                "labels": np.array([[number] for number in range(101, 101 + len(ALL_PEOPLE)) for _ in IMAGE_NUMBERS]),
                "camId": np.array([[int(name.split("_")[2])] for name in files]),
            },
        )
    return dataset_dir


def build(**keys):
    cfg = get_cfg()
    cfg.merge_from_list([word for key, value in keys.items() for word in (f"DATASETS.CUHK03.{key}", str(value))])
    return build_dataset("CUHK03", cfg)


def names_and_labels(items):
    return [(item.path.rsplit("/", 1)[1], item.pid, item.camid) for item in items]


def test_new_protocol_uses_split_and_labels_from_mat_file(dataset_dir, caplog):
    dataset = build()
    assert "extracting" in caplog.text and "images of 7 of 7 people" in caplog.text
    assert "detected images, split 0 of the new protocol" in caplog.text
    assert names_and_labels(dataset.train)[:3] == [
        ("1_001_1_01.png", "cuhk03_101", 0),
        ("1_001_1_02.png", "cuhk03_101", 0),
        ("1_001_2_06.png", "cuhk03_101", 1),
    ]
    assert len(dataset.train) == 8 and {item.pid for item in dataset.train} == {"cuhk03_101", "cuhk03_102"}
    assert names_and_labels(dataset.query) == [("1_003_1_01.png", 103, 0), ("1_003_2_06.png", 103, 1)]
    assert names_and_labels(dataset.gallery) == [("1_003_1_02.png", 103, 0), ("1_003_2_10.png", 103, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_extracted_images_equal_images_in_mat_file(kind, dataset_dir):
    build(LABELED=kind == "labeled")
    images = dataset_dir / f"images_{kind}"
    assert len(list(images.iterdir())) == len(ALL_PEOPLE) * len(IMAGE_NUMBERS)
    for name, (pair, person, shot) in {"1_003_2_10.png": (1, 3, 10), "5_001_1_02.png": (5, 1, 2)}.items():
        with Image.open(images / name) as image:
            np.testing.assert_array_equal(np.asarray(image), pixels(pair, person, shot, kind))
    assert {entry.name for entry in dataset_dir.iterdir() if "_mat" not in entry.name and entry.suffix != ".mat"} == {
        "cuhk03_release",
        f"images_{kind}",
        f"splits_new_{kind}.json",
    }


def test_labeled_and_detected_images_use_separate_splits_files(dataset_dir):
    assert [len(build(LABELED=labeled).gallery) for labeled in (False, True)] == [2, 1]


@pytest.mark.parametrize("split", [0, 1])
def test_classic_split_separates_training_and_test_identities(split, dataset_dir):
    dataset = build(CLASSIC=True, SPLIT=split)
    tested = {f"{pair}_{person:03d}" for pair, person in TEST_PEOPLE[split]}
    assert {item.path.rsplit("/", 1)[1][:5] for item in dataset.query} == tested
    assert names_and_labels(dataset.query) == names_and_labels(dataset.gallery)
    assert {item.pid for item in dataset.query} == set(range(1, len(tested) + 1))
    assert len(dataset.train) == (len(ALL_PEOPLE) - len(tested)) * len(IMAGE_NUMBERS)
    assert len({item.pid for item in dataset.train}) == len(ALL_PEOPLE) - len(tested)
    assert not tested & {item.path.rsplit("/", 1)[1][:5] for item in dataset.train}


@pytest.mark.parametrize(("keys", "count"), [({"SPLIT": 1}, 1), ({"SPLIT": 2, "CLASSIC": True}, 2)])
def test_split_index_out_of_range_raises(keys, count, dataset_dir):
    with pytest.raises(ConfigError, match=rf"DATASETS\.CUHK03\.SPLIT .*0\.\.{count - 1} .*got {keys['SPLIT']}"):
        build(**keys)


def test_images_are_not_extracted_again_if_files_are_complete(dataset_dir, monkeypatch, caplog):
    first = build()
    (dataset_dir / "cuhk03_release/cuhk-03.mat").unlink()
    (dataset_dir / "cuhk03_new_protocol_config_detected.mat").unlink()
    monkeypatch.setitem(sys.modules, "h5py", None)
    caplog.clear()
    again = build()
    assert (first.train, first.query, first.gallery) == (again.train, again.query, again.gallery)
    assert "extracting" not in caplog.text


def test_classic_protocol_reuses_extracted_images(dataset_dir, caplog):
    build()
    caplog.clear()
    assert len(build(CLASSIC=True).query) == 8
    assert "extracting" not in caplog.text


class Killed(BaseException):
    pass


@pytest.mark.parametrize("name", ["write_images", "new_split", "write_atomically"])
@pytest.mark.parametrize("error", [Killed, OSError])
def test_interrupted_extraction_leaves_no_partial_images(name, error, dataset_dir, monkeypatch):
    real = getattr(cuhk03, name)

    def interrupted(*arguments):
        real(*arguments)
        raise error(28, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cuhk03, name, interrupted)
        with pytest.raises(Killed if error is Killed else DataError):
            build()
    assert not (dataset_dir / "images_detected").exists()
    assert not [entry for entry in dataset_dir.iterdir() if entry.name.startswith(".images")]
    assert len(build().train) == 8 and len(list((dataset_dir / "images_detected").iterdir())) == 28


def test_leftover_files_of_killed_extraction_are_ignored(dataset_dir):
    abandoned = dataset_dir / ".images_detected.building-0"
    abandoned.mkdir()
    (abandoned / "1_001_1_01.png").touch()
    (dataset_dir / "splits_new_detected.json").write_text("[]")
    assert len(build().train) == 8 and len(list((dataset_dir / "images_detected").iterdir())) == 28


def test_image_folder_without_splits_file_raises(dataset_dir):
    """An interrupted conversion by FastReID leaves such a folder."""
    (dataset_dir / "images_detected").mkdir()
    (dataset_dir / "images_detected/1_001_1_01.png").touch()
    with pytest.raises(DataError, match="(?s)images_detected .*splits_.*fix: delete"):
        build()


def test_concurrent_extractions_give_equal_datasets(dataset_dir, monkeypatch):
    real, both = cuhk03.write_images, threading.Barrier(2, timeout=60)

    def synchronized(*arguments):
        real(*arguments)
        both.wait()

    monkeypatch.setattr(cuhk03, "write_images", synchronized)
    made, threads = (
        [],
        [threading.Thread(target=lambda: made.append(names_and_labels(build().train))) for _ in range(2)],
    )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2 and made[0] == made[1]
    assert not [entry for entry in dataset_dir.iterdir() if entry.name.startswith(".")]


def test_images_and_splits_written_by_fastreid_are_read(root):
    dataset_dir = root / "cuhk03"
    (dataset_dir / "images_detected").mkdir(parents=True)
    split = {
        "train": [["/old/place/images_detected/1_001_1_01.png", 0, 0]],
        "query": [["C:\\old\\images_detected\\1_002_1_01.png", 2, 0]],
        "gallery": [["datasets/cuhk03/images_detected/1_002_2_06.png", 2, 1]],
        "num_train_pids": 1,
    }
    (dataset_dir / "splits_new_detected.json").write_text(json.dumps([split]))
    dataset = CUHK03(root)
    assert names_and_labels(dataset.train) == [("1_001_1_01.png", "cuhk03_0", 0)]
    assert [item.path for item in dataset.query] == [str(dataset_dir / "images_detected/1_002_1_01.png")]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[1]", '[{"train": []}]', '[{"train": [["a"]]}]'])
def test_corrupt_splits_file_raises(text, root):
    (root / "cuhk03/images_detected").mkdir(parents=True)
    (root / "cuhk03/splits_new_detected.json").write_text(text)
    with pytest.raises(DataError, match=r"(?s)splits_new_detected\.json.*fix: delete"):
        CUHK03(root)


def test_missing_mat_file_error_lists_all_missing_files(root):
    with pytest.raises(DataError) as raised:
        build()
    text = str(raised.value)
    assert str(root / "cuhk03/cuhk03_release/cuhk-03.mat") in text
    assert "cuhk03_new_protocol_config_detected.mat" in text and "FASTAMP_DATASETS" in text


def test_error_suggests_renaming_similar_folder(dataset_dir):
    dataset_dir.rename(dataset_dir.with_name("CUHK03-NP"))
    with pytest.raises(DataError, match="CUHK03-NP"):
        build()


def test_missing_h5py_error_contains_install_command(dataset_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ConfigError, match="pip install h5py"):
        build()
    assert not [entry for entry in dataset_dir.iterdir() if "images" in entry.name]


@pytest.mark.parametrize("file", ["cuhk03_release/cuhk-03.mat", "cuhk03_new_protocol_config_detected.mat"])
@pytest.mark.parametrize("damage", ["other", "cut", "empty"])
def test_corrupt_mat_file_raises(file, damage, dataset_dir):
    content = (dataset_dir / file).read_bytes()
    (dataset_dir / file).write_bytes({"other": b"<html>", "cut": content[: len(content) // 2], "empty": b""}[damage])
    with pytest.raises(DataError, match=file):
        build()
    assert not (dataset_dir / "images_detected").exists()


def test_split_that_lists_unknown_images_raises(dataset_dir):
    write_mat(dataset_dir / "cuhk03_release/cuhk-03.mat", IMAGE_NUMBERS[1:])
    with pytest.raises(DataError, match=r"3 images .*cuhk-03\.mat.* 1_001_1_01\.png"):
        build()
