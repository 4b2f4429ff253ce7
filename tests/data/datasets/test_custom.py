"""Custom datasets: csv: and folder:, and the identities held out for testing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fastamp.config import get_cfg, read_config
from fastamp.data.build import build_dataset
from fastamp.data.dataset import ReidDataset
from fastamp.data.datasets.base import ImageDataset, count_items
from fastamp.data.datasets.items import PackedItems
from fastamp.data.decode import read_image
from fastamp.data.image_summary import inspect_image
from fastamp.data.missing_images import check_files
from fastamp.data.training_images import training_items
from fastamp.data.transforms import build_transforms
from fastamp.fastreid.data import CommDataset
from fastamp.utils.errors import ConfigError, DataError

HEADER = "path,pid,camid,split"
ROWS = [
    "a b.png,ann,west,train",
    "ü.png,ann,east,train",
    "c.png,bob,west,query",
    "sub/d.png,bob,7,gallery",
    "e.png,10,7,gallery",
]


def write_csv(folder, rows=ROWS, header=HEADER, encoding="utf-8"):
    file = folder / "my data.csv"
    file.write_text("\n".join([header, *rows]) + "\n", encoding=encoding)
    return f"csv:{file}"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_csv_columns_set_split_identity_and_camera(tmp_path, encoding):
    dataset = build_dataset(write_csv(tmp_path, encoding=encoding))
    assert [(Path(item.path).name, item.pid, item.camid) for item in dataset.train] == [
        ("a b.png", f"csv:{tmp_path}/my data.csv_ann", 2),
        ("ü.png", f"csv:{tmp_path}/my data.csv_ann", 1),
    ]
    assert [item[1:3] for item in dataset.query] == [(2, 2)]
    # Identities and cameras are numbered, integers before names; paths are relative to the CSV file.
    assert [item[1:3] for item in dataset.gallery] == [(2, 0), (1, 0)]
    assert dataset.gallery[0].path == str(tmp_path / "sub/d.png")
    assert dataset.identity(2) == "bob" and dataset.identity(dataset.train[0].pid) == "ann"


def test_csv_without_camera_column_assigns_unique_camera_per_image(tmp_path, caplog):
    dataset = build_dataset(write_csv(tmp_path, ["a.png,1", "/abs/b.png,2", "c.png,1"], "path,pid"))
    assert len(dataset.train) == 3 and not dataset.query and not dataset.gallery
    assert len({item.camid for item in dataset.train}) == 3 and dataset.train[1].path == "/abs/b.png"
    assert "camid" in caplog.text


def test_csv_box_crops_image(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "frame.png")
    name = write_csv(tmp_path, ["frame.png,1,5,6,21,38", "frame.png,2,0,0,60,40"], "path,pid,x0,y0,x1,y1")
    cfg = read_config("", ["INPUT.SIZE_TEST", (32, 16)])
    dataset = ReidDataset(build_dataset(name).train, build_transforms(cfg, is_train=False), relabel=True)
    assert torch.equal(dataset[0]["images"], torch.from_numpy(pixels[6:38, 5:21]).permute(2, 0, 1))
    assert dataset.num_classes == 2


def test_boxes_with_width_and_height_equal_boxes_with_corners(tmp_path):
    corners = write_csv(tmp_path, ["f.png,1,5,6,21,38,left", "f.png,2,0,0,60,40,right"], "path,pid,x0,y0,x1,y1,side")
    expected = [item.box for item in build_dataset(corners).train]
    sizes = write_csv(tmp_path, ["f.png,1,left,16,5,6,32", "f.png,2,right,60,0,0,40"], "path,pid,side,w,x,y,h")
    dataset = build_dataset(sizes)
    assert [item.box for item in dataset.train] == expected == [(5, 6, 21, 38), (0, 0, 60, 40)]
    assert list(dataset.train.columns) == ["side"] and dataset.further_columns()[0] == ["side"]


def test_csv_box_outside_image_raises(tmp_path):
    Image.new("RGB", (60, 40)).save(tmp_path / "frame.png")
    name = write_csv(tmp_path, ["frame.png,1,60,6,81,38", "frame.png,2,-9,6,0,38"], "path,pid,x0,y0,x1,y1")
    dataset = ReidDataset(build_dataset(name).train, build_transforms(get_cfg(), is_train=False), relabel=True)
    for row, box in enumerate(("60 6 81 38", "-9 6 0 38")):
        with pytest.raises(DataError, match=f"{box}.*frame.png.* 60 x 40"):
            dataset[row]


@pytest.mark.parametrize("header, box", [("x0,y0,x1,y1", "-3,6,61,40.7"), ("x,y,w,h", "-3,6,64,34.7")])
def test_box_across_the_border_is_clipped_by_every_reader(tmp_path, header, box):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "frame.png")
    dataset = build_dataset(write_csv(tmp_path, [f"frame.png,1,{box}", "frame.png,2,1,2,30,31"], f"path,pid,{header}"))
    item = dataset.train[0]
    assert torch.equal(read_image(item.path, box=item.box), torch.from_numpy(pixels[6:]).permute(2, 0, 1))
    assert np.array_equal(CommDataset(dataset.train)[0]["images"], pixels[6:])
    assert inspect_image(item).size == (60, 34) and not inspect_image(item).fault


def test_normalized_boxes_are_an_error(tmp_path):
    for header, row in (("x0,y0,x1,y1", "0.1,0.2,0.9,1"), ("x,y,w,h", "0.5,0.5,0.2,0.4")):
        with pytest.raises(DataError, match="line 2.*normalized"):
            build_dataset(write_csv(tmp_path, [f"frame.png,1,{row}"], f"path,pid,{header}"))
    dataset = ImageDataset([("a.png", "x", 0, 0, (0.1, 0.2, 0.9, 1.0))], [], [])
    with pytest.raises(DataError, match="train.*normalized"):
        _ = dataset.train


def test_boxes_of_a_few_pixels_log_a_warning(tmp_path, caplog):
    rows = ["frame.png,1,5,6,30,38", "frame.png,2,5,6,9,38"]
    dataset = build_dataset(write_csv(tmp_path, rows, "path,pid,x0,y0,x1,y1"))
    assert len(dataset.train) == 2 and "1 of 2 boxes" in caplog.text and "(5, 6, 9, 38)" in caplog.text
    caplog.clear()
    packed = PackedItems.of(ImageDataset([("a.png", "x", 0, 0, (1.6, 2, 5.2, 9))], [], []).train)
    assert packed.box(0) == (2, 2, 5, 9) and "1 of 1 boxes" in caplog.text


@pytest.mark.parametrize(
    "header, rows, message",
    [
        ("path,id,camid", ["a,1,1"], r"path,id,camid.*\bpid\b.*'id'"),
        ("path,pid,x0,y0", ["a,1,1,1"], "missing x1, y1"),
        ("path,pid,pid", ["a,1,1"], "duplicate pid"),
        ("", [], "line is empty"),
        ("path,pid,x0,y0,x1,y1", ["a,1,5,0,inf,9"], "5 0 inf 9"),
        ("path,pid", [], "no images"),
        ("path,pid", ["a,"], "line 2: .*pid"),
        ("path,pid", ["a,1,2"], "line 2: .* 2 .* 3"),
        (HEADER, ["a,1,1,Test"], r"line 2: .*'Test'.*query \(.*gallery \("),
        (HEADER, ["a,1,1,train", 'b,"1 "x,1,train'], "line 3"),
        ("path,pid,x0,y0,x1,y1", ['a,1,5,0,"9,5",9'], "decimal point"),
        (HEADER, ["a,1,1,trian"], r"line 2: .*'trian'.*'train'"),
        ("path,pid,x0,y0,x1,y1", ["a,1,5,0,5,9"], "expected x0 < x1"),
        ("path,pid,x0,y0,x1,y1", ["a,1,5,0,x,9"], " 5 0 x 9"),
        ("path,pid,x,y,w,h", ["a,1,5,0,x,9"], "x y w h .*5 0 x 9"),
        ("path,pid,x,y,w,h", ["a,1,5,0,0,9"], "got 5 0 5 9 .x1 = x . w"),
        ("path,pid,x,y,w,h,theta", ["a,1,5,0,9,9,0"], "rotation theta"),
    ],
)
def test_invalid_csv_error_names_line_or_column(tmp_path, header, rows, message):
    with pytest.raises(DataError, match=message):
        build_dataset(write_csv(tmp_path, rows, header))


def test_binary_csv_file_raises(tmp_path):
    (tmp_path / "picture.csv").write_bytes(b"\xff\xd8\xff\x00")
    with pytest.raises(DataError, match="picture.csv: .*utf-8"):
        build_dataset(f"csv:{tmp_path / 'picture.csv'}")


@pytest.mark.parametrize("kind", ["csv", "folder"])
def test_missing_csv_or_folder_error_names_path(tmp_path, datasets_root, kind):
    with pytest.raises(DataError, match=f"(?s){kind}:mine.*{tmp_path}/mine"):
        build_dataset(f"{kind}:mine")


def test_unknown_dataset_prefix_error_suggests_similar_prefix():
    with pytest.raises(ConfigError, match=r"DATASETS.NAMES.*'cvs:mine'.*'csv'"):
        build_dataset("cvs:mine")


def make_folder(folder, identities=10, cameras=3, images=2):
    for identity in range(identities):
        (folder / f"person {identity}").mkdir(parents=True)
        for camera in range(cameras):
            for number in range(images):
                (folder / f"person {identity}" / f"cam{camera}_{number}.JPG").touch()
    (folder / "person 0" / "notes.txt").touch()
    (folder / "person 0" / "._cam0_0.jpg").touch()
    return f"folder:{folder}"


def folder_config(**values):
    cfg = get_cfg()
    cfg.merge_from_list([word for key, value in values.items() for word in (f"DATASETS.FOLDER.{key}", value)])
    return cfg


def test_folder_dataset_with_cameras_is_split_by_identity(tmp_path):
    name = make_folder(tmp_path / "my people")
    cfg = folder_config(CAMERA=r"cam(\d)", TEST_FRACTION=0.3)
    dataset = build_dataset(name, cfg)
    train_names = {dataset.identity(item.pid) for item in dataset.train}
    assert len(train_names) == 7 and len(dataset.train) == 42
    # One image of each of 3 identities under each of 3 cameras is a query.
    assert len(dataset.query) == 9 and len(dataset.gallery) == 9
    assert {item.pid for item in dataset.query} == {1, 2, 3} and {item.camid for item in dataset.query} == {0, 1, 2}
    assert not {Path(item.path).parent.name for item in dataset.query + dataset.gallery} & train_names
    again = build_dataset(name, cfg)
    assert again.train == dataset.train and again.query == dataset.query
    assert build_dataset(name, folder_config(CAMERA=r"cam(\d)", TEST_FRACTION=0.3, SEED=1)).train != dataset.train


def test_images_without_cameras_are_not_counted_as_cameras(tmp_path):
    name = make_folder(tmp_path)
    for camera, count in (("", 0), (r"cam(\d)", 3)):
        dataset = build_dataset(name, folder_config(CAMERA=camera))
        assert all(count_items(items, dataset)[2] == count for items in (dataset.train, dataset.query, dataset.gallery))
    assert count_items(list(dataset.train), dataset) == count_items(dataset.train, dataset)


def test_folder_dataset_without_cameras_assigns_unique_camera_per_image(tmp_path, caplog):
    dataset = build_dataset(make_folder(tmp_path), folder_config(TEST_FRACTION=0.5))
    assert len(dataset.query) == 5 and len(dataset.gallery) == 25
    assert len({item.camid for item in dataset.query + dataset.gallery}) == 30
    assert "DATASETS.FOLDER.CAMERA is empty" in caplog.text


@pytest.mark.parametrize("fraction, sizes", [(0.0, (60, 0, 0)), (1.0, (0, 30, 30))])
def test_folder_test_fraction_0_gives_only_training_and_1_only_test_images(tmp_path, fraction, sizes):
    dataset = build_dataset(make_folder(tmp_path), folder_config(CAMERA=r"cam(\d)", TEST_FRACTION=fraction))
    assert (len(dataset.train), len(dataset.query), len(dataset.gallery)) == sizes


@pytest.mark.parametrize(
    "values, error, message",
    [
        ({"CAMERA": r"c(\d"}, ConfigError, "CAMERA .* is not a valid regular expression"),
        ({"CAMERA": "cam"}, ConfigError, "has no group"),
        ({"CAMERA": r"kamera(\d)"}, DataError, "DATASETS.FOLDER.CAMERA.*kamera"),
        ({"TEST_FRACTION": 0.95}, ConfigError, "DATASETS.FOLDER.TEST_FRACTION.* 0.95.* 0 of 10"),
    ],
)
def test_invalid_folder_dataset_settings_raise(tmp_path, values, error, message):
    with pytest.raises(error, match=message):
        build_dataset(make_folder(tmp_path), folder_config(**values))


def test_folder_dataset_without_images_raises(tmp_path):
    (tmp_path / "person").mkdir()
    with pytest.raises(DataError, match=str(tmp_path)):
        build_dataset(f"folder:{tmp_path}")


def test_identities_in_two_folder_datasets_are_distinct(tmp_path):
    names = [make_folder(tmp_path / name, identities=3) for name in ("one", "two")]
    items = training_items([build_dataset(name, folder_config(TEST_FRACTION=0.0)) for name in names])
    assert len({item.pid for item in items}) == 6 and len({item.camid for item in items}) == 36


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_csv_with_semicolons_or_tabs_is_read(tmp_path, delimiter):
    lines = [" Path , PID ,", "a.png,3.0,0", ",,", "b.png,-1,1", "~/c.png,--7,2", ""]
    file = tmp_path / "table.csv"
    file.write_text("\r\n".join(lines).replace(",", delimiter))
    dataset = build_dataset(f"csv:{file}")
    assert [Path(item.path).name for item in dataset.train] == ["a.png", "c.png"]
    assert dataset.train[1].path.startswith(str(Path.home())) and dataset.identity(dataset.train[1].pid) == "--7"


def test_csv_test_identities_are_numbered_with_integers_before_text(tmp_path):
    rows = [f"{number}.png,{pid},query" for number, pid in enumerate(["--19", "9" * 30, "7", "2", "x"])]
    dataset = build_dataset(write_csv(tmp_path, rows, "path,pid,split"))
    assert [dataset.identity(number) for number in range(1, 6)] == ["2", "7", "--19", "9" * 30, "x"]


def test_hidden_folders_are_skipped_and_folder_named_train_raises(tmp_path):
    name = make_folder(tmp_path / "people", identities=4)
    for hidden in (".thumbs", "@eaDir"):
        (tmp_path / "people" / hidden).mkdir()
        (tmp_path / "people" / hidden / "cam0_0.jpg").touch()
    (tmp_path / "people/person 1/.ipynb_checkpoints").mkdir()
    (tmp_path / "people/person 1/.ipynb_checkpoints/cam0_0.jpg").touch()
    (tmp_path / "people/person 1/folder.jpg").mkdir()
    assert len(build_dataset(name, folder_config(TEST_FRACTION=0.0)).train) == 24
    make_folder(tmp_path / "parts/train")
    with pytest.raises(DataError, match="(?s)got train.*folder:.*parts/train"):
        build_dataset(f"folder:{tmp_path / 'parts'}")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="/file\\b"):
        build_dataset(f"folder:{tmp_path / 'file'}")


@pytest.mark.parametrize(
    "name, message",
    [
        ("csv:", "empty path"),
        ("/data/mine.csv", "fix: .*csv:/data/mine.csv"),
        ("data/mine", "fix: .*folder:data/mine"),
        ("csv:a.csv,csv:b.csv", r"several datasets"),
    ],
)
def test_malformed_dataset_name_error_suggests_fix(name, message):
    with pytest.raises((ConfigError, DataError), match=message):
        build_dataset(name)


def test_dataset_listed_twice_raises(tmp_path):
    dataset = build_dataset(make_folder(tmp_path), folder_config(TEST_FRACTION=0.0))
    with pytest.raises(DataError, match="folder:.* DATASETS.NAMES"):
        training_items([dataset, dataset])


def test_csv_without_split_is_split_as_a_folder(tmp_path, caplog):
    make_folder(tmp_path / "people")
    files = sorted((tmp_path / "people").rglob("*.JPG"))
    rows = [f"people/{file.parent.name}/{file.name},{file.parent.name},{file.name[3]}" for file in files]
    settings = {"TEST_FRACTION": 0.3, "SEED": 2}
    listed = build_dataset(write_csv(tmp_path, rows, "path,pid,camid"), folder_config(**settings))
    folder = build_dataset(f"folder:{tmp_path / 'people'}", folder_config(CAMERA=r"cam(\d)", **settings))
    for split in ("train", "query", "gallery"):
        ours, theirs = ({item.path for item in getattr(dataset, split)} for dataset in (listed, folder))
        assert ours == theirs and ours
    for title in ("column split is missing", "folder:"):
        assert any(title in line and "3 of 10 identities" in line and "SEED 2" in line for line in caplog.messages)
    assert {listed.camera(item.camid) for item in listed.query} == {"0", "1", "2"}
    assert {folder.camera(item.camid) for item in folder.query} == {"0", "1", "2"}
    assert {listed.camera(item.camid) for item in listed.train} == {"0", "1", "2"}


def test_csv_without_split_and_with_one_camera_ignores_the_camera(tmp_path):
    rows = [f"{pid}_{number}.png,{pid},door" for pid in range(6) for number in range(3)]
    dataset = build_dataset(write_csv(tmp_path, rows, "path,pid,camid"))
    images = [*dataset.query, *dataset.gallery]
    assert dataset.query and len({item.camid for item in images}) == len(images) and not dataset.has_cameras
    assert {dataset.camera(item.camid) for item in images} == {"door"}


@pytest.mark.parametrize("rows", [["a.png,1", "b.png,2"], [f"{pid}.png,{pid}" for pid in range(9)]])
def test_csv_that_cannot_be_split_is_for_training(tmp_path, caplog, rows):
    dataset = build_dataset(write_csv(tmp_path, rows, "path,pid"))
    assert len(dataset.train) == len(rows) and not dataset.query and not dataset.gallery
    assert "all images are for training" in caplog.text


def test_csv_names_of_cameras_and_lines_are_kept(tmp_path):
    dataset = build_dataset(write_csv(tmp_path))
    assert [dataset.camera(item.camid) for item in dataset.train] == ["west", "east"]
    assert [dataset.camera(item.camid) for item in dataset.gallery] == ["7", "7"]
    assert dataset.line("gallery", 1) == 6 and dataset.origin(dataset.query[0].path).endswith("my data.csv, line 4")
    boxes = build_dataset(write_csv(tmp_path, [f"a.png,{n // 2},{n},0,9,9" for n in range(8)], "path,pid,x0,y0,x1,y1"))
    lines = [
        boxes.origin(item.path, item.box) for split in ("train", "query", "gallery") for item in boxes.images_in(split)
    ]
    assert sorted(line.rsplit(" ", 1)[1] for line in lines) == [str(n + 2) for n in range(8)]
    without = build_dataset(write_csv(tmp_path, [f"{n}.png,{n // 4}" for n in range(16)], "path,pid"))
    assert without.query and without.camera(without.query[0].camid) == ""


def test_csv_lists_all_invalid_lines_and_can_skip_them(tmp_path):
    rows = [*ROWS, "f.png,,west,train", "g.png,1,west,trian", "h.png,1,west,query"]
    name = write_csv(tmp_path, rows)
    with pytest.raises(DataError, match="(?s)line 7:.*pid.*line 8.*trian.*--write-clean"):
        build_dataset(name)
    dataset = build_dataset(name, skip_invalid=True)
    assert (
        dataset.invalid_lines[7] == "no value for pid"
        and list(dataset.invalid_lines) == [7, 8]
        and len(dataset.query) == 2
        and dataset.line("query", 1) == 9
    )


def test_csv_warns_about_repeated_images(tmp_path, caplog):
    name = write_csv(tmp_path, ["a.png,1,0,0,5,9", "a.png,1,5,0,9,9", "b.png,2,0,0,5,9", "a.png,3,0,0,5,9"],
                     "path,pid,x0,y0,x1,y1")  # fmt: skip
    build_dataset(name)
    (message,) = [line for line in caplog.messages if "1 line repeats" in line]
    assert "line 5 repeats line 2 (a.png)" in message


def test_missing_and_empty_files_are_listed_with_their_line_before_training(tmp_path):
    for name in ("a", "c", "d"):
        Image.new("RGB", (4, 8)).save(tmp_path / f"{name}.png")
    (tmp_path / "d.png").write_bytes(b"")
    rows = [f"{name}.png,{pid},train" for pid, name in enumerate("abcd")]
    name = write_csv(tmp_path, rows, "path,pid,split")
    dataset = build_dataset(name)
    with pytest.raises(DataError) as caught:
        check_files(dataset.train, [dataset])
    text = str(caught.value)
    assert f"1 of 4 image files of {name} not found" in text and f"b.png ({tmp_path}/my data.csv, line 3)" in text
    assert f"d.png ({tmp_path}/my data.csv, line 5): the file is empty" in text
    assert f"fastamp check-data '{name}' --write-clean" in text


def test_files_that_are_not_images_are_listed_before_training(tmp_path):
    Image.new("RGB", (4, 8)).save(tmp_path / "a.jpg")
    (tmp_path / "b.JPG").write_text("not an image")
    Image.new("RGB", (4, 8)).save(tmp_path / "c.jpg", format="WEBP")  # of another format than its suffix
    (tmp_path / "d.data").write_text("read by code of the user")
    rows = [f"{name},{pid},train" for pid, name in enumerate(("a.jpg", "b.JPG", "c.jpg", "d.data"))]
    name = write_csv(tmp_path, rows, "path,pid,split")
    dataset = build_dataset(name)
    with pytest.raises(DataError, match="1 of 4 ") as caught:
        check_files(dataset.train, [dataset])
    assert f"b.JPG ({tmp_path}/my data.csv, line 3): cannot identify the image format" in str(caught.value)


def test_corrupt_image_error_names_its_line(tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")
    source = build_dataset(write_csv(tmp_path, ["a.png,1,train"], "path,pid,split"))
    transforms = build_transforms(get_cfg(), is_train=False)
    for relabel in (True, False):  # training and test images
        items = source.train if relabel else [source.train[0]._replace(pid=1, camid=0)]
        dataset = ReidDataset(items, transforms, relabel=relabel, sources=[source])
        with pytest.raises(DataError, match=r"(?s)a.png.*listed in .*my data.csv, line 2\n  fix: restore") as caught:
            dataset[0]
        assert ("ON_CORRUPT" in str(caught.value)) == relabel


def test_csv_identities_and_cameras_with_leading_zeros_are_equal_numbers(tmp_path):
    names = sorted("0" * zeros + "7" for zeros in range(10))
    rows = [f"{name}.png,{name},{name},{split}" for name in names for split in ("query", "gallery")]
    dataset = build_dataset(write_csv(tmp_path, rows))
    assert {(item.pid, item.camid) for item in [*dataset.query, *dataset.gallery]} == {(1, 0)}
    assert dataset.identity(1) == dataset.camera(0) == names[0]


def test_csv_separator_is_the_most_frequent_one_of_the_header(tmp_path):
    rows = ["a.png;ann;w;train;tall, thin", "b.png;bob;w;train;"]
    dataset = build_dataset(write_csv(tmp_path, rows, "path;pid;camid;split;notes, if any"))
    assert [dataset.identity(item.pid) for item in dataset.train] == ["ann", "bob"]


def test_invalid_csv_lines_with_the_same_problem_share_a_line_of_the_error(tmp_path):
    rows = [f"{number}.png,{number},1,{'Train' if number < 3 else 'dev'}" for number in range(30)]
    with pytest.raises(DataError) as caught:
        build_dataset(write_csv(tmp_path, [*rows, "a.png,,1,train"]))
    text = str(caught.value)
    assert "28 invalid lines" in text and text.count("unknown split 'dev'") == 1
    assert "lines 5, 6, 7, 8, 9, 10, 11, 12, 13, 14 and 17 more: unknown split" in text
    assert "line 32: no value for pid" in text


def test_split_names_of_a_csv_file_ignore_case(tmp_path):
    dataset = build_dataset(write_csv(tmp_path, ["a.png,1,1,TRAIN", "b.png,2,1,Query", "c.png,2,2,Gallery"]))
    assert [len(items) for items in (dataset.train, dataset.query, dataset.gallery)] == [1, 1, 1]


def test_random_split_of_one_camera_states_that_cameras_are_ignored(tmp_path):
    rows = [f"{number}.png,{number // 3},door" for number in range(18)]
    assert "cameras are ignored" in build_dataset(write_csv(tmp_path, rows, "path,pid,camid")).split_note
    rows = [f"{number}.png,{number // 3},cam{number % 3}" for number in range(18)]
    assert "cameras" not in build_dataset(write_csv(tmp_path, rows, "path,pid,camid")).split_note


def people(folder, names=("ann", "bob", "cyd", "dan", "eve")):
    """Write images to folder/people/IDENTITY/CAMERA/FILE, and return the folder of the dataset."""
    for name in names:
        for camera in ("front door", "склад"):
            for number in range(2):
                file = folder / "people" / name / camera / f"c9_{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 16)).save(file)
    return folder / "people"


def test_folder_camera_may_be_a_subfolder_of_the_identity(tmp_path):
    cfg = get_cfg()
    cfg.DATASETS.FOLDER.CAMERA = "^(.+)/"
    dataset = build_dataset(f"folder:{people(tmp_path)}", cfg)
    assert {dataset.camera(item.camid) for item in dataset.gallery} == {"front door", "склад"}
    assert all(dataset.camera(item.camid) in item.path for item in [*dataset.train, *dataset.query, *dataset.gallery])
    cfg.DATASETS.FOLDER.CAMERA = r"c(\d)_"
    assert {dataset.camera(item.camid) for item in build_dataset(f"folder:{people(tmp_path)}", cfg).train} == {"9"}


def test_folder_names_what_it_skips_and_ignores_links_to_itself(tmp_path, caplog):
    folder = people(tmp_path)
    Image.new("RGB", (8, 16)).save(folder / "loose.png")
    (folder / "notes.txt").write_text("")
    (folder / "nobody").mkdir()
    (folder / "loop").symlink_to(folder)
    (folder / "ann" / "loop").symlink_to(folder)
    dataset = build_dataset(f"folder:{folder}")
    assert len(dataset.train) + len(dataset.query) + len(dataset.gallery) == 20
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert all(name in message for name in ("loose.png", "nobody", "loop")) and "notes.txt" not in message


@pytest.mark.parametrize("target", ["nowhere.png", "broken.png"])
def test_broken_link_in_folder_is_reported_as_a_missing_file(tmp_path, target):
    folder = people(tmp_path)
    for name in ("ann", "bob", "cyd", "dan", "eve"):
        (folder / name / "broken.png").symlink_to(target)
    dataset = build_dataset(f"folder:{folder}")
    with pytest.raises(DataError, match=r"(?s)3 of 15.*broken\.png"):
        check_files(dataset.train, [dataset])


def test_paths_with_backslashes_are_explained(tmp_path):
    dataset = build_dataset(write_csv(tmp_path, [r"images\a.png,1,1,train", r"images\b.png,1,1,train"]))
    with pytest.raises(DataError, match=r"fix:.* / "):
        check_files(dataset.train, [dataset])


def test_csv_files_of_other_programs_are_read(tmp_path, subtests):
    for separator in (",", ";", "|", "\t"):
        for above in ("", "sep={}\n", '"sep={}"\r\n', "# photos, 2024\n#\n", "sep={}\n# photos; 2024\n"):
            for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"):
                with subtests.test(f"{separator!r} {above!r} {encoding}"):
                    rows = ["path,pid,camid,split", "ä.png,ann,1,train", "# a comment", "b.png,bob,2,train"]
                    text = above.format(separator) + "\n".join(rows).replace(",", separator)
                    (tmp_path / "t.csv").write_bytes(text.encode(encoding))
                    dataset = build_dataset(f"csv:{tmp_path / 't.csv'}")
                    assert [Path(item.path).name for item in dataset.train] == ["ä.png", "b.png"]
                    assert [dataset.identity(item.pid) for item in dataset.train] == ["ann", "bob"]
                    assert dataset.origin(dataset.train[1].path).endswith(f"line {4 + above.count(chr(10))}")


def test_csv_header_and_names_may_begin_with_a_number_sign(tmp_path):
    (tmp_path / "t.csv").write_text("# path,pid\n#1.png,a\n#2.png,b\n")
    assert [Path(item.path).name for item in build_dataset(f"csv:{tmp_path / 't.csv'}").train] == ["#1.png", "#2.png"]
