"""Tests of columns in an evaluation: selection of rows, missing columns, groups of queries."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from naive_ranking import naive, protocol_of, random_set

from fastamp.config import get_cfg
from fastamp.evaluation import Identities, Protocol, ReidEvaluator, ReportOptions, compute_metrics, print_results
from fastamp.evaluation.identities import Junk, Matches
from fastamp.evaluation.protocol import check_columns
from fastamp.evaluation.ranking_rule import RankingRule
from fastamp.layers.distance import pairwise_distance
from fastamp.utils.errors import DataError


def with_columns(identities, **columns):
    """Add columns with random values 0..highest to identities; ``columns``: name -> highest value."""
    random = np.random.default_rng(7)
    sizes = len(identities.query_pids), len(identities.gallery_pids)
    values = {
        name: tuple(torch.from_numpy(random.integers(0, highest + 1, size)) for size in sizes)
        for name, highest in columns.items()
    }
    return Identities(
        identities.query_pids, identities.gallery_pids, identities.query_camids, identities.gallery_camids, values
    )


@pytest.fixture
def same_outfit():
    """Custom rule that needs the column ``clothes``."""

    def same(matches, queries, gallery):
        return matches.query_columns["clothes"][queries] == matches.gallery_columns["clothes"][gallery]

    class SameOutfit(RankingRule):
        text = "other clothes"
        junk = Junk(same)
        columns = ("clothes",)

    return Protocol(rule=SameOutfit(), resamples=0)


def test_rule_reads_columns_in_ranking_examples_and_pairs(same_outfit):
    queries, gallery, ids = random_set(1)
    ids = with_columns(ids, clothes=2)
    found = compute_metrics(queries, gallery, ids, same_outfit, ReportOptions(kinds=("best",), lists=3, length=100))
    as_cameras = Identities(ids.query_pids, ids.gallery_pids, *ids.columns["clothes"])
    expected = list(naive(pairwise_distance(queries, gallery, "cosine").tolist(), as_cameras))
    assert found.ranking.ap.tolist() == pytest.approx([row[0] for row in expected], abs=1e-12)
    for example in found.examples.lists["best"]:
        clothes = ids.columns["clothes"][1][example.gallery[example.matches]]
        assert (clothes != ids.columns["clothes"][0][example.query]).all()
    assert found.examples.cameras is not None  # its rankers see the columns of the gallery images of one camera


def test_selected_rows_keep_their_columns():
    _, _, ids = random_set(2)
    ids = with_columns(ids, clothes=5)
    rows, mask = np.array([4, 1]), torch.arange(120) % 2 == 0
    part = ids.select(rows, mask)
    assert part.query_pids.tolist() == ids.query_pids[[4, 1]].tolist()
    assert part.columns["clothes"][0].tolist() == ids.columns["clothes"][0][[4, 1]].tolist()
    assert part.columns["clothes"][1].tolist() == ids.columns["clothes"][1][::2].tolist()
    both = ids.all_images().columns["clothes"]
    assert both[0].tolist() == both[1].tolist() == torch.cat(ids.columns["clothes"]).tolist()
    assert Matches(ids, junk=None).gallery_columns["clothes"].dtype == np.int64


def test_missing_column_is_an_error_that_lists_the_available_ones(same_outfit):
    queries, gallery, ids = random_set(1)
    with pytest.raises(DataError, match=r"TEST.PROTOCOL=SameOutfit(.|\n)*'clothes'(.|\n)*species, time"):
        compute_metrics(queries, gallery, with_columns(ids, species=1, time=1), same_outfit)
    with pytest.raises(DataError, match=r"TEST.GROUP_BY=specie(.|\n)*'species'"):
        compute_metrics(queries, gallery, with_columns(ids, species=1), Protocol(group_by="specie"))


def test_group_by_a_missing_column_also_offers_the_camera():
    with pytest.raises(DataError, match=r"TEST.GROUP_BY=Camera(.|\n)*camera, species"):
        check_columns(["species"], Protocol(group_by="Camera"))
    # Protocols cannot use the camera as a column.
    with pytest.raises(DataError, match=r": species\n"):
        check_columns(["species"], protocol_of("cloth_changing"))


def evaluator(protocol, num_query):
    found = ReidEvaluator(get_cfg(), num_query)
    found.protocol = protocol
    return found


def batch_of(ids, rows=slice(None), **more):
    every = ids.all_images()
    return {"targets": every.query_pids[rows], "camids": every.query_camids[rows], **more}


def test_evaluator_collects_the_needed_columns_of_each_batch(same_outfit):
    queries, gallery, ids = random_set(3)
    ids = with_columns(ids, clothes=2)
    features, clothes = torch.cat((queries, gallery)), torch.cat(ids.columns["clothes"])
    found = evaluator(same_outfit, len(queries))
    for first in range(0, len(features), 64):
        rows = slice(first, first + 64)
        found.process(batch_of(ids, rows, clothes=clothes[rows], unused=clothes[rows]), features[rows])
    assert "column clothes" in found.rows.columns and "column unused" not in found.rows.columns
    assert found.evaluate()["mAP"] == compute_metrics(queries, gallery, ids, same_outfit).metrics()["mAP"]


def test_evaluator_error_lists_columns_of_the_batch(same_outfit):
    queries, gallery, ids = random_set(3)
    found, count = evaluator(same_outfit, len(queries)), len(queries) + len(gallery)
    extra = {"species": torch.zeros(count), "tags": [()] * count, "viewids": torch.zeros(count)}
    with pytest.raises(DataError, match=": species\n"):
        found.process(batch_of(ids, **extra), torch.cat((queries, gallery)))


def test_groups_equal_an_evaluation_of_their_queries_alone(caplog):
    queries, gallery, ids = random_set(5)
    ids = with_columns(ids, species=2)
    species = ids.columns["species"][0]
    species[:4] = -1
    found = evaluator(Protocol(group_by="species", resamples=0), len(queries))
    found.set_column_names({"species": ("lynx", "otter", "wolf")})
    features = torch.cat((queries, gallery))
    found.process(batch_of(ids, species=torch.cat(ids.columns["species"])), features)
    metrics = found.evaluate()
    assert list(metrics["groups"]) == ["lynx", "missing", "otter", "wolf"]
    for value, name in zip((0, 1, 2, -1), ("lynx", "otter", "wolf", "missing"), strict=True):
        rows = species == value
        alone = compute_metrics(queries[rows], gallery, ids.select(rows, slice(None)), Protocol(resamples=0)).metrics()
        for metric in ("mAP", "Rank-1", "mINP", "metric"):
            assert metrics["groups"][name][metric] == pytest.approx(alone[metric], abs=1e-9)
        assert metrics["groups"][name]["num_query"] == int(rows.sum())
    mean = np.mean([group["mAP"] for group in metrics["groups"].values()])
    assert metrics["mean_over_groups"]["mAP"] == pytest.approx(mean)
    json.dumps(metrics)
    print_results({"Lakes": metrics}, protocol="as tested")
    assert "group: otter" in caplog.text and "mean of 4 groups" in caplog.text


def test_group_without_a_match_has_counts_only_and_is_not_in_the_mean():
    queries, gallery, ids = random_set(5)
    ids.query_camids[0] = 9
    ids.query_pids[0] = 1000
    metrics = compute_metrics(queries, gallery, ids, Protocol(group_by="camera")).metrics()
    assert list(metrics["groups"]) == ["0", "1", "2", "9"]
    assert metrics["groups"]["9"] == {"num_query": 1, "num_query_without_match": 1}
    rest = [metrics["groups"][name]["mAP"] for name in "012"]
    assert metrics["mean_over_groups"]["mAP"] == pytest.approx(np.mean(rest))


def test_groups_of_float_column_are_sorted_by_number():
    queries, gallery, ids = random_set(5)
    values = torch.tensor([10.0, 2.5, float("nan")])[torch.arange(150) % 3]
    ids = Identities(*(getattr(ids, f"{side}_{name}") for name in ("pids", "camids") for side in ("query", "gallery")),
                     {"height": (values[:30], values[30:])})  # fmt: skip
    groups = compute_metrics(queries, gallery, ids, Protocol(group_by="height")).metrics()["groups"]
    assert list(groups) == ["2.5", "10", "missing"]


def test_missing_integers_and_columns_without_values_are_a_group_of_their_own():
    queries, gallery, ids = random_set(5)
    ids = with_columns(ids, age=2, empty=0, change=2)
    ages, changes = ids.columns["age"][0], ids.columns["change"][0]
    ages[:4], changes[:4] = -1, -1
    ids.columns["empty"][0].fill_(-1)
    ids = replace(ids, column_names={"age": (), "empty": ()})  # "change" has no missing values

    def groups(column):
        return compute_metrics(queries, gallery, ids, Protocol(group_by=column)).metrics()["groups"]

    assert list(groups("age")) == ["0", "1", "2", "missing"]
    assert list(groups("empty")) == ["missing"] and list(groups("change")) == ["-1", "0", "1", "2"]
