"""Rows that compare published and measured results: targets, fingerprints, intervals and files."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fastamp.config import get_cfg
from fastamp.data.datasets import DATASET_REGISTRY
from fastamp.data.datasets.base import ImageDataset, ImageItem
from fastamp.engine.reproduction import (
    METRICS,
    Row,
    difference,
    fingerprint,
    has_published_counts,
    published_of_recipe,
    read_row,
    read_rows,
    row_file,
    row_table,
    summarize,
    targets_of,
    write_row,
)
from fastamp.evaluation.split_average import average_runs
from fastamp.utils.errors import DataError
from fastamp.zoo import find, list_entries

FIGURES = [{"test_set": "Market-1501", "mAP": 50.0, "rank1": 70.0, "protocol": "no re-ranking", "source": "README.md"}]


def row(**values):
    measured = {"mAP": {"value": 51.5, "low": 50.0, "high": 53.0}, "Rank-1": {"value": 69.0}}
    data = {f"Market1501 {split}": {"folder": "m", "images": 2, "identities": 1, "names": "ab"} for split in ("query",)}
    data["Market1501 gallery"] = data["Market1501 query"]
    default = Row(
        name="a",
        kind="evaluation",
        dataset="Market1501",
        protocol="cosine",
        published=FIGURES,
        measured=measured,
        interval="95 % bootstrap over queries",
        difference=difference(measured, FIGURES),
        data=data,
        settings={},
        versions={"fastamp": "0.1.0"},
        hardware={"device": "CPU"},
        seconds=1.0,
        peak_memory_mib=2.0,
        date="2026-01-01",
    )
    return replace(default, **values)


def test_targets_of_all_entries_are_datasets_with_valid_keys():
    targets = [target for entry in list_entries() for target in targets_of(entry)]
    assert len(targets) > 150
    for target in targets:
        assert target.dataset in DATASET_REGISTRY
        assert target.published and all(
            any(one.get(key) is not None for key in METRICS.values()) for one in target.published
        )
        get_cfg().with_values(dict(target.keys))


def test_protocol_of_the_figures_sets_keys():
    plain, reranked = targets_of(find("solider_reid_swin_tiny_msmt17"))
    assert (plain.keys["TEST.RERANK.ENABLED"], reranked.keys["TEST.RERANK.ENABLED"]) == (False, True)
    (ain, _) = targets_of(find("torchreid_osnet_ain_x1_0_msmt17_combineall"))
    assert (ain.dataset, dict(ain.keys)) == ("Market1501", {"TEST.METRIC": "cosine"})
    paper_and_program = targets_of(find("transreid_ssl_vit_small_market1501"))[0].published
    assert [figures["mAP"] for figures in paper_and_program] == [91.2, 91.0]
    assert targets_of(find("megadescriptor_t_224")) == []


def test_recipe_has_the_figures_of_its_published_file():
    recipe = "Market1501/bagtricks_R50"
    assert published_of_recipe(recipe, "Market1501", ("Market1501",))[0]["mAP"] == 86.1
    assert published_of_recipe(recipe, "Demo", ("Market1501",)) == []
    assert published_of_recipe(recipe, "Market1501", ("Demo",)) == []


class Folder(ImageDataset):
    dataset_name = "folder"

    def __init__(self, root, version):
        items = [ImageItem(str(root / version / f"{name}.jpg"), number, 0) for number, name in enumerate("ab")]
        super().__init__(items, items[:1], items)


def test_fingerprint_tells_versions_apart_and_ignores_the_place(tmp_path):
    for place, content in (("x/v1", b"12"), ("y/v1", b"12"), ("x/v2", b"123")):
        (tmp_path / place).mkdir(parents=True)
        for name in "ab":
            (tmp_path / place / f"{name}.jpg").write_bytes(content)
    found = [
        fingerprint(Folder(tmp_path / root, version).gallery, tmp_path / root)
        for root, version in (("x", "v1"), ("y", "v1"), ("x", "v2"))
    ]
    assert found[0] == found[1]
    assert found[0] | {"bytes": 6, "folder": "v2"} == found[2]
    assert (found[0]["images"], found[0]["identities"], found[0]["bytes"]) == (2, 2, 4)
    query = fingerprint(Folder(tmp_path / "x", "v1").query, tmp_path / "x")
    assert query["names"] != found[0]["names"]
    (tmp_path / "x/v1/a.jpg").unlink()
    with pytest.raises(DataError, match="a.jpg"):
        fingerprint(Folder(tmp_path / "x", "v1").query, tmp_path / "x")


def test_counts_are_compared_with_the_published_ones():
    published = build_counts(3368, 750)
    assert has_published_counts(published)
    assert not has_published_counts(build_counts(3367, 750))
    assert not has_published_counts(build_counts(3368, 749))
    assert not has_published_counts({"Demo query": {"images": 100, "identities": 50}})
    assert not has_published_counts({"Unregistered query": {"images": 100, "identities": 50}})
    assert not has_published_counts({})


def build_counts(images, identities):
    return {
        "Market1501 query": {"images": images, "identities": identities},
        "Market1501 gallery": {"images": 15913, "identities": 751},
    }


def test_interval_of_several_seeds_is_that_of_scipy():
    values = [61.0, 63.5, 62.0]
    measured, _ = summarize([{"mAP": value, "Rank-1": 70.0, "intervals": {"mAP": [0, 1]}} for value in values])
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    assert measured["mAP"] == pytest.approx({"value": np.mean(values), "low": low, "high": high})
    assert measured["Rank-1"] == {"value": 70.0, "low": 70.0, "high": 70.0}
    assert "mINP" not in measured


def test_interval_of_one_result_is_that_of_its_evaluation():
    measured, _ = summarize([{"mAP": 60.0, "mINP": 20.0, "intervals": {"mAP": [58.0, 62.0]}}])
    assert measured == {"mAP": {"value": 60.0, "low": 58.0, "high": 62.0}, "mINP": {"value": 20.0}}


def test_interval_over_splits_is_their_standard_deviation():
    found = average_runs([{"mAP": 60.0, "Rank-1": 50.0}, {"mAP": 64.0, "Rank-1": 50.0}])
    measured, interval = summarize([found])
    assert measured["mAP"] == pytest.approx({"value": 62.0, "low": 62 - 8**0.5, "high": 62 + 8**0.5})
    assert "2 splits" in interval


def test_figures_on_random_splits_are_means_over_all():
    entry = replace(find("torchreid_osnet_x1_0_msmt17"), results=[FIGURES[0] | {"test_set": "VIPeR"}, FIGURES[0]])
    viper, market = targets_of(entry)
    assert viper.keys["TEST.ALL_SPLITS"] and "TEST.ALL_SPLITS" not in market.keys


def test_row_is_read_as_written_and_unknown_images_are_shown(tmp_path):
    written = row()
    file = row_file(tmp_path / "rows", "Market1501/a", "Market1501", {"seeds": [0]})
    assert file != row_file(tmp_path / "rows", "Market1501/a", "Market1501", {"seeds": [1]})
    write_row(written, file)
    (found,) = read_rows(tmp_path / "rows")
    assert found.difference == {"mAP": 1.5, "Rank-1": -1.0}
    (cells,) = row_table([found])[0]
    assert any("unknown" in cell for cell in cells)
    known = replace(found, data=build_known())
    assert not any("unknown" in cell for cell in row_table([known])[0][0])


def build_known():
    return {name: values | {"folder": "m", "names": "ab"} for name, values in build_counts(3368, 750).items()}


@pytest.mark.parametrize(
    "change",
    [
        {"measured": {}},
        {"measured": {"mAP": {"value": 101}}},
        {"measured": {"other": {"value": 1}}},
        {"difference": {"mAP": 0.0}},
        {"format": 2},
        {"more": 1},
        {"data": {"Market1501 query": {}}},
        {"data": {}},
        {"seconds": "long"},
    ],
)
def test_damaged_row_is_refused(tmp_path, change):
    file = tmp_path / "row.json"
    write_row(row(), file)
    read_row(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DataError, match="row.json"):
        read_row(file)
    file.write_text("{")
    with pytest.raises(DataError, match="row.json"):
        read_row(file)
