"""Protocols: which gallery images count, and the options that go together."""

import pytest
import torch
from judging import naive, protocol, random_distances, rows_of

from fastamp.config.defaults import KEYS
from fastamp.evaluation import Protocol, rank_distances
from fastamp.evaluation import protocol as module
from fastamp.evaluation.neighbours import BACKENDS
from fastamp.evaluation.protocol import RULES, Matches, Ranker
from fastamp.evaluation.query_expansion import SIDES
from fastamp.evaluation.rerank import FORMS
from fastamp.layers.distance import METRICS
from fastamp.utils.errors import ConfigError


def test_many_matches_are_judged_in_parts(monkeypatch):
    distances, ids = random_distances(4, 40, 100, 50, pids=3)
    whole = rank_distances(distances, ids)
    monkeypatch.setattr(module, "_MOST_PAIRS", 60)
    assert len(list(Matches(ids, cross_camera=True).spans(0, 40))) > 20
    parts = rank_distances(distances, ids)
    assert torch.equal(whole.ap, parts.ap) and torch.equal(whole.first_match, parts.first_match)


def test_without_cameras_nothing_is_junk():
    distances, ids = random_distances(0, 5, 60, 20)
    ranker = Ranker(ids, cross_camera=False)
    ranker.add(0, distances.clone())
    expected = list(naive(distances.tolist(), ids, cross_camera=False))
    for ours, row in zip(rows_of(ranker.result()), expected, strict=True):
        assert ours == pytest.approx(row, abs=1e-12)
    assert expected != list(naive(distances.tolist(), ids))


def test_identity_minus_one_has_no_match_where_it_is_left_out():
    distances, ids = random_distances(1, 5, 60, 20)
    ids.gallery_pids[:20], ids.query_pids[:2] = -1, -1
    result = rank_distances(distances, ids, trapezoid=True)
    assert result.valid.tolist() == [False, False, True, True, True]
    assert result.ap.max() <= 1 and result.inp.max() <= 1


@pytest.mark.parametrize(
    "opts, words",
    [
        ([], ["cosine distance", "own camera are junk", "no re-ranking"]),
        (["TEST.METRIC", "euclidean", "TEST.PROTOCOL", "no_camera"], ["euclidean distance", "no cameras"]),
        (["TEST.RERANK", "on"], ["re-ranking (zhong, k1 20, k2 6, lambda 0.3)"]),
        (["TEST.AQE", "on", "TEST.AQE.SIDES", "query"], ["expansion of queries (k 5, alpha 3, 1 x)"]),
        (["TEST.PROTOCOL", "cuhk03", "TEST.AP", "trapezoid"], ["single gallery shot", "10 draws, seed 0", "trapezoid"]),
    ],
)
def test_the_protocol_in_one_line(opts, words):
    line = protocol(*opts).describe()
    assert "\n" not in line and all(word in line for word in words)


@pytest.mark.parametrize("key", ["RERANK", "AQE", "ROC"])
def test_what_a_drawn_gallery_cannot_have(key):
    with pytest.raises(ConfigError, match=rf"TEST.{key}.ENABLED needs one gallery.*\n.*fix: TEST.{key}"):
        protocol("TEST.PROTOCOL", "vehicleid", f"TEST.{key}", "on")
    with pytest.raises(ConfigError, match="TEST.AP trapezoid"):
        protocol("TEST.PROTOCOL", "vehicleid", "TEST.AP", "trapezoid")


def test_choices_of_keys_are_those_of_the_parts():
    choices = {
        "TEST.PROTOCOL": tuple(RULES),
        "TEST.KNN_BACKEND": BACKENDS,
        "TEST.AQE.SIDES": SIDES,
        "TEST.RERANK.FORM": FORMS,
        "TEST.METRIC": METRICS,
    }
    for key, expected in choices.items():
        assert set(KEYS[key].choices) == set(expected)
    with pytest.raises(ConfigError, match="TEST.PROTOCOL: 'market'.*Did you mean 'market1501'"):
        Protocol(rule="market")
