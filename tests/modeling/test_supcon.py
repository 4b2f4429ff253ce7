"""Supervised contrastive loss: comparison with pytorch-metric-learning, and degenerate cases."""

import pytest
import torch

from fastamp.config import read_config
from fastamp.modeling.losses import build_losses
from fastamp.modeling.losses.supcon import SupConLoss, supcon_loss


def test_supcon_loss_equals_pytorch_metric_learning():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    features, targets = torch.randn(12, 8), torch.arange(12) // 3
    torch.testing.assert_close(supcon_loss(features, targets), losses.SupConLoss(temperature=0.1)(features, targets))


def test_supcon_loss_uses_temperature_and_scale_from_config():
    cfg = read_config("", [
        "MODEL.LOSSES.NAME", "SupConLoss", "MODEL.LOSSES.SUPCON.TEMPERATURE", "0.5", "MODEL.LOSSES.SUPCON.SCALE", "2",
    ])  # fmt: skip
    loss = build_losses(cfg)["loss_supcon"]
    features, targets = torch.randn(6, 4), torch.arange(6) // 2
    expected = 2 * supcon_loss(features, targets, temperature=0.5)
    torch.testing.assert_close(loss({"features": features}, targets), expected)
    assert SupConLoss.over_pairs
