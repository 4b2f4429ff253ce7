"""Attention layers compared with the formulas in the papers."""

import pytest
import torch

from fastamp.layers import NonLocal, SELayer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_squeeze_and_excitation_matches_the_formula_in_the_paper(dtype):
    layer = SELayer(32, reduction=8).to(dtype)
    x = torch.randn(2, 32, 4, 3, dtype=dtype)
    hidden = (x.mean((2, 3)) @ layer.fc[0].weight.t()).relu()
    gate = (hidden @ layer.fc[2].weight.t()).sigmoid()
    torch.testing.assert_close(layer(x), x * gate[:, :, None, None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(4, 3), (1, 1)])
def test_non_local_block_matches_computation_with_full_similarity_matrix(dtype, size):
    layer = NonLocal(8, "BN").to(dtype).eval()
    torch.nn.init.normal_(layer.W[1].weight)
    x = torch.randn(2, 8, *size, dtype=dtype)
    theta, phi, g = (getattr(layer, name)(x).flatten(2) for name in ("theta", "phi", "g"))
    similarity = theta.transpose(1, 2) @ phi  # (B, N, N)
    attended = (similarity / similarity.shape[-1]) @ g.transpose(1, 2)
    expected = layer.W(attended.transpose(1, 2).reshape(2, 1, *size)) + x
    torch.testing.assert_close(layer(x), expected)


def test_non_local_block_is_the_identity_at_initialization():
    x = torch.randn(2, 8, 4, 3)
    assert torch.equal(NonLocal(8, "BN")(x), x)


def test_non_local_block_does_not_overflow_under_float16_autocast():
    layer = NonLocal(2, "BN").eval()
    for conv in (layer.theta, layer.phi, layer.g):
        torch.nn.init.constant_(conv.weight, 1.0)
        torch.nn.init.zeros_(conv.bias)
    torch.nn.init.constant_(layer.W[0].weight, 1e-5)
    torch.nn.init.ones_(layer.W[1].weight)
    x = torch.full((1, 2, 4, 4), 50.0)
    with torch.autocast("cpu", dtype=torch.float16):
        out = layer(x)
    assert torch.isfinite(out).all()
    assert not torch.isfinite((x.half() * 2) * (x.half() * 2) * (x.half() * 2)).all()  # the same product in float16
