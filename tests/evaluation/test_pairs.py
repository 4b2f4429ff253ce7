"""Tests of sampled pairs: equality with a loop over all pairs, and excluded pairs."""

import itertools

import numpy as np
import pytest
import torch

from fastamp.evaluation import Identities, pairs
from fastamp.evaluation.identities import SAME_CAMERA
from fastamp.evaluation.pairs import PairScores, sample_pairs


def small_set():
    random = np.random.default_rng(0)
    query_pids, gallery_pids = torch.tensor([1, 2, 3, 9]), torch.from_numpy(random.integers(-1, 5, 60))
    ids = Identities(query_pids, gallery_pids, torch.tensor([0, 1, 0, 0]), torch.from_numpy(random.integers(0, 3, 60)))
    features = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).float()
    return features[:4], features[4:], ids


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("cross_camera", [True, False])
def test_pair_scores_of_a_small_set_include_all_pairs(metric, cross_camera):
    queries, gallery, ids = small_set()
    genuine, impostor = [], []
    for q, g in itertools.product(range(4), range(60)):
        if q == 3 or ids.gallery_pids[g] == -1:
            continue  # query without a match, or distractor of identity -1
        score = torch.cosine_similarity(queries[q], gallery[g], dim=0)
        if metric == "euclidean":
            score = (queries[q] - gallery[g]).norm()
        if ids.query_pids[q] != ids.gallery_pids[g]:
            impostor.append(score.item())
        elif not cross_camera or ids.query_camids[q] != ids.gallery_camids[g]:
            genuine.append(score.item())
    found = sample_pairs(queries, gallery, ids, metric=metric, junk=SAME_CAMERA if cross_camera else None)
    assert (found.num_genuine, found.num_impostor) == (len(genuine), len(impostor))
    for quantiles, scores in ((found.genuine, genuine), (found.impostor, impostor)):
        assert quantiles.shape == (1001,) and quantiles.dtype == torch.float32
        assert np.allclose(quantiles[[0, -1]], [min(scores), max(scores)], atol=1e-6)
    # Fraction of less similar pairs, from the quantiles and by counting.
    for score in np.quantile(impostor, [0.1, 0.5, 0.9]):
        fractions = found.percentile_of(score)
        less = np.less if metric == "cosine" else np.greater
        for fraction, scores in zip(fractions, (genuine, impostor), strict=True):
            assert fraction == pytest.approx(less(scores, score).mean(), abs=1.5 / len(scores))
    low, high = (-2.0, 2.0) if metric == "cosine" else (1e9, -1.0)
    assert found.percentile_of(low) == (0, 0) and found.percentile_of(high) == (1, 1)


def test_sampled_pairs_of_a_large_set_depend_only_on_the_seed(monkeypatch):
    monkeypatch.setattr(pairs, "_QUERIES", 50)
    monkeypatch.setattr(pairs, "_GALLERY", 400)
    monkeypatch.setattr(pairs, "_MATCHES", 6)
    pids = torch.arange(300).repeat(8)
    features = torch.randn(2400, 4) + torch.randn(300, 4).repeat(8, 1)
    ids = Identities(pids[:600], pids, torch.zeros(600), torch.ones(2400))
    found = sample_pairs(features[:600], features, ids, metric="cosine", junk=SAME_CAMERA)
    assert found.num_genuine == 50 * 6 and 19_800 < found.num_impostor < 20_000
    again = sample_pairs(features[:600].numpy(), features.numpy(), ids, metric="cosine", junk=SAME_CAMERA)
    assert torch.equal(found.genuine, again.genuine) and torch.equal(found.impostor, again.impostor)
    assert (found.genuine > found.impostor).float().mean() > 0.9
    other = sample_pairs(features[:600], features, ids, metric="cosine", junk=SAME_CAMERA, seed=1)
    assert not torch.equal(found.genuine, other.genuine)


def test_sampled_pairs_exclude_pairs_of_an_image_with_itself():
    pids = torch.tensor([1, 1, 2])
    ids = Identities(pids, pids, torch.zeros(3), torch.zeros(3))
    features = torch.eye(3)
    found = sample_pairs(features, features, ids, metric="cosine", junk=None, same_images=True)
    assert found.num_genuine == 2 and found.genuine.max() == 0
    assert PairScores(**found.state_dict()).num_impostor == found.num_impostor == 2


def test_pair_sampling_returns_none_without_genuine_or_impostor_pairs():
    features = torch.eye(2)
    for labels in ([1, 2], [1, 1], [-1, -1]):
        pids = torch.tensor(labels)
        ids = Identities(pids, pids, torch.zeros(2), torch.zeros(2))
        assert sample_pairs(features, features, ids, metric="cosine", junk=None, same_images=True) is None
