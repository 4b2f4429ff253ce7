"""timm's models as backbones: shapes over families, their weights, and what is said where one cannot be."""

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


@pytest.mark.parametrize(
    "name, shape",
    [
        ("test_resnet", (96, 16, 8)),
        ("test_efficientnet", (256, 16, 8)),
        ("test_convnext", (64, 16, 8)),
        ("mobilenetv4_conv_small_050", (1280, 8, 4)),  # 480 wide before the head's convolution
        ("test_vit", (64, 1, 1)),
        ("deit_tiny_distilled_patch16_224", (192, 1, 1)),
        ("mixer_s32_224", (512, 1, 1)),
        ("swin_tiny_patch4_window7_224", (768, 8, 4)),
    ],
)
def test_families(name, shape):
    backbone = build(name, size=(256, 128))
    assert backbone.feature_dim == shape[0]
    assert backbone.training
    with torch.no_grad():
        assert backbone.eval()(torch.randn(2, 3, 256, 128)).shape == (2, *shape)


def test_maps_are_what_timm_computes():
    backbone = build("test_resnet", "MODEL.BACKBONE.LAST_STRIDE", "2").eval()
    theirs = timm.create_model("test_resnet", num_classes=0).eval()
    theirs.load_state_dict(backbone.model.state_dict())
    x = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        torch.testing.assert_close(backbone(x), theirs.forward_features(x))
        torch.testing.assert_close(backbone(x).mean(dim=(2, 3)), theirs(x))


def test_a_map_with_the_channels_last_is_turned():
    backbone = build("swin_tiny_patch4_window7_224").eval()
    x = torch.randn(1, 3, 64, 32)
    with torch.no_grad():
        torch.testing.assert_close(backbone(x), backbone.model.forward_features(x).permute(0, 3, 1, 2))


def test_the_class_token_where_there_is_one():
    backbone = build("test_vit").eval()
    x = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        torch.testing.assert_close(backbone(x).flatten(1), backbone.model.forward_features(x)[:, 0])


def test_else_the_mean_over_what_are_no_registers():
    backbone = build("test_vit2").eval()
    assert (backbone.has_class_token, backbone.prefix_tokens) == (False, 1)
    x = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        expected = backbone.model.forward_features(x)[:, 1:].mean(dim=1)
        torch.testing.assert_close(backbone(x).flatten(1), expected)


@pytest.mark.parametrize("stride, size", [(1, (4, 2)), (2, (2, 1))])
def test_last_stride(stride, size):
    backbone = build("test_resnet", "MODEL.BACKBONE.LAST_STRIDE", str(stride)).eval()
    assert backbone(torch.zeros(1, 3, 64, 32)).shape[2:] == size


def test_a_model_of_one_stride_says_so(caplog):
    caplog.set_level("INFO")
    build("test_vit", "MODEL.BACKBONE.WITH_IBN", "True", "MODEL.BACKBONE.NORM", "GN")
    assert "LAST_STRIDE 1 does nothing" in caplog.text
    assert "WITH_IBN does nothing" in caplog.text
    assert "NORM does nothing" in caplog.text


def test_images_of_other_sizes_and_channels():
    backbone = build("test_vit", "INPUT.CHANNELS", "1").eval()
    with torch.no_grad():
        assert backbone(torch.randn(2, 1, 96, 48)).shape == (2, 64, 1, 1)


def test_a_whole_model_trains_without_its_width_being_known():
    cfg = config("test_convnext", "MODEL.HEADS.NUM_CLASSES", "5", "MODEL.DEVICE", "cpu")
    cfg.merge_from_list(["MODEL.LOSSES.NAME", "('CrossEntropyLoss',)"])
    model = build_model(cfg)
    images = torch.rand(4, 3, 64, 32) * 255
    sum(model({"images": images, "targets": torch.tensor([0, 0, 1, 1])}).values()).backward()
    assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []


def pretrained(name, path, *opts):
    return build(name, "MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(path), *opts)


def test_a_file_of_timms(tmp_path):
    theirs = timm.create_model("test_resnet")
    torch.save(theirs.state_dict(), tmp_path / "resnet.pth")
    backbone = pretrained("test_resnet", tmp_path / "resnet.pth")
    for name, value in backbone.model.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name])


def test_position_embeddings_are_resized_to_the_images(tmp_path):
    torch.manual_seed(1)
    theirs = timm.create_model("test_vit", img_size=(160, 160), dynamic_img_size=True)
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    backbone = pretrained("test_vit", tmp_path / "vit.pth").eval()
    assert backbone.model.pos_embed.shape == (1, 4 * 2 + 1, 64)
    assert torch.equal(backbone.model.cls_token, theirs.cls_token)
    x = torch.randn(2, 3, 64, 32)
    with torch.no_grad():
        expected = theirs.eval().forward_features(x)[:, 0]
        torch.testing.assert_close(backbone(x).flatten(1), expected, rtol=1e-4, atol=1e-5)


def test_the_backbone_of_a_whole_model(tmp_path):
    backbone = build("test_vit")
    state = {f"backbone.{key}": value for key, value in backbone.state_dict().items()}
    torch.save({"model": state}, tmp_path / "whole.pth")
    other = pretrained("test_vit", tmp_path / "whole.pth")
    assert all(torch.equal(value, backbone.state_dict()[key]) for key, value in other.state_dict().items())


def test_weights_for_rgb_fill_one_channel(tmp_path):
    theirs = timm.create_model("test_vit", img_size=(64, 32))
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    backbone = pretrained("test_vit", tmp_path / "vit.pth", "INPUT.CHANNELS", "1")
    expected = theirs.patch_embed.proj.weight.sum(dim=1, keepdim=True)
    torch.testing.assert_close(backbone.model.patch_embed.proj.weight, expected)


def test_a_file_of_another_model(tmp_path):
    torch.save(timm.create_model("test_resnet").state_dict(), tmp_path / "resnet.pth")
    with pytest.raises(WeightsError, match="do not fit"):
        pretrained("test_vit", tmp_path / "resnet.pth")


def test_timms_own_weights_are_loaded_by_timm(monkeypatch):
    create, asked = timm.create_model, []

    def stub(name, pretrained=False, **arguments):
        asked.append((pretrained, arguments))
        return create(name, **arguments)

    monkeypatch.setattr(timm, "create_model", stub)
    build("test_resnet.r160_in1k", "MODEL.BACKBONE.PRETRAIN", "True")
    assert asked[-1] == (True, {"num_classes": 0, "global_pool": "", "in_chans": 3, "output_stride": 16})


def test_no_download(monkeypatch):
    create = timm.create_model

    def offline(name, pretrained=False, **arguments):
        if pretrained:
            raise FileNotFoundError("no network")
        return create(name, **arguments)

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(WeightsError, match=r"weights of test_resnet .*\(no network\)[\s\S]*PRETRAIN_PATH"):
        build("test_resnet", "MODEL.BACKBONE.PRETRAIN", "True")


@pytest.mark.parametrize(
    "name, near",
    [("resnt18", "'resnet18'"), ("resnet18.a1_in", "'resnet18.a1_in1k'"), ("hf-hub:some/one", "")],
)
def test_unknown_names(name, near):
    with pytest.raises(ConfigError, match=f"has no model '{name}'.*{near}"):
        build(name)


def test_images_that_a_model_cannot_take():
    with pytest.raises(ConfigError, match=r"INPUT.SIZE_TRAIN is \(64, 32\), but timm's nest_tiny"):
        build("nest_tiny")
    cfg = config("mixer_s32_224")
    cfg.INPUT.SIZE_TEST = (128, 64)
    with pytest.raises(ConfigError, match=r"INPUT.SIZE_TEST is \(128, 64\), but timm's mixer"):
        build_backbone(cfg)
    cfg.INPUT.SIZE_TEST, cfg.INPUT.CROP.SIZE, cfg.INPUT.CROP.ENABLED = (300,), (64, 32), True
    build_backbone(cfg)
    cfg.INPUT.CROP.ENABLED, cfg.INPUT.SIZE_TRAIN = False, (0,)
    with pytest.raises(ConfigError, match=r"mixer_s32_224 needs images of one size, and INPUT.SIZE_TRAIN \(0,\)"):
        build_backbone(cfg)


def test_without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r'timm/resnet18: timm is not installed.\n.*pip install "fastamp\[timm\]"'):
        build("resnet18")
