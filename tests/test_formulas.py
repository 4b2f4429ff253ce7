"""Tests of core formulas against naive float64 implementations of their definitions, also for extreme inputs.

Inputs: features at scales 1e-3, 1 and 1e3, with ties, all equal, from one identity, and from a single image.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from naive_ranking import naive, protocol_of, random_set

from fastamp.config import read_config
from fastamp.evaluation import compute_metrics
from fastamp.evaluation.query_expansion import QueryExpansion, expand
from fastamp.evaluation.rerank import ReRankedDistances, ReRanking
from fastamp.layers import CLS_LAYER_REGISTRY, POOL_LAYER_REGISTRY, pairwise_distance
from fastamp.layers.distance import FeatureDistances, squared_euclidean_distance
from fastamp.modeling.losses import cross_entropy_loss, focal_loss, pairwise_circle_loss, pairwise_cosface, triplet_loss
from fastamp.modeling.losses.center import center_loss
from fastamp.modeling.losses.distillation import distillation_loss
from fastamp.modeling.losses.supcon import supcon_loss
from fastamp.modeling.meta_arch.moco import MemoryBank
from fastamp.solver import WeightAverage, build_lr_schedule

RNG = np.random.default_rng(0)
BASE = RNG.normal(size=(8, 6)).astype(np.float32)
IDS = np.array([0, 0, 1, 1, 2, 2, 3, 3])
TIES = BASE.copy()
TIES[[2, 4, 6]] = TIES[0]
CASES = {
    "1e-3": (np.float32(1e-3) * BASE, IDS),
    "1": (BASE, IDS),
    "1e3": (np.float32(1e3) * BASE, IDS),
    "ties": (TIES, IDS),
    "all equal": (np.full((8, 6), 0.3, np.float32), IDS),
    "all equal, 1e3": (np.full((8, 6), 300.7, np.float32), IDS),
    "near each other, far from 0": (np.float32(1000) + BASE, IDS),
    "one identity": (BASE, np.zeros(8, np.int64)),
    "no two of one identity": (BASE, np.arange(8)),
    "one image": (BASE[:1], IDS[:1]),
}


@pytest.fixture(params=CASES)
def case(request):
    features, ids = CASES[request.param]
    return features, ids


def log_sum_exp(values):
    values = np.asarray(list(values), np.float64)
    if not len(values):
        return -math.inf
    return values.max() + math.log(np.exp(values - values.max()).sum())


def softplus(value):
    return np.logaddexp(0.0, value)


def softmax(values):
    return np.exp(np.asarray(values, np.float64) - log_sum_exp(values))


def unit(x):
    x = np.asarray(x, np.float64)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def check(function, features, *args, expected, rel=1e-5, absolute=1e-5, **options):
    """Compare a loss in float32 and float64 with the expected value, and check that its gradient is finite."""
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor(features, dtype=dtype, requires_grad=True)
        others = (torch.tensor(arg, dtype=dtype if arg.dtype.kind == "f" else None) for arg in args)
        loss = function(x, *others, **options)
        loss.backward()
        assert loss.dtype == dtype and torch.isfinite(x.grad).all()
        assert loss.item() == pytest.approx(expected, rel=rel, abs=absolute)


# ---- losses over classes

LOGITS = {
    "1e-3": 1e-3 * BASE,
    "1": BASE,
    "1e3": 1e3 * BASE,
    "equal": np.ones((8, 6)),
    "one class": BASE[:, :1],
    "one image": BASE[:1],
}


@pytest.fixture(params=LOGITS)
def logits(request):
    values = LOGITS[request.param].astype(np.float32)
    return values, np.arange(len(values)) % values.shape[1]


@pytest.mark.parametrize("epsilon", [0.0, 0.1, -1.0])
def test_label_smoothed_cross_entropy_matches_definition(logits, epsilon):
    """Szegedy et al. 2016, arXiv:1512.00567, section 7, with eps / (K - 1) for the other classes, as in FastReID."""
    values, targets = logits
    losses = []
    for row, target in zip(values, targets, strict=True):
        log_p = row.astype(np.float64) - log_sum_exp(row)
        eps = 0.2 * math.exp(log_p[target]) if epsilon < 0 else epsilon
        others = max(len(row) - 1, 1)
        losses.append(-sum((1 - eps if k == target else eps / others) * value for k, value in enumerate(log_p)))
    counted = sum(loss != 0 for loss in np.asarray(losses, np.float32))
    expected = sum(losses) / max(counted, 1)
    check(cross_entropy_loss, values, targets, expected=expected, epsilon=epsilon, alpha=0.2)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_focal_loss_matches_definition(logits, gamma):
    """Lin et al. 2017, arXiv:1708.02002, eq. 5."""
    values, targets = logits
    losses = []
    for row, target in zip(values, targets, strict=True):
        others = [v for k, v in enumerate(row) if k != target]
        log_p = float(row[target]) - log_sum_exp(row)
        one_minus_p = math.exp(log_sum_exp(others) - log_sum_exp(row)) if others else 0.0
        losses.append(-0.25 * one_minus_p**gamma * log_p)
    check(focal_loss, values, targets, expected=np.mean(losses), alpha=0.25, gamma=gamma)


@pytest.mark.parametrize("temperature", [1.0, 16.0])
def test_distillation_loss_matches_definition(logits, temperature):
    """Hinton et al. 2015, arXiv:1503.02531, section 2; symmetric, as in FastReID."""
    student, _ = logits
    teacher = np.roll(student, 1, axis=1)
    total = 0.0
    for s, t in zip(student.astype(np.float64) / temperature, teacher.astype(np.float64) / temperature, strict=True):
        log_s, log_t = s - log_sum_exp(s), t - log_sum_exp(t)
        total += sum(math.exp(b) * (b - a) + math.exp(a) * (a - b) for a, b in zip(log_s, log_t, strict=True)) / 2
    expected = temperature**2 * total / len(student)
    check(distillation_loss, student, teacher, expected=expected, temperature=temperature)


MARGIN_CASES = {"random": BASE, "1e-3": 1e-3 * BASE, "1e3": 1e3 * BASE, "the weight itself": None, "opposite": None}


@pytest.mark.parametrize("name", ["Linear", "CosSoftmax", "ArcSoftmax", "CircleSoftmax"])
@pytest.mark.parametrize("kind", MARGIN_CASES)
def test_margin_softmaxes_match_definitions(name, kind):
    """CosFace arXiv:1801.09414 eq. 4, ArcFace arXiv:1801.07698 eq. 3, Circle arXiv:2002.10857 eqs. 8 and 9."""
    weight = np.random.default_rng(1).normal(size=(8, 6)).astype(np.float32)
    features = {"the weight itself": weight, "opposite": -weight}.get(kind, MARGIN_CASES[kind]).astype(np.float32)
    targets, scale, margin = np.arange(8), 64.0, 0.35
    expected = np.zeros((8, 8))
    for i, k in np.ndindex(8, 8):
        cosine = float(np.clip(unit(features[i]) @ unit(weight[k]), -1, 1))
        right = k == targets[i]
        if name == "Linear":
            value = features[i].astype(np.float64) @ weight[k]
        elif name == "CosSoftmax":
            value = cosine - margin * right
        elif name == "ArcSoftmax":
            value = math.cos(math.acos(cosine) + margin * right)
        elif right:
            value = max(0.0, 1 + margin - cosine) * (cosine - (1 - margin))
        else:
            value = max(0.0, cosine + margin) * (cosine - margin)
        expected[i, k] = scale * value
    layer = CLS_LAYER_REGISTRY.get(name)(scale=scale, margin=margin)
    x = torch.tensor(features, requires_grad=True)
    logits, plain = layer(x, torch.tensor(weight), torch.tensor(targets))
    logits.sum().backward()
    assert torch.isfinite(x.grad).all()
    # Cosines are clamped to 1 - 1e-6 (an angle of 0.0014, times sin(m) in ArcFace) to keep gradients finite.
    limit = scale * 1.5e-3 if name == "ArcSoftmax" else scale * 1e-5
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-5, atol=limit)
    assert plain.dtype == torch.float32


# ---- losses over pairs


def distances_of(features, normalize):
    x = unit(features) if normalize else features.astype(np.float64)
    squares = ((x[:, None] - x[None]) ** 2).sum(2)
    return squares if normalize else np.sqrt(squares)


def test_triplet_loss_matches_definition(case, subtests):
    """Hermans et al. 2017, arXiv:1703.07737, eq. 5; weighted: Ye et al. 2020, arXiv:2001.04193."""
    for mining, margin, normalize in itertools.product(["hard", "softmax", "fastreid"], [0.0, 0.3], [False, True]):
        with subtests.test(mining=mining, margin=margin, normalize=normalize):
            features, ids = case
            losses = []
            for i, d in enumerate(distances_of(features, normalize)):
                p, n = d[ids == ids[i]], d[ids != ids[i]]
                if mining == "fastreid":
                    weights = np.exp(p - p.max()), np.exp(-n)
                    ap, an = ((w * v).sum() / (w.sum() + 1e-6) for w, v in zip(weights, (p, n), strict=True))
                else:
                    ap = p.max() if mining == "hard" else softmax(p) @ p
                    an = math.inf if not len(n) else n.min() if mining == "hard" else softmax(-n) @ n
                losses.append(max(0.0, ap - an + margin) if margin else softplus(ap - an))
            # Distances of equal features are square roots of rounding errors, which depend on the processor.
            check(
                triplet_loss, features, ids, expected=np.mean(losses), absolute=2e-3 if features.max() > 100 else 5e-4,
                margin=margin, normalize=normalize, hard_mining=mining == "hard",
                weighting="softmax" if mining == "hard" else mining,
            )  # fmt: skip


def pair_loss(features, ids, positive, negative):
    cosines = unit(features) @ unit(features).T
    losses = []
    for i, row in enumerate(cosines):
        p = [positive(c) for j, c in enumerate(row) if ids[j] == ids[i] and j != i]
        n = [negative(c) for j, c in enumerate(row) if ids[j] != ids[i]]
        losses.append(softplus(log_sum_exp(p) + log_sum_exp(n)) if p and n else 0.0)
    return np.mean(losses)


@pytest.mark.parametrize("gamma", [1.0, 128.0])
def test_pairwise_circle_loss_matches_definition(case, gamma):
    """Sun et al. 2020, arXiv:2002.10857, eq. 6."""
    features, ids = case
    m = 0.25
    expected = pair_loss(
        features,
        ids,
        lambda c: -gamma * max(0, 1 + m - c) * (c - (1 - m)),
        lambda c: gamma * max(0, c + m) * (c - m),
    )
    check(pairwise_circle_loss, features, ids, expected=expected, absolute=1e-4, margin=m, gamma=gamma)


@pytest.mark.parametrize("gamma", [1.0, 128.0])
def test_pairwise_cosface_matches_definition(case, gamma):
    """Sun et al. 2020, arXiv:2002.10857, eq. 1."""
    features, ids = case
    expected = pair_loss(features, ids, lambda c: -gamma * c, lambda c: gamma * (c + 0.25))
    check(pairwise_cosface, features, ids, expected=expected, absolute=1e-4, margin=0.25, gamma=gamma)


@pytest.mark.parametrize("temperature", [0.01, 0.1])
def test_supervised_contrastive_loss_matches_definition(case, temperature):
    """Khosla et al. 2020, arXiv:2004.11362, eq. 2."""
    features, ids = case
    logits = unit(features) @ unit(features).T / temperature
    losses = []
    for i, row in enumerate(logits):
        others = [j for j in range(len(ids)) if j != i]
        positives = [j for j in others if ids[j] == ids[i]]
        if positives:
            losses.append(-np.mean([row[j] - log_sum_exp(row[others]) for j in positives]))
    expected = np.mean(losses) if losses else 0.0
    check(supcon_loss, features, ids, expected=expected, absolute=1e-4, temperature=temperature)


def test_center_loss_matches_definition(case):
    """Wen et al. 2016, eq. 2, but a mean instead of a sum, without the factor 1/2."""
    features, ids = case
    centers = np.random.default_rng(2).normal(size=(8, 6)).astype(np.float32)
    expected = np.mean([((f.astype(np.float64) - centers[i]) ** 2).sum() for f, i in zip(features, ids, strict=True)])
    check(center_loss, features, ids, centers, expected=expected)


def test_memory_bank_loss_matches_definition(case):
    """Pairwise CosFace between queries and the bank; each query's own key is excluded."""
    features, ids = case
    bank = MemoryBank(feature_dim=6, size=20, margin=0.25, gamma=32.0)
    old, old_ids = BASE[:5], np.array([0, 1, 1, 2, 9])
    bank(torch.tensor(old), torch.tensor(old), torch.tensor(old_ids))
    keys, key_ids = np.concatenate((old, features)), np.concatenate((old_ids, ids))
    losses = []
    for i, row in enumerate(unit(features) @ unit(keys).T):
        p = [-32.0 * c for j, c in enumerate(row) if key_ids[j] == ids[i] and j != i + 5]
        n = [32.0 * (c + 0.25) for j, c in enumerate(row) if key_ids[j] != ids[i]]
        losses.append(softplus(log_sum_exp(p) + log_sum_exp(n)) if p and n else 0.0)
    x = torch.tensor(features, requires_grad=True)
    loss = bank(x, torch.tensor(features), torch.tensor(ids))
    loss.backward()
    assert loss.item() == pytest.approx(np.mean(losses), rel=1e-5, abs=1e-4) and torch.isfinite(x.grad).all()


# ---- pooling, distances


def test_generalized_mean_pooling_matches_definition(subtests):
    """Radenovic et al. 2018, arXiv:1711.02512, eq. 3, with activations clamped to at least 1e-6."""
    for scale, p, kind, name in itertools.product(
        [1e-3, 1.0, 1e3],
        [1.0, 3.0, 12.0],
        ["random", "equal", "one place"],
        ["GeneralizedMeanPooling", "GeneralizedMeanPoolingP"],
    ):
        with subtests.test(scale=scale, p=p, kind=kind, name=name):
            maps = np.abs(np.random.default_rng(3).normal(size=(2, 3, 4, 2))).astype(np.float32) * np.float32(scale)
            if kind == "equal":
                maps[:] = scale
            maps = maps[:, :, :1, :1] if kind == "one place" else maps
            expected = (maps.clip(1e-6).astype(np.float64) ** p).mean((2, 3)) ** (1 / p)
            x = torch.tensor(maps, requires_grad=True)
            layer = POOL_LAYER_REGISTRY.get(name)(p=p)
            out = layer(x)
            out.sum().backward()
            np.testing.assert_allclose(out.detach().numpy()[:, :, 0, 0], expected, rtol=1e-5)
            # The derivative of the definition: x^(p-1) mean^(1-p) / count.
            count = maps.shape[2] * maps.shape[3]
            slope = (maps.astype(np.float64) / expected[:, :, None, None]) ** (p - 1) / count
            np.testing.assert_allclose(x.grad.numpy(), slope, rtol=1e-4, atol=1e-7)
            if isinstance(layer.p, torch.nn.Parameter):
                assert torch.isfinite(layer.p.grad).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_average_and_maximum_pooling_match_definitions(scale):
    maps = (RNG.normal(size=(2, 3, 4, 2)) * scale).astype(np.float32)
    mean, largest = maps.astype(np.float64).mean((2, 3)), maps.max((2, 3))
    expected = {
        "GlobalAvgPool": mean, "GlobalMaxPool": largest, "AdaptiveAvgMaxPool": mean + largest,
        "ClipGlobalAvgPool": mean.clip(0, 1),
    }  # fmt: skip
    for name, values in expected.items():
        out = POOL_LAYER_REGISTRY.get(name)()(torch.tensor(maps))
        np.testing.assert_allclose(out.numpy()[:, :, 0, 0], values, rtol=1e-5, atol=1e-6 * scale)


def test_pairwise_distances_match_definitions(case):
    """The minimum Euclidean distance of 1e-6 keeps gradients finite; cosine distances have float32 accuracy."""
    features, _ = case
    x = torch.tensor(features)
    expected = distances_of(features, normalize=False)
    # The rounding error is relative to the spread of the features, not to their norm.
    spread = np.abs(features.astype(np.float64) - features.mean(0, dtype=np.float64)).max()
    np.testing.assert_allclose(pairwise_distance(x, x).numpy(), expected, rtol=1e-3, atol=2e-3 * spread + 2e-6)
    np.testing.assert_allclose(
        squared_euclidean_distance(x, x).numpy(), expected**2, rtol=1e-4, atol=1e-5 * spread**2 + 1e-12
    )
    cosine = 1 - unit(features) @ unit(features).T
    np.testing.assert_allclose(pairwise_distance(x, x, "cosine").numpy(), cosine, atol=1e-6)


@pytest.mark.parametrize("metric", ["euclidean", "cosine"])
def test_evaluation_distances_match_definitions(case, metric):
    features, _ = case
    distances = FeatureDistances(torch.tensor(features), torch.tensor(features), metric=metric)
    out = torch.empty(distances.shape)
    distances.rows(0, len(features), out)
    length = float((features.astype(np.float64) ** 2).sum(1).max())
    expected = distances_of(features, False) ** 2 if metric == "euclidean" else 1 - unit(features) @ unit(features).T
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-6 * (length if metric == "euclidean" else 1))


# ---- averages


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_ema_and_swa_match_definitions(kind, scale):
    """EMA: a <- d a + (1 - d) w. SWA: the mean (Izmailov et al. 2018, arXiv:1803.05407, algorithm 1)."""
    model = torch.nn.Linear(3, 2)
    steps = [scale * np.random.default_rng(k).normal(size=(2, 3)) for k in range(50)]
    with torch.no_grad():
        model.weight.copy_(torch.tensor(steps[0]))
    average, expected = WeightAverage(model, kind), steps[0]
    for number, values in enumerate(steps[1:], start=1):
        with torch.no_grad():
            model.weight.copy_(torch.tensor(values))
        average.update(0.01 if kind == "ema" else 1 / (average.updates + 2))
        expected = 0.99 * expected + 0.01 * values if kind == "ema" else np.mean(steps[: number + 1], axis=0)
    np.testing.assert_allclose(average.tensors()["weight"].numpy(), expected, rtol=1e-4, atol=1e-6 * scale)


# ---- evaluation


def ranked_set(kind, scale):
    """Return features (with ties if ``kind`` is "ties"), identities and cameras."""
    queries, gallery, ids = random_set(0, queries=10, gallery=40)
    if kind == "ties":  # on a coarse grid, with copies
        queries, gallery = queries.round(), gallery.round()
        gallery[::5] = gallery[1].clone()
    return queries * scale, gallery * scale, ids


def exact_distances(queries, gallery, metric):
    q, g = queries.double().numpy(), gallery.double().numpy()
    if metric == "cosine":
        return 1 - unit(q) @ unit(g).T
    return ((q[:, None] - g[None]) ** 2).sum(2)


@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**10])
@pytest.mark.parametrize("kind", ["random", "ties"])
def test_map_minp_cmc_and_accept_rates_match_definitions(kind, scale):
    """Zheng et al. 2015 (mAP, CMC), Ye et al. 2020, arXiv:2001.04193, eq. 9 (mINP); TAR at FAR by counting pairs."""
    queries, gallery, ids = ranked_set(kind, scale)
    # Integers times a power of two: squared float32 distances of ties are exact.
    options = {"resamples": 0, "false_accept_rates": (0.1, 0.5), "metric": "euclidean"}
    metrics = compute_metrics(queries, gallery, ids, protocol_of(**options)).metrics()
    distances = exact_distances(queries, gallery, "euclidean")
    rows = [row for row in naive(distances.tolist(), ids) if row[3]]
    assert metrics["mAP"] == pytest.approx(100 * np.mean([row[0] for row in rows]), abs=1e-4)
    assert metrics["mINP"] == pytest.approx(100 * np.mean([row[1] for row in rows]), abs=1e-4)
    assert metrics["Rank-1"] == pytest.approx(100 * np.mean([row[2] < 1 for row in rows]), abs=1e-4)
    same = (ids.query_pids[:, None] == ids.gallery_pids[None]).numpy()
    junk = same & (ids.query_camids[:, None] == ids.gallery_camids[None]).numpy()
    genuine, impostor = distances[same & ~junk], distances[~same]
    for rate in (0.1, 0.5):
        best = max(((genuine <= t).mean() for t in np.unique(distances) if (impostor <= t).mean() <= rate), default=0.0)
        assert metrics[f"TAR@FAR={rate}"] == pytest.approx(100 * best, abs=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_query_expansion_matches_definition(scale, alpha):
    """Radenovic et al. 2019, arXiv:1711.02512, section 3.3, over queries and gallery together."""
    queries, gallery, _ = ranked_set("random", scale)
    x = torch.cat((queries, gallery)).double().numpy()
    cosines = unit(x) @ unit(x).T
    nearest = np.argsort(-cosines, axis=1, kind="stable")[:, :4]
    expected = []
    for i, rows in enumerate(nearest):
        weights = cosines[i, rows] ** alpha
        expected.append((weights[:, None] * x[rows]).sum(0) / len(rows))
    found = np.concatenate([side.numpy() for side in expand(queries, gallery, QueryExpansion(k=4, alpha=alpha))])
    # Directions only: cosine distances do not depend on the norm.
    np.testing.assert_allclose(unit(found), unit(expected), atol=1e-5)


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**10])
@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
def test_re_ranking_is_scale_invariant(scale, metric):
    """Zhong et al. 2017, arXiv:1701.08398: distances are divided by the maximum of their row.

    Values are checked in tests/evaluation/test_rerank.py.
    """
    results = []
    for factor in (1.0, scale):
        queries, gallery, _ = ranked_set("random", factor)
        blocks = ReRankedDistances(queries, gallery, metric=metric, options=ReRanking()).blocks()
        results.append(torch.cat([block.clone() for _, block in blocks]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["all equal", "one"])
def test_re_ranking_of_equal_features_is_finite(kind):
    queries, gallery = torch.ones(3, 4), torch.ones(5 if kind == "all equal" else 1, 4)
    blocks = ReRankedDistances(queries, gallery, metric="cosine", options=ReRanking()).blocks()
    assert torch.isfinite(torch.cat([block.clone() for _, block in blocks])).all()


# ---- learning rates


@pytest.mark.parametrize("base_lr", [1e-6, 1.0, 1e3])
@pytest.mark.parametrize("sched", ["MultiStepLR", "CosineAnnealingLR"])
def test_lr_schedules_match_definitions(sched, base_lr):
    """Step decay by gamma, or cosine (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5), times a linear warm-up."""
    cfg = read_config("", [
        "SOLVER.SCHED", sched, "SOLVER.EPOCH_SCHEDULE", "absolute", "SOLVER.MAX_EPOCH", "10",
        "SOLVER.STEPS", "[4, 7]", "SOLVER.GAMMA", "0.1", "SOLVER.ETA_MIN_LR", str(1e-3 * base_lr),
        "SOLVER.WARMUP_ITERS", "8", "SOLVER.WARMUP_FACTOR", "0.1",
    ])  # fmt: skip
    schedule = build_lr_schedule(cfg, 4)
    for epoch in range(10):
        steps = 4 * epoch
        rate = schedule.learning_rate(base_lr, epoch=epoch, steps_taken=steps)
        warmup = min(1.0, 0.1 + 0.9 * steps / 8)
        decayed = base_lr * 0.1 ** ((epoch >= 4) + (epoch >= 7))
        if sched == "CosineAnnealingLR":
            decayed = base_lr * (1e-3 + (1 - 1e-3) * (1 + math.cos(math.pi * epoch / 10)) / 2)
        assert rate == pytest.approx(warmup * decayed, rel=1e-9)
