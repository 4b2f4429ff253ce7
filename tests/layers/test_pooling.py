"""Pooling layers compared with naive formulas, and float32 pooling under autocast."""

import itertools

import pytest
import torch

from fastamp.layers import POOL_LAYER_REGISTRY, pooled_width

NAIVE = {
    "GlobalAvgPool": lambda x: x.mean((2, 3)),
    "FastGlobalAvgPool": lambda x: x.mean((2, 3)),
    "ClipGlobalAvgPool": lambda x: x.mean((2, 3)).clamp(0, 1),
    "GlobalMaxPool": lambda x: x.amax((2, 3)),
    "AdaptiveAvgMaxPool": lambda x: x.mean((2, 3)) + x.amax((2, 3)),
    "MaxAvgPool": lambda x: torch.cat((x.amax((2, 3)), x.mean((2, 3))), 1),
    "GeneralizedMeanPooling": lambda x: x.clamp(min=1e-6).pow(3).mean((2, 3)).pow(1 / 3),
    "GeneralizedMeanPoolingP": lambda x: x.clamp(min=1e-6).pow(3).mean((2, 3)).pow(1 / 3),
}


def test_pooling_layers_match_naive_formulas(subtests):
    for name, dtype in itertools.product(NAIVE, [torch.float32, torch.float64]):
        with subtests.test(name=name, dtype=dtype):
            x = torch.rand(2, 5, 4, 3, dtype=dtype)
            out = POOL_LAYER_REGISTRY.get(name)()(x)
            assert out.shape == (2, pooled_width(name, 5), 1, 1)
            torch.testing.assert_close(out.flatten(1), NAIVE[name](x), check_dtype=False)


def test_nine_pooling_layers_of_fastreid_and_one_more_are_registered():
    assert set(POOL_LAYER_REGISTRY) == {*NAIVE, "Flatten", "Identity"} and len(list(POOL_LAYER_REGISTRY)) == 10


def test_clip_pooling_clamps_the_mean_to_unit_interval():
    x = torch.tensor([-2.0, 0.5, 3.0]).view(1, 3, 1, 1).expand(1, 3, 2, 2)
    assert POOL_LAYER_REGISTRY.get("ClipGlobalAvgPool")()(x).flatten().tolist() == [0, 0.5, 1]


def test_flatten_pooling_keeps_all_positions():
    x = torch.rand(2, 3, 4, 5)
    assert torch.equal(POOL_LAYER_REGISTRY.get("Flatten")()(x), x.reshape(2, 60))


@pytest.mark.parametrize("name", NAIVE)
def test_pooling_of_large_float16_activations_does_not_overflow(name):
    x = torch.full((1, 2, 4, 4), 50.0, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.float16):
        out = POOL_LAYER_REGISTRY.get(name)()(x)
    assert out.dtype == torch.float32
    assert torch.isfinite(out).all()


def test_learned_pooling_exponent_gets_a_gradient():
    pool = POOL_LAYER_REGISTRY.get("GeneralizedMeanPoolingP")()
    assert [tuple(p.shape) for p in pool.parameters()] == [(1,)]
    pool(torch.rand(2, 3, 4, 4)).sum().backward()
    assert pool.p.grad.abs().item() > 0


def test_identity_pooling_returns_its_input():
    x = torch.rand(2, 3, 1, 1)
    assert torch.equal(POOL_LAYER_REGISTRY.get("Identity")()(x), x)
