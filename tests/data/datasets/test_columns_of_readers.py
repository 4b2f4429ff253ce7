"""Datasets with columns: values of the columns, splits, keys, and error messages for damaged lists and names."""

import json
import random
from itertools import groupby
from pathlib import Path

import pytest
import torch
from dataset_trees import TREES, build, message, under, write
from naive_ranking import protocol_of

from fastamp.config import read_config
from fastamp.data.build import build_dataset
from fastamp.data.datasets import DATASET_REGISTRY
from fastamp.data.datasets.items import PackedItems
from fastamp.data.training_images import training_parts
from fastamp.evaluation import Identities
from fastamp.evaluation.metrics import compute_metrics
from fastamp.evaluation.ranking_rule import PROTOCOL_REGISTRY
from fastamp.utils.errors import ConfigError

LISTS = json.loads((Path(__file__).parents[2] / "reference/methods/vi_lists1.json").read_text())
SPLITS = ("train", "query", "gallery")
SYSU_CAMERAS = ["visible", "visible", "infrared", "visible", "visible", "infrared"]


def column(items, name):
    return [item.columns[name] for item in items]


@pytest.mark.parametrize(
    ("name", "column_name", "train", "query", "gallery"),
    [
        ("SYSUMM01", "modality", SYSU_CAMERAS * 2, ["infrared"] * 3, ["visible"] * 4),
        ("RegDB", "modality", ["visible", "infrared"], ["visible"], ["infrared"]),
        ("RegDBThermalToVisible", "modality", ["visible", "infrared"], ["infrared"], ["visible"]),
        ("LLCM", "modality", ["visible", "infrared"], ["infrared"], ["visible"] * 2),
        ("LLCMVisibleToInfrared", "modality", ["visible", "infrared"], ["visible"] * 2, ["infrared"]),
        ("LTCC", "clothes", ["000_1", "000_2"], ["005_1"], ["005_2"]),
        ("PRCC", "clothes", ["001_AB", "001_AB", "001_C"], ["002_C", "004_C"], ["002_AB", "004_AB"]),
        ("PRCCSC", "clothes", ["001_AB", "001_AB", "001_C"], ["002_AB", "004_AB"], ["002_AB", "004_AB"]),
        ("VCClothes", "clothes", ["0001_01"], ["0002_01"] * 4, ["0002_02"] * 4),
        ("VCClothesCC", "clothes", ["0001_01"], ["0002_01"] * 2, ["0002_02"] * 2),
        ("LaST", "clothes", ["000001_A", "000001_B"], [None], [None, None]),
        ("DeepChange", "clothes", ["P1_1", "P1_2"], ["P2_1"], ["P2_2"]),
        ("AGReID", "platform", ["aerial", "ground"], ["aerial"], ["ground"]),
        ("AGReID", "altitude", [0, 2], [1], [1]),
        ("AGReIDGroundToAerial", "platform", ["aerial", "ground"], ["ground"], ["aerial"]),
        ("SOP", "category", ["bicycle"] * 2, ["chair"], ["chair"]),
        ("InShop", "category", ["WOMEN/Dresses"], ["WOMEN/Dresses"], ["MEN/Pants"]),
        ("AGReIDv2", "platform", ["ground"], ["aerial", "ground"], ["aerial", "ground"]),
    ],
)  # fmt: skip
def test_columns_of_every_dataset(name, column_name, train, query, gallery, root):
    dataset = build(name, root)
    assert [column(getattr(dataset, split), column_name) for split in SPLITS] == [train, query, gallery]


def test_names_of_columns_are_the_same_in_all_splits_and_survive_packing(new_root, subtests):
    for name in TREES:
        with subtests.test(name):
            dataset = build(name, new_root())
            splits = [items for split in SPLITS if (items := getattr(dataset, split))]
            names = {tuple(item.columns or ()) for items in splits for item in items}
            assert len(names) == 1
            assert all(tuple(PackedItems.of(items).columns) == next(iter(names)) for items in splits)


@pytest.mark.parametrize(
    "names",
    [
        ("RegDB", "RegDBThermalToVisible"),
        ("LLCM", "LLCMVisibleToInfrared"),
        ("PRCC", "PRCCSC"),
        ("VCClothes", "VCClothesSC", "VCClothesCC"),
        ("AGReID", "AGReIDGroundToAerial"),
    ],
)
def test_variants_have_the_same_training_images_and_cameras(names, root):
    datasets = [build(name, root) for name in names]
    parts = training_parts(datasets)
    assert len(parts[0]) == len(datasets[0].train) and not any(map(len, parts[1:]))
    assert len({dataset.camera(item.camid) for dataset in datasets for item in dataset.train}) == len(
        {item.camid for item in datasets[0].train}
    )


def test_camera_names_are_those_of_the_dataset(root):
    sysu, regdb, llcm, ltcc = (build(name, root) for name in ("SYSUMM01", "RegDB", "LLCM", "LTCC"))
    assert sorted({sysu.camera(item.camid) for item in sysu.query}) == ["3", "6"]
    assert sorted({sysu.camera(item.camid) for item in sysu.gallery}) == ["1", "2", "4", "5"]
    assert [regdb.camera(item.camid) for item in regdb.train] == ["visible", "thermal"]
    assert [llcm.camera(item.camid) for item in llcm.gallery] == ["1", "3"]
    assert [ltcc.camera(item.camid) for item in (*ltcc.query, *ltcc.gallery)] == ["2", "12"]
    last = build("LaST", root)
    assert {last.camera(item.camid) for item in (*last.train, *last.query)} == {""}
    assert len({item.camid for item in (*last.query, *last.gallery)}) == 3


def test_sysu_images_are_sorted_by_identity_camera_and_name(root):
    """The draws of the protocols depend on the order of the images of an identity and camera."""
    extra = {f"SYSU-MM01/cam{camera}/0003/{number:04d}.jpg": "" for camera in range(1, 7) for number in (12, 3, 7)}
    extra["SYSU-MM01/exp/test_id.txt"] = "3,1"
    extra["SYSU-MM01/exp/train_id.txt"] = "2"
    gallery = build("SYSUMM01", root, extra).gallery
    paths = [Path(item.path).relative_to(root / "SYSU-MM01").as_posix() for item in gallery]
    assert paths == sorted(paths, key=lambda path: (path.split("/")[1], path.split("/")[0], path))
    assert len(paths) == 4 + 4 * 4


@pytest.mark.parametrize("name", ["sysu", "llcm", "llcm_visible"])
def test_test_images_have_the_order_of_the_reference_programs(name, root):
    """Draw the galleries as the programs of AGW and DEEN do: one ``random.choice`` per identity and camera."""
    lists = LISTS[name.split("_")[0]]
    dataset, folder, query, gallery = {
        "sysu": ("SYSUMM01", "SYSU-MM01", "query_all", "gallery_all"),
        "llcm": ("LLCM", "LLCM", "query_mode2", "gallery_mode1"),
        "llcm_visible": ("LLCMVisibleToInfrared", "LLCM", "query_mode1", "gallery_mode2"),
    }[name]
    files = {path: text for path, text in TREES[dataset][0].items() if path.endswith(".txt") or "/cam" not in path}
    files |= {f"{folder}/cam{camera}/{pid:04d}/1.jpg": "" for camera in range(1, 7) for pid in (1, 2)}
    for path, count in lists["tree"].items():
        files |= {f"{folder}/{path}/{number:04d}.jpg": "" for number in range(1, count + 1)}
    files[f"{folder}/{'exp' if name == 'sysu' else 'idx'}/test_id.txt"] = lists["test_id.txt"]
    write(root, files)
    built = build_dataset(dataset)

    def relative(item):
        return Path(item.path).relative_to(root / folder).as_posix()

    assert len(built.query) == lists[query]["count"]
    assert [*map(relative, built.query[:3])] == lists[query]["first"]
    assert [*map(relative, built.query[-3:])] == lists[query]["last"]
    for trial in range(4):
        generator = random.Random(trial)
        drawn = [
            relative(generator.choice([*images]))
            for _, images in groupby(built.gallery, key=lambda item: (item.pid, item.camid))
        ]
        assert drawn == lists[f"{gallery}_trial{trial}"]


def test_regdb_trial_selects_the_split(root):
    assert [item.pid for item in build("RegDB", root, REGDB__TRIAL="2").query] == [3]
    dataset = build("RegDB", root, REGDB__TRIAL="2")
    assert [item.pid for item in dataset.train] == ["regdb_285"] * 2 and "split 2 of 10" in dataset.split_note
    assert "train_visible_7.txt" in message(lambda: build("RegDB", root, REGDB__TRIAL="7"))
    with pytest.raises(ConfigError, match="REGDB"):
        build("RegDB", root, REGDB__TRIAL="11")


@pytest.mark.parametrize("name", ["AGReID", "AGReIDGroundToAerial", "AGReIDv2"])
def test_altitudes_of_a_person_can_be_one_identity(name, root):
    extra = under("AG-ReID", ["bounding_box_train/P0006T02140A1C0F9.jpg"])
    extra |= under("AG-ReID.v2", ["train_all/P0006T02140A1/P0006T02140A1C0F9.jpg"])
    assert len({item.pid for item in build(name, root, extra).train}) > 1
    merged = build(name, root, AGREID__MERGE_ALTITUDES="True")
    assert {item.pid for item in merged.train} == {f"{merged.name}_602140"}
    assert {item.pid for item in merged.gallery} == {104041}


def test_agreidv2_list_selects_the_test_images(root):
    dataset = build("AGReIDv2", root, AGREIDV2__SPLIT="exp1")
    assert [column(getattr(dataset, split), "platform") for split in SPLITS] == [["ground"], ["aerial"], ["ground"]]
    assert "exp2.txt" in message(lambda: build("AGReIDv2", root, AGREIDV2__SPLIT="exp2"))
    write(root, {"AG-ReID.v2/exp1.txt": "query/P0001T04041A1/P0001T04041A1C0F32.jpg\n"})
    assert "lists 1 images of query, of which 0 exist" in message(
        lambda: build_dataset("AGReIDv2", config("AGREIDV2__SPLIT", "exp1")).query
    )
    assert "lists 0 images" in message(lambda: build_dataset("AGReIDv2", config("AGREIDV2__SPLIT", "exp1")).gallery)


def config(key, value):
    return read_config("", [f"DATASETS.{key.replace('__', '.')}", value])


@pytest.mark.parametrize(
    ("name", "file", "text", "part"),
    [
        ("SYSUMM01", "SYSU-MM01/exp/test_id.txt", "3,x", "got 'x'"),
        ("SYSUMM01", "SYSU-MM01/exp/test_id.txt", "3,9", "no images of 1 of 2 identities"),
        ("SYSUMM01", "SYSU-MM01/exp/test_id.txt", "", "is empty"),
        ("LLCM", "LLCM/idx/test_id.txt", "2 3", "got '2 3'"),
        ("LLCM", "LLCM/idx/test_id.txt", "2,77", "no folder 0077"),
        ("RegDB", "RegDB/idx/test_visible_1.txt", "male_front_v_00001_3.bmp 0\n", "with the identity as the folder"),
        ("RegDB", "RegDB/idx/test_visible_1.txt", "Visible/3/x.bmp 0\n", "image not found"),
        ("RegDB", "RegDB/idx/test_visible_1.txt", "Visible/3/a.bmp\n", "expected a name and a number"),
        ("RegDB", "RegDB/idx/test_visible_1.txt", "Visible/3/a.bmp 0\nVisible/3/b.bmp 1\n", "several labels"),
        ("SOP", "Stanford_Online_Products/Ebay_test.txt", "header\n", "got no lines"),
        ("SOP", "Stanford_Online_Products/Ebay_test.txt", "header\n3 x 2 a.JPG\n", "got '3 x 2 a.JPG'"),
        ("SOP", "Stanford_Online_Products/Ebay_test.txt", "header\n3 9 2\n", "got '3 9 2'"),
        ("SOP", "Stanford_Online_Products/Ebay_test.txt", "header\n3 9 2 x.JPG\n", "image not found"),
        ("InShop", "InShop/Eval/list_eval_partition.txt", "1\nx\nimg/a/b/c.jpg id_1 train\n", "no query images"),
        ("InShop", "InShop/Eval/list_eval_partition.txt", "1\nx\nimg/a/b/c.jpg id_1 trian\n", "trian"),
        ("CUB200", "CUB_200_2011/image_class_labels.txt", "1 100\n", "got '2'"),
        ("CUB200", "CUB_200_2011/images.txt", "1 100.Bird/a.jpg\n", "no images of the test classes"),
        ("DeepChange", "DeepChangeDataset/test-set-query-bbox.txt", "P2_C1_1_01.jpg\n", "tracklet 12"),
        ("DeepChange", "DeepChangeDataset/test-set-query-bbox.txt", "P2_C1__01.jpg,7\n", "tracklet 12"),
        ("DeepChange", "DeepChangeDataset/test-set-query-bbox.txt", "P2_C1_1_02.jpg,7\n", "image not found"),
    ],
)
def test_invalid_list_file_raises(name, file, text, part, root):
    dataset = build(name, root, {file: text})
    words = message(lambda: dataset.query)
    assert part in words and Path(file).name in words and "fix:" in words


def test_invalid_training_list_of_llcm_raises(root):
    write(root, {"LLCM/vis/0001/x.jpg": ""})
    for line, part in (("vis/0001/x.jpg 0", "such as 0001_c01"), ("vis/0001/0001_c07_s1.jpg 0", "image not found")):
        dataset = build("LLCM", root, {"LLCM/idx/train_vis.txt": line})
        assert part in message(lambda dataset=dataset: dataset.train)


@pytest.mark.parametrize(
    ("name", "file", "split"),
    [
        ("LTCC", "LTCC_ReID/query/005__c2_1.png", "query"),
        ("VCClothes", "VC-Clothes/train/0001-01--01.jpg", "train"),
        ("LaST", "last/train/000001/000001_0003_.jpg", "train"),
    ],
)
def test_empty_clothes_raise(name, file, split, root):
    dataset = build(name, root, {file: ""})
    text = message(lambda: getattr(dataset, split))
    assert Path(file).name in text and "'clothes' is empty" in text and "fix:" in text


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("SYSUMM01", "SYSU-MM01/cam3"),
        ("LLCM", "LLCM/test_nir"),
        ("PRCC", "prcc/rgb/test/A"),
        ("PRCC", "prcc/rgb/test/B"),
        ("DeepChange", "DeepChangeDataset/test-set-gallery"),
    ],
)
def test_missing_folder_raises(name, folder, root):
    write(root, TREES[name][0])
    (root / folder).rename(root / "elsewhere")
    assert str(root / folder) in message(lambda: build_dataset(name))


def test_split_without_images_of_its_cameras_raises(root):
    files = {path: text for path, text in TREES["VCClothesSC"][0].items() if not path.startswith("VC-Clothes/query")}
    write(root, files | {"VC-Clothes/query/0002-01-01-01.jpg": ""})
    assert "no image from cameras 2, 3 in" in message(lambda: build_dataset("VCClothesSC").query)
    assert len(build_dataset("VCClothes").query) == 1


def test_identities_without_images_of_a_modality_raise(root):
    tree = {path: text for path, text in TREES["LLCM"][0].items() if "test_nir" not in path}
    write(root, tree | {"LLCM/test_nir/cam1/0002/notes.txt": ""})
    assert "no *.jpg file of the listed identities" in message(lambda: build_dataset("LLCM").query)


def test_published_counts_name_existing_splits(subtests):
    names = [name for name in TREES if DATASET_REGISTRY.get(name).published_counts]
    assert len(names) == 22
    for name in names:
        with subtests.test(name):
            counts = DATASET_REGISTRY.get(name).published_counts
            assert set(counts) <= set(SPLITS) and all(len(pair) == 2 and min(pair) >= 0 for pair in counts.values())


TOTALS = {
    **{"LTCC": 17119, "VCClothes": 19060, "LaST": 71248 + 135529, "CCVID": 347833},
    **{"SOP": 120053, "InShop": 52712, "CUB200": 11788},
}


def test_published_counts_add_up_to_the_published_total(subtests):
    for name, total in TOTALS.items():
        with subtests.test(name):
            assert sum(images for images, _ in DATASET_REGISTRY.get(name).published_counts.values()) == total


def test_identity_0_of_ltcc_is_a_person_and_not_a_distractor(root):
    person = {f"LTCC_ReID/{folder}/000_2_c2_1.png": "" for folder in ("query", "test")}
    dataset = build("LTCC", root, files=person)
    (part,) = training_parts([dataset], combine_all=True)
    assert sum("/query/" in item.path or "/test/" in item.path for item in part if item.pid == "ltcc_0") == 2


def test_protocols_of_a_dataset_exist_and_have_their_columns(new_root, subtests):
    names = [name for name in TREES if DATASET_REGISTRY.get(name).protocols]
    assert len(names) == 20
    for name in names:
        with subtests.test(name):
            dataset = build(name, new_root())
            for rule in DATASET_REGISTRY.get(name).protocols:
                assert set(PROTOCOL_REGISTRY.get(rule)().columns) <= set(dataset.query[0].columns or ())


@pytest.mark.parametrize("rule", ["sysu_all_single", "sysu_indoor_multi", "llcm", "prcc", "recall_at_k"])
def test_protocols_rank_the_images_of_their_dataset(rule, root):
    name = next(name for name in TREES if rule in DATASET_REGISTRY.get(name).protocols)
    dataset = build(name, root)
    sides = [[[getattr(item, field) for item in items] for field in ("pid", "camid")] for items in dataset.test_items()]
    (query_pids, query_camids), (gallery_pids, gallery_camids) = torch.tensor(sides[0]), torch.tensor(sides[1])
    identities = Identities(query_pids, gallery_pids, query_camids, gallery_camids)
    features = [torch.nn.functional.one_hot(pids, 10).float() for pids in (query_pids, gallery_pids)]
    result = compute_metrics(*features, identities, protocol_of(rule, resamples=0))
    assert result.metrics()["Rank-1"] == 100
