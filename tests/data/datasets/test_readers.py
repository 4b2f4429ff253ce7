"""Dataset readers: images, identities and cameras of every layout, and error messages for wrong layouts."""

import shutil
from collections import Counter
from pathlib import Path

import pytest
from dataset_trees import TREES, build, message, msmt, write
from documented import documented_file

from fastamp.config import get_cfg, read_config
from fastamp.data.build import build_dataset
from fastamp.data.datasets import DATASET_REGISTRY, FilenameDataset, ImageDataset
from fastamp.data.training_images import training_items, training_parts
from fastamp.utils.errors import ConfigError

NAMES = sorted(TREES)
MARKET = "Market-1501-v15.09.15"
FILENAME_DATASETS = [name for name in NAMES if issubclass(DATASET_REGISTRY.get(name), FilenameDataset)]
TRAINING_ONLY = [name for name, (_, _, query, _) in TREES.items() if query == []]


def folder_of(name):
    return next(iter(TREES[name][0])).split("/")[0]


def labels_of(items):
    return [(item.pid, item.camid) for item in items]


def first_images(name):
    dataset = build_dataset(name)
    return dataset.train + dataset.query + dataset.gallery


def test_all_datasets_are_registered():
    assert (len(NAMES), len(FILENAME_DATASETS), len(TRAINING_ONLY)) == (54, 30, 15)
    assert {*NAMES, "CUHK03", "Demo"} <= set(DATASET_REGISTRY)


def test_dataset_names_and_folders_are_unique():
    classes = [DATASET_REGISTRY.get(name) for name in [*NAMES, "CUHK03", "Demo"]]
    assert len({cls.dataset_name for cls in classes}) == len(classes) == 56
    same_folder = {
        "vehicleid": 4,
        "VERI-Wild": 4,
        "SYSU-MM01": 2,
        "RegDB": 2,
        "LLCM": 2,
        "prcc": 2,
        "VC-Clothes": 3,
        "AG-ReID": 2,
    }
    counts = Counter(reader.folder for reader in classes)
    assert {folder: count for folder, count in counts.items() if count > 1} == same_folder


def test_every_reader_finds_images_identities_and_cameras(new_root, subtests):
    for name in NAMES:
        with subtests.test(name):
            root = new_root()
            files, train, query, gallery = TREES[name]
            write(root, files)
            dataset = build_dataset(name)
            prefix = DATASET_REGISTRY.get(name).dataset_name
            assert type(dataset) is DATASET_REGISTRY.get(name)
            for items, expected in ((dataset.query, query), (dataset.gallery, gallery)):
                assert expected is None or labels_of(items) == expected
                assert all(type(item.pid) is int and item.camid >= 0 for item in items)
            assert train is None or labels_of(dataset.train) == [(f"{prefix}_{pid}", camera) for pid, camera in train]
            assert all(Path(item.path).is_file() for item in dataset.train + dataset.query + dataset.gallery)
            assert all(type(item.path) is str and type(item.camid) is int for item in dataset.train)


def test_files_created_by_operating_systems_are_ignored(new_root, subtests):
    for name in NAMES:
        with subtests.test(name):
            root = new_root()
            files = TREES[name][0]
            write(root, files)
            before = build_dataset(name)
            for path in [path for path, text in files.items() if not text]:
                for other in ("Thumbs.db", ".DS_Store", f"._{Path(path).name}"):
                    (root / path).with_name(other).touch()
            after = build_dataset(name)
            assert (before.train, before.query, before.gallery) == (after.train, after.query, after.gallery)


def test_uppercase_suffixes_and_unicode_file_names_are_read(new_root, subtests):
    for name in FILENAME_DATASETS:
        with subtests.test(name):
            write(new_root(), TREES[name][0])
            before = build_dataset(name)
            labels = labels_of(before.train), labels_of(before.query)
            for item in before.train + before.query:
                file = Path(item.path)
                if file.is_file():
                    file.rename(file.with_name(f"{file.stem}_é 子{file.suffix.upper()}"))
            after = build_dataset(name)
            assert (labels_of(after.train), labels_of(after.query)) == labels
            assert all("子" in item.path for item in after.train)


def test_example_file_name_of_every_dataset_matches_its_layout(new_root, subtests):
    for name in FILENAME_DATASETS:
        with subtests.test(name):
            write(new_root(), TREES[name][0])
            component = DATASET_REGISTRY.get(name)
            example = component.example.split(" (")[0]
            image = Path(build_dataset(name).train[0].path)
            folder = image.parents[example.count("/")]
            write(folder, {example: ""})
            assert str(folder / example) in [item.path for item in first_images(name)]


# ---- wrong layouts


def test_missing_dataset_error_describes_layout(new_root, subtests):
    for name in NAMES:
        with subtests.test(name):
            root = new_root()
            text = message(build_dataset, name)
            assert f"dataset {name} not found" in text
            assert str(root / folder_of(name)) in text and "FASTAMP_DATASETS" in text
            assert "an empty folder" in text
            assert f"    {folder_of(name)}/" in text.split("expected under the data root")[1]


def test_folder_with_similar_name_is_suggested(new_root, subtests):
    for similar in ("{}-v2".format, "my {}".format, lambda folder: "a" + folder.lower()):
        for name in NAMES:
            with subtests.test(f"{name} {similar(name)}"):
                root = write(new_root(), TREES[name][0])
                available = root / folder_of(name)
                renamed = root / similar(available.name)
                available.rename(renamed)
                text = message(build_dataset, name)
                assert f"found {renamed};" in text and f"rename it to {available}" in text


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("Market1501", "Market1501"),
        ("Market1501", "market-1501"),
        ("DukeMTMC", "dukemtmc"),
        ("MSMT17", "MSMT17"),
        ("VeRi", "VeRi-776"),
        ("LPW", "lpw"),
        ("GRID", "grid"),
        ("PRID", "prid-2011"),
        ("VeRiWild", "veriwild"),
    ],
)
def test_folder_with_common_alternative_name_is_suggested(name, similar, root):
    write(root, TREES[name][0])
    (root / folder_of(name)).rename(root / similar)
    assert f"found {root / similar};" in message(build_dataset, name)


def test_folder_of_another_dataset_is_not_suggested(root):
    write(root, TREES["OccludedDuke"][0] | TREES["Market1501"][0])
    text = message(build_dataset, "DukeMTMC")
    assert "hint" not in text and "Occluded_Duke/" in text


def test_folder_one_level_too_deep_is_suggested(new_root, subtests):
    """Shinpuhkan is skipped because its images can be at any depth."""
    for name in [name for name in NAMES if name != "Shinpuhkan"]:
        with subtests.test(name):
            root = new_root()
            folder = folder_of(name)
            write(root / folder, TREES[name][0])
            text = message(first_images, name)
            assert str(root / folder / folder) in text


@pytest.mark.parametrize("name", ["DukeMTMC", "LPW", "MSMT17", "VehicleID", "AirportALERT"])
def test_error_explains_that_data_root_is_the_dataset_folder(name, root, monkeypatch):
    write(root, TREES[name][0])
    monkeypatch.setenv("FASTAMP_DATASETS", str(root / folder_of(name)))
    assert f"make {root} the data root" in message(build_dataset, name)


@pytest.mark.parametrize("name", ["DukeMTMC", "LPW", "VeRiWild"])
def test_missing_dataset_error_suggests_subfolder_of_data_root(name, root):
    write(root / "person", TREES[name][0])
    assert f"or make {root / 'person'} the data root" in message(build_dataset, name)


def test_missing_dataset_error_lists_content_of_similarly_named_folder(root):
    write(root, {"dukemtmc-reid/train/a.jpg": "", "dukemtmc-reid/test/a.jpg": ""})
    text = message(build_dataset, "DukeMTMC")
    assert f"{root / 'dukemtmc-reid'}, which contains test, train" in text


def test_dataset_folders_without_images_raise(new_root, subtests):
    for name in FILENAME_DATASETS:
        with subtests.test(name):
            root = write(new_root(), TREES[name][0])
            for path in TREES[name][0]:
                (root / path).rename((root / path).with_suffix(".txt"))
            text = message(first_images, name)
            assert f"no *{DATASET_REGISTRY.get(name).suffix} file in" in text and folder_of(name) in text


@pytest.mark.parametrize(
    ("name", "stray"),
    [
        ("VeRi", "image_train/car.jpg"),
        ("GRID", "images/probe.jpeg"),
        ("iLIDS", "person001/photo.png"),
        ("PRID", "slim_train/person_0001/photo.png"),
        ("VIPeR", "cam_a/photo.bmp"),
        ("CAVIARa", "1.jpg"),
    ],
)
def test_unexpected_file_names_are_skipped_with_warning(name, stray, root, caplog):
    write(root, TREES[name][0])
    before = len(first_images(name))
    write(root, {f"{folder_of(name)}/{stray}": ""})
    assert len(first_images(name)) == before
    assert (
        "skipped 1 file with an unexpected name" in caplog.text and str(root / folder_of(name) / stray) in caplog.text
    )


@pytest.mark.parametrize(
    ("name", "file", "text", "part"),
    [
        ("MSMT17", "MSMT17_V1/list_train.txt", "", "is empty"),
        ("MSMT17", "MSMT17_V1/list_train.txt", "0000/a_b_01_c.jpg\n", "expected a name and a number"),
        ("MSMT17", "MSMT17_V1/list_train.txt", "0000/a.jpg 1\n", "got 0000/a.jpg"),
        ("MSMT17", "MSMT17_V1/list_train.txt", "0000/a_b_00_c.jpg 1\n", "0000_000_01_0303morning"),
        ("MSMT17", "MSMT17_V1/list_train.txt", "0000/a_b_01_c.jpg 1\n", "not found"),
        ("VehicleID", "vehicleid/train_test_split/train_list.txt", "a/b 1\n", "expected two numbers"),
        ("VehicleID", "vehicleid/train_test_split/train_list.txt", "0000099 1\n", "not found"),
        ("VeRiWild", "VERI-Wild/train_test_split/train_list.txt", "000001.jpg\n", "expected vid/imgid"),
        (
            "VeRiWild",
            "VERI-Wild/train_test_split/train_list.txt",
            "00001/000009.jpg\n",
            "no camera for 00001/000009",
        ),
        ("AirportALERT", "AirportALERT/filepath.txt", "9\\a.jpg\n", "expected camera\\pid\\file"),
        ("AirportALERT", "AirportALERT/filepath.txt", "1\\11000\\a.jpg\n", "11001"),
    ],
)
def test_invalid_list_file_raises(name, file, text, part, root):
    write(root, TREES[name][0] | {file: text})
    words = message(lambda: build_dataset(name).train)
    assert part in words and Path(file).name in words


# ---- one dataset each


def test_training_only_datasets_have_no_test_images(new_root, subtests):
    for name in TRAINING_ONLY:
        with subtests.test(name):
            dataset = build(name, new_root())
            assert dataset.query == [] and dataset.gallery == []


def test_market1501_500k_distractors_are_added_to_gallery(root, caplog):
    for place in (root / MARKET / "images", root / "images"):
        assert len(build("Market1501", root).gallery) == 2
        assert "images" in message(lambda: build("Market1501", root, MARKET1501_500K="True"))
        write(place, {"0001_c1s1_000001_00.jpg": "", "any thing.jpg": "", "Thumbs.db": ""})
        gallery = build("Market1501", root, MARKET1501_500K="True").gallery
        assert labels_of(gallery) == [(0, 4), (1, 1), (0, 5), (0, 5)]
        assert f"2 distractors from {place}" in caplog.text
        shutil.rmtree(place)


def test_config_keys_of_one_dataset_do_not_affect_another_dataset(root):
    """Also covers a user's subclass whose constructor takes only ``root``."""

    class Own(DATASET_REGISTRY.get("Market1501")):
        def __init__(self, root="datasets"):
            super().__init__(root)

    write(root, TREES["Market1501"][0])
    assert len(Own.from_config(get_cfg(), str(root)).train) == 3
    assert len(build("DukeMTMC", root, MARKET1501_500K="True").gallery) == 2


@pytest.mark.parametrize(("version", "available", "expected_version"), [
    ("auto", ("V1",), "V1"), ("auto", ("V2",), "V2"), ("auto", ("V1", "V2"), "V1"), ("V2", ("V1", "V2"), "V2"),
    ("V1", ("V1", "V2"), "V1"),
])  # fmt: skip
@pytest.mark.parametrize("validation", [False, True])
def test_msmt17_version_and_validation_select_lists(version, available, expected_version, validation, root, caplog):
    trees = {"V1": msmt("MSMT17_V1", "train", "test"), "V2": msmt("MSMT17_V2", "mask_train_v2", "mask_test_v2")}
    for release in available:
        write(root, trees[release])
    cfg = read_config("", ["DATASETS.MSMT17.VERSION", version, "DATASETS.MSMT17.VALIDATION", validation])
    dataset = build_dataset("MSMT17", cfg)
    assert f"version {expected_version}, training on list_train.txt" in caplog.text
    assert ("list_val.txt" in caplog.text) is validation
    assert labels_of(dataset.train) == [("msmt17_0", 0), ("msmt17_1", 1)] + [("msmt17_0", 14)] * validation
    assert labels_of(dataset.gallery) == [(3, 3), (2, 2)]
    assert all(
        Path(item.path).is_relative_to(root / f"MSMT17_{expected_version}") for item in dataset.train + dataset.query
    )


def test_msmt17_missing_validation_list_raises_only_if_requested(root):
    write(root, TREES["MSMT17"][0])
    (root / "MSMT17_V1/list_val.txt").unlink()
    assert len(build_dataset("MSMT17").train) == 2
    cfg = get_cfg()
    for key in ("MSMT17.VALIDATION", "COMBINEALL"):
        cfg.merge_from_list([f"DATASETS.{key}", "True"])
        assert "list_val.txt" in message(lambda: build_dataset("MSMT17", cfg))
    with pytest.raises(ConfigError, match=r"DATASETS\.MSMT17\.VERSION.*'V3'"):
        DATASET_REGISTRY.get("MSMT17")(root, version="V3")


@pytest.mark.parametrize(
    ("name", "vehicle"), [("VehicleID", 21), ("SmallVehicleID", 22), ("MediumVehicleID", 23), ("LargeVehicleID", 24)]
)
def test_vehicleid_random_gallery_depends_only_on_seed(name, vehicle, root):
    galleries = {}
    for seed in range(8):
        dataset, again = (build(name, root, VEHICLEID__SEED=str(seed)) for _ in range(2))
        assert [item.pid for item in dataset.gallery] == [20, vehicle]
        assert sorted(item.pid for item in dataset.query) == [20, 20, vehicle]
        cameras = [item.camid for item in dataset.query + dataset.gallery]
        assert sorted(cameras) == [4, 5, 6, 7, 8]
        assert (dataset.query, dataset.gallery) == (again.query, again.gallery)
        galleries[seed] = tuple(dataset.gallery)
    assert len(set(galleries.values())) > 1
    # The draw must stay what it is: results are compared by it.
    assert [[item.camid for item in galleries[seed]] for seed in range(4)] == GALLERIES


GALLERIES = [[4, 8], [5, 8], [4, 8], [6, 7]]


def test_viper_splits_are_random_and_reproducible(root, caplog):
    splits = []
    for split in range(10):
        dataset = build("VIPeR", root, VIPER__SPLIT=str(split))
        assert f"random split {split} of 10" in caplog.text
        trained = {int(item.pid.removeprefix("viper_")) for item in dataset.train}
        assert len(dataset.train) == 8 and len(trained) == 4 and {item.camid for item in dataset.train} == {0, 1}
        tested = sorted(set(range(8)) - trained)
        assert labels_of(dataset.query) == [(pid + 1, 0) for pid in tested]
        assert labels_of(dataset.gallery) == [(pid + 1, 1) for pid in tested]
        assert {Path(item.path).parent.name for item in dataset.query} == {"cam_a"}
        splits.append(tuple(sorted(trained)))
        assert build("VIPeR", root, VIPER__SPLIT=str(split)).train == dataset.train
    assert len(set(splits)) > 5 and splits[0] == (1, 2, 6, 7)
    with pytest.raises(ConfigError, match=r"DATASETS\.VIPER\.SPLIT.* got 10"):
        DATASET_REGISTRY.get("VIPeR")(root, split=10)
    reverse = build("VIPeR", root, VIPER__SPLIT="9", VIPER__QUERY="cam_b")
    assert (reverse.train, reverse.query, reverse.gallery) == (dataset.train, dataset.gallery, dataset.query)
    with pytest.raises(ConfigError, match=r"DATASETS\.VIPER\.QUERY.*cam_c"):
        DATASET_REGISTRY.get("VIPeR")(root, query="cam_c")


def test_sensereid_trains_on_query_and_gallery_images(root, caplog):
    dataset = build("SenseReID", root)
    assert len(dataset.train) == 3
    assert "SenseReID: " in caplog.text
    # No image becomes two, with two identities.
    items = training_items([dataset], combine_all=True)
    assert [item.pid for item in items] == ["sensereid_12", "sensereid_12", "sensereid_99"]


@pytest.mark.parametrize("query", ["test_probe", "test_prob"])
def test_sensereid_reads_test_probe_or_test_prob(root, query):
    write(root, {f"SenseReID/{name}": "" for name in (f"{query}/00012_0.jpg", "test_gallery/00012_1.jpg")})
    dataset = build_dataset("SenseReID")
    assert labels_of(dataset.query) == [(12, 0)] and labels_of(dataset.gallery) == [(12, 1)] and len(dataset.train) == 2


def test_sensereid_error_names_test_probe_and_test_prob(root):
    write(root, {"SenseReID/test_gallery/00012_1.jpg": ""})
    assert "test_probe" in (text := message(build_dataset, "SenseReID")) and "test_prob," in text


VARIANTS = [("VehicleID", "SmallVehicleID"), ("SmallVehicleID", "VehicleID", "LargeVehicleID"),
            ("VeRiWild", "MediumVeRiWild")]  # fmt: skip


@pytest.mark.parametrize("names", VARIANTS)
def test_training_images_of_dataset_variants_are_used_once(names, root, caplog):
    datasets = [build(name, root) for name in names]
    single, found = training_parts([datasets[0]])[0], training_parts(datasets)
    assert [item.path for item in found[0]] == [item.path for item in single] and not any(found[1:])
    assert {item.pid for item in found[0]} == {
        f"{datasets[0].family}_{datasets[0].identity(item.pid)}" for item in single
    }
    count = len(single)
    assert f"{names[1]}: {count} of {count} training images are also in {names[0]}" in caplog.text


@pytest.mark.parametrize("names", VARIANTS)
def test_combine_all_uses_images_of_dataset_variants_once(names, root):
    for name in names:
        write(root, TREES[name][0])
    lists = [*root.rglob("vehicleid/train_test_split/test_list_*.txt")]
    for file in lists:  # as in the real dataset, an image has the same identity in all lists
        file.write_text(lists[0].read_text())
    datasets = [build_dataset(name) for name in names]
    items = training_items(datasets, combine_all=True)
    paths = {item.path for dataset in datasets for item in dataset.train + dataset.query + dataset.gallery}
    assert sorted(item.path for item in items) == sorted(paths)
    # An identity has one name, whichever variant an image is from.
    assert all(item.pid.startswith(f"{datasets[0].family}_") for item in items)


def test_image_with_different_identities_in_two_datasets_warns(root, tmp_path, caplog):
    market = build("Market1501", root)
    lines = ["path,pid", f"{market.train[1].path},5", "other.jpg,5", "another.jpg,6"]
    (tmp_path / "more.csv").write_text("\n".join(lines))
    datasets = [market, build_dataset(f"csv:{tmp_path / 'more.csv'}")]
    assert len(training_items(datasets)) == len(market.train) + 3
    assert "more.csv: 1 of 3 training images are also in Market1501" in caplog.text


def test_cameras_have_the_same_number_in_all_splits(root):
    class Gates(FilenameDataset):
        folder = tree = "gates"
        train_folders, query_folders, gallery_folders = ("a",), ("b",), ("c",)
        layout = (r"(?P<pid>\d+)@(?P<camera>\w+)",)
        example = "1@west.jpg"

    names = ("a/1@north.jpg", "a/1@10.jpg", "b/2@west.jpg", "b/2@9.jpg", "c/2@west.jpg", "c/2@east.jpg")
    write(root, {f"gates/{name}": "" for name in names})
    dataset = Gates(root)
    items = dataset.train + dataset.query + dataset.gallery
    cameras = {Path(item.path).stem.split("@")[1]: item.camid for item in items}
    assert cameras == {"9": 0, "10": 1, "east": 2, "north": 3, "west": 4}


# ---- custom components


def test_registered_dataset_class_or_function_is_built_by_name(root):
    class Own(ImageDataset):
        def __init__(self, root="datasets", **kwargs):
            super().__init__([(f"{root}/a.jpg", "own_1", "own_0")], [], [], **kwargs)

    def own(root):
        return Own(root)

    for name, component in (("OwnClass", Own), ("OwnFunction", own)):
        DATASET_REGISTRY.register(name)(component)
        try:
            for arguments in ((), (get_cfg(),)):
                assert build_dataset(name, *arguments).train[0].path == f"{root}/a.jpg"
        finally:
            del DATASET_REGISTRY._components[name]


GUIDE = (Path(__file__).parents[3] / "docs/guides/datasets.md").read_text(encoding="utf-8")


def test_documented_dataset_class_loads_images_and_keeps_camera_names(root):
    paths = ("train/12/gate_001.png", "query/1/barn_1.png", "gallery/1/a_1.png")
    write(root, {f"cows/{path}": "" for path in paths})
    try:
        exec(documented_file("extending/dataset", "cows.py"), {})
        dataset = build_dataset("Cows")
    finally:
        DATASET_REGISTRY._components.pop("Cows", None)
    items = dataset.train + dataset.query + dataset.gallery
    assert labels_of(items) == [("cows_12", 2), (1, 1), (1, 0)]
    assert [dataset.camera(item.camid) for item in items] == ["gate", "barn", "a"]


def test_camera_names_are_the_numbers_in_file_names(root):
    names = {
        "bounding_box_train": "0002_c1s1_1_1.jpg",
        "query": "0001_c3s1_1_1.jpg",
        "bounding_box_test": "0001_c6_1.jpg",
    }
    write(root, {f"Market-1501-v15.09.15/{folder}/{name}": "" for folder, name in names.items()})
    dataset = build_dataset("Market1501")
    assert [(item.camid, dataset.camera(item.camid)) for item in dataset.query] == [(2, "3")]
    assert [dataset.camera(item.camid) for item in dataset.train] == ["1"]


def test_guide_lists_every_dataset_and_folder(subtests):
    for name in (*NAMES, "CUHK03", "Demo"):
        with subtests.test(name):
            assert f"`{name}`" in GUIDE
            assert name == "Demo" or f"`{DATASET_REGISTRY.get(name).folder}/" in GUIDE


VIEWS = (
    "/home/a b/VeRi/image_train/0002_c002_00030600_0.jpg 12 -1 3",
    "/home/a b/VeRi/image_query/0005_c001_1_0.jpg 12 -1 7",
    "/home/a b/VeRi/image_test/0005_c019_1_0.jpg 12 -1 0",
)


def test_veri_views_are_read_from_keypoint_files(root, caplog):
    lists = {"veri/keypoint_train.txt": f"{VIEWS[0]}\n", "veri/keypoint_test.txt": "\n".join(VIEWS[1:])}
    write(root, TREES["VeRi"][0] | lists)
    plain = build("VeRi", root)
    assert [item.viewid for item in plain.train] == [0, 0]
    dataset = build("VeRi", root, VERI__VIEWS="True")
    assert [(item.camid, item.viewid) for item in dataset.train] == [(1, 3)]
    assert [item.viewid for item in (*dataset.query, *dataset.gallery)] == [7, 0]
    assert "excluded 1 of 2 train images" in caplog.text
    write(root, {"veri/keypoint_test.txt": f"{VIEWS[1]}.5"})
    assert "'/home/a b" in message(lambda: build("VeRi", root, VERI__VIEWS="True").train)
    write(root, {"veri/keypoint_test.txt": VIEWS[1]})
    assert "no gallery image" in message(lambda: build("VeRi", root, VERI__VIEWS="True").gallery)


def test_veri_views_without_keypoint_files_raise(root):
    write(root, TREES["VeRi"][0])
    assert "keypoint_train.txt" in message(lambda: build("VeRi", root, VERI__VIEWS="True"))
