"""Normalization layers built by their config names, and IBN."""

import pytest
import torch
from torch import nn

from fastamp.layers import IBN, build_norm
from fastamp.utils.errors import ConfigError


@pytest.mark.parametrize(
    "name, kind",
    [("BN", nn.BatchNorm2d), ("syncBN", nn.SyncBatchNorm), ("SyncBN", nn.SyncBatchNorm), ("GN", nn.GroupNorm)],
)
def test_build_norm_sets_weight_to_one_and_bias_to_zero(name, kind):
    norm = build_norm(name, 64, freeze_bias=True)
    assert isinstance(norm, kind)
    assert torch.equal(norm.weight, torch.ones(64)) and torch.equal(norm.bias, torch.zeros(64))
    assert norm.weight.requires_grad and not norm.bias.requires_grad


def test_unknown_norm_error_suggests_the_nearest_name():
    with pytest.raises(ConfigError, match="'SyncBN'"):
        build_norm("synBN", 64)


@pytest.mark.parametrize("norm", ["BN", "syncBN", "GN"])
def test_trainable_normalization_layers_train_in_a_single_process(norm):
    layer, x = build_norm(norm, 32), torch.randn(4, 32, 3, 2)
    out = layer(x)
    if norm != "GN":
        torch.testing.assert_close(out, nn.BatchNorm2d(32)(x))
    out.square().sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("channels", [64, 5])
@pytest.mark.parametrize("training", [True, False])
def test_ibn_applies_instance_norm_to_half_of_the_channels(channels, training):
    layer = IBN("BN", channels).train(training)
    x = 3 * torch.randn(4, channels, 5, 3) + 1
    out, half = layer(x), channels // 2
    mean, variance = x.mean((2, 3), keepdim=True), x.var((2, 3), unbiased=False, keepdim=True)
    torch.testing.assert_close(out[:, :half], ((x - mean) / (variance + 1e-5).sqrt())[:, :half])
    if training:
        mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
        torch.testing.assert_close(out[:, half:], ((x - mean) / (variance + 1e-5).sqrt())[:, half:])
    assert set(layer.state_dict()) >= {"IN.weight", "IN.bias", "BN.weight", "BN.running_mean"}


def test_frozen_batch_norm_keeps_pretrained_statistics():
    state = nn.BatchNorm2d(8).state_dict() | {"running_mean": torch.ones(8), "weight": torch.full((8,), 2.0)}
    frozen, x = build_norm("FrozenBN", 8), torch.randn(4, 8, 3, 2)
    frozen.load_state_dict(state)
    assert list(frozen.parameters()) == []
    torch.testing.assert_close(frozen.train()(x), 2 * (x - 1), rtol=1e-4, atol=1e-4)
    assert torch.equal(frozen.running_mean, torch.ones(8))
