"""Features of tracklets: pooling over frames, and the metrics of an evaluator."""

import pytest
import torch

from fastamp.config import read_config
from fastamp.evaluation import Identities, ReidEvaluator, compute_metrics
from fastamp.evaluation.tracklets import pool_tracklets

NUM_QUERY = 11


def frames(seed=0):
    """Return the columns of 40 frames; tracklets 2 and 5 are in both the query and the gallery set."""
    generator = torch.Generator().manual_seed(seed)
    tracklet = torch.tensor([2] * 4 + [7] + [5] * 6 + [2] * 4 + [9] * 7 + [-1] * 3 + [5] * 6 + [1] * 9)
    targets = torch.tensor([0, 9, 0, 0, 0, 1, 0, 1, 9, 2])[tracklet]  # those without a tracklet: identity 2
    return {
        "features": torch.randn(len(tracklet), 6, dtype=torch.float64, generator=generator),
        "targets": targets,
        "camids": tracklet.clamp(min=0),
        "indices": torch.arange(len(tracklet)),
        "tracklet": tracklet,
    }


def naive(columns, pool):
    """Pool with a loop: (features, indices of the first frames, frames per tracklet)."""
    groups = {}
    for row, tracklet in enumerate(columns["tracklet"].tolist()):
        name = row + 100 if tracklet == -1 else tracklet
        groups.setdefault((row >= NUM_QUERY, name), []).append(row)
    rows = list(groups.values())
    pooled = [columns["features"][frames] for frames in rows]
    pooled = [tracklet.mean(0) if pool == "avg" else tracklet.amax(0) for tracklet in pooled]
    return torch.stack(pooled), [frames[0] for frames in rows], [len(frames) for frames in rows]


@pytest.mark.parametrize("pool", ["avg", "max"])
def test_pooled_features_equal_a_loop(pool):
    columns = frames()
    features, first, counts = naive(columns, pool)
    reduced = pool_tracklets(columns, ["features"], num_query=NUM_QUERY, pool=pool)
    torch.testing.assert_close(reduced["features"], features)
    assert reduced["indices"].tolist() == first and reduced["frames"].tolist() == counts
    for name in ("targets", "camids", "tracklet"):
        assert reduced[name].tolist() == columns[name][first].tolist()


@pytest.mark.parametrize("pool", ["avg", "max"])
@pytest.mark.parametrize("size", [1, 3, 7, 40])
def test_reducing_batches_first_gives_the_same_result(pool, size):
    columns = frames()
    options = {"num_query": NUM_QUERY, "pool": pool}
    parts = [
        pool_tracklets({name: values[rows] for name, values in columns.items()}, ["features"], **options)
        for rows in torch.arange(40).split(size)
    ]
    merged = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    whole = pool_tracklets(columns, ["features"], **options)
    for name, values in pool_tracklets(merged, ["features"], **options).items():
        torch.testing.assert_close(values, whole[name])


def evaluate(columns, size, *opts):
    cfg = read_config("", ["TEST.BASELINES", "True", *opts])
    evaluator = ReidEvaluator(cfg, NUM_QUERY)
    images = torch.randint(256, (40, 3, 8, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for rows in torch.arange(40).split(size):
        batch = {name: values[rows] for name, values in columns.items() if name != "features"}
        evaluator.process(batch | {"images": images[rows]}, columns["features"][rows])
    return evaluator.evaluate(), evaluator


@pytest.mark.parametrize("size", [1, 6, 40])
def test_evaluator_ranks_tracklets(size):
    columns = frames()
    features, first, _ = naive(columns, "avg")
    pids, camids = columns["targets"][first], columns["camids"][first]
    expected = compute_metrics(features[:3], features[3:], Identities(pids[:3], pids[3:], camids[:3], camids[3:]))
    metrics, evaluator = evaluate(columns, size)
    assert {name: metrics[name] for name in ("mAP", "Rank-1", "mINP")} == pytest.approx(
        {name: expected.metrics()[name] for name in ("mAP", "Rank-1", "mINP")}
    )
    assert (metrics["num_query"], metrics["num_gallery"], metrics["num_frames"]) == (3, 7, 40)
    assert evaluator.first_frames.tolist() == first
    assert metrics["baselines"]["raw pixels"]["num_gallery"] == 7


def test_pool_none_ranks_frames():
    metrics, evaluator = evaluate(frames(), 6, "TEST.TRACKLET.POOL", "none")
    assert (metrics["num_query"], metrics["num_gallery"]) == (11, 29) and "num_frames" not in metrics
    assert evaluator.first_frames is None


def test_images_have_no_first_frames():
    columns = frames()
    del columns["tracklet"]
    metrics, evaluator = evaluate(columns, 6)
    assert metrics["num_query"] == 11 and evaluator.first_frames is None
