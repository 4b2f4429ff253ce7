"""Margin softmax layers compared with naive loops, at cosines of 1 and -1, and under autocast."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from fastamp.layers import CLS_LAYER_REGISTRY
from fastamp.utils.errors import ConfigError

SCALE, MARGIN = 30.0, 0.35
MARGIN_LAYERS = ["ArcSoftmax", "CosSoftmax", "CircleSoftmax", "MonotonicArcSoftmax"]
REFERENCE = Path(__file__).parents[1] / "reference/methods"


def naive(name, cosine, right):
    """Compute one logit with the formula in the paper."""
    if name == "ArcSoftmax":
        return SCALE * math.cos(math.acos(cosine) + (MARGIN if right else 0))
    if name == "MonotonicArcSoftmax":
        if right and math.acos(cosine) + MARGIN > math.pi:
            return SCALE * (cosine - MARGIN * math.sin(MARGIN))
        return naive("ArcSoftmax", cosine, right)
    if name == "CosSoftmax":
        return SCALE * (cosine - (MARGIN if right else 0))
    if right:
        return SCALE * max(0, 1 + MARGIN - cosine) * (cosine - (1 - MARGIN))
    return SCALE * max(0, cosine + MARGIN) * (cosine - MARGIN)


def layer(name):
    return CLS_LAYER_REGISTRY.get(name)(scale=SCALE, margin=MARGIN)


def test_margin_softmax_matches_a_naive_loop(subtests):
    for name, dtype, classes in itertools.product(MARGIN_LAYERS, [torch.float32, torch.float64], [5, 1]):
        with subtests.test(name=name, dtype=dtype, classes=classes):
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


def test_classifier_logits_are_float32_under_autocast(subtests):
    for name, dtype in itertools.product(["Linear", *MARGIN_LAYERS], [torch.float16, torch.bfloat16]):
        with subtests.test(name=name, dtype=dtype):
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


def test_sub_center_and_monotonic_layers_equal_the_numbers_of_miewid():
    data = np.load(REFERENCE / "animals_miewid1.npz")
    targets, weight = torch.from_numpy(data["labels"]), torch.from_numpy(data["subcenter_weight"])
    layers = {
        "subcenter": CLS_LAYER_REGISTRY.get("SubCenterArcSoftmax")(scale=30.0, margin=0.5, num_classes=12),
        "arcface": CLS_LAYER_REGISTRY.get("MonotonicArcSoftmax")(scale=30.0, margin=0.5),
    }
    layers["subcenter"].set_class_counts(data["class_counts"])
    assert layers["subcenter"].margins.numpy() == pytest.approx(data["dynamic_margins"], abs=1e-6)
    for name, layer in layers.items():
        features = torch.from_numpy(data["embeddings"]).requires_grad_()
        logits, _ = layer(features, weight if name == "subcenter" else weight[::2], targets)
        loss = functional.cross_entropy(logits, targets)
        loss.backward()
        assert loss.item() == pytest.approx(float(data[f"{name}_loss"]), rel=1e-6)
        assert features.grad.numpy() == pytest.approx(data[f"{name}_grad"], abs=1e-6)
        if name == "arcface":
            assert logits[:4].detach().numpy() == pytest.approx(data["arcface_logits_first"], rel=1e-5)


def sub_centers(**options):
    return CLS_LAYER_REGISTRY.get("SubCenterArcSoftmax")(scale=SCALE, margin=0.5, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sub_center_softmax_matches_a_naive_loop(dtype):
    layer = sub_centers(num_classes=4, centers=3)
    layer.set_class_counts([1, 16, 81, 5])
    features, weight, targets = torch.randn(8, 5, dtype=dtype), torch.randn(12, 5, dtype=dtype), torch.arange(8) % 4
    for_loss, for_accuracy = layer(features, weight, targets)
    rarity = [n**-0.25 for n in (1, 16, 81, 5)]
    for i in range(8):
        for j in range(4):
            cosine = max(
                functional.cosine_similarity(features[i], row, dim=0).item() for row in weight[3 * j : 3 * j + 3]
            )
            margin = 0.2 + 0.3 * (rarity[j] - rarity[2]) / (rarity[0] - rarity[2])
            expected = math.cos(math.acos(cosine) + margin) if targets[i] == j else cosine
            assert for_loss[i, j].item() == pytest.approx(SCALE * expected, abs=2e-4)
            assert for_accuracy[i, j].item() == pytest.approx(SCALE * cosine, abs=2e-4)
    assert layer.logits(features, weight).equal(for_accuracy)


def test_sub_center_margins_are_defined_for_equal_counts_one_class_and_no_counts():
    for counts in ([7, 7, 7], [3], [0, 1]):
        layer = sub_centers(num_classes=len(counts))
        assert layer.margins.tolist() == [0.5] * len(counts)
        layer.set_class_counts(counts)
        assert layer.margins.tolist() == [0.5] * len(counts)


def test_sub_center_gradient_is_finite_if_features_equal_the_weights():
    weight = torch.randn(128, 512)
    features = torch.cat((weight[::2], -weight[::2])).requires_grad_()
    targets = torch.arange(64).repeat(2)
    functional.cross_entropy(sub_centers(num_classes=64)(features, weight, targets)[0], targets).backward()
    assert torch.isfinite(features.grad).all()


def test_sub_center_min_margin_above_the_margin_is_an_error():
    with pytest.raises(ConfigError, match="MIN_MARGIN"):
        sub_centers(min_margin=0.6)
