"""Models converted to float16 keep the same modules in float32 as under autocast."""

import pytest
import tiny
import torch
from torch import nn

from fastamp.amp import apply_force_fp32, force_fp32
from fastamp.amp.fp16_export import to_float16
from fastamp.layers import POOL_LAYER_REGISTRY
from fastamp.layers.attention import NonLocal
from fastamp.modeling import build_model


def in_float16(module):
    to_float16(module.eval().requires_grad_(False))
    return module


def dtypes(module):
    return {name: tensor.dtype for name, tensor in module.state_dict().items() if tensor.is_floating_point()}


def test_to_float16_keeps_normalization_layers_and_heads_in_float32(tmp_path):
    model = build_model(tiny.tiny_config(tmp_path, "MODEL.HEADS.NUM_CLASSES", "4")).eval().requires_grad_(False)
    images = torch.randint(256, (4, 3, 64, 32), dtype=torch.uint8)
    expected = model({"images": images})
    for part in model.children():
        to_float16(part)
    found = model({"images": images})
    low = {name for name, dtype in dtypes(model).items() if dtype == torch.float16}
    assert low == {"backbone.0.weight", "backbone.4.weight"}
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-3 * expected.abs().max().item())
    assert not torch.equal(found, expected)  # the negative control: it computes in float16


@pytest.mark.parametrize("reduced", ["FCHead", "LightMBN"])
def test_to_float16_converts_only_the_trunks_of_models_that_reduce_the_features(tmp_path, reduced):
    key = "MODEL.HEADS.NAME" if reduced == "FCHead" else "MODEL.META_ARCHITECTURE"
    osnet = ("MODEL.BACKBONE.NAME", "build_osnet_backbone", "MODEL.BACKBONE.DEPTH", "x0_25")
    width = ("MODEL.BACKBONE.FEAT_DIM", "128", "MODEL.HEADS.EMBEDDING_DIM", "8")
    cfg = tiny.tiny_config(tmp_path, *osnet, *width, key, reduced, "MODEL.HEADS.NUM_CLASSES", "4")
    model = build_model(cfg).eval().requires_grad_(False)
    for part in model.children():
        to_float16(part)
    low = {name for name, dtype in dtypes(model).items() if dtype == torch.float16}
    assert low and {name.partition(".")[0] for name in low} <= set(model.trunks)
    assert model({"images": torch.zeros(2, 3, 64, 32, dtype=torch.uint8)}).dtype == torch.float32


def test_output_after_to_float16_matches_autocast():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        expected = net(images)
    torch.testing.assert_close(in_float16(net)(images), expected, rtol=2e-3, atol=2e-3)


def test_float32_pooling_after_float16_convolution_does_not_overflow():
    pool = POOL_LAYER_REGISTRY.get("GeneralizedMeanPooling")()
    conv = nn.Conv2d(1, 1, 1, bias=False)
    nn.init.constant_(conv.weight, 50.0)
    features = in_float16(nn.Sequential(conv, pool))(torch.ones(1, 1, 2, 2))
    torch.testing.assert_close(features, torch.full((1, 1, 1, 1), 50.0))
    assert torch.isinf(torch.full((1,), 50.0, dtype=torch.float16) ** 3)  # the negative control


def test_to_float16_keeps_force_fp32_modules_in_float32():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    apply_force_fp32(net, ["1"])
    assert in_float16(net)(torch.ones(1, 4)).dtype == torch.float16  # output of the last layer
    assert dtypes(net)["0.weight"] == dtypes(net)["2.weight"] == torch.float16
    assert dtypes(net)["1.weight"] == torch.float32


def test_to_float16_keeps_modules_with_force_fp32_methods_in_float32():
    x = torch.randn(2, 8, 4, 4)
    block = NonLocal(8, "BN")
    nn.init.ones_(block.W[1].weight)
    block = in_float16(block)
    assert set(dtypes(block).values()) == {torch.float32}
    assert block(x.half()).dtype == torch.float16


def test_to_float16_converts_floating_point_buffers():
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(4, 12)
            self.register_buffer("bias", torch.ones(3, 3))
            self.register_buffer("index", torch.arange(3))

        def forward(self, x):
            queries, keys, values = self.qkv(x).chunk(3, dim=-1)
            return (queries @ keys.mT + self.bias[self.index]).softmax(-1) @ values

    module = in_float16(Biased())
    assert module(torch.ones(1, 3, 4)).dtype == torch.float16
    assert module.index.dtype == torch.int64


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.BatchNorm1d(4)])
def test_normalization_layers_compute_in_float32_after_to_float16(norm):
    seen = []
    norm.register_forward_hook(lambda module, args, output: seen.append(args[0].dtype))
    net = in_float16(nn.Sequential(norm))
    x = torch.randn(4, 4) if not isinstance(norm, nn.InstanceNorm1d) else torch.randn(2, 4, 8)
    assert net(x.half()).dtype == torch.float16
    assert seen == [torch.float32] and set(dtypes(norm).values()) <= {torch.float32}


def test_to_float16_converts_container_with_norm_in_its_class_name():
    class PreNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)

        @force_fp32
        def _unused(self):
            pass

        def forward(self, x):
            return self.layer(self.norm(x))

    assert in_float16(PreNorm()).layer.weight.dtype == torch.float32  # has a float32 method

    del PreNorm._unused
    assert in_float16(PreNorm()).layer.weight.dtype == torch.float16
