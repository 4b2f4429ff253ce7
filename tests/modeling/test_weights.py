"""Pretrained backbones: from a local file in torchvision's form, or a message that says what to do."""

from urllib.error import URLError

import pytest
import torch
import torchvision

from fastamp.config import get_cfg
from fastamp.modeling import build_backbone, weights
from fastamp.utils.errors import WeightsError


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


def test_a_download_that_fails_says_what_to_do(monkeypatch):
    class Offline:
        url = "https://example.org/resnet18.pth"

        def get_state_dict(self, **kwargs):
            raise URLError("no network")

    monkeypatch.setattr(weights, "get_model_weights", lambda name: {"IMAGENET1K_V1": Offline()})
    with pytest.raises(WeightsError, match="https://example.org/resnet18.pth") as error:
        build_backbone(config("MODEL.BACKBONE.PRETRAIN", "True"))
    assert "MODEL.BACKBONE.PRETRAIN_PATH" in str(error.value)
