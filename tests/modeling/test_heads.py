"""The embedding head: what comes out in each mode, and its errors."""

import pytest
import torch
import torch.nn.functional as F

from fastamp.modeling.heads import ClasHead, EmbeddingHead, FCHead
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
    with pytest.raises(ConfigError, match="POOL_LAYER Flatten makes 64 values of a map of 8 x 4 x 2; .* for 8 values"):
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


@pytest.mark.parametrize("cls_layer", ["Linear", "CosSoftmax", "ArcSoftmax", "CircleSoftmax"])
def test_clas_head_evaluates_the_classes(cls_layer):
    options = {"cls_layer": cls_layer, "scale": 16, "margin": 0.3, "embedding_dim": 4}
    head, x, targets = ClasHead(feat_dim=8, num_classes=3, **options), torch.randn(5, 8, 4, 2), torch.arange(5) % 3
    outputs = head(x, targets)
    assert outputs["features"].shape == (5, 4)  # after the neck, whatever NECK_FEAT says
    logits = head.eval()(x)
    neck = head.bottleneck(x.mean((2, 3), keepdim=True)).flatten(1)
    weight = head.weight
    if cls_layer != "Linear":
        neck, weight = F.normalize(neck), F.normalize(weight)
    torch.testing.assert_close(logits, 16 * neck @ weight.t())
    assert head.feature_dim == logits.shape[1] == 3


def test_clas_head_has_the_names_of_the_embedding_head():
    head, other = ClasHead(feat_dim=8, num_classes=3), make()
    head.load_state_dict(other.state_dict())
    with pytest.raises(ConfigError, match="NUM_CLASSES is 0"):
        ClasHead(feat_dim=8, num_classes=0).eval()(torch.randn(2, 8, 4, 2))


def test_logits_are_those_of_the_training_without_a_margin():
    head, x, targets = make(cls_layer="ArcSoftmax", scale=8, margin=0.5), torch.randn(6, 8, 4, 2), torch.arange(6) % 3
    torch.testing.assert_close(head.logits(x), head(x, targets)["pred_class_logits"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head.eval().logits(x.bfloat16()).dtype == torch.float32


def test_logits_of_the_fc_head():
    head = FCHead(feat_dim=8, embedding_dim=4, num_classes=3, scale=2)
    x, targets = torch.randn(6, 8, 4, 2), torch.arange(6) % 3
    logits = head(x, targets)["pred_class_logits"]
    torch.testing.assert_close(head.logits(x), logits)
    assert logits.requires_grad  # a student learns by them


@pytest.mark.parametrize("neck_feat, eval_feat", [("before", "after"), ("after", "before")])
def test_the_fc_head_gives_the_feature_behind_or_before_its_layer(neck_feat, eval_feat):
    head = FCHead(feat_dim=6, embedding_dim=4, num_classes=3, neck_feat=neck_feat, eval_feat=eval_feat)
    maps = torch.randn(5, 6, 2, 2)
    widths = {"before": 6, "after": 4}
    assert head.eval()(maps).shape == (5, widths[eval_feat])
    outputs = head.train()(maps, torch.tensor([0, 1, 2, 0, 1]))
    assert outputs["features"].shape == (5, widths[neck_feat]) and outputs["cls_outputs"].shape == (5, 3)
    expected = torch.relu(head.fc[1](head.fc[0](maps.mean((2, 3))))) @ head.weight.t()
    torch.testing.assert_close(outputs["cls_outputs"], expected)
    assert head.logits(maps).shape == (5, 3)


def test_what_the_fc_head_does_not_have_is_said(caplog):
    FCHead(feat_dim=6, embedding_dim=4, num_classes=3)
    assert caplog.text == ""
    FCHead(feat_dim=6, embedding_dim=4, num_classes=3, with_bnneck=True)
    assert "WITH_BNNECK and NORM do nothing" in caplog.text


def test_the_fc_head_needs_a_width():
    with pytest.raises(ConfigError, match="EMBEDDING_DIM 512"):
        FCHead(feat_dim=6, embedding_dim=0, num_classes=3)


def test_errors_of_the_fc_head():
    x = torch.randn(2, 8, 4, 2)
    for pool_layer, message in (("Identity", "leaves a map of 4 x 2"), ("Flatten", "makes 64 values of a map of")):
        head = FCHead(feat_dim=8, embedding_dim=4, num_classes=3, pool_layer=pool_layer)
        with pytest.raises(ConfigError, match=f"POOL_LAYER {pool_layer} {message}"):
            head(x, torch.zeros(2, dtype=torch.int64))
        with pytest.raises(ConfigError, match=f"POOL_LAYER {pool_layer} {message}"):
            head.logits(x)
