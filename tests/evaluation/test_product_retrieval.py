"""Tests of recall at k, against FastRetri and a naive loop; with all images as queries, or with a gallery."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from naive_ranking import protocol, protocol_of

from fastamp.evaluation import Identities, ReportOptions, compute_metrics
from fastamp.utils.errors import ConfigError, NoMatchError

REFERENCE = Path(__file__).parents[1] / "reference/methods"


def identities(query_pids, gallery_pids):
    """Identities of the two sides; all images are from one camera."""
    sides = [torch.as_tensor(pids, dtype=torch.int64) for pids in (query_pids, gallery_pids)]
    return Identities(*sides, *map(torch.zeros_like, sides))


def recalls(queries, gallery, ids, rule, metric, ranks):
    options = protocol_of(rule, metric=metric, ranks=tuple(ranks), resamples=0)
    metrics = compute_metrics(queries, gallery, ids, options).metrics()
    return [metrics[f"Recall@{rank}"] for rank in ranks], metrics


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("name", ["retri1", "retri2"])
@pytest.mark.parametrize("rule", ["recall_at_k", "recall_at_k_first_hit"])
def test_recall_over_all_images_equals_reference(name, metric, rule):
    data = np.load(REFERENCE / f"{name}.npz")
    expected = json.loads((REFERENCE / f"{name}_recall.json").read_text())[f"leave_one_out_{metric}"]
    features, pids = torch.from_numpy(data["features"]).double(), data["labels"]
    for split in (40, len(pids)):  # the order of images does not matter; a test set may have queries only
        ids = identities(pids[:split], pids[split:])
        found, metrics = recalls(features[:split], features[split:], ids, rule, metric, list(map(int, expected)))
        assert np.round(found, 2).tolist() == list(expected.values())
        assert (metrics["num_query"], metrics["num_gallery"]) == (len(pids), len(pids) - 1)


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_recall_in_a_gallery_equals_reference(metric):
    data = np.load(REFERENCE / "retri1.npz")
    expected = json.loads((REFERENCE / "retri1_recall.json").read_text())[f"query_gallery_{metric}"]
    sides = [torch.from_numpy(data[name]) for name in ("features", "gallery")]
    ids = identities(data["labels"], data["gallery_labels"])
    found, metrics = recalls(*sides, ids, "recall_at_k_gallery", metric, list(map(int, expected)))
    assert np.round(found, 2).tolist() == list(expected.values())
    assert (
        metrics["Rank-1"] == metrics["Recall@1"]
        and "Recall@1" in protocol("TEST.PROTOCOL", "recall_at_k_gallery").metric_names()
    )


def test_copies_show_the_difference_between_the_image_itself_and_the_first_hit():
    """Image 1 is a copy of image 0 with another label: FastRetri drops image 0 for image 1, which then finds itself."""
    features = torch.tensor([[0.0], [0.0], [5.0], [6.0], [0.5], [9.0]])
    ids = identities([0, 1, 2, 2, 0, 1], [])
    found = [
        compute_metrics(features, features[:0], ids, protocol_of(rule, metric="euclidean")).ranking.hits(1)[1].item()
        for rule in ("recall_at_k", "recall_at_k_first_hit")
    ]
    assert found == [0, 1]


def test_image_without_another_of_its_class_is_excluded_or_a_miss():
    features, ids = torch.arange(5.0)[:, None], identities([0, 0, 1, 1, 7], [])
    plain, first_hit = (
        compute_metrics(features, features[:0], ids, protocol_of(rule, metric="euclidean", resamples=0)).metrics()
        for rule in ("recall_at_k", "recall_at_k_first_hit")
    )
    assert (plain["num_query_without_match"], first_hit["num_query_without_match"]) == (1, 0)
    assert plain["Recall@1"] * 4 == pytest.approx(first_hit["Recall@1"] * 5)
    with pytest.raises(NoMatchError, match=r"\b5 "):
        compute_metrics(features, features[:0], identities(range(5), []), protocol_of("recall_at_k"))


@pytest.mark.parametrize("rule", ["recall_at_k_first_hit", "animals_disjoint_miewid"])
def test_miss_is_no_hit_at_ranks_beyond_the_gallery(rule):
    generator = torch.Generator().manual_seed(0)
    pids = [0, 0, 1, 1, 2, 3, 4, 5, 6]  # five of nine images are the only ones of their class
    options = protocol("TEST.PROTOCOL", rule, "TEST.ANIMALS.DATABASE", "", "TEST.RANKS", "(8, 9, 50)")
    features = torch.randn(9, 4, generator=generator)
    report = ReportOptions(lists=9, length=50)
    result = compute_metrics(features, features[:0], identities(pids, []), options, report)
    found = result.metrics()
    assert [found[f"Rank-{rank}"] for rank in (8, 9, 50)] == pytest.approx([100 * 4 / 9] * 3)
    assert found["num_query_without_match"] == 0
    lists = {one.query: one.first_match for part in result.examples.lists.values() for one in part}
    misses = [query for query in lists if query > 3]
    assert misses and not any(lists[query] for query in misses)


def test_reports_and_verification_exclude_the_query_itself():
    generator = torch.Generator().manual_seed(1)
    pids = torch.arange(40) % 8
    features = torch.nn.functional.one_hot(pids, 8) + 0.5 * torch.randn(40, 8, generator=generator)
    options = protocol_of("recall_at_k", false_accept_rates=(0.1,))
    ids = identities(pids[:10], pids[10:])
    found = compute_metrics(features[:10], features[10:], ids, options, ReportOptions(lists=3, length=50))
    assert (found.roc.num_genuine, found.roc.num_impostor) == (40 * 4, 40 * 35)
    for example in [one for lists in found.examples.lists.values() for one in lists]:
        assert example.query not in example.gallery and len(example.gallery) == 39


@pytest.mark.parametrize("option", ["RERANK", "AQE"])
def test_leave_one_out_excludes_reranking_and_expansion(option):
    with pytest.raises(ConfigError, match=rf"TEST.{option}.ENABLED.*recall_at_k"):
        protocol("TEST.PROTOCOL", "recall_at_k", f"TEST.{option}", "on")
    assert protocol("TEST.PROTOCOL", "recall_at_k_gallery", f"TEST.{option}", "on")
