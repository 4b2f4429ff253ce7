"""Names of identities: unknown ones are excluded and counted, and equal numbers are one, in every reader."""

import re
from pathlib import Path

import pytest

from fastamp.config import read_config
from fastamp.data.build import build_dataset
from fastamp.data.datasets import FilenameDataset, ImageDataset, Market1501
from fastamp.data.datasets.identity_names import is_unknown_identity
from fastamp.data.split_table import SplitOptions, split_table
from fastamp.diagnostics.data_check import check_dataset
from fastamp.utils.errors import DataError

UNKNOWN = ["-1", "-1.0", "nan", "NaN", "None", "null", "unknown", "?", "-2", "N/A", " -3.50", "-inf", "-1e0"]
KNOWN = ["0", "1", "--7", "-0", "anna", "Nana", "x-1", "1-1", "None Such", "inf", "??a", "-a"]


def csv_dataset(folder, pids):
    lines = [f"{row}.png,{pid},{'train' if row % 3 else 'query'},{row}" for row, pid in enumerate(pids)]
    (folder / "t.csv").write_text("\n".join(["path,pid,split,camid", *lines]))
    return build_dataset(f"csv:{folder / 't.csv'}")


def test_rule():
    assert [name for name in [*UNKNOWN, *KNOWN] if is_unknown_identity(name)] == UNKNOWN


def test_every_reader_has_the_same_rule(tmp_path, write_image, subtests):
    for number, name in enumerate((*UNKNOWN, *KNOWN)):
        with subtests.test(name):
            root = tmp_path / str(number)
            root.mkdir()
            found = csv_dataset(root, [name, name, name, "a", "b", "c"])
            is_kept = [any(found.identity(item.pid) == name.strip() for item in found.train)]

            for identity in (name, "a", "b", "c"):
                for image in range(2):
                    write_image(root / "people" / identity.replace("/", "") / f"{image}.jpg")
            cfg = read_config("", ["DATASETS.FOLDER.TEST_FRACTION", 0.0])
            folder = build_dataset(f"folder:{root / 'people'}", cfg)
            if "/" not in name:
                is_kept.append(any(folder.identity(item.pid) == name for item in folder.train))

            rows = [f"{pid}{row}.png,{pid}" for pid in (name, "a", "b") for row in range(4)]
            (root / "s.csv").write_text("\n".join(["path,pid", *rows]))
            split_table(root / "s.csv", root / "out.csv", SplitOptions("closed"))
            is_kept.append(len((root / "out.csv").read_text().splitlines()) == 13)

            class Listed(ImageDataset):
                def __init__(self, pid):
                    super().__init__([("a.jpg", f"{self.name}_{pid}", 0), ("b.jpg", f"{self.name}_1b", 0)], [], [])

            is_kept.append(len(Listed(name).train) == 2)
            if "/" not in name:

                class Files(FilenameDataset):
                    folder, train_folders, layout, example = "files", ("a",), (r"^(?P<pid>[^@]+)@",), "1@.jpg"

                for label in (name, "a"):
                    write_image(root / "files/a" / f"{label}@0.jpg")
                is_kept.append(len(Files(root).train) == 2)
            assert is_kept == [name in KNOWN] * len(is_kept)


def test_unknown_identities_are_counted(tmp_path, caplog):
    dataset = csv_dataset(tmp_path, ["a", "nan", "b", "nan", "-1", "c"])
    assert "3" in dataset.excluded_note and "nan (2)" in dataset.excluded_note and "-1 (1)" in dataset.excluded_note
    assert dataset.excluded_note in caplog.text
    assert dataset.excluded_note in check_dataset(dataset).notes
    assert any("nan (2)" in note for note in check_dataset(dataset).notes)


@pytest.mark.parametrize("pids", [["-1", "nan"], ["?"]])
def test_dataset_of_unknown_identities_only_is_an_error(tmp_path, pids, write_image):
    (tmp_path / "t.csv").write_text("\n".join(["path,pid", *(f"{row}.png,{pid}" for row, pid in enumerate(pids))]))
    with pytest.raises(DataError, match=rf"{re.escape(pids[0])} \(1\)"):
        build_dataset(f"csv:{tmp_path / 't.csv'}")
    for pid in pids:
        write_image(tmp_path / "people" / pid / "0.jpg")
    with pytest.raises(DataError, match=rf"{re.escape(pids[0])} \(1\)"):
        build_dataset(f"folder:{tmp_path / 'people'}")


def test_training_images_without_identities_are_kept_for_training_without_labels(tmp_path, caplog):
    file = tmp_path / "t.csv"
    rows = ["a.png,-1,train", "b.png,unknown,train", "c.png,5,query", "d.png,5,gallery", "e.png,?,gallery"]
    file.write_text("\n".join(["path,pid,split", *rows]))
    dataset = build_dataset(f"csv:{file}")
    assert [Path(item.path).name for item in dataset.train] == ["a.png", "b.png"]
    assert len({item.pid for item in dataset.train}) == 1 and len(dataset.gallery) == 1
    assert "training images have unknown identities" in caplog.text


def test_equal_numbers_are_one_identity(tmp_path, caplog, write_image):
    dataset = csv_dataset(tmp_path, ["0007", "7", "7.0", "8", "08", "x7"])
    assert {dataset.identity(item.pid) for item in [*dataset.train, *dataset.query]} == {"0007", "8", "x7"}
    assert "0007 and 7" in caplog.text
    for name in ("0007", "7", "8", "9", "10"):
        write_image(tmp_path / "people" / name / "0.jpg")
        write_image(tmp_path / "people" / name / "1.jpg")
    folder = build_dataset(f"folder:{tmp_path / 'people'}")
    items = [*folder.train, *folder.query, *folder.gallery]
    assert len(items) == 10 and len({folder.identity(item.pid) for item in items}) == 4


def test_equal_numbers_stay_on_one_side_of_a_split(tmp_path):
    rows = [f"{row}.png,{['007', '7', '9', 'b', 'c'][row % 5]}" for row in range(40)]
    (tmp_path / "s.csv").write_text("\n".join(["path,pid", *rows]))
    report = split_table(tmp_path / "s.csv", tmp_path / "out.csv", SplitOptions("disjoint", unknown=0.5))
    assert sum(identities for role, _, identities in report.rows if role in ("train", "gallery")) == 4


def test_cameras_of_equal_numbers_are_one(tmp_path):
    (tmp_path / "t.csv").write_text("path,pid,camid,split\na,1,01,query\nb,1,1,gallery\nc,1,2,gallery\nd,3,2,train")
    dataset = build_dataset(f"csv:{tmp_path / 't.csv'}")
    assert dataset.query[0].camid == dataset.gallery[0].camid != dataset.gallery[1].camid


# ---- names in the layout of Market-1501


def rename(market, *names):
    for name, file in zip(names, sorted((market / "bounding_box_train").iterdir()), strict=False):
        file.rename(file.with_name(name))


def test_names_that_differ_before_the_identity_are_an_error_that_shows_both(market):
    rename(market, "A001_c1s1_0.jpg", "B001_c1s1_0.jpg")
    with pytest.raises(DataError, match="(?s)A001_c1s1_0.jpg.*B001_c1s1_0.jpg.*fix:"):
        _ = Market1501(market.parent).train


def test_names_that_begin_equally_are_read(market):
    rename(market, "cafe_0101_c1s1_0.jpg", "cafe_0102_c1s1_0.jpg", "A-0103_c2s1_0.jpg")
    pids = {item.pid for item in Market1501(market.parent).train}
    assert {"market1501_101", "market1501_102", "market1501_103"} <= pids  # not -103


def test_camera_zero_has_a_fix(market):
    rename(market, "0001_c0s1_0.jpg")
    with pytest.raises(DataError, match="fix:"):
        _ = Market1501(market.parent).train
