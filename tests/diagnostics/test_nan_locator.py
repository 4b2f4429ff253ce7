"""Tests of the NaN locator: forward, backward and loss-scale overflow, float32 failures and non-finite batches."""

import pytest
import torch
from torch import nn

from fastamp.amp import PrecisionPolicy, apply_force_fp32
from fastamp.diagnostics.isolated_passes import IsolatedPasses
from fastamp.diagnostics.nan_locator import largest_finite_scale, locate_in_evaluation, locate_in_training, try_locate


def policy(dtype):
    return PrecisionPolicy("cpu", dtype, "test")


class Loss(nn.Module):
    def forward(self, logits, targets):
        return nn.functional.cross_entropy(logits.float(), targets)


class Net(nn.Module):
    """Two convolutions with one fault that only affects float16."""

    def __init__(self, fault=""):
        super().__init__()
        torch.manual_seed(0)
        self.fault = fault
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)  # module backward hooks would fail on its inputs
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
        self.linear, self.loss = nn.Linear(8, 4), Loss()
        if fault == "weight":
            with torch.no_grad():
                self.conv2.weight.mul_(1e5)

    def forward(self, batch):
        x = self.relu(self.norm1(self.conv1(batch["images"])))
        if self.fault == "function":
            x = x * 1e6
        if self.fault == "mask":
            x = torch.where(x > 1e9, x, x + 0)
        x = self.norm2(self.conv2(x)).mean((2, 3))
        logits = self.linear(x)
        if not self.training:
            return logits
        loss = self.loss(logits, batch["targets"])
        factor = {"backward": 1e7, "scale": 30.0, "nan": float("nan"), "inf": float("inf")}.get(self.fault, 1.0)
        return {"loss": loss * factor}


def batch(value=None, channels=3):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, channels, 12, 12, generator=generator)
    if value is not None:
        images[0, 0, 0, 0] = value
    return {"images": images, "targets": torch.arange(8) % 4}


def find(fault, dtype, scale=1.0, **kwargs):
    with IsolatedPasses(Net(fault), batch(**kwargs)) as passes:
        return locate_in_training(passes, policy(dtype), scale=scale)


@pytest.mark.parametrize(
    "fault, kind, module, part",
    [
        ("weight", "forward overflow", "conv2", "output"),
        ("function", "forward overflow", "", "between its submodules, before conv2"),
        ("backward", "backward overflow", "loss", "gradient of its input"),
        ("scale", "loss-scale overflow", "loss", "gradient of its input"),
    ],
)
def test_nan_locator_finds_module_and_kind_of_each_overflow(fault, kind, module, part):
    found = find(fault, torch.float16, scale=65536.0)
    assert (found.kind, found.module, found.part) == (kind, module, part)
    assert found.dtype == "float16" and found.inputs_finite
    text = found.describe()
    assert text.startswith(f"{kind} in ") and "fix:" in text and "6.55e+04" in text
    # bfloat16 has the range of float32, so that the same model does not overflow.
    assert find(fault, torch.bfloat16) is None


def test_nan_location_contains_input_and_parameter_magnitudes():
    found = find("weight", torch.float16)
    assert found.float32_magnitude > 65504 and 1 < found.input_magnitude < 100
    assert found.parameter_magnitude < 65504  # the products overflow, not the weights


def test_nan_location_suggests_largest_loss_scale_with_finite_gradients():
    found = find("scale", torch.float16, scale=65536.0)
    with IsolatedPasses(Net("scale"), batch()) as passes:
        assert passes.train(policy(torch.float16), scale=found.safe_scale).finite
        assert not passes.train(policy(torch.float16), scale=2 * found.safe_scale).finite
        assert largest_finite_scale(passes, policy(torch.float16), 2.0**24) == found.safe_scale
        assert largest_finite_scale(passes, policy(torch.float16), 3.0) == 3.0
    assert f"SOLVER.AMP.INIT_SCALE to {found.safe_scale:g}" in found.fix()


@pytest.mark.parametrize("fault", ["nan", "inf"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_nan_locator_reports_float32_failures_as_not_caused_by_precision(fault, dtype):
    found = find(fault, dtype)
    assert found.kind == "not finite in float32" and "SOLVER.BASE_LR" in found.describe()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_locator_reports_a_non_finite_batch(value):
    assert find("", torch.float16, value=value).kind == "batch not finite"


def test_nan_locator_returns_none_if_all_values_are_finite():
    assert find("", torch.float16, scale=1024.0) is None
    assert find("", torch.float32) is None


def test_nan_locator_ignores_masks_that_are_infinite_in_float32():
    """An attention mask of minus infinity is not an overflow."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask, self.linear = nn.Identity(), nn.Linear(4, 4)
            self.big = nn.Linear(4, 4)
            with torch.no_grad():
                self.big.weight.fill_(6e4)

        def forward(self, batch):
            scores = self.mask(self.linear(batch["x"]).masked_fill(torch.eye(4, dtype=torch.bool), float("-inf")))
            return {"loss": self.big(scores.softmax(1) + 1).float().mean()}

    with IsolatedPasses(Masked(), {"x": torch.ones(4, 4)}) as passes:
        found = locate_in_training(passes, policy(torch.float16))
    assert found.module == "big"


def test_nan_locator_in_evaluation_finds_overflow_and_non_finite_batch():
    with IsolatedPasses(Net("weight"), batch()) as passes:
        found = locate_in_evaluation(passes, policy(torch.float16))
        assert (found.kind, found.module) == ("forward overflow", "conv2")
        assert locate_in_evaluation(passes, policy(torch.bfloat16)) is None
    with IsolatedPasses(Net(), batch(value=float("nan"))) as passes:
        assert locate_in_evaluation(passes, policy(torch.float16)).kind == "batch not finite"


def test_forcing_the_located_module_to_float32_fixes_the_overflow():
    model = Net("weight")
    with IsolatedPasses(model, batch()) as passes:
        name = locate_in_training(passes, policy(torch.float16)).module
    apply_force_fp32(model, [name])
    with IsolatedPasses(model, batch()) as passes:
        assert locate_in_training(passes, policy(torch.float16), scale=1024.0) is None


def test_nan_locator_hooks_do_not_change_later_gradients():
    """The hooks replace the inputs of modules with views, which must not affect later passes."""
    model = Net("function")
    with IsolatedPasses(model, batch()) as passes:
        before = passes.train(policy(torch.bfloat16)).gradients
        locate_in_training(passes, policy(torch.float16))
        after = passes.train(policy(torch.bfloat16)).gradients
    assert before.keys() == after.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())


class Cached(nn.Module):
    """Module that writes into a list argument, and accepts a dict subclass and a keyword argument."""

    class Table(dict):
        def first(self):
            return self["x"]

    class Part(nn.Module):
        def __init__(self, gain):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            with torch.no_grad():
                self.linear.weight.fill_(gain)

        def forward(self, table, cache, *, bias):
            cache.append(self.linear(table.first()))
            return (cache[-1] + bias,)

    def __init__(self, gain):
        super().__init__()
        self.part = self.Part(gain)

    def forward(self, batch):
        cache = []
        (out,) = self.part(self.Table(x=batch["x"]), cache, bias=0.5)
        return {"loss": (out.float() * 1e-9 + cache[0].float() * 0).mean()}


def test_nan_locator_supports_list_dict_and_keyword_arguments():
    with IsolatedPasses(Cached(6e4), {"x": torch.ones(2, 4)}) as passes:
        assert locate_in_training(passes, policy(torch.float16)).module == "part.linear"
    model = Cached(6e4)
    apply_force_fp32(model, ["part"])
    with torch.autocast("cpu", dtype=torch.float16):
        assert torch.isfinite(model({"x": torch.ones(2, 4)})["loss"])


def test_suggested_force_fp32_keeps_forced_modules_and_adds_adjacent_layers():
    model = Net("function")
    apply_force_fp32(model, ["linear"])
    with IsolatedPasses(model, batch()) as passes:
        found = locate_in_training(passes, policy(torch.float16))
    assert found.adjacent == ("relu", "conv2")
    assert "SOLVER.AMP.FORCE_FP32 \"['linear', 'relu', 'conv2']\"" in found.fix()
    apply_force_fp32(model, ["relu", "conv2"])
    with IsolatedPasses(model, batch()) as passes:
        assert locate_in_training(passes, policy(torch.float16), scale=1024.0) is None


class Hungry(Net):
    """Net that runs out of memory in float32 with more than four images."""

    def forward(self, batch):
        if len(batch["images"]) > 4 and not torch.is_autocast_enabled("cpu"):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(batch)


class Broken(Net):
    """Net that raises an error in float32."""

    def forward(self, batch):
        if not torch.is_autocast_enabled("cpu"):
            raise RuntimeError("not in float32")
        return super().forward(batch)


def test_nan_locator_halves_large_batches_and_returns_reasons_for_failures():
    find = lambda passes: locate_in_training(passes, policy(torch.float16))  # noqa: E731
    found, note = try_locate(Hungry("weight"), batch(), find)
    assert found.module == "conv2" and note == ""  # on half of the batch
    found, note = try_locate(Broken("weight"), batch(), find)
    assert found is None and "RuntimeError: not in float32" in note


def test_nan_locations_are_ordered_with_causes_before_effects():
    order = [find(fault, torch.float16, scale=65536.0).order for fault in ("weight", "backward", "scale")]
    assert order == sorted(order) and len(set(order)) == 3
    assert find("", torch.float16, value=float("nan")).order < order[0]
