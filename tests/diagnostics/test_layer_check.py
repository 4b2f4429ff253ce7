"""Tests of the layer check: planted faults are found, and correct models pass."""

import itertools
from pathlib import Path

import every_backbone
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from command import load_script
from torch import nn

from fastamp.amp import LossScaler, OptimizationStep, PrecisionPolicy
from fastamp.diagnostics.fp32_search import search_force_fp32
from fastamp.diagnostics.isolated_passes import IsolatedPasses
from fastamp.diagnostics.layer_check import check_layers
from fastamp.diagnostics.precision_check import DOCTOR_MIN_COSINE, check_float32, check_precision
from fastamp.diagnostics.precision_diagnostics import PrecisionDiagnostics
from fastamp.diagnostics.preflight import preflight
from fastamp.modeling import build_model
from fastamp.utils.errors import TrainingError

LOW = [torch.bfloat16, torch.float16]
ROOT = Path(__file__).parents[2]

reference = load_script("tests/modeling/test_reference.py")


def policy(dtype):
    return PrecisionPolicy("cpu", dtype, "test")


def images(count, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch = {"images": torch.randint(256, (count, 3, *size), dtype=torch.uint8, generator=generator)}
    batch |= {"targets": torch.arange(count) // 2, "camids": torch.arange(count) % 2}
    return batch | {"viewids": torch.zeros(count, dtype=torch.int64)}


def small_resnet():
    torch.manual_seed(0)
    return build_model(every_backbone.config("resnet 18x", "MODEL.BACKBONE.PRETRAIN", "False")).train()


def wrong_layers(model, dtype, size=every_backbone.SIZE):
    with IsolatedPasses(model, images(4, size)) as passes:
        return check_layers(passes, policy(dtype))[0]


class Block(nn.Module):
    """A convolution, then ``layer``, then a batch norm."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.layer, self.norm = nn.Conv2d(3, 8, 3), layer, nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, batch):
        x = self.norm(self.layer(self.conv(batch["images"].float() / 255))).mean((2, 3))
        return {"loss_cls": F.cross_entropy(self.head(x).float(), batch["targets"])} if self.training else x


def is_low(x):
    return x.dtype in LOW


# ---- comparison with float32


@pytest.mark.integration
@pytest.mark.parametrize("dtype", LOW)
def test_layer_check_finds_a_convolution_with_five_percent_error(monkeypatch, dtype):
    """The error is found even in an untrained model, where comparing embeddings does not reveal it."""
    model, original = small_resnet(), nn.Conv2d.forward
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    planted, error = None, 0.05

    def forward(layer, x):
        out = original(layer, x)
        return out * (1 + error) if layer is planted and is_low(out) else out

    monkeypatch.setattr(nn.Conv2d, "forward", forward)
    with IsolatedPasses(model, images(2, every_backbone.SIZE)) as passes:
        assert check_layers(passes, policy(dtype))[0] == []
        for planted in convolutions:
            error = -error
            (found,) = check_layers(passes, policy(dtype))[0]
            assert model.get_submodule(found.name) is planted
    assert len(convolutions) == 20


class NoisyLinear(nn.Linear):
    def forward(self, x):
        out = super().forward(x)
        return out + 0.05 * out.std() * torch.ones_like(out) if is_low(out) else out


def test_layer_check_finds_an_error_in_a_subclass_of_linear():
    class Net(Block):
        def __init__(self):
            super().__init__(nn.Identity())
            self.embed = NoisyLinear(8, 16)

        def forward(self, batch):
            x = self.embed(self.norm(self.conv(batch["images"].float() / 255)).mean((2, 3)))
            return {"loss_cls": F.cross_entropy(x.float(), batch["targets"])} if self.training else x

    (found,) = wrong_layers(Net().train(), torch.bfloat16)
    assert found.name == "embed" and found.error > found.limit and not found.repeated


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_layer_check_finds_values_non_finite_only_in_low_precision(monkeypatch, wrong):
    original = nn.Conv2d.forward

    def forward(layer, x):
        out = original(layer, x)
        if is_low(out):
            out[0, 0, 0, 0] = wrong
        return out

    monkeypatch.setattr(nn.Conv2d, "forward", forward)
    found = wrong_layers(Block(nn.Identity()).train(), torch.bfloat16)
    assert [layer.name for layer in found] == ["conv"] and "not finite" in found[0].describe()


def test_layer_check_does_not_report_an_overflowing_layer_as_wrong():
    model = Block(nn.Conv2d(8, 8, 1)).train()
    with torch.no_grad():
        model.layer.weight.mul_(1e7)
    assert wrong_layers(model, torch.float16) == []
    report = preflight(model, images(4, (12, 12)), policy=policy(torch.float16), scaler=LossScaler())
    assert report.location.module == "layer" and not report.kernel


def test_correct_layers_pass_the_layer_check_at_any_scale(subtests):
    """This includes norms of constant inputs, where rounding errors dominate even in float32."""
    layers = [
        nn.InstanceNorm2d(8), nn.GroupNorm(2, 8), nn.GELU(), nn.Softmax(1), nn.Hardswish(), nn.ReLU(inplace=True),
        nn.AvgPool2d(2), nn.Tanhshrink(), nn.LocalResponseNorm(2), nn.LPPool2d(3, 2), nn.SiLU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=8), nn.ConvTranspose2d(8, 8, 2), nn.PReLU(),
    ]  # fmt: skip
    for dtype, layer, scale, constant in itertools.product(LOW, layers, [1e-4, 1.0, 1e3], [False, True]):
        with subtests.test(dtype=dtype, layer=layer, scale=scale, constant=constant):
            model = Block(layer).train()
            with torch.no_grad():
                model.conv.weight.mul_(scale)
                model.conv.bias.mul_(scale)
            batch = images(4, (12, 12))
            if constant:
                batch["images"].fill_(255)
            with IsolatedPasses(model, batch) as passes:
                assert check_layers(passes, policy(dtype))[0] == []


@pytest.mark.parametrize("dtype", LOW)
def test_correct_recurrent_layer_passes_the_layer_check(dtype):
    """A recurrent layer rounds at each time step, so it is only checked for repeatability."""

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(10, 10, num_layers=3)

        def forward(self, x):
            return self.lstm(x.flatten(1, 2))[0].reshape(x.shape)

    model = Block(Rows()).train()
    with torch.no_grad():
        for p in model.layer.parameters():
            p.mul_(10)
    assert wrong_layers(model, dtype, (12, 12)) == []


# ---- repeatability


class DiffersOnSecondCall(nn.Module):
    """Layer that multiplies its output by a factor in every second call."""

    def __init__(self, factor, low_only):
        super().__init__()
        self.factor, self.low_only, self.calls = factor, low_only, itertools.count()

    def forward(self, x):
        if self.low_only and not is_low(x):
            return x
        return x * self.factor if next(self.calls) % 2 else x


@pytest.mark.parametrize("low_only", [False, True])
@pytest.mark.parametrize("factor", [1.05, 0.0, float("nan")])
def test_layer_check_finds_a_nondeterministic_layer(factor, low_only):
    (found,) = wrong_layers(Block(DiffersOnSecondCall(factor, low_only)).train(), torch.bfloat16)
    assert (found.name, found.kind) == ("layer", "DiffersOnSecondCall") and found.repeated > found.limit
    assert "not deterministic in bfloat16" in found.describe()


def test_layer_check_finds_a_layer_that_depends_on_its_call_count():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    assert [layer.name for layer in wrong_layers(Block(Counting()).train(), torch.bfloat16)] == ["layer"]


def test_layer_check_finds_nondeterministic_code_between_layers():
    class Between(Block):
        passes = itertools.count()

        def forward(self, batch):
            out = super().forward(batch)
            return out if self.training else out + next(self.passes)

    (found,) = wrong_layers(Between(nn.Identity()).train(), torch.bfloat16)
    assert found.name == "" and found.kind == "Between"


class AlwaysDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, training=True)


class Noise(nn.Module):
    """Layer that adds noise from a separate random generator."""

    def __init__(self, kind):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0) if kind == "torch" else np.random.default_rng(0)

    def forward(self, x):
        if isinstance(self.generator, torch.Generator):
            return x + torch.randn(x.shape, generator=self.generator).to(x.dtype)
        return x + torch.from_numpy(self.generator.standard_normal(x.shape)).to(x.dtype)


@pytest.mark.parametrize(
    "layer", [AlwaysDropout(), nn.Dropout(0.5), nn.RReLU(), Noise("torch"), Noise("numpy")], ids=str
)
def test_layers_that_draw_random_numbers_pass_the_preflight(layer):
    model = Block(layer).train()
    report = preflight(model, images(4, (12, 12)), policy=policy(torch.bfloat16))
    assert report.problem == ""


class RandomGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, generator):
        ctx.low, ctx.generator = is_low(x), generator
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        noise = torch.randn(gradient.shape, generator=ctx.generator).to(gradient.dtype)
        return (gradient * noise if ctx.low else gradient), None


class RandomBackward(nn.Module):
    """Layer with gradients that are multiplied by new noise in each pass, either only in low precision or always."""

    def __init__(self, low_only):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.function = lambda x: RandomGradient.apply(x if low_only else x.to(torch.bfloat16), generator)

    def forward(self, x):
        return self.function(x).to(x.dtype)


def test_preflight_reports_gradients_nondeterministic_only_in_low_precision():
    report = preflight(Block(RandomBackward(True)).train(), images(4, (12, 12)), policy=policy(torch.bfloat16))
    assert report.kernel and "different gradients" in report.problem and "conv." in report.problem
    # Random gradients in float32 are not caused by the precision.
    report = preflight(Block(RandomBackward(False)).train(), images(4, (12, 12)), policy=policy(torch.bfloat16))
    assert report.problem == ""


# ---- pre-flight and doctor


@pytest.fixture
def broken(monkeypatch):
    """A ResNet-18 with one convolution that is wrong in bfloat16."""
    model, original = small_resnet(), nn.Conv2d.forward
    planted = model.get_submodule("backbone.layer2.0.conv1")

    def forward(layer, x):
        out = original(layer, x)
        return out * 1.05 if layer is planted and out.dtype == torch.bfloat16 else out

    monkeypatch.setattr(nn.Conv2d, "forward", forward)
    return model


@pytest.mark.parametrize("choice", ["error", "warn", "fallback"])
def test_preflight_raises_warns_or_falls_back_if_a_layer_is_wrong(broken, choice, caplog, tmp_path):
    diagnostics = PrecisionDiagnostics(preflight=choice, trace_nonfinite=True, folder=tmp_path)
    step = OptimizationStep(broken, [torch.optim.SGD(broken.parameters(), 0.1)])
    batch = images(4, every_backbone.SIZE)
    requested = policy(torch.bfloat16)
    if choice == "error":
        with pytest.raises(TrainingError, match=r"backbone.layer2.0.conv1 \(Conv2d\) in bfloat16") as error:
            diagnostics.before_first_step(step, batch, requested)
        assert "SOLVER.AMP.FORCE_FP32 \"['backbone.layer2.0.conv1']\"" in str(error.value)
        assert "fastamp replay" not in str(error.value)  # a replay does not reproduce it
        return
    chosen = diagnostics.before_first_step(step, batch, requested)
    assert chosen.dtype == (torch.bfloat16 if choice == "warn" else torch.float32)
    assert "backbone.layer2.0.conv1 (Conv2d) in bfloat16" in caplog.text


@pytest.mark.integration
def test_fp32_search_selects_a_layer_with_wrong_results(broken):
    low, batch = policy(torch.bfloat16), images(4, every_backbone.SIZE)
    reference = check_float32(broken, batch, low)

    def check():
        return check_precision(broken, batch, low, reference=reference, min_cosine=DOCTOR_MIN_COSINE)

    state = check()
    assert state.kernel and state.layers[0].name == "backbone.layer2.0.conv1"
    found = search_force_fp32(broken, batch, low, check=check, current=state)
    assert found == ["backbone.layer2.0.conv1"]


# ---- no false positives


QUICK = ["resnet 18x", "osnet x0_25", "vit deit_small"]


def check_backbone(name):
    torch.manual_seed(0)
    model = build_model(every_backbone.config(name, "MODEL.BACKBONE.PRETRAIN", "False")).train()
    for dtype in LOW:
        assert wrong_layers(model, dtype) == []


@pytest.mark.integration
@pytest.mark.parametrize("name", QUICK)
def test_common_backbones_pass_the_layer_check(name):
    check_backbone(name)


@pytest.mark.export
@pytest.mark.parametrize("name", [name for name in every_backbone.BACKBONES if name not in QUICK])
def test_less_common_backbones_pass_the_layer_check(name):
    check_backbone(name)


@pytest.mark.export
@pytest.mark.parametrize("name", reference.MODELS)
def test_untrained_reference_models_pass_the_preflight_in_bfloat16(name):
    model = reference.reference_model(name).train()
    batch = images(4, reference.MODELS[name]["input_size"])
    report = preflight(model, batch, policy=policy(torch.bfloat16))
    assert report.problem == ""
