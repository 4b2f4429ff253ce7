"""What a report shows of a ranking: against naive loops, and bounded."""

import dataclasses

import numpy as np
import pytest
import torch
from judging import naive, random_set

from fastamp.evaluation import Identities, Protocol, Wanted, compute_metrics
from fastamp.evaluation.query_expansion import QueryExpansion
from fastamp.evaluation.rerank import ReRanking
from fastamp.layers.distance import pairwise_distance

ALL = Wanted(kinds=("best", "worst", "random"), lists=4, length=7)


def judged(wanted=ALL, **protocol):
    queries, gallery, ids = random_set(3, queries=90, cameras=4)
    return compute_metrics(queries, gallery, ids, Protocol(**protocol), wanted), queries, gallery, ids


@pytest.mark.parametrize("rule", ["market1501", "no_camera"])
def test_camera_pairs_are_rankings_of_their_images_alone(rule):
    result, queries, gallery, ids = judged(rule=rule, memory_budget_mb=0.01)
    matrix, distances = result.details.cameras, pairwise_distance(queries, gallery, "cosine")
    assert matrix.query_cameras == matrix.gallery_cameras == [0, 1, 2, 3] and matrix.left_out == 0
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


def test_lists_show_the_nearest_images_without_junk():
    result, queries, gallery, ids = judged()
    distances = pairwise_distance(queries, gallery, "cosine").numpy()
    shown = [one for lists in result.details.lists.values() for one in lists]
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


def test_best_and_worst_are_that_and_of_many_identities():
    result, *_, ids = judged(dataclasses.replace(ALL, lists=8))
    lists, ap = result.details.lists, result.ranking.ap
    best, worst = ([one.query for one in lists[kind]] for kind in ("best", "worst"))
    assert not set(best) & set(worst)
    assert ap[best].min() >= ap.median() >= ap[worst].max()
    assert len(set(ids.query_pids[best].tolist())) > 4
    assert ap[best[0]] == ap.max() and ap[worst[0]] == ap[result.ranking.valid].min()


def test_few_queries_are_in_one_list_each():
    queries, gallery, ids = random_set(3, queries=3)
    details = compute_metrics(queries, gallery, ids, wanted=ALL).details
    assert [len(details.lists[kind]) for kind in ("best", "worst", "random")] == [2, 1, 3]


def test_accept_rates_are_those_of_verification():
    plain, *_ = judged()
    asked, *_ = judged(false_accept_rates=(0.1,))
    assert plain.roc is None and not plain.details.roc_of_all and asked.details.roc is asked.roc
    np.testing.assert_array_equal(plain.details.roc.tar, asked.roc.tar)
    assert plain.metrics().keys() < asked.metrics().keys()


def test_large_sets_are_sampled():
    result, *_ = judged(dataclasses.replace(ALL, pairs=120 * 40, cameras=2))
    details = result.details
    assert (details.sampled, details.queries) == (40, 90)
    assert details.roc.num_genuine + details.roc.num_impostor <= 120 * 40
    assert len(details.cameras.query_cameras) == 2 and details.cameras.left_out == 4
    again, *_ = judged(dataclasses.replace(ALL, pairs=120 * 40, cameras=2), memory_budget_mb=0.005)
    np.testing.assert_array_equal(details.roc.tar, again.details.roc.tar)
    np.testing.assert_allclose(details.cameras.mean_ap, again.details.cameras.mean_ap)


@pytest.mark.parametrize(
    "protocol",
    [
        {"metric": "euclidean"},
        {"rule": "cuhk03", "repeats": 2},
        {"rule": "vehicleid", "repeats": 2},
        {"trapezoid": True},
        {"re_ranking": ReRanking(k1=5, k2=2)},
        {"expansion": QueryExpansion(k=3, alpha=1.0, times=1, sides="both")},
    ],
)
def test_what_is_shown_changes_no_number(protocol):
    with_details, *_, ids = judged(**protocol)
    without, *_ = judged(None, **protocol)
    assert without.details is None and with_details.metrics() == without.metrics()
    for one in with_details.details.lists["best"]:
        if protocol.get("rule") == "vehicleid":
            assert one.query not in one.gallery
            ids = ids.all_images() if len(ids.query_pids) == 90 else ids
        assert one.matches[one.first_match - 1] or one.first_match > 7
        same = ids.gallery_pids[torch.from_numpy(one.gallery)] == ids.query_pids[one.query]
        assert one.matches.tolist() == same.tolist()


def test_one_camera_makes_no_matrix():
    queries, gallery, ids = random_set(3)
    ids = dataclasses.replace(ids, query_camids=ids.query_camids * 0, gallery_camids=ids.gallery_camids * 0)
    details = compute_metrics(queries, gallery, ids, Protocol(rule="no_camera"), ALL).details
    assert details.cameras is None and details.roc is not None
