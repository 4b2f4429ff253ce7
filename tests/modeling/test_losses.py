"""Losses: reference values, degenerate cases and autocast; test_formulas.py compares them with their definitions."""

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
from fastamp.modeling.losses.supcon import supcon_loss


def test_no_gradient_flows_through_adaptive_smoothing():
    logits, targets = torch.randn(6, 5, requires_grad=True), torch.tensor([0, 1, 2, 3, 4, 0])
    cross_entropy_loss(logits, targets, epsilon=-1.0, alpha=0.2).backward()
    probabilities = logits.detach().softmax(1)
    eps = 0.2 * probabilities.gather(1, targets[:, None])
    labels = (eps / 4).expand(-1, 5).scatter(1, targets[:, None], 1 - eps)
    torch.testing.assert_close(logits.grad, (probabilities - labels) / 6)


def test_cross_entropy_without_smoothing_equals_pytorch():
    logits, targets = torch.randn(8, 10), torch.randint(10, (8,))
    torch.testing.assert_close(cross_entropy_loss(logits, targets), F.cross_entropy(logits, targets))


def test_cross_entropy_is_averaged_over_samples_with_nonzero_loss():
    logits = torch.tensor([[1000.0, 0.0], [0.0, 0.0]])
    assert cross_entropy_loss(logits, torch.tensor([0, 0])).item() == pytest.approx(math.log(2))


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


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_loss_is_finite_for_confident_samples(gamma):
    logits = torch.tensor([[1000.0, 0.0], [0.0, 1000.0], [3.0, 3.0]], requires_grad=True)
    loss = focal_loss(logits, torch.tensor([0, 0, 1]), gamma=gamma)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(logits.grad).all()
    one_class = torch.randn(4, 1, requires_grad=True)
    focal_loss(one_class, torch.zeros(4, dtype=torch.int64), gamma=gamma).backward()
    assert torch.equal(one_class.grad, torch.zeros(4, 1))


PAIRWISE = (pairwise_circle_loss, pairwise_cosface, supcon_loss)


@pytest.mark.parametrize("function", PAIRWISE)
def test_pairwise_losses_are_zero_if_batch_has_no_pairs(function, subtests):
    for targets in ([0, 0] if function is supcon_loss else [0, 0, 0, 0], [0, 1, 2, 3], [0]):
        with subtests.test(targets=targets):
            features = torch.randn(len(targets), 4, requires_grad=True)
            loss = function(features, torch.tensor(targets))
            loss.backward()
            assert loss.item() == 0 and not features.grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", [*PAIRWISE, triplet_loss, cross_entropy_loss, focal_loss])
def test_losses_are_float32_under_autocast(function, dtype):
    values, targets = (100 * torch.randn(8, 6)).to(dtype), torch.arange(8) // 2
    with torch.autocast("cpu", dtype=dtype):
        low = function(values, targets)
    assert low.dtype == torch.float32 and torch.equal(low, function(values.float(), targets))


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
