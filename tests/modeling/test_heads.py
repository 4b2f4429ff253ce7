"""The embedding head: what comes out in each mode, and its errors."""

import pytest
import torch

from fastamp.modeling.heads import EmbeddingHead
from fastamp.utils.errors import ConfigError


def make(**options):
    return EmbeddingHead(**({"feat_dim": 8, "num_classes": 3} | options))


@pytest.mark.parametrize("neck_feat, dim", [("before", 8), ("after", 4)])
def test_features_before_and_after_the_neck(neck_feat, dim):
    head = make(neck_feat=neck_feat, embedding_dim=4)
    outputs = head(torch.randn(5, 8, 4, 2), torch.tensor([0, 1, 2, 0, 1]))
    assert outputs["features"].shape == (5, dim) and outputs["cls_outputs"].shape == (5, 3)
    assert head.eval()(torch.randn(5, 8, 4, 2)).shape == (5, 4)  # always the one after the neck


def test_logits_are_scaled():
    head, x = make(scale=10), torch.randn(4, 8, 2, 2)
    targets = torch.zeros(4, dtype=torch.int64)
    plain = make(scale=1)
    plain.load_state_dict(head.state_dict())
    torch.testing.assert_close(head(x, targets)["cls_outputs"], 10 * plain(x, targets)["cls_outputs"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_everything_is_float32_under_autocast(dtype):
    head = make()
    with torch.autocast("cpu", dtype=dtype):
        outputs = head(torch.randn(4, 8, 2, 2, dtype=dtype), torch.zeros(4, dtype=torch.int64))
        feature = head.eval()(torch.randn(4, 8, 2, 2, dtype=dtype))
    assert {value.dtype for value in outputs.values()} == {feature.dtype} == {torch.float32}


def test_errors():
    x, targets = torch.randn(2, 8, 4, 2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ConfigError, match="POOL_LAYER Identity leaves a map of 4 x 2"):
        make(pool_layer="Identity")(x, targets)
    with pytest.raises(ConfigError, match="POOL_LAYER Flatten makes 64 values of a map of 8 x 4 x 2; .* for 8"):
        make(pool_layer="Flatten")(x, targets)
    with pytest.raises(ConfigError, match="NUM_CLASSES is 0"):
        make(num_classes=0)(x, targets)
    assert make(num_classes=0).eval()(x).shape == (2, 8)
    with pytest.raises(ConfigError, match="NECK_FEAT: 'between'"):
        make(neck_feat="between")


def test_a_flattened_map_is_a_feature():
    x, targets = torch.randn(4, 8, 1, 1), torch.tensor([0, 1, 2, 0])
    head = make(pool_layer="Flatten")
    assert head(x, targets)["features"].shape == (4, 8)
    assert make(pool_layer="Flatten", feat_dim=16).eval()(torch.randn(4, 8, 2, 1)).shape == (4, 16)
