"""timm backbones: output shapes, pretrained weights and errors."""

import sys

import pytest
import torch

from fastamp.config import get_cfg
from fastamp.modeling import build_backbone, build_model
from fastamp.utils.errors import ConfigError, WeightsError

timm = pytest.importorskip("timm")


def config(name, *opts, size=(64, 32)):
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.BACKBONE.NAME", f"timm/{name}", *opts])
    cfg.INPUT.SIZE_TRAIN = cfg.INPUT.SIZE_TEST = size
    return cfg


def build(name, *opts, size=(64, 32)):
    return build_backbone(config(name, *opts, size=size))


@pytest.mark.integration
@pytest.mark.parametrize(
    "name, shape",
    [
        ("test_resnet", (96, 16, 8)),
        ("test_efficientnet", (256, 16, 8)),
        ("test_convnext", (64, 16, 8)),
        ("mobilenetv4_conv_small_050", (1280, 8, 4)),  # 480 channels before the convolution of the head
        ("test_vit", (64, 1, 1)),
        ("deit_tiny_distilled_patch16_224", (192, 1, 1)),
        ("mixer_s32_224", (512, 8, 4)),
        ("beit_base_patch16_224", (768, 1, 1)),
        ("swin_tiny_patch4_window7_224", (768, 8, 4)),
        ("swinv2_tiny_window8_256", (768, 8, 4)),
        ("pvt_v2_b0", (256, 8, 4)),
        ("hiera_tiny_224", (768, 8, 4)),
        ("davit_tiny", (768, 8, 4)),
        ("levit_128s", (384, 4, 2)),
        ("tiny_vit_5m_224", (320, 8, 4)),
        ("maxvit_tiny_rw_224", (512, 8, 4)),
        ("mobilenetv4_hybrid_medium", (1280, 8, 4)),  # attention and convolutions
    ],
)
def test_timm_backbone_returns_feature_map_for_each_model_family(name, shape):
    backbone = build(name, size=(256, 128))
    assert backbone.feature_dim == shape[0]
    assert backbone.training
    with torch.no_grad():
        assert backbone.eval()(torch.randn(2, 3, 256, 128)).shape == (2, *shape)


def test_timm_backbone_feature_maps_equal_timm():
    backbone = build("test_resnet", "MODEL.BACKBONE.LAST_STRIDE", "2").eval()
    reference = timm.create_model("test_resnet", num_classes=0).eval()
    reference.load_state_dict(backbone.model.state_dict())
    x = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        torch.testing.assert_close(backbone(x), reference.forward_features(x))
        torch.testing.assert_close(backbone(x).mean(dim=(2, 3)), reference(x))


def test_timm_backbone_permutes_channels_last_feature_map():
    backbone = build("swin_tiny_patch4_window7_224").eval()
    x = torch.randn(1, 3, 64, 32)
    with torch.no_grad():
        torch.testing.assert_close(backbone(x), backbone.model.forward_features(x).permute(0, 3, 1, 2))


def test_timm_backbone_returns_class_token_if_model_has_one():
    backbone = build("test_vit").eval()
    x = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        torch.testing.assert_close(backbone(x).flatten(1), backbone.model.forward_features(x)[:, 0])


def test_timm_backbone_without_class_token_returns_map_of_patch_tokens():
    backbone = build("test_vit2").eval()
    assert (backbone.feature, backbone.prefix) == ("patches", 1)
    x = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        expected = backbone.model.fc_norm(backbone.model.forward_features(x))[:, 1:]
        torch.testing.assert_close(backbone(x), expected.transpose(1, 2).unflatten(2, (4, 2)))


def test_timm_backbone_returns_map_before_a_head_that_pools():
    backbone = build("inception_next_atto", size=(128, 64)).eval()
    x = torch.randn(2, 3, 128, 64)
    with torch.no_grad():
        assert backbone(x).shape == (2, 320, 8, 4) and backbone.feature_dim == 320
        torch.testing.assert_close(backbone(x), backbone.model.forward_features(x))


@pytest.mark.integration
@pytest.mark.parametrize(
    "name, size, learned",
    [
        ("twins_svt_small", (256, 128), 0),
        ("test_vit_relpos", (64, 32), 0),
        ("cait_xxs24_224", (64, 32), 1),
        ("xcit_nano_12_p16_224", (64, 32), 1),
        ("tnt_s_patch16_224", (64, 32), 1),
        ("volo_d1_224", (64, 32), 1),
    ],
)
def test_patches_of_other_transformers_are_a_map(name, size, learned):
    backbone = build(name, "MODEL.BACKBONE.FEATURE", "patches", size=size).eval()
    x = torch.randn(2, 3, *size)
    with torch.no_grad():
        model = backbone.model
        tokens = model.forward_head(model.forward_features(x), pre_logits=True)[:, learned:]
        rows = round((2 * tokens.shape[1]) ** 0.5)
        assert backbone(x).shape[2:] == (rows, rows // 2)
        torch.testing.assert_close(backbone(x).flatten(2), tokens.transpose(1, 2))


@pytest.mark.integration
@pytest.mark.parametrize("name", ["pit_ti_224", "coat_lite_tiny"])
def test_patches_of_a_model_that_returns_a_vector_raise(name):
    assert build(name).feature_dim in (256, 320)
    with pytest.raises(ConfigError, match=r"MODEL\.BACKBONE\.FEATURE.*patches"):
        build(name, "MODEL.BACKBONE.FEATURE", "patches")


@pytest.mark.parametrize("stride, size", [(1, (4, 2)), (2, (2, 1))])
def test_timm_backbone_last_stride_1_doubles_feature_map_size(stride, size):
    backbone = build("test_resnet", "MODEL.BACKBONE.LAST_STRIDE", str(stride)).eval()
    assert backbone(torch.zeros(1, 3, 64, 32)).shape[2:] == size


def test_timm_backbone_logs_ignored_options(caplog):
    build("test_vit", "MODEL.BACKBONE.WITH_IBN", "True", "MODEL.BACKBONE.NORM", "GN")
    assert "MODEL.BACKBONE.LAST_STRIDE" in caplog.text
    assert "MODEL.BACKBONE.WITH_IBN" in caplog.text
    assert "MODEL.BACKBONE.NORM" in caplog.text


def test_timm_vit_accepts_gray_images_of_another_size():
    backbone = build("test_vit", "INPUT.CHANNELS", "1").eval()
    with torch.no_grad():
        assert backbone(torch.randn(2, 1, 96, 48)).shape == (2, 64, 1, 1)


def test_model_with_timm_backbone_does_not_need_feat_dim():
    cfg = config("test_convnext", "MODEL.HEADS.NUM_CLASSES", "5", "MODEL.DEVICE", "cpu")
    cfg.merge_from_list(["MODEL.LOSSES.NAME", "('CrossEntropyLoss',)"])
    model = build_model(cfg)
    images = torch.rand(4, 3, 64, 32) * 255
    sum(model({"images": images, "targets": torch.tensor([0, 0, 1, 1])}).values()).backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


def pretrained(name, path, *opts):
    return build(name, "MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(path), *opts)


def test_timm_backbone_loads_weights_file_of_timm(tmp_path):
    reference = timm.create_model("test_resnet")
    torch.save(reference.state_dict(), tmp_path / "resnet.pth")
    backbone = pretrained("test_resnet", tmp_path / "resnet.pth")
    for name, value in backbone.model.state_dict().items():
        assert torch.equal(value, reference.state_dict()[name])


def test_timm_vit_position_embedding_is_resized_to_image_size(tmp_path):
    torch.manual_seed(1)
    reference = timm.create_model("test_vit", img_size=(160, 160), dynamic_img_size=True)
    torch.save(reference.state_dict(), tmp_path / "vit.pth")
    backbone = pretrained("test_vit", tmp_path / "vit.pth").eval()
    assert backbone.model.pos_embed.shape == (1, 4 * 2 + 1, 64)
    assert torch.equal(backbone.model.cls_token, reference.cls_token)
    x = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        expected = reference.eval().forward_features(x)[:, 0]
        torch.testing.assert_close(backbone(x).flatten(1), expected, rtol=1e-4, atol=1e-5)


def test_timm_backbone_loads_backbone_weights_from_model_checkpoint(tmp_path):
    backbone = build("test_vit")
    state = {f"backbone.{key}": value for key, value in backbone.state_dict().items()}
    torch.save({"model": state}, tmp_path / "whole.pth")
    other = pretrained("test_vit", tmp_path / "whole.pth")
    assert all(torch.equal(value, backbone.state_dict()[key]) for key, value in other.state_dict().items())


def test_timm_backbone_sums_rgb_weights_for_one_image_channel(tmp_path):
    reference = timm.create_model("test_vit", img_size=(64, 32))
    torch.save(reference.state_dict(), tmp_path / "vit.pth")
    backbone = pretrained("test_vit", tmp_path / "vit.pth", "INPUT.CHANNELS", "1")
    expected = reference.patch_embed.proj.weight.sum(dim=1, keepdim=True)
    torch.testing.assert_close(backbone.model.patch_embed.proj.weight, expected)


def test_loading_weights_of_another_timm_model_raises(tmp_path):
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "resnet.pth")
    with pytest.raises(WeightsError, match="MODEL.WEIGHTS_MIN_MATCH"):
        pretrained("test_vit", tmp_path / "resnet.pth")


def test_pretrain_without_path_downloads_weights_through_timm(monkeypatch):
    create, calls = timm.create_model, []

    def stub(name, pretrained=False, **arguments):
        calls.append((pretrained, arguments))
        return create(name, **arguments)

    monkeypatch.setattr(timm, "create_model", stub)
    build("test_resnet.r160_in1k", "MODEL.BACKBONE.PRETRAIN", "True")
    assert calls[-1] == (True, {"num_classes": 0, "global_pool": "", "in_chans": 3, "output_stride": 16})


def test_failed_download_of_timm_weights_raises(monkeypatch):
    create = timm.create_model

    def offline(name, pretrained=False, **arguments):
        if pretrained:
            raise FileNotFoundError("no network")
        return create(name, **arguments)

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(WeightsError, match=r"test_resnet[\s\S]*PRETRAIN_PATH"):
        build("test_resnet", "MODEL.BACKBONE.PRETRAIN", "True")


@pytest.mark.parametrize(
    "name, suggestion",
    [("resnt18", "'resnet18'"), ("resnet18.a1_in", "'resnet18.a1_in1k'")],
)
def test_error_for_unknown_timm_model_suggests_nearest_name(name, suggestion):
    with pytest.raises(ConfigError, match=f"'{name}'.*{suggestion}"):
        build(name)


def test_overlapping_patches_of_other_models_raise():
    with pytest.raises(ConfigError, match=r"STRIDE_SIZE.*\(12, 12\)[\s\S]*ResNet"):
        build("test_resnet", "MODEL.BACKBONE.STRIDE_SIZE", "(12, 12)")


def test_error_for_a_hub_name_without_access_names_a_local_folder(monkeypatch):
    def offline(*_, **__):
        raise OSError("no connection")

    monkeypatch.setattr("timm.models._hub.download_from_hf", offline)
    with pytest.raises(ConfigError, match=r"hf-hub:some/one[\s\S]*local-dir:FOLDER"):
        build("hf-hub:some/one")


def test_timm_backbone_raises_for_unsupported_image_sizes():
    with pytest.raises(ConfigError, match=r"INPUT.SIZE_TRAIN.*\(64, 32\).*nest_tiny[\s\S]*fix: .*\(224, 224\)"):
        build("nest_tiny")
    cfg = config("mixer_s32_224")
    cfg.INPUT.SIZE_TEST = (128, 64)
    with pytest.raises(ConfigError, match=r"INPUT.SIZE_TEST.*\(128, 64\).*mixer"):
        build_backbone(cfg)
    cfg.INPUT.SIZE_TEST, cfg.INPUT.CROP.SIZE, cfg.INPUT.CROP.ENABLED = (300,), (64, 32), True
    build_backbone(cfg)
    cfg.INPUT.CROP.ENABLED, cfg.INPUT.SIZE_TRAIN = False, (0,)
    with pytest.raises(ConfigError, match=r"mixer_s32_224.*INPUT.SIZE_TRAIN.*\(0,\)"):
        build_backbone(cfg)


def test_timm_backbone_raises_if_timm_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r'timm/resnet18(.|\n)*pip install "fastamp\[timm\]"'):
        build("resnet18")
