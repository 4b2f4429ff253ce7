"""Tests of protocols: selection of gallery images, and compatibility of options."""

import numpy as np
import pytest
import torch
from naive_ranking import naive, protocol, random_distances, random_set, rows_of

from fastamp.config import get_cfg
from fastamp.config.defaults import KEYS
from fastamp.evaluation import Identities, Protocol, ReidEvaluator, ReportOptions, compute_metrics, rank_distances
from fastamp.evaluation import identities as module
from fastamp.evaluation.identities import SAME_CAMERA, Junk, Matches, same_camera
from fastamp.evaluation.neighbors import BACKENDS
from fastamp.evaluation.query_expansion import TARGETS
from fastamp.evaluation.ranking_rule import PROTOCOL_REGISTRY, NoCamera, RandomRule, Ranker, RankingRule
from fastamp.evaluation.rerank import VARIANTS
from fastamp.layers.distance import METRICS, pairwise_distance
from fastamp.utils.errors import ConfigError, NoMatchError
from fastamp.utils.registry import DuplicateNameError


def test_ranking_is_unchanged_if_queries_are_split_into_spans(monkeypatch):
    distances, ids = random_distances(4, 40, 100, 50, pids=3)
    whole = rank_distances(distances, ids)
    monkeypatch.setattr(module, "_MAX_PAIRS", 60)
    assert len(list(Matches(ids, junk=SAME_CAMERA).spans(0, 40))) > 20
    parts = rank_distances(distances, ids)
    assert torch.equal(whole.ap, parts.ap) and torch.equal(whole.first_match, parts.first_match)


def test_ranker_without_junk_rule_ranks_images_from_the_same_camera():
    distances, ids = random_distances(0, 5, 60, 20)
    ranker = Ranker(ids, NoCamera())
    ranker.add(0, distances.clone())
    expected = list(naive(distances.tolist(), ids, cross_camera=False))
    for ours, row in zip(rows_of(ranker.result()), expected, strict=True):
        assert ours == pytest.approx(row, abs=1e-12)
    assert expected != list(naive(distances.tolist(), ids))


@pytest.fixture
def other_cameras():
    """Custom rule: all images from the query's camera are junk, regardless of their identity."""

    class OtherCameras(RankingRule):
        text = "only other cameras"
        junk = Junk(same_camera, same_identity_only=False)

    return OtherCameras()


@pytest.mark.parametrize("most", [2**19, 50])
def test_custom_protocol_rule_applies_to_ranking_roc_pairs_and_examples(other_cameras, monkeypatch, most):
    monkeypatch.setattr(module, "_MAX_PAIRS", most)
    queries, gallery, ids = random_set(3, queries=90, cameras=4)
    rule = Protocol(rule=other_cameras, false_accept_rates=(0.1,), resamples=0)
    found = compute_metrics(queries, gallery, ids, rule, ReportOptions(kinds=("best", "worst"), lists=5, length=60))
    distances = pairwise_distance(queries, gallery, "cosine")
    same, allowed = ids.query_pids[:, None] == ids.gallery_pids, ids.query_camids[:, None] != ids.gallery_camids
    genuine, impostor = distances[same & allowed], distances[~same & allowed]

    expected = list(naive(distances.tolist(), ids, same_identity_only=False))
    for ours, row in zip(rows_of(found.ranking), expected, strict=True):
        assert ours == pytest.approx(row, abs=1e-12)
    assert found.metrics()["mAP"] == pytest.approx(100 * np.mean([ap for ap, _, _, valid in expected if valid]))
    assert found.metrics()["mAP"] > compute_metrics(queries, gallery, ids).metrics()["mAP"] + 1  # negative control

    assert (found.roc.num_genuine, found.roc.num_impostor) == (len(genuine), len(impostor))
    threshold = impostor.sort().values[len(impostor) // 10 - 1]
    assert found.roc.tar_at(0.1) == pytest.approx((genuine <= threshold).double().mean().item(), abs=2 / len(genuine))

    examples = compute_metrics(queries, gallery, ids, Protocol(rule=other_cameras), ReportOptions()).examples
    np.testing.assert_array_equal(examples.roc.tar, found.roc.tar)
    matrix = found.examples.cameras
    assert np.isnan(np.diag(matrix.mean_ap)).all()
    here, there = ids.query_camids == 0, ids.gallery_camids == 1
    some = Identities(ids.query_pids[here], ids.gallery_pids[there], ids.query_camids[here], ids.gallery_camids[there])
    precisions = [ap for ap, _, _, valid in naive(distances[here][:, there].tolist(), some) if valid]
    assert matrix.mean_ap[0, 1] == pytest.approx(np.mean(precisions), abs=1e-6)
    for one in [one for lists in found.examples.lists.values() for one in lists]:
        order = [g for g in np.argsort(distances[one.query].numpy(), kind="stable") if allowed[one.query, g]]
        assert one.gallery.tolist() == order[:60]

    evaluator = ReidEvaluator(get_cfg(), len(queries))
    evaluator.protocol = rule
    evaluator.process(
        {"targets": torch.cat((ids.query_pids, ids.gallery_pids)), "camids": ids.all_images().query_camids},
        torch.cat((queries, gallery)),
    )
    evaluator.evaluate()
    assert (evaluator.pairs.num_genuine, evaluator.pairs.num_impostor) == (len(genuine), len(impostor))
    for quantiles, similarities in ((evaluator.pairs.genuine, genuine), (evaluator.pairs.impostor, impostor)):
        np.testing.assert_allclose(quantiles[[0, -1]], [1 - similarities.max(), 1 - similarities.min()], atol=1e-6)


def test_error_of_custom_rule_without_matches_does_not_mention_cameras():
    class AllJunk(RankingRule):
        text = "all images are junk"
        junk = Junk(lambda matches, queries, gallery: np.full(np.broadcast(queries, gallery).shape, True))

    with pytest.raises(NoMatchError, match="TEST.PROTOCOL.*AllJunk") as error:
        compute_metrics(*random_set(3), Protocol(rule=AllJunk()))
    assert "camera" not in str(error.value)


def test_junk_pairs_are_unchanged_if_queries_are_split_into_spans(other_cameras, monkeypatch):
    _, ids = random_distances(4, 40, 100, 50, pids=60)
    matches = Matches(ids, junk=other_cameras.junk)
    whole = matches.pairs(0, 40)
    monkeypatch.setattr(module, "_MAX_PAIRS", 250)
    spans = list(matches.spans(0, 40))
    assert spans == [(first, first + 2) for first in range(0, 40, 2)]
    parts = [(first, matches.pairs(first, last)) for first, last in spans]
    assert all(len(pairs.rows) + len(pairs.junk_rows) <= 250 for _, pairs in parts)
    np.testing.assert_array_equal(np.concatenate([first + pairs.junk_rows for first, pairs in parts]), whole.junk_rows)
    np.testing.assert_array_equal(np.concatenate([pairs.junk_columns for _, pairs in parts]), whole.junk_columns)
    assert len(list(Matches(ids, junk=SAME_CAMERA).spans(0, 40))) == 1


def test_trapezoidal_ap_excludes_images_of_identity_minus_one():
    distances, ids = random_distances(1, 5, 60, 20)
    ids.gallery_pids[:20], ids.query_pids[:2] = -1, -1
    result = rank_distances(distances, ids, trapezoid=True)
    assert result.valid.tolist() == [False, False, True, True, True]
    assert result.ap.max() <= 1 and result.inp.max() <= 1


@pytest.mark.parametrize(
    "opts, words",
    [
        ([], ["cosine distance", "Market-1501", "no re-ranking"]),
        (["TEST.METRIC", "euclidean", "TEST.PROTOCOL", "no_camera"], ["euclidean distance", "no cameras"]),
        (["TEST.RERANK", "on"], ["re-ranking (zhong, k1 20, k2 6, lambda 0.3)"]),
        (["TEST.AQE", "on", "TEST.AQE.TARGET", "query"], ["expansion of queries (k 5, alpha 3, 1 x)"]),
        (
            ["TEST.PROTOCOL", "cuhk03", "TEST.AP_METHOD", "trapezoid"],
            ["CUHK03", "10 trials", "seed 0", "trapezoid"],
        ),
    ],
)
def test_protocol_description_lists_options_in_one_line(opts, words):
    line = protocol(*opts).describe()
    assert "\n" not in line and all(word in line for word in words)


@pytest.mark.parametrize("key", ["RERANK", "AQE", "ROC"])
def test_vehicleid_protocol_rejects_reranking_expansion_roc_and_trapezoidal_ap(key):
    with pytest.raises(ConfigError, match=rf"TEST.{key}.ENABLED.*vehicleid"):
        protocol("TEST.PROTOCOL", "vehicleid", f"TEST.{key}", "on")
    with pytest.raises(ConfigError, match="TEST.AP_METHOD.*vehicleid"):
        protocol("TEST.PROTOCOL", "vehicleid", "TEST.AP_METHOD", "trapezoid")


def test_choices_of_evaluation_config_keys_match_the_implementations():
    choices = {
        "TEST.KNN_BACKEND": BACKENDS,
        "TEST.AQE.TARGET": TARGETS,
        "TEST.RERANK.VARIANT": VARIANTS,
        "TEST.METRIC": METRICS,
    }
    for key, expected in choices.items():
        where = "config/sections/evaluation.py"
        assert set(KEYS[key].choices) == set(expected), f"fix: choices of {key} in {where}: {tuple(expected)}"


def test_unknown_protocol_lists_choices_and_the_nearest():
    with pytest.raises(
        ConfigError, match=r"TEST.PROTOCOL.*'market'.*'market1501'(.|\n)*choices: .*cuhk03, .*vehicleid"
    ):
        protocol("TEST.PROTOCOL", "market")


def test_registered_protocol_can_be_named_in_a_config(monkeypatch):
    monkeypatch.setattr(PROTOCOL_REGISTRY, "_components", dict(PROTOCOL_REGISTRY._components))

    @PROTOCOL_REGISTRY.register("mine")
    class Mine(RandomRule):
        text = "mine, {num_trials} trials"

    built = protocol("TEST.PROTOCOL", "mine", "TEST.NUM_TRIALS", "3", "TEST.AP_METHOD", "trapezoid")
    assert "mine, 3 trials" in built.describe() and built.rule == Mine(num_trials=3, trapezoid=True)
    assert built.rule.name == "mine"
    with pytest.raises(DuplicateNameError, match="TEST.PROTOCOL: 'mine'"):
        PROTOCOL_REGISTRY.register("mine")(RankingRule)
