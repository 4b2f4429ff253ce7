"""Video datasets: tracklets, temporal order, splits and errors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from dataset_trees import build, mat
from naive_ranking import protocol_of
from PIL import Image

from fastamp.config import get_cfg
from fastamp.data.build import build_dataset, build_reid_test_loader
from fastamp.diagnostics.data_check import check_dataset
from fastamp.evaluation import ReidEvaluator
from fastamp.utils.errors import ConfigError, DataError

NAMES = ("MARS", "DukeMTMCVideo", "iLIDSVID", "PRID2011", "CCVID")


def tracklets(items):
    """Return tracklet -> file names, in the order of the items."""
    found = {}
    for item in items:
        found.setdefault(item.columns["tracklet"], []).append(Path(item.path).name)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_frames_of_a_tracklet_are_consecutive_sorted_and_of_one_person_and_camera(name, root):
    dataset = build(name, root)
    for items in (dataset.train, dataset.query, dataset.gallery):
        names = [item.columns["tracklet"] for item in items]
        assert names == [name for name in dict.fromkeys(names) for _ in range(names.count(name))]
        assert all(files == sorted(files) for files in tracklets(items).values())
        assert len({(item.pid, item.camid, item.columns["tracklet"]) for item in items}) == len(set(names))
        assert all(Path(item.path).is_file() for item in items)


def test_mars_gallery_contains_the_queries_and_distractors_but_no_junk(root):
    dataset = build("MARS", root)
    assert list(tracklets(dataset.query)) == ["0002C1T0001F001", "0002C5T0001F001"]
    assert list(tracklets(dataset.gallery)) == [
        *("0000C2T0001F001", "0002C1T0001F001", "0002C5T0001F001", "0002C5T0002F001")
    ]
    assert tracklets(dataset.train)["0003C6T0001F001"] == ["0003C6T0001F001.jpg", "0003C6T0001F002.jpg"]
    assert [dataset.camera(item.camid) for item in dataset.query] == ["1", "1", "5"]


def test_mars_variant_of_torchreid_has_no_queries_in_the_gallery(root):
    dataset = build("MARS", root, MARS__QUERIES_IN_GALLERY="False")
    assert list(tracklets(dataset.query)) == ["0002C1T0001F001", "0002C5T0001F001"]
    assert list(tracklets(dataset.gallery)) == ["0000C2T0001F001", "0002C5T0002F001"]


@pytest.mark.parametrize("shape", [[[3], [4]], [[3, 4]]])
def test_mars_query_numbers_may_be_a_row_or_a_column(shape, root):
    assert len(build("MARS", root, {"mars/info/query_IDX.mat": mat(query_IDX=shape)}).query) == 3


def test_duke_tracklets_have_both_styles_of_file_names(root):
    assert tracklets(build("DukeMTMCVideo", root).train) == {
        "0001_0000": ["0001C6F0001X30823.jpg", "0001C6F0002X30823.jpg"],
        "0003_0000": ["0003_C1_F0001_X1.jpg"],
    }


def test_splits_select_the_people(root):
    assert {item.pid for item in build("iLIDSVID", root, ILIDSVID__SPLIT="1").query} == {1, 2}
    assert {item.pid for item in build("PRID2011", root, PRID2011__SPLIT="1").query} == {2}
    dataset = build("PRID2011", root)
    assert tracklets(dataset.gallery) == {"person_0001_cam_b": ["cam_b_00009.png", "cam_b_00010.png"]}
    assert dataset.camera(1) == "cam_b"


def test_clothes_and_cameras_of_ccvid(root):
    dataset = build("CCVID", root)
    assert [item.columns["clothes"] for item in dataset.train] == ["001_u0_l0", "001_u0_l0", "001_u1_l0"]
    assert [dataset.camera(item.camid) for item in dataset.gallery] == ["14", "14", "1"]


def test_cloth_changing_protocols_rank_tracklets_of_ccvid(root):
    dataset = build("CCVID", root)
    for path in {item.path for item in dataset.query + dataset.gallery}:
        Image.new("RGB", (16, 32)).save(path)
    cfg = get_cfg().with_values({"DATALOADER.NUM_WORKERS": 0, "TEST.PROTOCOL": "cloth_changing", "MODEL.DEVICE": "cpu"})
    loader, num_query = build_reid_test_loader(cfg, "CCVID")

    def evaluate(rule):
        evaluator = ReidEvaluator(cfg.with_values({"TEST.PROTOCOL": rule}), num_query)
        for batch in loader:
            evaluator.process(batch, torch.rand(len(batch["targets"]), 4))
        return evaluator.evaluate()

    found = evaluate("cloth_changing")
    assert (found["num_query"], found["num_gallery"], found["num_frames"]) == (1, 2, 4)
    with pytest.raises(DataError, match="1 queries"):
        evaluate("same_clothes")


@pytest.mark.parametrize(("name", "key"), [("iLIDSVID", "ILIDSVID"), ("PRID2011", "PRID2011")])
def test_unknown_split(name, key, root):
    with pytest.raises(ConfigError, match=rf"DATASETS.{key}.SPLIT.* 7\b"):
        build(name, root, **{f"{key}__SPLIT": "7"})


@pytest.mark.parametrize(
    ("name", "file", "content", "part"),
    [
        ("MARS", "mars/info/tracks_train_info.mat", b"text", "tracks_train_info.mat"),
        ("MARS", "mars/info/tracks_train_info.mat", mat(other=[[1, 2, 1, 1]]), "tracks_train_info"),
        ("MARS", "mars/info/tracks_train_info.mat", mat(track_train_info=[[1, 9, 1, 1]]), "row 1 9 1 1 for 5 images"),
        ("MARS", "mars/info/query_IDX.mat", mat(query_IDX=[[0, 3]]), "expected numbers in 1..5"),
        ("MARS", "mars/info/train_name.txt", "", "is empty"),
        ("DukeMTMCVideo", "dukemtmc-vidreid/DukeMTMC-VideoReID/train/0001/0000/0000.jpg", "", "0001_C6_F0099"),
        ("iLIDSVID", "ilids-vid/train-test people splits/train_test_splits_ilidsvid.mat", mat(ls_set=[[9]]), "but 4"),
        ("CCVID", "CCVID/train.txt", "session1/001_01 001\n", "session1/001_01 001"),
        ("CCVID", "CCVID/train.txt", "session1/001 001 u0\n", "folder, identity, clothes"),
        ("CCVID", "CCVID/query.txt", "session1/009_01 009 u0\n", "009_01"),
        ("PRID2011", "prid2011/splits_prid2011.json", "{", "splits_prid2011.json"),
        ("PRID2011", "prid2011/splits_prid2011.json", json.dumps([{"train": ["x"], "test": ["y"]}]), "got 'x'"),
        ("PRID2011", "prid2011/splits_prid2011.json", json.dumps([{"train": [], "test": []}]), "no train tracklets"),
        ("PRID2011", "prid2011/splits_prid2011.json", json.dumps([{"train": ["person_9"], "test": []}]), "person_9"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(name, file, content, part, root):
    with pytest.raises(DataError, match=part):
        assert build(name, root, {file: content}).train + build_dataset(name).query


def test_check_data_accepts_query_tracklets_in_the_gallery(root):
    dataset = build("MARS", root)
    rng = np.random.default_rng(0)
    for path in {item.path for item in dataset.train + dataset.gallery}:
        Image.fromarray(rng.integers(256, size=(32, 16, 3), dtype=np.uint8)).save(path)
    report = check_dataset(dataset)
    assert not report.has_errors
    strict = check_dataset(dataset, protocol=protocol_of("no_camera"))
    assert any(finding.fault == "images in both query and gallery" for finding in strict.findings)
