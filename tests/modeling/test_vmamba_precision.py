"""VMamba in low precision: scan, sum and norm are float32 in every mode; if they are not, the guards name the scan."""

import copy
from pathlib import Path

import every_backbone
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastamp
from fastamp.amp import LossScaler, OptimizationStep, PrecisionPolicy
from fastamp.amp.fp16_export import to_float16
from fastamp.diagnostics.nan_locator import describe_evaluation, locate_in_training, try_locate
from fastamp.diagnostics.preflight import preflight
from fastamp.feature_pass import NotFiniteError, feature_pass
from fastamp.inference.export import export
from fastamp.modeling import build_model
from fastamp.modeling.backbones import vmamba
from fastamp.modeling.backbones.vmamba import CrossScan, ScanNorm, SelectiveScan2d

REFERENCE = np.load(Path(__file__).parents[1] / "reference/vmamba/overflow1.npz")
SIZE = (32, 8)
FLOAT16 = PrecisionPolicy("cpu", torch.float16)
GUARDED = CrossScan.forward, ScanNorm.forward


def unguarded(function):
    """Return the function inside a float32 region."""
    return function.__wrapped__


def merge_and_normalize(dtype, scan, norm):
    """Apply the modules to the inputs of ``overflow1``, which are exact in float16; (1, 256, 12)."""
    values = {name: torch.from_numpy(REFERENCE[name]) for name in ("u", "delta", "A", "B", "C", "D", "delta_bias")}
    u, delta, b, c = (values[name].to(dtype) for name in ("u", "delta", "B", "C"))
    x, delta = u.unflatten(1, (4, -1)), delta.unflatten(1, (4, -1))
    bias = values["delta_bias"].unflatten(0, (4, -1))
    y = scan(x, delta, b, c, log_a=(-values["A"]).log(), d=values["D"], delta_bias=bias, size=SIZE)
    return norm(y).flatten(2).transpose(1, 2)


def remove_guards(monkeypatch, always=True):
    """Compute the scan and its norm in the dtype of the inputs, as mamba_ssm's kernel returns it.

    Args:
        monkeypatch: pytest's fixture.
        always: in training as well; False: only if gradients are disabled, the error of the report.
    """
    scan = vmamba.selective_scan
    monkeypatch.setattr(vmamba, "selective_scan", lambda u, *args, **options: scan(u, *args, **options).to(u.dtype))
    for module_class, guarded in zip((CrossScan, ScanNorm), GUARDED, strict=True):

        def forward(self, *args, guarded=guarded, **options):
            return (unguarded(guarded) if always or not torch.is_grad_enabled() else guarded)(self, *args, **options)

        monkeypatch.setattr(module_class, "forward", forward)


def test_scan_sum_and_norm_are_float32_in_every_mode(subtests):
    expected = torch.from_numpy(REFERENCE["merged_norm_float32"])
    modes = {"train": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    for name, mode in modes.items():
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for half_weights in (False, True):
                scan, norm = CrossScan(), ScanNorm(12)
                norm = norm.half() if half_weights else norm
                scan.train(name == "train"), norm.train(name == "train")
                inputs = torch.float16 if dtype == torch.float16 else torch.float32
                policy = PrecisionPolicy("cpu", dtype)
                with subtests.test(name, dtype=dtype, half_weights=half_weights), mode(), policy.autocast():
                    found = merge_and_normalize(inputs, scan, norm)
                    assert found.dtype == torch.float32
                    torch.testing.assert_close(found.detach(), expected, rtol=1e-4, atol=1e-4)


def test_without_the_guard_the_scan_of_the_reference_gives_nan(monkeypatch):
    remove_guards(monkeypatch)
    with torch.no_grad(), FLOAT16.autocast():
        found = merge_and_normalize(torch.float16, CrossScan(), ScanNorm(12))
    # A quarter of the scan is infinite, and each row of the norm with such a value is NaN.
    assert torch.equal(found.isnan(), torch.from_numpy(REFERENCE["merged_norm_nan_half_output"]))
    assert found.isnan().all()


def overflowing_model():
    """A small VMamba with weights that are exact in float16, and scans whose outputs exceed 65504."""
    torch.manual_seed(0)
    model = build_model(every_backbone.config("vmamba nano", "MODEL.BACKBONE.DROP_PATH_RATIO", "0"))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, SelectiveScan2d):
                module.in_proj.weight.mul_(60)
                module.Ds.fill_(60_000)
    return model


@pytest.fixture
def model():
    return overflowing_model()


@pytest.fixture
def batch():
    images = torch.randint(256, (4, 3, 64, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return {"images": images, "targets": torch.tensor([0, 0, 1, 1])}


def features(model, batch, policy):
    found = []
    feature_pass(model, [batch], lambda _, outputs: found.append(outputs), policy, locate=describe_evaluation)
    return found[0]


@pytest.mark.integration
def test_model_with_large_scans_is_finite_in_float16(model, batch, tmp_path):
    largest = []
    handle = model.backbone.layers[0].blocks[0].op.scan.register_forward_hook(lambda *args: largest.append(args[2]))
    expected = features(model, batch, PrecisionPolicy("cpu", torch.float32))
    handle.remove()
    assert largest[0].abs().max() > 65504
    assert F.cosine_similarity(features(model, batch, FLOAT16), expected).min() > 0.999
    for convert in (to_float16, torch.nn.Module.half):
        half = copy.deepcopy(model.eval())
        convert(half.backbone)
        with torch.no_grad():
            dtype = torch.float32 if convert is to_float16 else torch.float16
            maps = half.backbone(model.preprocess(batch["images"]).to(dtype)).float()
            found = half.heads(maps)
        assert F.cosine_similarity(found, expected).min() > 0.999
    report = preflight(model.train(), batch, policy=FLOAT16, scaler=LossScaler())
    assert not report.problem
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), LossScaler(init_scale=report.loss_scale)
    step = OptimizationStep(model, [optimizer], scaler=scaler)
    with FLOAT16.autocast():
        losses = model(batch)
    step.scale(losses).backward()
    assert step.finish().ok


@pytest.mark.integration
def test_scan_that_is_float32_only_in_training_is_named_by_preflight_and_evaluation(model, batch, monkeypatch):
    remove_guards(monkeypatch, always=False)
    report = preflight(model.train(), batch, policy=FLOAT16, scaler=LossScaler())
    assert "in evaluation" in report.problem and "op.scan" in report.problem
    assert (report.location.kind, report.location.module) == ("forward overflow", "backbone.layers.0.blocks.0.op.scan")
    with pytest.raises(NotFiniteError, match=r"backbone\.layers\.0\.blocks\.0\.op\.scan \(CrossScan\)"):
        features(model, batch, FLOAT16)
    with FLOAT16.autocast():  # training shows nothing
        assert all(loss.isfinite() for loss in model(batch).values())


@pytest.mark.integration
def test_scan_in_float16_is_named_at_the_first_skipped_step(model, batch, monkeypatch):
    remove_guards(monkeypatch)
    model.train()
    step = OptimizationStep(model, [torch.optim.SGD(model.parameters(), lr=1e-3)], scaler=LossScaler(init_scale=1.0))
    with FLOAT16.autocast():
        losses = model(batch)
    step.scale(losses).backward()
    assert not step.finish().ok
    location, _ = try_locate(model, batch, lambda passes: locate_in_training(passes, FLOAT16))
    assert (location.kind, location.module) == ("forward overflow", "backbone.layers.0.blocks.0.op.scan")


@pytest.mark.integration
@pytest.mark.export
@pytest.mark.parametrize("suffix", [".onnx", ".pt2", ".ts"])
def test_exported_float16_model_with_large_scans_has_finite_features(suffix, model, batch, tmp_path):
    cfg = every_backbone.config("vmamba nano", "DATASETS.TESTS", "()")
    torch.save({"model": model.state_dict(), "config": cfg.dump()}, tmp_path / "model.pth")
    predictor = fastamp.Predictor(tmp_path / "model.pth", device="cpu")
    report = export(predictor, tmp_path / f"model{suffix}", precision="fp16")
    assert report.comparisons
    assert min(comparison.min_cosine for comparison in report.comparisons) > 0.999
