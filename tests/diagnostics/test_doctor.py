"""Tests of the mixed-precision doctor: layer measurements, and the search for modules to force to float32."""

import pytest
import torch
from torch import nn

from fastamp.amp import PrecisionPolicy
from fastamp.diagnostics.fp32_search import forced, search_force_fp32
from fastamp.diagnostics.isolated_passes import IsolatedPasses
from fastamp.diagnostics.precision_check import DOCTOR_MIN_COSINE, check_float32, check_precision
from fastamp.diagnostics.profiling import lost_gradients, measure_cost, measure_layers, safe_loss_scale

FLOAT32, BFLOAT16, FLOAT16 = (
    PrecisionPolicy("cpu", dtype, "test") for dtype in (torch.float32, torch.bfloat16, torch.float16)
)


class Net(nn.Module):
    """Four linear layers with batch norm; the initial weights of layer i are multiplied by ``gains[i]``."""

    def __init__(self, gains=(1, 1, 1, 1), function=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in gains)
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in gains)
        self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(16, 4)
        self.function = function
        with torch.no_grad():
            for layer, gain in zip(self.layers, gains, strict=True):
                layer.weight.mul_(gain)

    def forward(self, batch):
        x = batch["x"]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = self.relu(norm(layer(x)))
        if self.function:
            x = self.function(x)
        if not self.training:
            return x
        return {"loss": nn.functional.cross_entropy(self.head(x).float(), batch["targets"])}


BATCH = {"x": torch.randn(32, 16, generator=torch.Generator().manual_seed(0)), "targets": torch.arange(32) % 4}


def checker(model, policy):
    reference = check_float32(model, BATCH, policy)
    assert not reference.problem
    return lambda: check_precision(model, BATCH, policy, reference=reference, min_cosine=DOCTOR_MIN_COSINE)


def search(model, policy):
    lines, check = [], checker(model, policy)
    return search_force_fp32(model, BATCH, policy, check=check, current=check(), report=lines.append), lines


def passes_check(model, policy, names=()):
    with forced(model, names):
        return not checker(model, policy)().problem


def test_search_for_fp32_modules_finds_none_in_a_model_that_passes_in_low_precision():
    assert search(Net(), FLOAT16) == ([], []) and search(Net(), BFLOAT16) == ([], [])


@pytest.mark.parametrize(
    "gains, names",
    [((1, 1e6, 1, 1), ["layers.1"]), ((1e6, 1, 1, 1e6), ["layers.0", "layers.3"])],
)
def test_fp32_search_selects_exactly_the_overflowing_layers(gains, names):
    found, lines = search(Net(gains), FLOAT16)
    assert found == names and all(any(name in line for line in lines) for name in names)
    assert not passes_check(Net(gains), FLOAT16) and passes_check(Net(gains), FLOAT16, names)
    for name in names:  # each is necessary
        assert not passes_check(Net(gains), FLOAT16, [other for other in names if other != name])
    assert search(Net(gains), BFLOAT16)[0] == []


def test_fp32_search_selects_layers_next_to_an_overflowing_function():
    """A function has no module name, so the layers next to it are forced."""
    model = Net(function=lambda x: x * 1e6 / 1e6)
    found, _ = search(model, FLOAT16)
    assert found == ["relu"] and passes_check(model, FLOAT16, found)
    # Without the division all gradients are a million times larger, and no module can use float16.
    assert search(Net(function=lambda x: x * 1e6), FLOAT16)[0] is None


def test_fp32_search_selects_layers_that_lose_precision():
    """Cancellation of large numbers: no overflow, but features dominated by rounding."""

    class Canceling(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)
            with torch.no_grad():
                self.linear.bias.fill_(2000.0)

        def forward(self, x):
            return self.linear(x) - 2000.0

    class Model(Net):
        def __init__(self):
            super().__init__()
            self.canceling = Canceling()
            for norm in self.norms:
                norm.num_batches_tracked += 1  # embeddings are compared for trained models only

        def forward(self, batch):
            out = super().forward(batch)
            return out if self.training else self.canceling(out)

    found, lines = search(Model(), BFLOAT16)
    assert any(name.startswith("canceling") for name in found)
    assert any("bfloat16 embeddings differ from float32" in line for line in lines)
    assert passes_check(Model(), BFLOAT16, found) and not passes_check(Model(), BFLOAT16)


def test_fp32_search_returns_none_if_every_layer_overflows():
    class Loud(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(20))
            for layer in self.layers:
                nn.init.constant_(layer.weight, 1e6)

        def forward(self, batch):
            x = batch["x"].abs()
            for layer in self.layers:
                x = layer(x) / 1e7
            return {"loss": x.float().mean()} if self.training else x

    assert search(Loud(), FLOAT16)[0] is None and search(Loud(), BFLOAT16)[0] == []


def test_temporary_fp32_forcing_restores_module_classes_and_forward_methods():
    model = Net((1, 1e6, 1, 1))
    classes = [type(module) for module in model.modules()]
    with forced(model, ["layers.1"]):
        assert [type(module) for module in model.modules()] != classes
    assert [type(module) for module in model.modules()] == classes
    model.head.forward = original = model.head.forward
    with forced(model, ["head"]):
        assert model.head.forward is not original
    assert model.head.forward is original


def test_layer_measurements_reflect_precision_and_range_of_each_dtype():
    model = Net((1, 300, 1, 1))
    with IsolatedPasses(model, BATCH) as passes:
        low, half = (measure_layers(passes, policy) for policy in (BFLOAT16, FLOAT16))
    assert [layer.name for layer in low if layer.kind == "Linear"] == [f"layers.{n}" for n in range(4)]
    by_name = {layer.name: layer for layer in low}
    assert 1e-3 < by_name["layers.0"].own_error < 1e-2 and by_name["layers.0"].error == by_name["layers.0"].own_error
    assert by_name["layers.3"].error > by_name["layers.0"].error  # errors add up
    assert by_name["norms.0"].own_error == 0.0  # autocast runs it in float32
    halves = {layer.name: layer for layer in half}
    assert halves["layers.0"].own_error < by_name["layers.0"].own_error / 4  # three more bits
    assert halves["layers.1"].magnitude == by_name["layers.1"].magnitude > 100
    assert halves["layers.1"].limit_share == halves["layers.1"].magnitude / 65504


def test_measured_layer_error_equals_direct_computation():
    model = Net()
    with IsolatedPasses(model, BATCH) as passes:
        layer = measure_layers(passes, BFLOAT16)[0]
    plain = model.layers[0](BATCH["x"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model.layers[0](BATCH["x"]).float()
    assert layer.magnitude == plain.abs().max().item()
    assert layer.own_error == pytest.approx(((low - plain).norm() / plain.norm()).item())


def test_lower_loss_scale_increases_gradient_underflow():
    def lost(model, scale):
        with IsolatedPasses(model, BATCH) as passes:
            counts = lost_gradients(passes, FLOAT16, scale=scale)
        return sum(n for n, _ in counts.values()), sum(total for _, total in counts.values())

    class Quiet(Net):
        def forward(self, batch):
            out = super().forward(batch)
            return {"loss": out["loss"] * 1e-6} if self.training else out

    few, total = lost(Quiet(), 2.0**20)
    many, _ = lost(Quiet(), 1.0)
    assert many > total / 2 and few < total / 50
    assert total == sum(p.numel() for p in Quiet().parameters())
    with IsolatedPasses(Quiet(), BATCH) as passes:
        counts = lost_gradients(passes, FLOAT16, scale=1.0)
        layers = {layer.name: layer for layer in measure_layers(passes, FLOAT16, lost=counts)}
    assert layers["layers.0"].zero_gradients == counts["layers.0"][0] / counts["layers.0"][1] > 0
    assert layers["relu"].zero_gradients is None


def test_safe_loss_scale_is_largest_power_of_two_with_finite_gradients():
    with IsolatedPasses(Net(), BATCH) as passes:
        scale = safe_loss_scale(passes, FLOAT16, up_to=2.0**24)
        assert passes.train(FLOAT16, scale=scale).finite and not passes.train(FLOAT16, scale=2 * scale).finite
        assert safe_loss_scale(passes, BFLOAT16, up_to=2.0**24) is None


def test_measured_training_cost_is_positive_in_each_precision():
    with IsolatedPasses(Net(), BATCH) as passes:
        full, low = measure_cost(passes, FLOAT32), measure_cost(passes, BFLOAT16)
    assert full.seconds > 0 and full.memory > 0 and low.memory > 0 and low.relative > 0


def test_fp32_search_selects_an_overflowing_layer_with_patched_forward():
    """Isolated passes restore the attributes of modules, but keep a patched forward."""
    model = Net((1, 1e6, 1, 1))
    model.layers[1].forward = model.layers[1].forward
    assert search(model, FLOAT16)[0] == ["layers.1"]
