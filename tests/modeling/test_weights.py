"""Pretrained backbones: from a local file in torchvision's form, or a message that says what to do."""

from urllib.error import URLError

import pytest
import torch
import torchvision

from fastamp.config import get_cfg
from fastamp.modeling import build_backbone
from fastamp.utils.errors import ConfigError, WeightsError


def config(*opts):
    cfg = get_cfg()
    cfg.merge_from_list(["MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512", *opts])
    return cfg


def pretrained(path):
    return build_backbone(config("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(path)))


@pytest.fixture(scope="module")
def resnet18():
    torch.manual_seed(1)
    return torchvision.models.resnet18()


def test_a_file_of_torchvisions(tmp_path, resnet18):
    torch.save(resnet18.state_dict(), tmp_path / "resnet18.pth")
    backbone = pretrained(tmp_path / "resnet18.pth")
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, resnet18.state_dict()[name])


def test_the_function_is_torchvisions_with_its_stem_and_stride(tmp_path, resnet18):
    torch.save(resnet18.state_dict(), tmp_path / "resnet18.pth")
    options = ("MODEL.BACKBONE.STEM_POOL", "padded", "MODEL.BACKBONE.LAST_STRIDE", "2")
    path = str(tmp_path / "resnet18.pth")
    backbone = build_backbone(
        config("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", path, *options)
    ).eval()
    x = torch.randn(2, 3, 64, 32)
    expected = torch.nn.Sequential(*list(resnet18.eval().children())[:-2])(x)
    torch.testing.assert_close(backbone(x), expected)


def test_the_backbone_of_a_whole_model(tmp_path, resnet18):
    state = {f"module.backbone.{key}": value for key, value in resnet18.state_dict().items() if "fc" not in key}
    torch.save({"model": state | {"module.heads.weight": torch.ones(3, 512)}}, tmp_path / "whole.pth")
    assert torch.equal(pretrained(tmp_path / "whole.pth").conv1.weight, resnet18.conv1.weight)


def test_another_depth_is_refused(tmp_path):
    torch.save(torchvision.models.resnet50().state_dict(), tmp_path / "resnet50.pth")
    with pytest.raises(WeightsError, match="of another model"):
        pretrained(tmp_path / "resnet50.pth")


@pytest.mark.parametrize("ibn, url", [("False", "pytorch.org/models/resnet18"), ("True", "IBN-Net/releases")])
def test_a_download_that_fails_says_what_to_do(monkeypatch, ibn, url):
    def offline(*args, **options):
        assert options["weights_only"] and options["check_hash"] is (ibn == "False")
        raise URLError("no network")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", offline)
    with pytest.raises(WeightsError, match=url) as error:
        build_backbone(config("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.WITH_IBN", ibn))
    assert "MODEL.BACKBONE.PRETRAIN_PATH" in str(error.value)


def test_a_variant_that_nobody_offers_weights_of():
    with pytest.raises(ConfigError, match="no ImageNet weights to download"):
        build_backbone(config("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.WITH_SE", "True"))


def test_non_local_blocks_are_not_missed_in_a_file(tmp_path):
    options = ("MODEL.BACKBONE.DEPTH", "50x", "MODEL.BACKBONE.FEAT_DIM", "2048", "MODEL.BACKBONE.WITH_IBN", "True")
    plain = build_backbone(config(*options))
    path = tmp_path / "ibn.pth"
    torch.save({key: value for key, value in plain.state_dict().items() if not key.startswith("NL_")}, path)
    pretrained = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(path))
    attentive = build_backbone(config(*options, "MODEL.BACKBONE.WITH_NL", "True", *pretrained))
    assert torch.equal(attentive.layer3[2].bn1.IN.weight, plain.layer3[2].bn1.IN.weight)
    assert torch.equal(attentive.layer4[2].conv3.weight, plain.layer4[2].conv3.weight)
    torch.save(torchvision.models.resnet50().state_dict(), path)
    with pytest.raises(WeightsError, match="do not fit the model's backbone"):  # it has no instance norm
        build_backbone(config(*options, *pretrained))
