"""Kernel of mamba_ssm in VMamba: stand-ins with the interface of the package, correct, wrong and missing."""

import sys
from types import ModuleType

import pytest
import torch

from fastamp.config import read_config
from fastamp.layers import selective_scan
from fastamp.modeling.backbones import build_backbone
from fastamp.utils.errors import ConfigError

CALLS = []


def correct(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    """Return the dtype of the input, as the kernel does."""
    CALLS.append(u.dtype)
    return selective_scan(u, delta, A, B, C, D, delta_bias, delta_softplus=delta_softplus).to(u.dtype)


def without_skip(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    return correct(u, delta, A, B, C, 0.9 * D, z, delta_bias, delta_softplus)


def wrong_gradient(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    return correct(u, delta, A, B.detach(), C, D, z, delta_bias, delta_softplus) + 0 * B.sum()


def without_skip_in_short_scans(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    return (correct if u.shape[2] > 8 else without_skip)(u, delta, A, B, C, D, z, delta_bias, delta_softplus)


def failing(*args, **kwargs):
    raise RuntimeError("Expected u.is_cuda() to be true")


@pytest.fixture
def package(monkeypatch):
    """Install a stand-in of mamba_ssm with the given function."""

    def install(function):
        names = ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.selective_scan_interface")
        modules = [ModuleType(name) for name in names]
        modules[2].selective_scan_fn = function
        for name, module in zip(names, modules, strict=True):
            monkeypatch.setitem(sys.modules, name, module)

    CALLS.clear()
    return install


def backbone(scan, **options):
    torch.manual_seed(0)
    values = {"NAME": "build_vmamba_backbone", "DEPTH": "nano", "FEAT_DIM": 256, "SCAN": scan, **options}
    opts = [word for name, value in values.items() for word in (f"MODEL.BACKBONE.{name}", value)]
    return build_backbone(read_config("", opts)).eval()


def test_correct_kernel_is_used_in_float32_in_every_mode(package):
    package(correct)
    images = torch.rand(2, 3, 64, 32, generator=torch.Generator().manual_seed(1))
    model, reference = backbone("mamba_ssm"), backbone("torch")
    expected = reference(images)
    with torch.inference_mode():
        torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        model(images)
    assert set(CALLS) == {torch.float32}
    assert len(CALLS) == 3 + 2 * 5  # comparisons at 128, 32 and 8 positions, and two passes of five blocks
    grads = [
        torch.autograd.grad(net(images).square().sum(), list(net.parameters()), allow_unused=True)
        for net in (model, reference)
    ]
    for found, other in zip(*grads, strict=True):
        assert (found is None) == (other is None)
        if found is not None:
            torch.testing.assert_close(found, other, rtol=1e-3, atol=1e-5)


@pytest.mark.integration
def test_kernel_is_compared_in_a_checkpoint(package):
    package(correct)
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    grads = [
        torch.autograd.grad(model(images).square().sum(), list(model.parameters()))
        for model in (backbone(scan, CHECKPOINTING=True).train() for scan in ("mamba_ssm", "torch"))
    ]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (without_skip, "output"),
        (without_skip_in_short_scans, "output"),
        (wrong_gradient, "gradient of B"),
        (failing, "is_cuda"),
    ],
)
def test_kernel_that_differs_or_fails_is_refused(package, function, named):
    package(function)
    model = backbone("mamba_ssm")
    for train in (True, False):
        with torch.set_grad_enabled(train), pytest.raises(ConfigError, match=f"(?s){named}.*MODEL.BACKBONE.SCAN"):
            model(torch.rand(1, 3, 32, 32))


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    with pytest.raises(ConfigError, match="mamba_ssm"):
        backbone("mamba_ssm")


def test_traced_model_uses_the_scan_of_fastamp(package):
    package(failing)
    model = backbone("mamba_ssm")
    images = torch.rand(1, 3, 32, 32)
    with torch.no_grad():
        traced = torch.jit.trace(model, images, check_trace=False)
        torch.testing.assert_close(traced(images), backbone("torch")(images), rtol=1e-4, atol=1e-4)
