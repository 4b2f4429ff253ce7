"""Image lists packed into arrays have the same items, labels and batches as lists of tuples; missing image files."""

import gc
import hashlib
import io
import itertools
import json
import pickle
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastamp.config import read_config
from fastamp.data.build import build_reid_test_loader, build_reid_train_loader
from fastamp.data.dataset import ReidDataset
from fastamp.data.datasets.base import ImageDataset
from fastamp.data.datasets.custom import CsvDataset
from fastamp.data.datasets.items import Column, ImageItem, PackedItems
from fastamp.data.missing_images import missing_files
from fastamp.data.transforms import build_transforms
from fastamp.utils.errors import DataError

REFERENCE = json.loads((Path(__file__).parent / "batches.json").read_text())
"""Digests of batches, computed with lists of tuples."""

SAMPLERS = (
    "TrainingSampler",
    "NaiveIdentitySampler",
    "BalancedIdentitySampler",
    "SetReWeightSampler",
    "ImbalancedDatasetSampler",
)

_buffer = io.BytesIO()
Image.new("RGB", (1, 1)).save(_buffer, "png")
PNG = _buffer.getvalue()


def write_sets(folder):
    """Write two CSV files and a folder of identities; the images are empty files."""
    rng = np.random.default_rng(0)
    lines = {"mine.csv": ["path,pid,camid,split,x0,y0,x1,y1"], "other.csv": ["camid;path;pid;split"]}
    for number in range(240):
        pid = ["ann", "bob", "-1", "7", "10", "é 人"][number % 6] if number % 5 else str(rng.integers(1, 30))
        split = ("train", "query", "gallery")[min(int(rng.integers(0, 6)), 5) % 4 % 3]
        left, top = rng.integers(0, 9, 2).tolist()
        path = f"images/{number % 3}/{number:03d} ü.png"
        lines["mine.csv"].append(f"{path},{pid},{rng.integers(0, 4)},{split},{left},{top},{left + 9}.4,{top + 7}")
        lines["other.csv"].append(
            f"{['west', 'east', '3'][number % 3]};./images//{number % 3}/x{number}.png;p{number % 11};train"
        )
    for name, text in lines.items():
        (folder / name).write_text("\n".join(text) + "\n", encoding="utf-8")
        for line in text[1:]:
            path = folder / line.split(";" if ";" in line else ",")[1 if ";" in line else 0]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(PNG)
    for identity, image in itertools.product(range(9), range(5)):
        path = folder / f"people/p{identity}/c{image % 2}_{image}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PNG)


def config(*options):
    return read_config(
        "",
        [
            "DATASETS.NAMES",
            "('csv:mine.csv',)",
            "SOLVER.IMS_PER_BATCH",
            "8",
            "DATALOADER.NUM_INSTANCE",
            "2",
            "DATALOADER.NUM_WORKERS",
            "0",
            "DATASETS.FOLDER.CAMERA",
            r"c(\d)",
            "SEED",
            "5",
            *options,
        ],
    )


CASES = {
    **{f"one set, {name}": ("DATALOADER.SAMPLER_TRAIN", name, "DATALOADER.SET_WEIGHT", "(1,)") for name in SAMPLERS},
    **{
        f"three sets, {name}": (
            "DATASETS.NAMES",
            "('csv:mine.csv', 'folder:people', 'csv:other.csv')",
            "DATALOADER.SAMPLER_TRAIN",
            name,
            "DATALOADER.SET_WEIGHT",
            "(1, 2, 1)",
        )
        for name in SAMPLERS
    },
    "one set, all splits": ("DATASETS.COMBINEALL", "True"),
    "two sets, all splits": ("DATASETS.COMBINEALL", "True", "DATASETS.NAMES", "('csv:mine.csv', 'folder:people')"),
    "cameras of text": ("DATASETS.NAMES", "('csv:other.csv',)"),
}


def digest(rows):
    return hashlib.sha256(json.dumps(rows, ensure_ascii=True).encode()).hexdigest()[:16]


def describe(dataset, keys):
    """Return the content of a batch, without the pixels, as a list."""
    rows = []
    for epoch, position, index in keys:
        item = dataset.items[index]
        box = None if item.box is None else [int(number) for number in item.box]
        names = [label if isinstance(label, str) else int(label) for label in (item.pid, item.camid)]
        rows.append(
            [
                int(epoch),
                int(position),
                int(index),
                item.path,
                *names,
                int(item.viewid),
                box,
                int(dataset.labels[index]),
                int(dataset.camids[index]),
            ]
        )
    return rows


def batches_of(case):
    """Compute the digests of 40 training batches and of the test set."""
    loader = build_reid_train_loader(config(*CASES[case]))
    keys = itertools.islice(iter(loader.batch_sampler), 40)
    training = [describe(loader.dataset, batch) for batch in keys]
    loader, queries = build_reid_test_loader(config(), "csv:mine.csv")
    return digest(training), digest([queries, *(describe(loader.dataset, batch) for batch in loader.batch_sampler)])


def test_packed_items_give_same_batches_as_tuples(tmp_path, monkeypatch, subtests):
    write_sets(tmp_path)
    monkeypatch.chdir(tmp_path)
    for case in CASES:
        with subtests.test(case):
            assert list(batches_of(case)) == REFERENCE[case]


ITEMS = [
    ("a.jpg", "x_1", 3),
    ("/data/é 人/b\udcff.png", "x_2", "gate", 2),
    ("/data/é 人/b.png", "x_1", 3, 0, (1, 2, 30, 40)),
    ("//odd//c", 7, -(2**40), 5, None),
    ("/", "", 3),
]


def test_packed_items_behave_like_list_of_tuples():
    expected = [ImageItem(*item) for item in ITEMS]
    packed = PackedItems.of(ITEMS)
    assert (
        list(packed) == expected and packed == expected and packed != expected[:-1] and PackedItems.of(packed) is packed
    )
    for index in (0, 3, -1, np.int64(2)):
        assert packed[index] == expected[index] and isinstance(packed[index], ImageItem)
    with pytest.raises(IndexError):
        packed[5]
    assert packed[1:4] == expected[1:4] and packed.take(np.array([4, 0])) == [expected[4], expected[0]]
    assert packed[2:] + packed[:2] == expected[2:] + expected[:2] and packed[:1] + ITEMS[1:] == expected
    assert ITEMS[:2] + packed[2:] == expected
    assert pickle.loads(pickle.dumps(packed)) == expected
    assert packed.pids.unique()[0] == ["x_1", "x_2", 7, ""]
    renamed = packed.replace(pids=packed.pids.map(lambda pid: f"s_{pid}"), camids=packed.camids.map(str))
    assert [item[:3] for item in renamed] == [(item.path, f"s_{item.pid}", str(item.camid)) for item in expected]
    assert [packed.find(item.path) for item in expected] == [0, 1, 2, 3, 4] and packed.find("b.png") is None
    rows = np.array([4, 0, 4, 2])
    assert packed.paths(rows) == [expected[row].path for row in rows] and packed.paths(rows[:0]) == []
    assert [packed.box(row) for row in range(5)] == [item.box for item in expected]
    empty = PackedItems.of([])
    assert not empty and empty == [] and empty + packed == expected and packed + empty == expected


def test_column_is_integer_only_if_all_values_fit_int64():
    column = Column.pack([np.int32(3), 5, True])
    assert column.is_integer and [column[index] for index in range(3)] == [3, 5, 1]
    for values in ([1, "1"], [2**70, 1], [1.5, 2]):
        column = Column.pack(values)
        assert not column.is_integer and [column[index] for index in range(2)] == values
    assert Column.pack([1, "a"]).map(lambda value: 7).is_integer


def large_containers(objects, size):
    """Find the containers with at least ``size`` elements that are reachable from ``objects``."""
    seen, stack, found = set(), list(objects), []
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, (type, types.ModuleType)):
            continue
        seen.add(id(value))
        if isinstance(value, (list, tuple, dict, set)) and len(value) >= size:
            found.append(value)
        stack += gc.get_referents(value)
    return found


def test_items_hold_no_python_object_per_image(tmp_path):
    """A worker that reads Python objects changes their reference counts and thereby copies memory."""
    write_sets(tmp_path)
    dataset = build_reid_train_loader(config("DATASETS.NAMES", f"('csv:{tmp_path}/mine.csv',)")).dataset
    arrays = [dataset.items, dataset.labels, dataset.camids]
    assert not large_containers(arrays, len(dataset))
    assert large_containers([*arrays, list(dataset.items)], len(dataset))  # negative control


def test_splits_given_as_lists_remain_lists(tmp_path):
    """Dataset classes written for FastReID may modify their lists."""

    class Mine(ImageDataset):
        dataset_name = "mine"

        def __init__(self, root):
            super().__init__([("a.jpg", "mine_1", 0)], lambda: [("b.jpg", 1, 0)], [])

    dataset = Mine(root="")
    assert dataset.train == [("a.jpg", "mine_1", 0, 0, None, None)] and isinstance(dataset.train, list)
    dataset.query.append(ImageItem("c.jpg", 2, 1))
    assert len(dataset.query) == 2 and dataset.gallery == []


def test_csv_image_paths_are_relative_to_csv_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    paths = ["a.png", "b/c.png", "b//d.png", "./e.png", "../f.png", "/abs/g.png", "~/h.png", "~", "b/..", "b/", 
             "b/./i.png", "/j.png", "//k.png", "b/~.png", "~x", ".."]  # fmt: skip
    for folder in (tmp_path, Path()):
        (folder / "list.csv").write_text("\n".join(["path,pid", *(f"{path},1" for path in paths)]))
        found = [item.path for item in CsvDataset(folder / "list.csv").train]
        assert found == [str(folder / Path(path).expanduser() if path[0] == "~" and path != "~x" else folder / path)
                         for path in paths]  # fmt: skip


def test_missing_image_files_raise_before_training(tmp_path):
    write_sets(tmp_path)
    name = f"csv:{tmp_path}/mine.csv"
    options = ["DATASETS.NAMES", f"('{name}', 'folder:{tmp_path}/people')"]
    build_reid_train_loader(config(*options))
    lines = (tmp_path / "mine.csv").read_text().splitlines()
    training = [number for number, line in enumerate(lines, start=1) if ",train," in line and ",-1," not in line]
    removed = [training[number] for number in (3, 7, 9)]
    for number in removed:
        (tmp_path / lines[number - 1].split(",")[0]).unlink()
    (tmp_path / lines[removed[0] - 1].split(",")[0]).mkdir()  # not a file
    query_line = next(number for number, line in enumerate(lines, start=1) if ",query," in line and ",-1," not in line)
    (tmp_path / lines[query_line - 1].split(",")[0]).unlink()
    with pytest.raises(DataError) as raised:
        build_reid_train_loader(config(*options))
    text = str(raised.value)
    assert f"3 of {len(training) + 25} image" in text and "fix:" in text
    for number in removed:
        path = tmp_path / lines[number - 1].split(",")[0]
        assert f"{path} ({tmp_path}/mine.csv, line {number})" in text
    with pytest.raises(DataError, match=f"1 of .*\n.*mine.csv, line {query_line}"):
        build_reid_test_loader(config(*options, "DATALOADER.ON_CORRUPT", "skip"), name)


def test_missing_image_files_warn_if_on_corrupt_is_skip(tmp_path, caplog):
    write_sets(tmp_path)
    Path(
        build_reid_train_loader(config("DATASETS.NAMES", f"('csv:{tmp_path}/mine.csv',)")).dataset.items[2].path
    ).unlink()
    options = ["DATASETS.NAMES", f"('csv:{tmp_path}/mine.csv',)", "DATALOADER.ON_CORRUPT", "skip"]
    build_reid_train_loader(config(*options))
    assert "1 of" in caplog.text and "DATALOADER.ON_CORRUPT is skip" in caplog.text and "mine.csv, line" in caplog.text


@pytest.mark.parametrize("list_folders", [True, False])
def test_missing_image_files_are_found_with_and_without_folder_listing(tmp_path, monkeypatch, list_folders):
    if not list_folders:
        monkeypatch.setattr("fastamp.data.missing_images._ENTRIES", 0)
        monkeypatch.setattr("fastamp.data.missing_images._ENTRIES_PER_FILE", 0)
    (tmp_path / "a").mkdir()
    for name in ("a/1.jpg", "a/é.jpg", "2.jpg", "a/\udcff.jpg"):
        (tmp_path / name).touch()
    (tmp_path / "a/link.jpg").symlink_to(tmp_path / "2.jpg")
    (tmp_path / "a/broken.jpg").symlink_to(tmp_path / "gone.jpg")
    names = ["a/gone.jpg", "a/1.jpg", "2.jpg", "nowhere/1.jpg", "a/é.jpg", "a/link.jpg", "a/broken.jpg", "2.jpg/3.jpg",
             "a/\udcff.jpg", "a/../2.jpg", "a", "a/gone.jpg"]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for folder in (f"{tmp_path}/", ""):
        items = PackedItems.of([(folder + name, 1, 0) for name in names])
        expected = [row for row, name in enumerate(names) if not (tmp_path / name).is_file()]
        assert missing_files(items).tolist() == expected == [0, 3, 6, 7, 10, 11]


@pytest.mark.parametrize("skip", [0, 5, 11])
def test_corrupt_image_is_replaced_by_next_image_of_same_identity(tmp_path, skip):
    """The search for a readable image continues at the start of the list after its end."""
    for number in range(12):
        if number in (1, 10):
            Image.new("RGB", (4, 8), (20 * number, 0, 0)).save(tmp_path / f"{number}.png")
    items = [(str(tmp_path / f"{number}.png"), f"p{number % 3 == 1}", 0) for number in range(12)]
    cfg = read_config("", ["INPUT.SIZE_TEST", (8, 4)])
    dataset = ReidDataset(items, build_transforms(cfg, is_train=False), relabel=True, skip_corrupt=True)
    assert [int(dataset.read(row)[0, 0, 0]) for row in (1, 4, 7, 10)] == [20, 200, 200, 200]
    with pytest.raises(DataError, match=r"\.png.*DATALOADER\.ON_CORRUPT"):
        dataset.read(skip)
    dataset.labels = None  # not needed for a readable image
    assert int(dataset.read(1)[0, 0, 0]) == 20


def test_rows_by_file_keep_the_boxes_of_a_file_together():
    def items(paths, box):
        return PackedItems.of([(path, 0, 0, 0, box) for path in paths])

    assert items("badbab", (0, 0, 9, 9)).rows_by_file().tolist() == [0, 3, 5, 1, 4, 2]
    assert items("bad", None).rows_by_file().tolist() == [0, 1, 2]
