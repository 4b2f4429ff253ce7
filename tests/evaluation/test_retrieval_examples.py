"""Tests of retrieval examples: equality with naive loops, and bounded size."""

import dataclasses

import numpy as np
import pytest
import torch
from naive_ranking import naive, protocol_of, random_set

from fastamp.evaluation import Identities, ReportOptions, compute_metrics
from fastamp.evaluation.query_expansion import QueryExpansion
from fastamp.evaluation.rerank import ReRanking
from fastamp.layers.distance import pairwise_distance

ALL = ReportOptions(kinds=("best", "worst", "random"), lists=4, length=7)


def evaluate(report_options=ALL, **protocol):
    queries, gallery, ids = random_set(3, queries=90, cameras=4)
    return compute_metrics(queries, gallery, ids, protocol_of(**protocol), report_options), queries, gallery, ids


@pytest.mark.parametrize("rule", ["market1501", "no_camera"])
def test_camera_matrix_equals_map_of_rankings_restricted_to_camera_pairs(rule):
    result, queries, gallery, ids = evaluate(rule=rule, memory_budget_mb=0.01)
    matrix, distances = result.examples.cameras, pairwise_distance(queries, gallery, "cosine")
    assert matrix.query_cameras == matrix.gallery_cameras == [0, 1, 2, 3] and matrix.num_omitted == 0
    for row in range(4):
        for column in range(4):
            here, there = ids.query_camids == row, ids.gallery_camids == column
            some = Identities(ids.query_pids[here], ids.gallery_pids[there], ids.query_camids[here],
                              ids.gallery_camids[there])  # fmt: skip
            found = list(naive(distances[here][:, there].tolist(), some, cross_camera=rule == "market1501"))
            precisions = [ap for ap, _, _, valid in found if valid]
            assert matrix.queries[row, column] == len(precisions)
            if precisions:
                assert matrix.mean_ap[row, column] == pytest.approx(np.mean(precisions), abs=1e-6)
    own_camera = np.isnan(np.diag(matrix.mean_ap))
    assert own_camera.all() == (rule == "market1501")


def test_rank_lists_contain_nearest_images_without_junk():
    result, queries, gallery, ids = evaluate()
    distances = pairwise_distance(queries, gallery, "cosine").numpy()
    shown = [one for lists in result.examples.lists.values() for one in lists]
    assert len(shown) == 12
    for one in shown:
        same = (ids.gallery_pids == ids.query_pids[one.query]).numpy()
        junk = same & (ids.gallery_camids == ids.query_camids[one.query]).numpy()
        order = [g for g in np.argsort(distances[one.query], kind="stable") if not junk[g]]
        assert one.gallery.tolist() == order[:7]
        assert one.matches.tolist() == same[order[:7]].tolist()
        assert one.ap == result.ranking.ap[one.query]
        assert one.first_match == 1 + int(result.ranking.first_match[one.query, 0])
        np.testing.assert_allclose(one.distances, distances[one.query][one.gallery], atol=1e-6)


def test_best_and_worst_rank_lists_cover_many_identities():
    result, *_, ids = evaluate(dataclasses.replace(ALL, lists=8))
    lists, ap = result.examples.lists, result.ranking.ap
    best, worst = ([one.query for one in lists[kind]] for kind in ("best", "worst"))
    assert not set(best) & set(worst)
    assert ap[best].min() >= ap.median() >= ap[worst].max()
    assert len(set(ids.query_pids[best].tolist())) > 4
    assert ap[best[0]] == ap.max() and ap[worst[0]] == ap[result.ranking.valid].min()


def test_best_and_worst_rank_lists_are_disjoint_with_few_queries():
    queries, gallery, ids = random_set(3, queries=3)
    examples = compute_metrics(queries, gallery, ids, report_options=ALL).examples
    assert [len(examples.lists[kind]) for kind in ("best", "worst", "random")] == [2, 1, 3]


def test_roc_curve_of_retrieval_examples_equals_roc_curve_of_metrics():
    plain, *_ = evaluate()
    asked, *_ = evaluate(false_accept_rates=(0.1,))
    assert plain.roc is None and not plain.examples.roc_uses_all_pairs and asked.examples.roc is asked.roc
    np.testing.assert_array_equal(plain.examples.roc.tar, asked.roc.tar)
    assert plain.metrics().keys() < asked.metrics().keys()


def test_retrieval_examples_of_a_large_set_use_sampled_queries():
    result, *_ = evaluate(dataclasses.replace(ALL, pairs=120 * 40, cameras=2))
    examples = result.examples
    assert (examples.sampled, examples.queries) == (40, 90)
    assert examples.roc.num_genuine + examples.roc.num_impostor <= 120 * 40
    assert len(examples.cameras.query_cameras) == 2 and examples.cameras.num_omitted == 4
    again, *_ = evaluate(dataclasses.replace(ALL, pairs=120 * 40, cameras=2), memory_budget_mb=0.005)
    # Products in other blocks round differently, which can move a distance to the next bin of the curve.
    rates = np.linspace(0.01, 0.99, 50)
    curves = [np.interp(rates, evaluated.roc.far, evaluated.roc.tar) for evaluated in (examples, again.examples)]
    np.testing.assert_allclose(*curves, atol=0.01)
    np.testing.assert_allclose(examples.cameras.mean_ap, again.examples.cameras.mean_ap)


@pytest.mark.parametrize(
    "protocol",
    [
        {"metric": "euclidean"},
        {"rule": "cuhk03", "num_trials": 2},
        {"rule": "vehicleid", "num_trials": 2},
        {"trapezoid": True},
        {"re_ranking": ReRanking(k1=5, k2=2)},
        {"expansion": QueryExpansion(k=3, alpha=1.0, times=1, target="both")},
    ],
)
def test_retrieval_examples_do_not_change_metrics(protocol):
    with_examples, *_, ids = evaluate(**protocol)
    without, *_ = evaluate(None, **protocol)
    assert without.examples is None and with_examples.metrics() == without.metrics()
    for one in with_examples.examples.lists["best"]:
        if protocol.get("rule") == "vehicleid":
            assert one.query not in one.gallery
            ids = ids.all_images() if len(ids.query_pids) == 90 else ids
        assert one.matches[one.first_match - 1] or one.first_match > 7
        same = ids.gallery_pids[torch.from_numpy(one.gallery)] == ids.query_pids[one.query]
        assert one.matches.tolist() == same.tolist()


def test_camera_matrix_is_none_with_single_camera():
    queries, gallery, ids = random_set(3)
    ids = dataclasses.replace(ids, query_camids=ids.query_camids * 0, gallery_camids=ids.gallery_camids * 0)
    examples = compute_metrics(queries, gallery, ids, protocol_of("no_camera"), ALL).examples
    assert examples.cameras is None and examples.roc is not None
