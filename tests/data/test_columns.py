"""Named columns: types in CSV files, encoding, batches, samplers and losses."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fastamp.config import get_cfg
from fastamp.data.build import build_dataset, build_reid_test_loader, build_reid_train_loader, with_num_categories
from fastamp.data.columns import count_missing, describe_type, encode_columns, integers_of
from fastamp.data.datasets.csv_columns import CsvColumnBuilder
from fastamp.data.datasets.items import Column, ImageItem, PackedItems, PackedText
from fastamp.data.samplers import ColumnBalancedSampler
from fastamp.data.training_images import training_parts
from fastamp.engine import DefaultTrainer
from fastamp.modeling.losses.compute import with_columns
from fastamp.utils.errors import ConfigError, DataError

CELLS = {
    "integer": ["7", "-3", "0", ""],
    "float": ["0.5", "1e-3", "7", "", "-.5"],
    "list": ["[1, 0]", "[2, 3]", ""],
    "text": ["007", "7"],
    "date": ["2021-05-03", "2021-05-04"],
    "nan": ["nan", "1.0"],
    "infinity": ["1e5", "inf"],
    "broken list": ["[1, 2]", "[1, 2"],
    "nested list": ["[[1]]", "[[2]]"],
    "huge integer": ["1" * 30, "2"],
    "empty": ["", ""],
    "underscore": ["1_000", "2"],
    "true": ["True", "False"],
}
TYPES = {
    "date": "text",
    "nan": "text",
    "infinity": "text",
    "broken list": "text",
    "nested list": "text",
    "huge integer": "text",
    "empty": "text",
    "underscore": "text",
    "true": "text",
}


def built(cells):
    builder = CsvColumnBuilder()
    for start in range(0, len(cells), 2):
        builder.extend(cells[start : start + 2])
    return builder.build()


def test_type_of_csv_column_is_determined_by_its_values(monkeypatch, subtests):
    for limit in (1, 2**16):
        for name in CELLS:
            with subtests.test(f"{limit} {name}"):
                monkeypatch.setattr("fastamp.data.datasets.csv_columns._MAX_CATEGORIES", limit)
                column = built(CELLS[name])
                assert describe_type(column) == TYPES.get(name, name)
                assert count_missing(column) == CELLS[name].count("")


@pytest.mark.parametrize("cells", [["7", "", "x"], ["7", "", "x", "été"], []])
def test_packed_texts_as_a_list(cells):
    assert PackedText.pack(cells).tolist() == cells


def test_white_space_around_csv_values_is_removed(tmp_path):
    lines = ["path , pid,split\t,side", " a b.png ,1 , train, left side ", "b.png,2,train,\u00a0right\u00a0"]
    (tmp_path / "spaces.csv").write_text("\n".join(lines), encoding="utf-8")
    items = build_dataset(f"csv:{tmp_path}/spaces.csv").train
    assert [Path(item.path).name for item in items] == ["a b.png", "b.png"]
    assert [item.columns["side"] for item in items] == ["left side", "right"]


def test_csv_values_are_exact():
    assert list(built(["7", "", "-3"])) == [7, None, -3]
    assert list(built(["007", "7", ""])) == ["007", "7", None]
    assert list(built(["[1, 2]", "", '["a", 0.5]'])) == [(1, 2), None, ("a", 0.5)]
    floats = list(built(["0.25", "", "3"]))
    assert floats[0] == 0.25 and np.isnan(floats[1]) and floats[2] == 3


def encode(values, categories=None, *, training=True, title="mine"):
    categories = {} if categories is None else {"c": categories}
    return encode_columns({"c": Column.pack(values)}, categories, title=title, training=training)["c"]


def test_encoding_of_each_type():
    text = encode(["b", "10", "9", None, "a", "007"])
    assert text.names == ("007", "9", "10", "a", "b") and text.values.tolist() == [4, 2, 1, -1, 3, 0]
    integer = encode([5, None, 2])
    assert integer.values.dtype == np.int64 and integer.values.tolist() == [5, -1, 2] and integer.names == ()
    assert encode([5, -1]).names is None and encode([None, None]).names == ()
    number = encode([0.5, None, 2])
    assert number.values.dtype == np.float32 and np.isnan(number.values[1])
    lists = encode([(1, 0), (0, 1)])
    assert lists.values.dtype == np.int64 and lists.values.tolist() == [[1, 0], [0, 1]]
    captions = encode([("a walks",), (), ("b", "c")])
    assert captions.take(np.array([2, 0])) == [("b", "c"), ("a walks",)]
    assert encode([(1, 2), None]).values == [(1, 2), ()]


def test_categories_fix_the_numbers_of_training_and_test_images():
    listed = ["visible", "infrared"]
    assert encode(["infrared", "visible"], listed).values.tolist() == [1, 0]
    test = encode(["infrared", "radar", "infrared"], listed, training=False)
    assert test.values.tolist() == [1, 2, 1] and test.names == ("visible", "infrared", "radar")
    assert encode([5, 9, 5], []).values.tolist() == [0, 1, 0]  # integers as categories of the training set
    with pytest.raises(DataError, match=r"radar.*listed: visible, infrared"):
        encode(["radar", "visible"], listed)
    with pytest.raises(ConfigError, match=r"no column 'modalty'; available columns: modality"):
        encode_columns({"modality": Column.pack(["a"])}, {"modalty": []}, title="mine", training=True)


def test_missing_integers_and_negative_ones_are_an_error():
    assert encode([-1, -2]).values.tolist() == [-1, -2]
    with pytest.raises(DataError, match="-2"):
        encode([None, -2])


def test_floats_that_float32_cannot_distinguish_are_reported(caplog):
    encode([1600000000.25, 1600000001.5])
    assert "precision of float32" in caplog.text


def test_reserved_names_are_an_error():
    with pytest.raises(DataError, match="targets"):
        PackedItems.of([ImageItem("a.jpg", 1, 0, columns={"targets": 1})])


def test_items_keep_their_columns_through_all_operations():
    first = PackedItems.of([ImageItem("a.jpg", 1, 0, columns={"side": "left", "age": 3}), ("b.jpg", 2, 1)])
    second = PackedItems.of([("c.jpg", 3, 0)])
    both = first + second
    assert [item.columns for item in both] == [
        {"side": "left", "age": 3},
        {"side": None, "age": None},
        {"side": None, "age": None},
    ]
    assert both.take(np.array([0])).replace(pids=Column.pack([9]))[0].columns == {"side": "left", "age": 3}
    assert second[0].columns is None and second.columns == {}
    floats = PackedItems.of([ImageItem("a.jpg", 1, 0, columns={"age": 0.5})])
    assert [item.columns["age"] for item in first[:1] + floats] == [3, 0.5]


@pytest.fixture
def csv_set(tmp_path):
    """Write a CSV dataset with columns of all types and missing values; return its name."""
    rows = ["path,pid,camid,split,modality,clothes,age,code"]
    for pid, number in itertools.product(range(8), range(6)):
        name = f"{pid}_{number}.png"
        Image.new("RGB", (8, 16), (30 * pid, 40 * number, 90)).save(tmp_path / name)
        split = "train" if pid < 4 else "query" if number == 0 else "gallery"
        modality = "infrared" if number in (0, 5) else "visible"
        rows.append(f"{name},{pid:03d},{number % 2},{split},{modality},{pid}_{number % 3},{pid / 2},{number:03d}")
    (tmp_path / "set.csv").write_text("\n".join(rows) + "\n")
    return f"csv:{tmp_path}/set.csv"


def config(name, *values):
    cfg = get_cfg()
    keys = ["DATASETS.NAMES", f"('{name}',)", "DATASETS.TESTS", f"('{name}',)", "DATALOADER.NUM_WORKERS", 0]
    keys += ["INPUT.SIZE_TRAIN", (16, 8), "INPUT.SIZE_TEST", (16, 8), "SOLVER.IMS_PER_BATCH", 8, "MODEL.DEVICE", "cpu"]
    cfg.merge_from_list([*keys, *values])
    return cfg


def test_batches_carry_the_columns_of_a_csv_file(csv_set):
    cfg = config(csv_set, "DATASETS.CATEGORIES.modality", ["visible", "infrared"])
    loader = build_reid_train_loader(cfg)
    batch = next(iter(loader))
    numbers = [int(path.rsplit("_")[-1].removesuffix(".png")) for path in batch["img_paths"]]
    assert batch["modality"].tolist() == [int(number in (0, 5)) for number in numbers]
    assert batch["clothes"].dtype == torch.int64 and loader.dataset.columns["clothes"].names[0] == "0_0"
    assert batch["age"].dtype == torch.float32
    assert [loader.dataset.columns["code"].names[code] for code in batch["code"]] == [f"{n:03d}" for n in numbers]
    cfg = with_num_categories(cfg, loader.dataset)
    assert cfg.DATASETS.NUM_CATEGORIES == {"modality": 2, "clothes": 12, "code": 6}
    test_loader, num_query = build_reid_test_loader(cfg, csv_set)
    batch = next(iter(test_loader))
    assert batch["modality"][:num_query].tolist() == [1] * num_query


def test_sets_without_columns_are_unchanged(csv_set, tmp_path):
    lines = (tmp_path / "set.csv").read_text().splitlines()
    (tmp_path / "plain.csv").write_text("\n".join(",".join(line.split(",")[:4]) for line in lines))
    name = f"csv:{tmp_path}/plain.csv"
    dataset = build_reid_train_loader(config(name)).dataset
    assert dataset.columns == {} and list(dataset.__getitems__([(0, 0, 0)])) == [
        "images",
        "targets",
        "camids",
        "viewids",
        "indices",
        "img_paths",
    ]
    cfg = config(name)
    assert with_num_categories(cfg, dataset) is cfg


def test_datasets_with_different_columns_are_combined(csv_set, tmp_path):
    (tmp_path / "other.csv").write_text("path,pid,split,side\n" + "".join(f"{p}_0.png,x{p},train,left\n" for p in "01"))
    parts = training_parts([build_dataset(csv_set), build_dataset(f"csv:{tmp_path}/other.csv")])
    items = PackedItems.concat(parts)
    assert items[0].columns["side"] is None and items[len(items) - 1].columns["modality"] is None


def test_short_lines_have_missing_values(tmp_path):
    (tmp_path / "short.csv").write_text("path,pid,age,side\na.png,1\nb.png,1,3\nc.png,1,4,left\n")
    items = build_dataset(f"csv:{tmp_path}/short.csv").train
    assert [item.columns for item in items] == [
        {"age": None, "side": None},
        {"age": 3, "side": None},
        {"age": 4, "side": "left"},
    ]


def test_similar_names_of_csv_columns_are_reported(csv_set, tmp_path, caplog):
    (tmp_path / "typo.csv").write_text("path,pid,cam_id,split,features\n0_0.png,1,2,train,5\n")
    dataset = build_dataset(f"csv:{tmp_path}/typo.csv")
    assert "cam_id" in caplog.text and "camid" in caplog.text and "features" in caplog.text
    assert dataset.train[0].columns == {"cam_id": 2}


@pytest.mark.parametrize("name", ["modality", "clothes", "camera", "code"])
def test_balanced_sampler_shares_the_images_of_an_identity_equally(csv_set, name):
    sampler_keys = ["DATALOADER.SAMPLER_TRAIN", "ColumnBalancedSampler", "DATALOADER.BALANCE_COLUMN", name]
    loader = build_reid_train_loader(config(csv_set, *sampler_keys, "DATALOADER.NUM_INSTANCE", 4))
    dataset, stream = loader.dataset, loader.batch_sampler.sampler.epoch(0)
    values = dataset.camids if name == "camera" else dataset.columns[name].values
    for _ in range(20):
        rows = np.array(list(itertools.islice(stream, 4)))
        assert len(set(dataset.labels[rows])) == 1
        available = len(set(values[dataset.labels == dataset.labels[rows[0]]]))
        counts = np.unique(values[rows], return_counts=True)[1]
        assert len(counts) == min(4, available) and counts.max() - counts.min() <= 1


def test_balanced_sampler_repeats_images_of_rare_values():
    options = {"labels": [0] * 5 + [1] * 2, "camids": [0] * 7, "batch_size": 12, "num_instances": 6, "seed": 0}
    sampler = ColumnBalancedSampler(values=np.array([0, 0, 0, 0, 1, 0, 0]), **options)
    rows = np.array(list(itertools.islice(sampler.epoch(0), 12))).reshape(2, 6)
    of_first = next(part for part in rows if part[0] < 5)
    assert sorted(of_first.tolist())[-3:] == [4, 4, 4] and len(set(of_first.tolist())) == 4
    assert sorted(next(part for part in rows if part[0] >= 5).tolist()) == [5, 5, 5, 6, 6, 6]


def test_balanced_epoch_counts_the_most_frequent_value_for_all():
    options = {"labels": [0] * 5 + [1] * 2, "camids": [0] * 7, "batch_size": 12, "num_instances": 6, "seed": 0}
    values = np.array([0, 0, 0, 0, 1, 0, 1])
    assert ColumnBalancedSampler(values=values, **options).images_per_epoch is None
    assert ColumnBalancedSampler(values=values, balanced_epoch=True, **options).images_per_epoch == 2 * 5


def test_column_without_values_is_an_error():
    with pytest.raises(ConfigError, match="'side'"):
        integers_of("side", {"side": np.array([-1, -1])}, "DATALOADER.BALANCE_COLUMN", "the training set")


@pytest.mark.parametrize(("column", "message"), [("sides", "no column 'sides'; available"), ("age", "integer or text")])
def test_balanced_sampler_rejects_other_columns(csv_set, column, message):
    keys = ["DATALOADER.SAMPLER_TRAIN", "ColumnBalancedSampler", "DATALOADER.BALANCE_COLUMN", column]
    with pytest.raises(ConfigError, match=message):
        build_reid_train_loader(config(csv_set, *keys))


class ClothesLoss(nn.Module):
    loss_name = "loss_clothes"
    columns = ("clothes",)

    def forward(self, outputs, targets):
        return outputs["features"].sum() * 0 + outputs["clothes"].sum()


def test_losses_receive_the_columns_that_they_name():
    outputs, losses = {"features": torch.ones(2, 3)}, {"loss_clothes": ClothesLoss()}
    batch = {"images": torch.zeros(2, 3, 4, 4), "targets": torch.arange(2), "clothes": torch.tensor([3, 4])}
    assert with_columns(outputs, batch, losses)["clothes"].tolist() == [3, 4]
    assert with_columns(outputs, batch, {}) is outputs and "clothes" not in outputs
    several = with_columns([(0.5, outputs), (1.0, outputs)], batch, losses)
    assert [weight for weight, _ in several] == [0.5, 1.0] and several[1][1]["clothes"].tolist() == [3, 4]
    with pytest.raises(ConfigError, match=r"'clothes'.*available columns: side"):
        with_columns(outputs, {"images": torch.zeros(2, 3, 4, 4), "side": torch.arange(2)}, losses)


def test_evaluation_groups_queries_by_a_column_of_the_csv_file(csv_set):
    cfg = config(csv_set, "TEST.GROUP_BY", "clothes", "TEST.BOOTSTRAP", 0)
    loader, num_query = build_reid_test_loader(cfg, csv_set)
    _, evaluator = DefaultTrainer.build_test(cfg, csv_set, (loader, num_query))
    for batch in loader:
        evaluator.process(batch, batch["images"].float().flatten(1))
    groups = evaluator.evaluate()["groups"]
    assert list(groups) == [f"{pid}_0" for pid in range(4, 8)] and groups["4_0"]["num_query"] == 1
    cfg = config(csv_set, "TEST.GROUP_BY", "species")
    with pytest.raises(DataError, match=r"'species'.*\n.*available columns: camera, age, clothes, code, modality"):
        DefaultTrainer.build_test(cfg, csv_set, (loader, num_query))


def test_cameras_that_the_protocol_cannot_evaluate_are_an_error_before_training(csv_set):
    cfg = config(csv_set, "TEST.PROTOCOL", "sysu_all_single")
    test = build_reid_test_loader(cfg, csv_set)
    with pytest.raises(DataError, match=r"SYSU-MM01(.|\n)* 0; .* 0, 1"):
        DefaultTrainer.build_test(cfg, csv_set, test)
