"""Distances between low-precision features, their gradients, and invalid names."""

import pytest
import torch

from fastamp.layers import pairwise_distance
from fastamp.utils.errors import ConfigError


def test_distances_of_float16_features_are_computed_in_float32():
    """As a negative control, the squared features overflow in float16."""
    x = torch.randn(3, 2048, generator=torch.Generator().manual_seed(0)).mul(6).half()
    assert torch.isinf(x.pow(2).sum(1)).any()
    with torch.autocast("cpu", dtype=torch.float16):
        distances = pairwise_distance(x, x)
    assert distances.dtype == torch.float32
    off_diagonal = ~torch.eye(3, dtype=torch.bool)
    torch.testing.assert_close(distances[off_diagonal], torch.cdist(x.float(), x.float())[off_diagonal])


def test_distance_gradient_is_finite_at_zero_distance():
    x = torch.ones(2, 3, requires_grad=True)
    pairwise_distance(x, x).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_unknown_distance_metric_error_suggests_the_nearest_name():
    with pytest.raises(ConfigError, match="TEST.METRIC.*'euclid'.*'euclidean'"):
        pairwise_distance(torch.ones(1, 1), torch.ones(1, 1), "euclid")
