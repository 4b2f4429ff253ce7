"""Losses: comparison with naive loops in two dtypes, and degenerate cases."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastamp.config import get_cfg
from fastamp.modeling.losses import (
    build_losses,
    cross_entropy_loss,
    focal_loss,
    pairwise_circle_loss,
    pairwise_cosface,
    triplet_loss,
)

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epsilon", [0.0, 0.1, -1.0])
def test_cross_entropy_equals_naive_loop(dtype, epsilon):
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 5, dtype=dtype), torch.tensor([0, 1, 2, 3, 4, 0])
    losses = []
    for row, target in zip(logits, targets, strict=True):
        probabilities = [math.exp(v) / sum(math.exp(w) for w in row.tolist()) for v in row.tolist()]
        eps = 0.2 * probabilities[target] if epsilon < 0 else epsilon
        labels = [1 - eps if k == target else eps / 4 for k in range(5)]
        losses.append(-sum(label * math.log(p) for label, p in zip(labels, probabilities, strict=True)))
    loss = cross_entropy_loss(logits, targets, epsilon=epsilon, alpha=0.2)
    assert loss.item() == pytest.approx(sum(losses) / 6, rel=1e-5)


def test_cross_entropy_without_smoothing_equals_pytorch():
    logits, targets = torch.randn(8, 10), torch.randint(10, (8,))
    torch.testing.assert_close(cross_entropy_loss(logits, targets), F.cross_entropy(logits, targets))


def test_cross_entropy_is_averaged_over_samples_with_nonzero_loss():
    logits = torch.tensor([[1000.0, 0.0], [0.0, 0.0]])
    assert cross_entropy_loss(logits, torch.tensor([0, 0])).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("epsilon", [0.0, 0.1, -1.0])
def test_cross_entropy_is_finite_with_one_class_or_one_image(epsilon):
    for shape in ((3, 1), (1, 4)):
        logits = torch.randn(shape, requires_grad=True)
        loss = cross_entropy_loss(logits, torch.zeros(shape[0], dtype=torch.int64), epsilon=epsilon)
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()


def naive_triplet(features, targets, margin, normalize, hard, weighting="softmax"):
    if normalize:
        features = F.normalize(features, dim=1)
    n = len(targets)
    losses = []
    for i in range(n):
        d = [(features[i] - features[j]).norm().item() for j in range(n)]
        if normalize:
            d = [v * v for v in d]
        positives = [d[j] for j in range(n) if targets[j] == targets[i]]
        negatives = [d[j] for j in range(n) if targets[j] != targets[i]]
        if hard:
            ap, an = max(positives), min(negatives)
        else:
            fastreid = weighting == "fastreid"
            wp = [math.exp(v - max(positives)) for v in positives]
            wn = [math.exp(-v if fastreid else min(negatives) - v) for v in negatives]
            ap = sum(w * v for w, v in zip(wp, positives, strict=True)) / (sum(wp) + fastreid * 1e-6)
            an = sum(w * v for w, v in zip(wn, negatives, strict=True)) / (sum(wn) + fastreid * 1e-6)
        losses.append(max(0.0, ap - an + margin) if margin > 0 else np.logaddexp(0, ap - an))
    return sum(losses) / n


def test_triplet_loss_equals_naive_loop(subtests):
    for dtype, margin, normalize, (hard, weighting) in itertools.product(
        DTYPES, [0.3, 0.0], [False, True], [(True, "softmax"), (False, "softmax"), (False, "fastreid")]
    ):
        with subtests.test(dtype=dtype, margin=margin, normalize=normalize, hard=hard, weighting=weighting):
            torch.manual_seed(0)
            features, targets = torch.randn(8, 6, dtype=dtype), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
            loss = triplet_loss(
                features, targets, margin=margin, normalize=normalize, hard_mining=hard, weighting=weighting
            )
            expected = naive_triplet(features.double(), targets, margin, normalize, hard, weighting)
            assert loss.item() == pytest.approx(expected, rel=2e-3 if dtype == torch.float32 else 1e-5)


def test_triplet_loss_is_finite_if_batch_has_no_negatives_or_positives(subtests):
    for weighting, targets, hard, margin in itertools.product(
        ["softmax", "fastreid"], [[0, 0, 0, 0], [0, 1, 2, 3], [0]], [True, False], [0.3, 0.0]
    ):
        with subtests.test(weighting=weighting, targets=targets, hard=hard, margin=margin):
            features = torch.randn(len(targets), 4, requires_grad=True)
            loss = triplet_loss(features, torch.tensor(targets), margin=margin, hard_mining=hard, weighting=weighting)
            loss.backward()
            assert torch.isfinite(loss) and torch.isfinite(features.grad).all()


WRT = np.load(Path(__file__).parents[1] / "reference" / "methods" / "vi_losses1.npz")


@pytest.mark.parametrize(("factor", "name"), [(1, "wrt"), (4, "wrt_features_x4")])
def test_triplet_loss_with_fastreid_weighting_equals_agw_reference(factor, name):
    features = torch.tensor(WRT["features"], requires_grad=True)
    targets = torch.tensor(WRT["labels"])
    loss = triplet_loss(factor * features, targets, margin=0.0, hard_mining=False, weighting="fastreid")
    loss.backward()
    assert loss.item() == pytest.approx(float(WRT[f"{name}_loss"]), rel=1e-6)
    torch.testing.assert_close(features.grad, torch.tensor(WRT[f"{name}_grad"]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weighting", ["softmax", "fastreid"])
def test_triplet_loss_of_small_distances_equals_agw_reference(weighting):
    features, targets = torch.tensor(WRT["features"]), torch.tensor(WRT["labels"])
    unit = F.normalize(features, dim=1)
    loss = triplet_loss(unit, targets, margin=0.0, hard_mining=False, weighting=weighting)
    assert loss.item() == pytest.approx(float(WRT["wrt_normalized_loss"]), rel=1e-6)


@pytest.mark.parametrize("factor", [1e-3, 1.0, 4.0, 1e3])
def test_triplet_loss_with_softmax_weighting_equals_naive_loop_for_scaled_features(factor):
    features, targets = factor * torch.tensor(WRT["features"]), torch.tensor(WRT["labels"])
    loss = triplet_loss(features, targets, margin=0.0, hard_mining=False)
    expected = naive_triplet(features.double(), targets, 0.0, False, False)
    assert loss.item() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_triplet_loss_with_fastreid_weighting_is_wrong_for_distances_above_14():
    """The median distance is 42, and the weighted negative distance is 0."""
    features, targets = 4 * torch.tensor(WRT["features"]), torch.tensor(WRT["labels"])
    right, fastreid = (
        triplet_loss(features, targets, margin=0.0, hard_mining=False, weighting=form)
        for form in ("softmax", "fastreid")
    )
    assert right.item() < 0.5 and fastreid.item() > 30


def test_triplet_loss_is_zero_if_batch_has_no_negatives():
    features = torch.tensor([[0.0], [1.0], [3.0]], requires_grad=True)
    for hard in (True, False):
        loss = triplet_loss(features, torch.tensor([0, 0, 0]), margin=0.0, hard_mining=hard)
        loss.backward()
        assert loss.item() == 0 and torch.equal(features.grad, torch.zeros(3, 1))


def test_triplet_loss_with_soft_margin_does_not_overflow():
    features = torch.tensor([[0.0], [1000.0], [1.0], [999.0]], requires_grad=True)
    loss = triplet_loss(features, torch.tensor([0, 0, 1, 1]), margin=0.0)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(features.grad).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_triplet_loss_and_cross_entropy_are_float32_under_autocast(dtype):
    with torch.autocast("cpu", dtype=dtype):
        features = (torch.randn(4, 8) @ torch.randn(8, 8)).requires_grad_()
        targets = torch.tensor([0, 0, 1, 1])
        assert features.dtype == dtype
        assert triplet_loss(features, targets).dtype == torch.float32
        assert cross_entropy_loss(features, targets).dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gamma", [0.0, 1.5, 2.0])
def test_focal_loss_equals_naive_loop(dtype, gamma):
    logits, targets = torch.randn(6, 5, dtype=dtype), torch.tensor([0, 1, 2, 3, 4, 0])
    losses = []
    for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
        p = math.exp(row[target]) / sum(math.exp(value) for value in row)
        losses.append(-0.25 * (1 - p) ** gamma * math.log(p))
    assert focal_loss(logits, targets, alpha=0.25, gamma=gamma).item() == pytest.approx(sum(losses) / 6, rel=1e-5)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_loss_is_finite_for_confident_samples(gamma):
    logits = torch.tensor([[1000.0, 0.0], [0.0, 1000.0], [3.0, 3.0]], requires_grad=True)
    loss = focal_loss(logits, torch.tensor([0, 0, 1]), gamma=gamma)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()
    one_class = torch.randn(4, 1, requires_grad=True)
    focal_loss(one_class, torch.zeros(4, dtype=torch.int64), gamma=gamma).backward()
    assert torch.equal(one_class.grad, torch.zeros(4, 1))


def naive_pairwise(name, features, targets, margin, gamma):
    unit, total = F.normalize(features, dim=1), 0.0
    for i in range(len(targets)):
        positives, negatives = [], []
        for j in range(len(targets)):
            s = (unit[i] @ unit[j]).item()
            if i != j and targets[i] == targets[j]:
                factor = max(0, 1 + margin - s) * (s - (1 - margin)) if name == "circle" else s
                positives.append(-gamma * factor)
            elif targets[i] != targets[j]:
                factor = max(0, s + margin) * (s - margin) if name == "circle" else s + margin
                negatives.append(gamma * factor)
        if positives and negatives:
            product = sum(map(math.exp, positives)) * sum(map(math.exp, negatives))
            total += math.log(1 + product)
    return total / len(targets)


PAIRWISE = {"circle": pairwise_circle_loss, "cosface": pairwise_cosface}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PAIRWISE)
@pytest.mark.parametrize("targets", [[0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 2, 3]])
def test_pairwise_cosine_losses_equal_naive_loop(dtype, name, targets):
    features, targets = torch.randn(6, 4, dtype=dtype), torch.tensor(targets)
    loss = PAIRWISE[name](features, targets, margin=0.25, gamma=16.0)
    assert loss.item() == pytest.approx(naive_pairwise(name, features, targets, 0.25, 16.0), rel=1e-4)


@pytest.mark.parametrize("name", PAIRWISE)
@pytest.mark.parametrize("targets", [[0, 0, 0, 0], [0, 1, 2, 3], [0]])
def test_pairwise_cosine_losses_are_zero_if_batch_has_no_pairs(name, targets):
    features = torch.randn(len(targets), 4, requires_grad=True)
    loss = PAIRWISE[name](features, torch.tensor(targets))
    loss.backward()
    assert loss.item() == 0 and torch.equal(features.grad, torch.zeros_like(features))


@pytest.mark.parametrize("function", [*PAIRWISE.values(), focal_loss])
def test_pairwise_cosine_and_focal_losses_are_float32_under_autocast(function):
    values, targets = 100 * torch.randn(8, 6), torch.arange(8) // 2
    with torch.autocast("cpu", dtype=torch.float16):
        low = function(values, targets)
    assert low.dtype == torch.float32 and torch.equal(low, function(values, targets))


def test_build_losses_applies_scale_of_each_loss():
    cfg = get_cfg()
    cfg.MODEL.LOSSES.NAME = ["CrossEntropyLoss", "TripletLoss", "FocalLoss", "CircleLoss", "Cosface"]
    for node, scale in (("CIRCLE", 2.0), ("COSFACE", 3.0), ("FL", 4.0)):
        cfg.MODEL.LOSSES[node].SCALE = scale
    losses = build_losses(cfg)
    assert list(losses) == ["loss_cls", "loss_triplet", "loss_focal", "loss_circle", "loss_cosface"]
    features, logits, targets = torch.randn(6, 4), torch.randn(6, 3), torch.arange(6) // 2
    outputs = {"features": features, "cls_outputs": logits}
    values = {name: loss(outputs, targets) for name, loss in losses.items()}
    torch.testing.assert_close(values["loss_circle"], 2 * pairwise_circle_loss(features, targets))
    torch.testing.assert_close(values["loss_cosface"], 3 * pairwise_cosface(features, targets))
    torch.testing.assert_close(values["loss_focal"], 4 * focal_loss(logits, targets))
