"""POOL_LAYER Flatten: input width of the head and supported values of FEAT_DIM."""

import pytest
import tiny
import torch

from fastamp.config import get_cfg
from fastamp.engine import DefaultTrainer
from fastamp.modeling import build_model
from fastamp.modeling.backbones import vit
from fastamp.utils.errors import ConfigError

MAP = 16 * 8 * 4  # flattened feature map of the tiny backbone at 64 x 32
SMALL = ("MODEL.BACKBONE.DEPTH", "18x", "INPUT.SIZE_TRAIN", "(64, 32)", "INPUT.SIZE_TEST", "(64, 32)")


def config(*opts):
    cfg = get_cfg()
    opts = ("MODEL.DEVICE", "cpu", "MODEL.HEADS.NUM_CLASSES", "3", "MODEL.HEADS.POOL_LAYER", "Flatten", *opts)
    cfg.merge_from_list(list(opts))
    return cfg


@pytest.mark.parametrize("feat_dim", [512, 512 * 4 * 2], ids=["backbone_width", "flattened_size"])
def test_flatten_pooling_accepts_channels_or_flattened_size_as_feat_dim(feat_dim):
    model = build_model(config(*SMALL, "MODEL.BACKBONE.FEAT_DIM", str(feat_dim), "MODEL.HEADS.WITH_BNNECK", "True"))
    assert model.heads.weight.shape == (3, 4096) and model.heads.bottleneck[0].weight.shape == (4096,)
    images = torch.randint(256, (2, 3, 64, 32), dtype=torch.uint8)
    with torch.no_grad():
        maps = model.eval().backbone(model.preprocess(images.float()))
        expected = model.heads.bottleneck(maps.flatten(1)[..., None, None]).flatten(1)
        torch.testing.assert_close(model({"images": images}), expected)
    assert model.train().training and model.backbone.training


@pytest.mark.parametrize("head, width", [("EmbeddingHead", 8), ("FCHead", 8), ("ClasHead", 3)])
def test_embedding_fc_and_clas_heads_support_flatten_pooling(head, width):
    opts = (*SMALL, "MODEL.BACKBONE.FEAT_DIM", "512", "MODEL.HEADS.NAME", head, "MODEL.HEADS.EMBEDDING_DIM", "8")
    model = build_model(config(*opts)).eval()
    with torch.no_grad():
        assert model({"images": torch.zeros(2, 3, 64, 32)}).shape == (2, width)


def test_flatten_pooling_supports_vit_with_camera_embeddings(monkeypatch):
    monkeypatch.setitem(vit.DEPTHS, "base", vit.Depth(vit.DEPTHS["base"].pretrained, width=32, blocks=1, heads=2))
    opts = (
        "MODEL.BACKBONE.NAME",
        "build_vit_backbone",
        "MODEL.BACKBONE.DEPTH",
        "base",
        "MODEL.BACKBONE.FEAT_DIM",
        "32",
    )
    model = build_model(config(*SMALL[2:], *opts, "MODEL.BACKBONE.SIE_CAMERAS", "2", "MODEL.BACKBONE.SIE_VIEWS", "3"))
    assert model.heads.weight.shape == (3, 32)


def test_mgn_with_flatten_pooling_raises():
    with pytest.raises(ConfigError, match="MODEL.HEADS.POOL_LAYER=Flatten.*MGN"):
        build_model(config(*SMALL, "MODEL.BACKBONE.FEAT_DIM", "512", "MODEL.META_ARCHITECTURE", "MGN"))


def test_error_for_wrong_feat_dim_contains_valid_values():
    for wrong in ("511", "1024"):
        with pytest.raises(ConfigError, match=f"FEAT_DIM is {wrong}.*512") as raised:
            build_model(config(*SMALL, "MODEL.BACKBONE.FEAT_DIM", wrong))
        assert "4096" in str(raised.value) or wrong == "511"
    with pytest.raises(ConfigError, match="FEAT_DIM is 4096.*512"):
        build_model(config(*SMALL, "MODEL.BACKBONE.FEAT_DIM", "4096", "MODEL.HEADS.POOL_LAYER", "GlobalAvgPool"))


def test_flatten_pooling_raises_without_fixed_image_size():
    width = ("MODEL.BACKBONE.FEAT_DIM", "512")
    with pytest.raises(ConfigError, match=r"Flatten.*INPUT\.SIZE_TEST.*512 x 8 x 4"):
        build_model(config(*SMALL, *width, "INPUT.SIZE_TEST", "(128, 64)"))
    with pytest.raises(ConfigError, match=r"Flatten.*INPUT\.SIZE_TEST.*\(64,\)"):
        build_model(config(*SMALL, *width, "INPUT.SIZE_TEST", "(64,)"))
    cropped = build_model(config(*SMALL, *width, "INPUT.CROP", "True", "INPUT.CROP.SIZE", "(32,)"))
    assert cropped.heads.weight.shape == (3, 512 * 2 * 2)


@pytest.mark.integration
def test_model_with_flatten_pooling_trains_and_resumes(demo, tmp_path):
    opts = ("MODEL.HEADS.POOL_LAYER", "Flatten")
    losses = ("MODEL.LOSSES.NAME", "('CrossEntropyLoss', 'TripletLoss', 'CenterLoss')")
    tiny.train(tmp_path, *opts, *losses)
    trained = tiny.weights(tmp_path / "model_final.pth")
    assert trained["heads.weight"].shape == (16, MAP)
    trainer = DefaultTrainer(tiny.tiny_config(tmp_path, *opts, *losses, "SOLVER.MAX_EPOCH", "2"))
    trainer.resume_or_load(resume=True)
    trainer.train()
    assert not torch.equal(tiny.weights(tmp_path / "model_final.pth")["heads.weight"], trained["heads.weight"])
