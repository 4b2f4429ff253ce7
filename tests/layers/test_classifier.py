"""Margin softmax layers compared with naive loops, at cosines of 1 and -1, and under autocast."""

import math

import pytest
import torch

from fastamp.layers import CLS_LAYER_REGISTRY

SCALE, MARGIN = 30.0, 0.35
MARGIN_LAYERS = ["ArcSoftmax", "CosSoftmax", "CircleSoftmax"]


def naive(name, cosine, right):
    """Compute one logit with the formula in the paper."""
    if name == "ArcSoftmax":
        return SCALE * math.cos(math.acos(cosine) + (MARGIN if right else 0))
    if name == "CosSoftmax":
        return SCALE * (cosine - (MARGIN if right else 0))
    if right:
        return SCALE * max(0, 1 + MARGIN - cosine) * (cosine - (1 - MARGIN))
    return SCALE * max(0, cosine + MARGIN) * (cosine - MARGIN)


def layer(name):
    return CLS_LAYER_REGISTRY.get(name)(scale=SCALE, margin=MARGIN)


@pytest.mark.parametrize("name", MARGIN_LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [5, 1])
def test_margin_softmax_matches_a_naive_loop(name, dtype, classes):
    features, weight = torch.randn(6, 4, dtype=dtype), torch.randn(classes, 4, dtype=dtype)
    targets = torch.arange(6) % classes
    for_loss, for_accuracy = layer(name)(features, weight, targets)
    for i in range(6):
        for j in range(classes):
            cosine = torch.nn.functional.cosine_similarity(features[i], weight[j], dim=0).item()
            assert for_loss[i, j].item() == pytest.approx(naive(name, cosine, targets[i] == j), abs=2e-4)
            assert for_accuracy[i, j].item() == pytest.approx(SCALE * cosine, abs=2e-4)


@pytest.mark.parametrize("name", MARGIN_LAYERS)
def test_margin_softmax_gradients_are_finite_if_features_equal_the_weights(name):
    weight = torch.randn(64, 512)
    features = torch.cat((weight, -weight, 1e4 * weight)).requires_grad_()
    weight.requires_grad_()
    targets = torch.arange(64).repeat(3)
    for_loss, _ = layer(name)(features, weight, targets)
    torch.nn.functional.cross_entropy(for_loss, targets).backward()
    assert all(torch.isfinite(t).all() for t in (for_loss, features.grad, weight.grad))
    # Negative control: without the clamp, rounding gives cosines above 1, and the arc cosine is NaN.
    unit = torch.nn.functional.normalize(weight.detach())
    assert (unit @ unit.t()).max() > 1


@pytest.mark.parametrize("name", ["Linear", *MARGIN_LAYERS])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_classifier_logits_are_float32_under_autocast(name, dtype):
    features, weight, targets = 3000 * torch.randn(6, 8), torch.randn(5, 8), torch.arange(6) % 5
    with torch.autocast("cpu", dtype=dtype):
        low, _ = layer(name)(features, weight, targets)
    expected, _ = layer(name)(features, weight, targets)
    assert low.dtype == torch.float32
    assert torch.equal(low, expected)


def test_no_gradient_flows_through_circle_softmax_factors():
    cosines = torch.tensor([[0.2]], requires_grad=True)
    circle = layer("CircleSoftmax")
    for out, expected in ((circle.right(cosines), 1 + MARGIN - 0.2), (circle.wrong(cosines), 0.2 + MARGIN)):
        (gradient,) = torch.autograd.grad(out.sum(), cosines)
        assert gradient.item() == pytest.approx(expected)
