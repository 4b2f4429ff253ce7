"""`TEST.ALL_SPLITS`: mean and standard deviation over the random splits and directions of a test set."""

import itertools
import json
import statistics

import numpy as np
import pytest
import tiny
import torch
from PIL import Image

from fastamp.data.build import build_dataset
from fastamp.data.random_splits import evaluated_splits
from fastamp.engine import DefaultTrainer
from fastamp.engine.hooks.evaluation import _flatten_metrics
from fastamp.report.sections import _tables
from fastamp.utils.errors import ConfigError

PEOPLE = 12
TEST = (("a", "query"), ("b", "gallery"))


class Pixels(torch.nn.Module):
    """Model whose features are the pixels."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.images = 0

    def forward(self, batch):
        self.images += len(batch["images"])
        return self.scale * batch["images"].float().flatten(1) - 128


@pytest.fixture
def images(tmp_path, monkeypatch):
    """(person, camera) -> pixels of the fake VIPeR images, which are similar for one person."""
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path / "data"))
    draw, found = np.random.default_rng(0), {}
    for person in range(PEOPLE):
        base = draw.integers(0, 256, (8, 4, 3))
        for camera in "ab":
            folder = tmp_path / f"data/VIPeR/cam_{camera}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = (base + draw.normal(0, 300, base.shape)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{person:03d}_45.bmp")
            found[person, camera] = pixels.astype(np.float64).ravel() - 128
    return found


def config(folder, *opts):
    sizes = ("INPUT.SIZE_TEST", "(8, 4)", "DATASETS.TESTS", "('VIPeR',)", "TEST.BASELINES", "False")
    return tiny.tiny_config(folder / "run", "DATASETS.NAMES", "('Demo',)", *sizes, "TEST.ALL_SPLITS", "True", *opts)


def naive(images, cfg, splits, queries="ab"):
    """Return mAP and Rank-1 of each split and direction, by a sort of the cosines of each query."""
    results = []
    for split, query in itertools.product(splits, queries):
        source = build_dataset("VIPeR", cfg.with_values({"DATASETS.VIPER.SPLIT": split}))
        people, gallery = [item.pid - 1 for item in source.query], "ab".replace(query, "")
        ranks = []
        for person in people:
            feature = images[person, query]
            cosine = {
                other: feature @ images[other, gallery] / np.linalg.norm(images[other, gallery]) for other in people
            }
            ranks.append(sorted(people, key=cosine.get, reverse=True).index(person) + 1)
        results.append((100 * np.mean([1 / rank for rank in ranks]), 100 * np.mean([rank == 1 for rank in ranks])))
    return results


def test_mean_over_all_splits_and_directions_is_that_of_a_naive_loop(images, tmp_path):
    cfg = config(tmp_path)
    model = Pixels()
    found = DefaultTrainer.test(cfg, model)
    assert model.images == len(images) == 2 * PEOPLE  # each image once
    expected = naive(images, cfg, range(10))
    assert len(found["splits"]) == len(expected) == 20 and len(set(expected)) > 5
    for position, name in enumerate(("mAP", "Rank-1")):
        values = [result[position] for result in expected]
        assert [split[name] for split in found["splits"].values()] == pytest.approx(values)
        assert found[name] == pytest.approx(np.mean(values))
        assert found["std"][name] == pytest.approx(statistics.stdev(values))
    flat = dict(_flatten_metrics("VIPeR", found))
    assert flat["VIPeR/mAP std"] == found["std"]["mAP"] and flat["VIPeR, split 3, query cam_b/mAP"] in dict(expected)
    assert all(isinstance(value, int | float) for value in flat.values())
    (table,) = _tables(found)
    assert [row[0] for row in table.rows] == ["mean", "standard deviation", *found["splits"]]


def test_splits_of_the_training_set_are_excluded(images, tmp_path):
    cfg = config(tmp_path, "DATASETS.NAMES", "('VIPeR',)", "DATASETS.VIPER.SPLIT", "4")
    found = DefaultTrainer.test(cfg, Pixels())
    values = [one for one, _ in naive(images, cfg, [4])]
    assert [split["mAP"] for split in found["splits"].values()] == pytest.approx(values)
    assert set(found["splits"]) == {"VIPeR, query cam_a", "VIPeR, query cam_b"}


def test_other_test_sets_are_evaluated_once_and_in_order(images, tmp_path):
    rows = [
        f"data/VIPeR/cam_{camera}/00{pid}_45.bmp,{pid},{camera},{split}" for pid in range(3) for camera, split in TEST
    ]
    (tmp_path / "set.csv").write_text("\n".join(["path,pid,camid,split", *rows]))
    name = f"csv:{tmp_path / 'set.csv'}"
    found = DefaultTrainer.test(config(tmp_path, "DATASETS.TESTS", f"('VIPeR', '{name}')"), Pixels())
    assert list(found) == ["VIPeR", name] and "splits" not in found[name] and len(found["VIPeR"]["splits"]) == 20
    assert list(evaluated_splits(config(tmp_path, "TEST.ALL_SPLITS", "False"), "VIPeR")) == ["VIPeR"]


@pytest.mark.parametrize(
    ("name", "opts", "count"),
    [
        ("CUHK03", ("DATASETS.CUHK03.CLASSIC", "True"), 20),
        ("CUHK03", (), 1),
        ("iLIDSVID", (), 10),
        ("PRID2011", (), 10),
        ("RegDB", (), 10),
        ("RegDBThermalToVisible", (), 10),
        ("csv:missing.csv", (), 1),
    ],
)
def test_every_dataset_with_several_splits(tmp_path, name, opts, count):
    splits = evaluated_splits(config(tmp_path, *opts), name)
    assert len(splits) == count == len({json.dumps(values) for values in splits.values()})
    for values in splits.values():
        config(tmp_path, *opts).with_values(values)


def test_test_sets_without_splits_are_refused(demo, tmp_path):
    with pytest.raises(ConfigError, match=r"TEST\.ALL_SPLITS.*Demo"):
        DefaultTrainer._build_test_loaders(config(tmp_path, "DATASETS.TESTS", "('Demo',)"))
