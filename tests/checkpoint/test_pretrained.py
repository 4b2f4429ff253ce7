"""Pretrained backbones: local files, downloads, input channels, errors."""

import hostile_pickles
import pytest
import torch
import torchvision

from fastamp.checkpoint.download import DownloadError
from fastamp.config import read_config
from fastamp.modeling import build_backbone, build_model
from fastamp.utils.errors import ConfigError, WeightsError


def config(*opts):
    return read_config("", ["MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512", *opts])


def pretrained(path, *opts):
    return build_backbone(config("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(path), *opts))


@pytest.fixture(scope="module")
def resnet18():
    torch.manual_seed(1)
    return torchvision.models.resnet18()


def test_pretrained_backbone_is_loaded_from_a_local_torchvision_file(tmp_path, resnet18):
    torch.save(resnet18.state_dict(), tmp_path / "resnet18.pth")
    backbone = pretrained(tmp_path / "resnet18.pth")
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, resnet18.state_dict()[name])


def test_backbone_features_match_torchvision_with_padded_stem_and_last_stride_2(tmp_path, resnet18):
    torch.save(resnet18.state_dict(), tmp_path / "resnet18.pth")
    options = ("MODEL.BACKBONE.STEM_POOL", "padded", "MODEL.BACKBONE.LAST_STRIDE", "2")
    path = str(tmp_path / "resnet18.pth")
    backbone = build_backbone(
        config("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", path, *options)
    ).eval()
    x = torch.randn(2, 3, 64, 32)
    expected = torch.nn.Sequential(*list(resnet18.eval().children())[:-2])(x)
    torch.testing.assert_close(backbone(x), expected)


def test_pretrained_backbone_is_loaded_from_a_complete_model(tmp_path, resnet18):
    state = {f"module.backbone.{key}": value for key, value in resnet18.state_dict().items() if "fc" not in key}
    torch.save({"model": state | {"module.heads.weight": torch.ones(3, 512)}}, tmp_path / "whole.pth")
    assert torch.equal(pretrained(tmp_path / "whole.pth").conv1.weight, resnet18.conv1.weight)


def test_pretrained_backbone_is_loaded_from_a_transreid_model(tmp_path, resnet18):
    state = {f"base.{name}": value for name, value in resnet18.state_dict().items()}
    torch.save(state | {"bottleneck.weight": torch.ones(512)}, tmp_path / "transreid.pth")
    assert torch.equal(pretrained(tmp_path / "transreid.pth").conv1.weight, resnet18.conv1.weight)


@pytest.fixture
def resnet18_file(tmp_path, resnet18):
    path = tmp_path / "resnet18.pth"
    torch.save(resnet18.state_dict(), path)
    return path


def test_adapted_rgb_weights_treat_gray_image_as_three_equal_channels(resnet18_file, resnet18, caplog):
    backbone = pretrained(resnet18_file, "INPUT.CHANNELS", "1")
    assert sum("conv1.weight in" in record.message for record in caplog.records) == 1
    assert "INPUT.CHANNELS is 1" in caplog.text
    gray = torch.randn(2, 1, 64, 32)
    expected = resnet18.conv1(gray.expand(-1, 3, -1, -1))
    torch.testing.assert_close(backbone.conv1(gray), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(backbone.layer1[0].conv1.weight, resnet18.layer1[0].conv1.weight)


def test_loading_rgb_weights_initializes_the_fourth_channel_to_zero(resnet18_file, resnet18, caplog):
    backbone = pretrained(resnet18_file, "INPUT.CHANNELS", "4")
    assert "INPUT.CHANNELS is 4" in caplog.text
    assert torch.equal(backbone.conv1.weight[:, :3], resnet18.conv1.weight)
    assert not backbone.conv1.weight[:, 3].any()
    images = torch.randn(2, 4, 64, 32)
    torch.testing.assert_close(backbone.conv1(images), resnet18.conv1(images[:, :3]), rtol=1e-4, atol=1e-5)
    backbone(images).square().mean().backward()
    assert backbone.conv1.weight.grad[:, 3].any()


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pretrained_weights_are_unchanged_if_input_channels_match(tmp_path, caplog, channels):
    options = ("INPUT.CHANNELS", str(channels))
    start = build_backbone(config(*options))
    torch.save(start.state_dict(), tmp_path / "start.pth")
    assert torch.equal(pretrained(tmp_path / "start.pth", *options).conv1.weight, start.conv1.weight)
    assert "INPUT.CHANNELS" not in caplog.text


def test_loading_gray_weights_into_a_four_channel_backbone_raises(tmp_path):
    torch.save(build_backbone(config("INPUT.CHANNELS", "1")).state_dict(), tmp_path / "gray.pth")
    with pytest.raises(WeightsError, match=r"gray.pth(.|\n)*conv1(.|\n)*INPUT\.CHANNELS"):
        pretrained(tmp_path / "gray.pth", "INPUT.CHANNELS", "4")


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """Replace PyTorch's download cache with an empty folder."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    return tmp_path / "hub/checkpoints"


def test_downloaded_weights_are_cached_and_adapted_to_one_channel(monkeypatch, resnet18, empty_cache):
    asked = []

    def download(url, path, sha256):
        asked.append((url, sha256))
        torch.save(resnet18.state_dict(), path)

    monkeypatch.setattr("fastamp.checkpoint.pretrained.download", download)
    for _ in range(2):
        backbone = build_backbone(config("MODEL.BACKBONE.PRETRAIN", "True", "INPUT.CHANNELS", "1"))
        assert torch.equal(backbone.conv1.weight, resnet18.conv1.weight.sum(dim=1, keepdim=True))
    assert asked == [("https://download.pytorch.org/models/resnet18-f37072fd.pth", "f37072fd")]
    assert [path.name for path in empty_cache.iterdir()] == ["resnet18-f37072fd.pth"]


def test_hostile_download_is_rejected(monkeypatch, empty_cache):
    code = hostile_pickles.PICKLES["a key of shared tuples"]
    monkeypatch.setattr(
        "fastamp.checkpoint.pretrained.download", lambda url, path, sha256: hostile_pickles.write(code, path)
    )
    with pytest.raises(WeightsError, match=rf"delete {empty_cache}"):
        build_backbone(config("MODEL.BACKBONE.PRETRAIN", "True"))


def test_gray_model_matches_rgb_model_with_three_equal_channels(resnet18_file):
    """If only INPUT.CHANNELS is set, the default RGB mean and standard deviation are converted to luma values."""
    options = ("MODEL.DEVICE", "cpu", "MODEL.HEADS.NUM_CLASSES", "3")
    options += ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(resnet18_file))
    gray = build_model(config(*options, "INPUT.CHANNELS", "1")).eval()
    mean, std = gray.pixel_mean.item(), gray.pixel_std.item()
    rgb = build_model(config(*options, "MODEL.PIXEL_MEAN", [mean] * 3, "MODEL.PIXEL_STD", [std] * 3)).eval()
    images = torch.randint(256, (2, 1, 64, 32), dtype=torch.uint8)
    with torch.no_grad():
        features = rgb({"images": images.expand(-1, 3, -1, -1)})
        torch.testing.assert_close(gray({"images": images}), features, rtol=1e-3, atol=1e-4)
    assert features.std() > 1e-2


def test_pixel_std_must_have_one_value_per_channel():
    with pytest.raises(ConfigError, match=r"MODEL\.PIXEL_STD.*INPUT\.CHANNELS 4"):
        build_model(config("MODEL.DEVICE", "cpu", "INPUT.CHANNELS", "4", "MODEL.PIXEL_MEAN", (1.0, 2.0, 3.0, 4.0)))


def test_pretrained_weights_of_another_depth_are_rejected(tmp_path):
    torch.save(torchvision.models.resnet50().state_dict(), tmp_path / "resnet50.pth")
    with pytest.raises(WeightsError, match="resnet50.pth"):
        pretrained(tmp_path / "resnet50.pth")


@pytest.mark.parametrize("ibn, url", [("False", "pytorch.org/models/resnet18"), ("True", "IBN-Net/releases")])
def test_failed_download_names_the_url_and_the_config_key(monkeypatch, empty_cache, ibn, url):
    def offline(url, path, sha256):
        assert bool(sha256) == (ibn == "False")
        raise DownloadError("no network")

    monkeypatch.setattr("fastamp.checkpoint.pretrained.download", offline)
    with pytest.raises(WeightsError, match=url) as error:
        build_backbone(config("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.WITH_IBN", ibn))
    assert "MODEL.BACKBONE.PRETRAIN_PATH" in str(error.value)


def test_pretrain_raises_for_backbone_variant_without_published_weights():
    with pytest.raises(ConfigError, match="MODEL.BACKBONE.PRETRAIN"):
        build_backbone(config("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.WITH_SE", "True"))


def test_pretrained_weights_may_lack_non_local_blocks(tmp_path):
    options = ("MODEL.BACKBONE.DEPTH", "50x", "MODEL.BACKBONE.FEAT_DIM", "2048", "MODEL.BACKBONE.WITH_IBN", "True")
    plain = build_backbone(config(*options))
    path = tmp_path / "ibn.pth"
    torch.save({key: value for key, value in plain.state_dict().items() if not key.startswith("NL_")}, path)
    pretrained = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(path))
    attentive = build_backbone(config(*options, "MODEL.BACKBONE.WITH_NL", "True", *pretrained))
    assert torch.equal(attentive.layer3[2].bn1.IN.weight, plain.layer3[2].bn1.IN.weight)
    assert torch.equal(attentive.layer4[2].conv3.weight, plain.layer4[2].conv3.weight)
    torch.save(torchvision.models.resnet50().state_dict(), path)
    with pytest.raises(WeightsError, match="MODEL.WEIGHTS_MIN_MATCH"):  # it has no instance norm
        build_backbone(config(*options, *pretrained))
