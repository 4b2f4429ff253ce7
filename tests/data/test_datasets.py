import shutil

import pytest
from dataset_trees import message

from fastamp.data.build import build_dataset
from fastamp.data.datasets import (
    DATASET_REGISTRY,
    Demo,
    ImageDataset,
    ImageItem,
    Market1501,
    data_root,
)
from fastamp.data.datasets import demo as demo_module
from fastamp.data.training_images import leaked_identities, training_items
from fastamp.utils.errors import ConfigError, DataError


def test_market1501_labels_match_file_names(market):
    dataset = Market1501(root=str(market.parent))
    assert len(dataset.train) == 24
    assert {item.pid for item in dataset.train} == {f"market1501_{pid}" for pid in (2, 7, 10, 11, 30, 1000)}
    assert {item.camid for item in dataset.train} == {0, 1, 2}
    assert dataset.query == [
        ImageItem(str(market / f"query/{pid:04d}_c1s1_000000_00.jpg"), pid, 0, 0) for pid in (1, 3)
    ]


def test_identity_minus_one_is_excluded_and_distractors_are_kept(market):
    gallery = Market1501(root=str(market.parent)).gallery
    assert sorted(item.pid for item in gallery) == [0, 1, 1, 1, 3, 3, 3]
    assert [item.camid for item in gallery if item.pid == 0] == [5]


def test_market1501_folders_directly_in_data_root_are_found(market):
    assert len(Market1501(root=market).train) == len(Market1501(root=market.parent).train)


def test_labels_do_not_depend_on_parent_folder_names(market, tmp_path):
    root = tmp_path / "0099_c4s1" / "-1_c9"
    root.mkdir(parents=True)
    market.rename(root / market.name)
    dataset = Market1501(root=root)
    assert {item.camid for item in dataset.train} == {0, 1, 2}
    assert len(dataset.gallery) == 7


def test_two_digit_camera_number_is_parsed(market, write_image):
    write_image(market / "query/0003_c12s1_000000_00.jpg")
    assert Market1501(root=market.parent).query[1].camid == 11


def test_images_are_sorted_by_name(market):
    paths = [item.path for item in Market1501(root=market.parent).train]
    assert paths == sorted(paths)


def test_missing_dataset_error_names_path_and_layout(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path / "nowhere"))
    text = message(lambda: build_dataset("Market1501"))
    assert str(tmp_path / "nowhere" / "Market-1501-v15.09.15" / "bounding_box_train") in text
    assert f"{tmp_path} contains" in text
    assert "bounding_box_train,query,bounding_box_test" in text
    assert "FASTAMP_DATASETS" in text


def test_missing_folder_error_lists_existing_folders(market):
    shutil.rmtree(market / "query")
    text = message(lambda: Market1501(root=market.parent))
    assert str(market / "query") in text and str(market / "bounding_box_train") not in text
    assert "bounding_box_test/, bounding_box_train/" in text


def test_folder_without_images_is_named_in_error(market):
    for file in (market / "bounding_box_train").iterdir():
        file.unlink()
    (market / "bounding_box_train" / "Thumbs.db").touch()
    text = message(lambda: Market1501(root=market.parent).train)
    assert str(market / "bounding_box_train") in text and "Thumbs.db" in text


def test_unexpected_file_names_are_skipped_with_warning(market, write_image, caplog):
    shutil.rmtree(market / "query")
    write_image(market / "query" / "person7.jpg")
    text = message(lambda: Market1501(root=market.parent).query)
    assert "person7.jpg" in text and "0002_c1s1" in text
    write_image(market / "query" / "0002_c1s1_000001_00.jpg")
    assert len(Market1501(root=market.parent).query) == 1
    assert "person7.jpg" in caplog.text


def test_split_with_only_excluded_identities_raises(market, write_image):
    shutil.rmtree(market / "query")
    write_image(market / "query" / "-1_c1s1_000001_00.jpg")
    assert "excluded identities (-1)" in message(lambda: Market1501(root=market.parent).query)


def test_camera_number_zero_raises(market, write_image):
    write_image(market / "query" / "0003_c0s1_000001_00.jpg")
    assert "0003_c0s1_000001_00.jpg" in message(lambda: Market1501(root=market.parent).query)


def test_data_root_prefers_fastamp_variable_to_fastreid_variable(monkeypatch):
    for variable in ("FASTAMP_DATASETS", "FASTREID_DATASETS"):
        monkeypatch.delenv(variable, raising=False)
    assert str(data_root()) == "datasets"
    monkeypatch.setenv("FASTREID_DATASETS", "/there")
    assert str(data_root()) == "/there"
    monkeypatch.setenv("FASTAMP_DATASETS", "/here")
    assert str(data_root()) == "/here"
    monkeypatch.setenv("FASTAMP_DATASETS", "")
    assert str(data_root()) == "/there"


def test_unknown_dataset_name_error_suggests_similar_name():
    with pytest.raises(ConfigError, match="'Market1501'"):
        build_dataset("Market1051")


class OtherDataset(ImageDataset):
    dataset_name = "others"

    def __init__(self, root="datasets", **kwargs):
        train = [("a.jpg", self.dataset_name + "_" + str(pid), self.dataset_name + "_" + str(0)) for pid in (1, 2)]
        super().__init__(train, lambda: [("b.jpg", 1, 0)], [("c.jpg", 1, 1)], **kwargs)


class Numbered(ImageDataset):
    def __init__(self, root="datasets"):
        super().__init__([("n.jpg", 1, 0), ("m.jpg", 10, 1)], [("q.jpg", 1, 0)], [("g.jpg", 1, 1), ("j.jpg", -1, 0)])


def test_splits_are_lists_or_functions():
    dataset = OtherDataset(root="x")
    assert dataset.train[0] == ImageItem("a.jpg", "others_1", "others_0")
    assert dataset.query == [ImageItem("b.jpg", 1, 0)] and dataset.gallery == [ImageItem("c.jpg", 1, 1)]
    with pytest.raises(DataError, match="nowhere"):
        dataset.check_before_run(["/", "/nowhere"])


def test_dataset_may_have_an_attribute_split():
    """Datasets of other programs often do."""

    class Own(Numbered):
        def __init__(self, root=""):
            super().__init__(root)
            self.split = "train"

    assert leaked_identities(Own()) == leaked_identities(Numbered()) == {"1"}


def test_identities_of_two_training_sets_are_distinct():
    items = training_items([OtherDataset(), Numbered()])
    assert [item.pid for item in items] == ["others_1", "others_2", "numbered_1", "numbered_10"]
    assert [item.camid for item in items] == ["others_0", "others_0", "numbered_0", "numbered_1"]


def test_single_training_set_keeps_identities_and_cameras():
    assert training_items([Numbered()]) == Numbered().train


def test_combine_all_adds_test_images_without_distractors(market):
    items = training_items([Market1501(root=market.parent)], combine_all=True)
    assert len(items) == 24 + 2 + 6
    assert {item.pid for item in items} >= {"market1501_2", "market1501_test_1", "market1501_test_3"}
    assert {item.camid for item in items} == {0, 1, 2}
    pids = [item.pid for item in training_items([Numbered()], combine_all=True)]
    assert pids == ["numbered_1", "numbered_10", "numbered_test_1", "numbered_test_1"]


def test_duplicate_dataset_name_raises():
    other = type("Copied", (Numbered,), {"dataset_name": "others"})
    with pytest.raises(DataError, match="OtherDataset.*Copied"):
        training_items([OtherDataset(), other()])


def test_dataset_without_training_images_raises():
    class Empty(ImageDataset):
        def __init__(self, root=""):
            super().__init__([], [], [])

    with pytest.raises(DataError, match="Empty"):
        training_items([Empty()])


@pytest.fixture
def small_demo(monkeypatch):
    def generate(folder, progress):
        real(folder, progress=progress, train_identities=2, test_identities=1, images_per_identity=4, distractors=1)

    real = demo_module.generate_demo
    monkeypatch.setattr(demo_module, "generate_demo", generate)


def test_demo_is_generated_on_first_use(tmp_path, small_demo, caplog):
    first = Demo(root=str(tmp_path))
    assert str(tmp_path / Demo.folder) in caplog.text
    assert {item.pid for item in first.train} == {"demo_1", "demo_2"}
    assert {item.pid for item in first.query} == {3}
    caplog.clear()
    assert Demo(root=str(tmp_path)).train == first.train
    assert caplog.text == ""
    assert "Demo" in DATASET_REGISTRY


def test_demo_in_unwritable_folder_raises(tmp_path, small_demo):
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="FASTAMP_DATASETS"):
        Demo(root=str(tmp_path / "file" / "root"))
