"""Heads: outputs in training and evaluation mode, and errors."""

import pytest
import torch
import torch.nn.functional as F

from fastamp.modeling.heads import ClasHead, EmbeddingHead, FCHead
from fastamp.utils.errors import ConfigError


def make(**options):
    return EmbeddingHead(**({"feat_dim": 8, "num_classes": 3} | options))


@pytest.mark.parametrize("neck_feat, dim", [("before", 8), ("after", 4)])
def test_neck_feat_selects_loss_feature_before_or_after_neck(neck_feat, dim):
    head = make(neck_feat=neck_feat, embedding_dim=4)
    outputs = head(torch.randn(5, 8, 4, 2), torch.tensor([0, 1, 2, 0, 1]))
    assert outputs["features"].shape == (5, dim) and outputs["cls_outputs"].shape == (5, 3)
    assert head.eval()(torch.randn(5, 8, 4, 2)).shape == (5, 4)  # EVAL_FEAT is "after"


def test_head_scale_multiplies_class_logits():
    head, x = make(scale=10), torch.randn(4, 8, 2, 2)
    targets = torch.zeros(4, dtype=torch.int64)
    plain = make(scale=1)
    plain.load_state_dict(head.state_dict())
    torch.testing.assert_close(head(x, targets)["cls_outputs"], 10 * plain(x, targets)["cls_outputs"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_head_outputs_are_float32_under_autocast(dtype):
    head = make()
    with torch.autocast("cpu", dtype=dtype):
        outputs = head(torch.randn(4, 8, 2, 2, dtype=dtype), torch.zeros(4, dtype=torch.int64))
        feature = head.eval()(torch.randn(4, 8, 2, 2, dtype=dtype))
    assert {value.dtype for value in outputs.values()} == {feature.dtype} == {torch.float32}


def test_embedding_head_raises_for_invalid_pooling_class_count_or_neck_feat():
    x, targets = torch.randn(2, 8, 4, 2), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ConfigError, match="POOL_LAYER=Identity.*4 x 2"):
        make(pool_layer="Identity")(x, targets)
    with pytest.raises(ConfigError, match="POOL_LAYER=Flatten.*64.*8 x 4 x 2.* 8"):
        make(pool_layer="Flatten")(x, targets)
    with pytest.raises(ConfigError, match="MODEL.HEADS.NUM_CLASSES"):
        make(num_classes=0)(x, targets)
    assert make(num_classes=0).eval()(x).shape == (2, 8)
    with pytest.raises(ConfigError, match="NECK_FEAT: .*'between'"):
        make(neck_feat="between")


def test_embedding_head_with_flatten_pooling_returns_flattened_feature_map():
    x, targets = torch.randn(4, 8, 1, 1), torch.tensor([0, 1, 2, 0])
    head = make(pool_layer="Flatten")
    assert head(x, targets)["features"].shape == (4, 8)
    assert make(pool_layer="Flatten", feat_dim=16).eval()(torch.randn(4, 8, 2, 1)).shape == (4, 16)


@pytest.mark.parametrize("cls_layer", ["Linear", "CosSoftmax", "ArcSoftmax", "CircleSoftmax"])
def test_clas_head_returns_scaled_logits_in_evaluation_mode(cls_layer):
    options = {"cls_layer": cls_layer, "scale": 16, "margin": 0.3, "embedding_dim": 4}
    head, x, targets = ClasHead(feat_dim=8, num_classes=3, **options), torch.randn(5, 8, 4, 2), torch.arange(5) % 3
    outputs = head(x, targets)
    assert outputs["features"].shape == (5, 4)  # after the neck: NECK_FEAT is ignored
    logits = head.eval()(x)
    neck = head.bottleneck(x.mean((2, 3), keepdim=True)).flatten(1)
    weight = head.weight
    if cls_layer != "Linear":
        neck, weight = F.normalize(neck), F.normalize(weight)
    torch.testing.assert_close(logits, 16 * neck @ weight.t())
    assert head.feature_dim == logits.shape[1] == 3


def test_clas_head_loads_embedding_head_weights_and_raises_without_classes():
    head, other = ClasHead(feat_dim=8, num_classes=3), make()
    head.load_state_dict(other.state_dict())
    with pytest.raises(ConfigError, match="MODEL.HEADS.NUM_CLASSES"):
        ClasHead(feat_dim=8, num_classes=0).eval()(torch.randn(2, 8, 4, 2))


def test_head_logits_method_returns_training_logits_without_margin():
    head, x, targets = make(cls_layer="ArcSoftmax", scale=8, margin=0.5), torch.randn(6, 8, 4, 2), torch.arange(6) % 3
    torch.testing.assert_close(head.logits(x), head(x, targets)["pred_class_logits"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert head.eval().logits(x.bfloat16()).dtype == torch.float32


def test_fc_head_logits_method_returns_training_logits():
    head = FCHead(feat_dim=8, embedding_dim=4, num_classes=3, scale=2)
    x, targets = torch.randn(6, 8, 4, 2), torch.arange(6) % 3
    logits = head(x, targets)["pred_class_logits"]
    torch.testing.assert_close(head.logits(x), logits)
    assert logits.requires_grad  # distillation needs the gradient


@pytest.mark.parametrize("neck_feat, eval_feat", [("before", "after"), ("after", "before")])
def test_fc_head_neck_feat_and_eval_feat_select_features_around_linear_layer(neck_feat, eval_feat):
    head = FCHead(feat_dim=6, embedding_dim=4, num_classes=3, neck_feat=neck_feat, eval_feat=eval_feat)
    maps = torch.randn(5, 6, 2, 2)
    widths = {"before": 6, "after": 4}
    assert head.eval()(maps).shape == (5, widths[eval_feat])
    outputs = head.train()(maps, torch.tensor([0, 1, 2, 0, 1]))
    assert outputs["features"].shape == (5, widths[neck_feat]) and outputs["cls_outputs"].shape == (5, 3)
    expected = torch.relu(head.fc[1](head.fc[0](maps.mean((2, 3))))) @ head.weight.t()
    torch.testing.assert_close(outputs["cls_outputs"], expected)
    assert head.logits(maps).shape == (5, 3)


def test_fc_head_warns_that_with_bnneck_is_ignored(caplog):
    FCHead(feat_dim=6, embedding_dim=4, num_classes=3)
    assert caplog.text == ""
    FCHead(feat_dim=6, embedding_dim=4, num_classes=3, with_bnneck=True)
    assert "MODEL.HEADS.WITH_BNNECK" in caplog.text


def test_fc_head_with_embedding_dim_0_raises():
    with pytest.raises(ConfigError, match="MODEL.HEADS.EMBEDDING_DIM"):
        FCHead(feat_dim=6, embedding_dim=0, num_classes=3)


def test_fc_head_with_unsupported_pooling_raises():
    x = torch.randn(2, 8, 4, 2)
    for pool_layer, message in (("Identity", "4 x 2"), ("Flatten", "64")):
        head = FCHead(feat_dim=8, embedding_dim=4, num_classes=3, pool_layer=pool_layer)
        with pytest.raises(ConfigError, match=f"POOL_LAYER={pool_layer}.*{message}"):
            head(x, torch.zeros(2, dtype=torch.int64))
        with pytest.raises(ConfigError, match=f"POOL_LAYER={pool_layer}.*{message}"):
            head.logits(x)
