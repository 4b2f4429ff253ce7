"""OSNet and OSNet-AIN: parameter counts, comparison with a plain computation, and torchreid's files."""

import pytest
import torch
import torch.nn.functional as F
from small_networks import Layers, build, config, count_parameters
from torch import nn

from fastamp.amp.checks import check_losses
from fastamp.checkpoint.download import DownloadError
from fastamp.checkpoint.load_state import load_model_state
from fastamp.modeling import build_backbone, build_model
from fastamp.modeling.backbones import osnet, osnet_ain
from fastamp.utils.errors import ConfigError, TrainingError, WeightsError

OSNET, AIN = "build_osnet_backbone", "build_osnet_ain_backbone"
IBN = ("MODEL.BACKBONE.WITH_IBN", "True")
VARIANTS = {"plain": (OSNET,), "ibn": (OSNET, *IBN), "ain": (AIN,)}


@pytest.mark.integration
@pytest.mark.parametrize(
    "depth, width, published",
    [("x1_0", 512, 2193616), ("x0_75", 384, 1299224), ("x0_5", 256, 636520), ("x0_25", 128, 203568)],
)
def test_osnet_parameter_counts_equal_torchreid(depth, width, published):
    """torchreid's counts include a linear layer with 512 outputs and batch norm, and count each gate four times."""
    gates = sum(2 * (2 * c * (c // 16) + c + c // 16) for c in (w // 4 for w in osnet.CHANNELS[depth][1:]))
    expected = published - (width * 512 + 512) - 2 * 512 - 3 * gates
    assert count_parameters(OSNET, depth, width) == count_parameters(AIN, depth, width) == expected
    if depth == "x1_0":  # torchreid publishes 2194640: two additional instance norms
        assert count_parameters(OSNET, depth, width, *IBN) == expected + 2194640 - published


def naive_forward(state, x, variant):
    """Compute the feature map of ``x`` from the tensors of a state dict, without the backbone's modules."""
    layers = Layers(state)

    def unit(x, name, relu=True, stride=1):
        x = layers.conv(x, f"{name}.conv", stride)
        x = layers.bn(x, f"{name}.bn") if layers.has(f"{name}.bn") else x
        return x.relu() if relu else x

    def light(x, name):
        return layers.bn(layers.conv(layers.conv(x, f"{name}.conv1"), f"{name}.conv2"), f"{name}.bn").relu()

    def streams(name):
        if variant == "ain":
            return [[f"{name}.conv2.{t}.layers.{i}" for i in range(t + 1)] for t in range(4)]
        return [[f"{name}.conv2a"]] + [
            [f"{name}.conv2{letter}.{i}" for i in range(t)] for t, letter in ((2, "b"), (3, "c"), (4, "d"))
        ]

    def block(x, name):
        reduced, total = unit(x, f"{name}.conv1"), 0
        for stream in streams(name):
            out = reduced
            for part in stream:
                out = light(out, part)
            hidden = layers.conv(F.adaptive_avg_pool2d(out, 1), f"{name}.gate.fc1").relu()
            total = total + out * layers.conv(hidden, f"{name}.gate.fc2").sigmoid()
        out = unit(total, f"{name}.conv3", relu=False)
        around = unit(x, f"{name}.downsample", relu=False) if layers.has(f"{name}.downsample.conv") else x
        if not layers.has(f"{name}.IN"):
            return (out + around).relu()
        if variant == "ain":
            return (layers.bn(out, f"{name}.IN") + around).relu()
        return layers.bn(out + around, f"{name}.IN").relu()

    x = F.max_pool2d(unit(x, "conv1", stride=2), 3, 2, 1)
    for stage in (2, 3, 4):
        x = block(block(x, f"conv{stage}.0"), f"conv{stage}.1")
        if stage < 4:
            x = F.avg_pool2d(unit(x, f"pool{stage}.0" if variant == "ain" else f"conv{stage}.2.0"), 2)
    return unit(x, "conv5")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size, map_size", [((64, 32), (4, 2)), ((71, 45), (4, 3))])
def test_osnet_features_equal_naive_computation(variant, size, map_size):
    name, *opts = VARIANTS[variant]
    backbone, images = build(name, "x0_25", 128, *opts), torch.randn(2, 3, *size).double()
    with torch.no_grad():
        maps = backbone(images)
        torch.testing.assert_close(maps, naive_forward(backbone.state_dict(), images, variant))
    assert maps.shape == (2, 128, *map_size)
    assert maps.std() > 0.01


@pytest.mark.parametrize("variant, expected", [("plain", set()), ("ibn", {"conv1.bn", "conv2.0.IN", "conv2.1.IN"})])
def test_osnet_ibn_has_instance_norm_only_in_stem_and_first_stage(variant, expected):
    name, *opts = VARIANTS[variant]
    backbone = build(name, "x0_25", 128, *opts)
    assert {name for name, m in backbone.named_modules() if isinstance(m, torch.nn.InstanceNorm2d)} == expected


def test_osnet_ain_has_instance_norm_at_published_positions():
    names = {name for name, m in build(AIN, "x0_25", 128).named_modules() if isinstance(m, torch.nn.InstanceNorm2d)}
    assert names == {"conv1.bn", "conv2.0.IN", "conv2.1.IN", "conv3.1.IN", "conv4.0.IN"}


def naive_gate(gate, streams):
    return sum(x * gate.fc2(gate.fc1(F.adaptive_avg_pool2d(x, 1)).relu()).sigmoid() for x in streams)


def gate_gradients(gate, function, *, autocast):
    """Return the output of ``function(streams)`` and the gradients of the streams and of the gate's parameters."""
    generator = torch.Generator().manual_seed(0)
    streams = [torch.randn(3, 32, 5, 4, generator=generator) for _ in range(4)]
    streams = [x.to(memory_format=torch.channels_last).requires_grad_() for x in streams]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = function(streams)
    return [out, *torch.autograd.grad(out.square().sum(), [*streams, *gate.parameters()])]


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_of_the_gate_equal_naive_computation(autocast):
    gate = osnet.ChannelGate(32)
    found = gate_gradients(gate, lambda streams: gate(*streams), autocast=autocast)
    expected = gate_gradients(gate, lambda streams: naive_gate(gate, streams), autocast=autocast)
    if autocast:
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    else:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_loss_of_an_osnet_outside_the_model_raises():
    other, images = build_backbone(config(OSNET, "x0_25", 128)), torch.rand(2, 3, 64, 32)
    loss = {"loss_new": other(images).mean()}
    check_losses(loss, model=other)
    with pytest.raises(TrainingError, match="'loss_new'"):
        check_losses(loss, model=nn.Linear(2, 2))


def test_gradients_of_the_gate_equal_finite_differences():
    gate = osnet.ChannelGate(16).double()
    streams = [torch.randn(2, 16, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(gate, streams)


def torchreid_state(backbone):
    """Create a torchreid state dict: no prefixes, with a fully connected layer and a classifier."""
    head = {"fc.0.weight": torch.ones(512, 128), "fc.1.running_mean": torch.ones(512), "classifier.bias": torch.ones(9)}
    return {key: value.clone() for key, value in backbone.state_dict().items()} | head


@pytest.mark.integration
def test_osnet_loads_torchreid_file_as_pretrained_weights(tmp_path):
    origin = build(AIN, "x0_25", 128)
    path = tmp_path / "osnet.pth.tar"
    torch.save({"state_dict": {f"module.{k}": v for k, v in torchreid_state(origin).items()}, "epoch": 1}, path)
    opts = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.PRETRAIN_PATH", str(path))
    backbone = build_backbone(config(AIN, "x0_25", 128, *opts))
    assert all(torch.equal(value, origin.state_dict()[key].float()) for key, value in backbone.state_dict().items())


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_with_osnet_loads_torchreid_state_dict(variant):
    name, *opts = VARIANTS[variant]
    origin = build(name, "x0_25", 128, *opts)
    model = build_model(config(name, "x0_25", 128, *opts, "MODEL.HEADS.NUM_CLASSES", "3")).eval().double()
    report = load_model_state(model, torchreid_state(origin), source="torchreid")
    assert report.backbone_fraction == 1
    assert "STEM_POOL" not in str(report.notes)  # the stem pooling is the same in FastReID and torchreid
    images = torch.randn(2, 3, 64, 32).double()
    torch.testing.assert_close(model.backbone(images), origin(images))


@pytest.mark.parametrize("variant, other", [("plain", "ibn"), ("ibn", "plain"), ("plain", "ain"), ("ain", "ibn")])
def test_loading_weights_of_another_osnet_variant_raises_or_reports_instance_norms(variant, other):
    """If enough tensors match, the report contains the missing or unused instance norms."""
    (name, *opts), (other_name, *other_opts) = VARIANTS[variant], VARIANTS[other]
    state = build(other_name, "x0_25", 128, *other_opts).state_dict()
    backbone = build(name, "x0_25", 128, *opts)
    if {name, other_name} == {OSNET}:
        report = load_model_state(backbone, state, source="other", backbone_prefix="")
        assert set(report.missing if variant == "ibn" else report.dropped) >= {"conv2.0.IN.weight", "conv2.1.IN.bias"}
    else:
        with pytest.raises(WeightsError, match="MODEL.WEIGHTS_MIN_MATCH"):
            load_model_state(backbone, state, source="other", backbone_prefix="")


@pytest.mark.integration
def test_osnet_pretrained_weights_have_distinct_cache_file_names(monkeypatch, tmp_path):
    """The cache identifies files by name, but the URLs do not contain file names."""
    calls = []

    def offline(url, path, sha256):
        calls.append((url, path.name))
        raise DownloadError("no network")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr("fastamp.checkpoint.pretrained.download", offline)
    variants = [(OSNET, *key) for key in osnet.PRETRAINED] + [(AIN, key, False) for key in osnet_ain.PRETRAINED]
    for name, depth, ibn in variants:
        opts = ("MODEL.BACKBONE.PRETRAIN", "True", "MODEL.BACKBONE.WITH_IBN", str(ibn))
        with pytest.raises(WeightsError, match=r"drive\.google"):
            build_backbone(config(name, depth, osnet.CHANNELS[depth][-1], *opts))
    assert len({url for url, _ in calls}) == len({file_name for _, file_name in calls}) == len(variants) == 9
    assert {file_name for _, file_name in calls} >= {"osnet_x1_0_imagenet.pth", "osnet_ain_x0_25_imagenet.pth"}


def test_html_page_downloaded_instead_of_osnet_weights_raises(monkeypatch, tmp_path):
    def download(url, path, sha256):
        path.write_text("<html>Quota exceeded</html>")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr("fastamp.checkpoint.pretrained.download", download)
    with pytest.raises(WeightsError, match=rf"{tmp_path}(.|\n)*PRETRAIN_PATH"):
        build_backbone(config(OSNET, "x0_25", 128, "MODEL.BACKBONE.PRETRAIN", "True"))


def test_pretrain_of_osnet_variant_without_published_weights_raises():
    with pytest.raises(ConfigError, match="MODEL.BACKBONE.PRETRAIN"):
        build_backbone(config(OSNET, "x0_25", 128, *IBN, "MODEL.BACKBONE.PRETRAIN", "True"))


@pytest.mark.integration
def test_gate_in_float16_is_traced_with_a_dynamic_batch_size():
    gate = osnet.ChannelGate(32).eval().requires_grad_(False).half()
    streams = tuple(torch.randn(2, 32, 4, 2).half() for _ in range(4))
    batch = torch.export.Dim("batch", min=1, max=2**31 - 1)
    shapes = {"streams": tuple({0: batch} for _ in streams)}
    program = torch.export.export(gate, streams, dynamic_shapes=shapes, strict=False)
    streams = tuple(torch.randn(5, 32, 4, 2).half() for _ in range(4))
    assert torch.equal(program.module()(*streams), gate(*streams))
