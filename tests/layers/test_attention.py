"""Attention layers compared with the formulas in the papers."""

from itertools import product

import pytest
import torch

from fastamp.layers import NonLocal, SELayer, dot_product_attention


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


def attention_by_loops(queries, keys, values, *, scale, mask, causal):
    output = torch.empty_like(queries)
    for image, head, row in product(*map(range, queries.shape[:3])):
        scores = scale * (keys[image, head] @ queries[image, head, row]) + mask[row]
        weights = scores[: row + 1 if causal else None].exp()
        output[image, head, row] = (weights / weights.sum()) @ values[image, head, : len(weights)]
    return output


@pytest.mark.parametrize("causal", [False, True])
def test_dot_product_attention_matches_the_formula_in_the_paper(causal):
    queries, keys, values = torch.randn(3, 2, 3, 5, 8, dtype=torch.float64)
    mask = torch.zeros(5, 5, dtype=torch.float64) if causal else torch.randn(5, 5, dtype=torch.float64)
    options = {"is_causal": True} if causal else {"attn_mask": mask}
    found = dot_product_attention(queries, keys, values, scale=0.3, **options)
    expected = attention_by_loops(queries, keys, values, scale=0.3, mask=mask, causal=causal)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_dot_product_attention_with_gradients_computes_in_float32_on_a_cpu(dtype, autocast):
    leaf = torch.randn(3, 2, 3, 17, 8).to(dtype).requires_grad_()
    exact = leaf.detach().double().requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        found = dot_product_attention(*leaf.unbind(0))
    expected = dot_product_attention(*exact.unbind(0))
    assert found.dtype == dtype
    rounded = {"rtol": torch.finfo(dtype).eps, "atol": 1e-4}  # only the result is rounded
    torch.testing.assert_close(found.double(), expected, **rounded)
    weights = torch.randn_like(expected).to(dtype)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, **rounded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dot_product_attention_without_gradients_is_not_cast(dtype):
    """Exported models are traced on a CPU, also for devices with fast kernels in low precision."""
    packed = torch.randn(3, 2, 3, 17, 8).to(dtype)
    traced = torch.jit.trace(lambda packed: dot_product_attention(*packed.unbind(0)), packed)
    assert "aten::scaled_dot_product_attention" in str(traced.graph)
    assert "aten::to" not in str(traced.graph)
