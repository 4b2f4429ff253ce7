"""Tests of the precision check in the pre-flight and in the doctor."""

import itertools

import amp_doctor
import pytest
import tiny
import torch
from conv_net import Hungry, Net, make_batch, policy
from torch import nn

from fastamp.diagnostics import precision_check
from fastamp.diagnostics.fp32_search import search_force_fp32
from fastamp.diagnostics.nan_location import NonFiniteLocation
from fastamp.diagnostics.precision_check import check_float32, check_precision
from fastamp.diagnostics.preflight import preflight
from fastamp.modeling import BACKBONE_REGISTRY
from fastamp.utils.errors import TrainingError

BFLOAT16, FLOAT16 = policy(torch.bfloat16), policy(torch.float16)


def check(model, batch, low, **options):
    return check_precision(model, batch, low, reference=check_float32(model, batch, low), **options)


class Noisy(Net):
    """Net with a different loss in each low-precision pass, like a nondeterministic kernel."""

    calls = itertools.count(1)  # isolated passes do not restore it

    def forward(self, batch):
        out = super().forward(batch)
        if self.training and torch.is_autocast_enabled("cpu"):
            out = {name: loss * next(self.calls) for name, loss in out.items()}
        return out


class VanishingNet(Net):
    def forward(self, batch):
        out = super().forward(batch)
        if self.training or not torch.is_autocast_enabled("cpu"):
            return out
        return out * (torch.arange(len(out)) > 0)[:, None]


class OverflowNet(Net):
    def forward(self, batch):
        out = super().forward(batch)
        return out if self.training or not torch.is_autocast_enabled("cpu") else out + float("inf")


@pytest.mark.parametrize(
    "model, low, finding",
    [
        (lambda: Net(3), BFLOAT16, ""),
        (lambda: Net(3, gain=1e7), FLOAT16, "overflow"),
        (lambda: OverflowNet(3), BFLOAT16, "overflow"),
        (lambda: Noisy(3), BFLOAT16, "unrepeatable"),
        (lambda: VanishingNet(3), BFLOAT16, "imprecise"),
    ],
)
def test_preflight_report_contains_findings_of_the_precision_check(model, low, finding):
    batch = make_batch()
    torch.manual_seed(0)
    found, report = check(model(), batch, low), preflight(model(), batch, policy=low)
    findings = [name for name in ("overflow", "unrepeatable", "imprecise") if getattr(found, name)]
    assert findings == ([finding] if finding else [])
    assert bool(found.problem) == bool(report.problem) and found.kernel == report.kernel
    if finding != "unrepeatable":
        assert report.problem.startswith(found.problem) and report.cosine == found.cosine
        assert {name: (value, found.losses[name]) for name, (value, _) in report.losses.items()} == report.losses


def test_precision_check_reports_a_wrong_layer_before_an_overflow(monkeypatch):
    """The wrong layer may be the cause of the overflow."""
    model, original = Net(3, gain=1e7), nn.Conv2d.forward

    def forward(layer, x):
        out = original(layer, x)
        return out * 1.5 if layer is model.body[0] and out.dtype == torch.float16 else out

    monkeypatch.setattr(nn.Conv2d, "forward", forward)
    found = check(model, make_batch(), FLOAT16)
    assert (
        [layer.name for layer in found.layers] == ["body.0"]
        and found.overflow
        and isinstance(found.location, NonFiniteLocation)
    )
    assert "body.0" in found.problem and found.problem != found.overflow
    report = preflight(model, make_batch(), policy=FLOAT16)
    assert report.kernel and report.location is None and report.problem == found.problem


def test_precision_check_fails_on_overflow_that_cannot_be_located(monkeypatch):
    monkeypatch.setattr(precision_check, "try_locate", lambda *args, **kwargs: (None, "(not located)"))
    model, batch = Net(3, gain=1e7), make_batch()
    found = check(model, batch, FLOAT16)
    assert found.overflow and found.location is None and "(not located)" in found.problem
    assert search_force_fp32(model, batch, FLOAT16, check=lambda: found, current=found) is None


def test_fp32_search_raises_if_memory_runs_out():
    model, batch = Net(3, gain=1e7), make_batch()
    hungry = Hungry(4, in_low_too=True)
    with pytest.raises(TrainingError, match="out of memory"):
        search_force_fp32(
            model,
            batch,
            FLOAT16,
            check=lambda: check(hungry, batch, FLOAT16),
            current=check(model, batch, FLOAT16),
        )


@BACKBONE_REGISTRY.register()
def build_float32_only_backbone(cfg):
    """Build the tiny backbone with a module that only supports float32."""

    class Float32Only(nn.Module):
        def forward(self, x):
            if x.dtype != torch.float32:
                raise RuntimeError("expected float32")
            return x

    return nn.Sequential(*list(tiny.build_tiny_backbone(cfg))[:5], Float32Only(), *tiny.build_tiny_backbone(cfg)[5:])


def test_amp_doctor_reports_a_module_that_does_not_support_bfloat16(demo, tmp_path, capfd):
    opts = ("MODEL.BACKBONE.NAME", "build_float32_only_backbone", "SOLVER.AMP", "bf16")
    assert amp_doctor.cli(["--dtypes", "bf16", *tiny.tiny_options(tmp_path, *opts)]) == 1
    out = capfd.readouterr().out
    assert "does not support this precision" in out and "backbone.5 (Float32Only)" in out


def test_precision_check_with_first_problem_only_stops_after_first_finding(monkeypatch):
    """Later passes, which may fail, are not run."""

    def fail(*args, **kwargs):
        raise AssertionError("a later pass")

    found = object()
    monkeypatch.setattr(precision_check, "check_layers", lambda passes, policy: ([found], 1))
    monkeypatch.setattr(precision_check, "_check_training", fail)
    model, batch = Net(3).train(), make_batch()
    assert check(model, batch, BFLOAT16, first_problem_only=True).layers == [found]
    with pytest.raises(AssertionError, match="a later pass"):
        check(model, batch, BFLOAT16)
