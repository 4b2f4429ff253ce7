"""Losses against naive loops, at two dtypes and in the degenerate cases."""

import math

import pytest
import torch
import torch.nn.functional as F

from fastamp.modeling.losses import cross_entropy_loss, triplet_loss

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epsilon", [0.0, 0.1, -1.0])
def test_cross_entropy_equals_a_naive_loop(dtype, epsilon):
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


def test_cross_entropy_without_smoothing_is_pytorchs():
    logits, targets = torch.randn(8, 10), torch.randint(10, (8,))
    torch.testing.assert_close(cross_entropy_loss(logits, targets), F.cross_entropy(logits, targets))


def test_cross_entropy_averages_over_samples_with_a_loss():
    logits = torch.tensor([[1000.0, 0.0], [0.0, 0.0]])
    assert cross_entropy_loss(logits, torch.tensor([0, 0])).item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("epsilon", [0.0, 0.1, -1.0])
def test_cross_entropy_of_one_class_or_one_image_is_finite(epsilon):
    for shape in ((3, 1), (1, 4)):
        logits = torch.randn(shape, requires_grad=True)
        loss = cross_entropy_loss(logits, torch.zeros(shape[0], dtype=torch.int64), epsilon=epsilon)
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()


def naive_triplet(features, targets, margin, normalize, hard):
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
            wp = [math.exp(v - max(positives)) for v in positives]
            wn = [math.exp(-v) for v in negatives]
            ap = sum(w * v for w, v in zip(wp, positives, strict=True)) / (sum(wp) + 1e-6)
            an = sum(w * v for w, v in zip(wn, negatives, strict=True)) / (sum(wn) + 1e-6)
        losses.append(max(0.0, ap - an + margin) if margin > 0 else math.log1p(math.exp(ap - an)))
    return sum(losses) / n


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("margin", [0.3, 0.0])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("hard", [True, False])
def test_triplet_equals_a_naive_loop(dtype, margin, normalize, hard):
    torch.manual_seed(0)
    features, targets = torch.randn(8, 6, dtype=dtype), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    loss = triplet_loss(features, targets, margin=margin, normalize=normalize, hard_mining=hard)
    expected = naive_triplet(features.double(), targets, margin, normalize, hard)
    assert loss.item() == pytest.approx(expected, rel=2e-3 if dtype == torch.float32 else 1e-5)


@pytest.mark.parametrize("targets", [[0, 0, 0, 0], [0, 1, 2, 3], [0]])
@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("margin", [0.3, 0.0])
def test_triplet_without_negatives_or_positives_is_finite(targets, hard, margin):
    features = torch.randn(len(targets), 4, requires_grad=True)
    loss = triplet_loss(features, torch.tensor(targets), margin=margin, hard_mining=hard)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(features.grad).all()


def test_soft_margin_does_not_overflow():
    features = torch.tensor([[0.0], [1000.0], [1.0], [999.0]], requires_grad=True)
    loss = triplet_loss(features, torch.tensor([0, 0, 1, 1]), margin=0.0)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(features.grad).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_are_float32_under_autocast(dtype):
    with torch.autocast("cpu", dtype=dtype):
        features = (torch.randn(4, 8) @ torch.randn(8, 8)).requires_grad_()
        targets = torch.tensor([0, 0, 1, 1])
        assert features.dtype == dtype
        assert triplet_loss(features, targets).dtype == torch.float32
        assert cross_entropy_loss(features, targets).dtype == torch.float32
