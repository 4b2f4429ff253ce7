"""``SOLVER.TF32`` determines the precision of float32 in both APIs of PyTorch, regardless of earlier settings."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fastamp.amp import tf32

NEW_API = hasattr(torch.backends.cudnn, "conv")
EARLIER_SETTINGS = {
    "nothing": "pass",
    "old API, on": "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True",
    "old API, off": "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False",
    "old API, bfloat16 on a CPU": "torch.set_float32_matmul_precision('medium')",
}
if NEW_API:
    EARLIER_SETTINGS |= {
        "new API, all on": "torch.backends.fp32_precision = 'tf32'",
        "new API, all off": "torch.backends.fp32_precision = 'ieee'",
        "new API, cudnn on": "torch.backends.cudnn.fp32_precision = 'tf32'",
        "new API, convolution off": "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
        "new API, operators on": "torch.backends.cuda.matmul.fp32_precision = 'tf32'; "
        "torch.backends.cudnn.conv.fp32_precision = 'tf32'; torch.backends.mkldnn.conv.fp32_precision = 'bf16'",
        "old, then new API": "torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.fp32_precision = 'ieee'; "
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
        "new, then old API": "torch.backends.fp32_precision = 'tf32'; torch.backends.cudnn.allow_tf32 = False; "
        "torch.backends.cuda.matmul.allow_tf32 = False",
    }

# Each case is forked from a process in which nothing was set.
SCRIPT = """
import json, os, sys, warnings
import torch
from fastamp.amp import PrecisionPolicy
from fastamp.amp.tf32 import without_tf32
from fastamp.config import get_cfg

def settings():
    matmul, cudnn, mkldnn = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
    found = {"old": [matmul.allow_tf32, cudnn.allow_tf32, torch.get_float32_matmul_precision() != "highest"]}
    if hasattr(cudnn, "conv"):
        found["cuda"] = [setting.fp32_precision for setting in (matmul, cudnn.conv, cudnn.rnn)]
        found["cpu"] = [setting.fp32_precision for setting in (mkldnn.matmul, mkldnn.conv, mkldnn.rnn)]
    return found

def examine(before, allowed):
    exec(before)
    cfg = get_cfg()
    cfg.SOLVER.TF32 = allowed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrecisionPolicy.from_config(cfg, torch.device("cpu"))
    found = [settings()]
    with torch.backends.cudnn.flags(enabled=True):  # reads and restores the old flags
        pass
    found.append(settings())
    with without_tf32():
        inside = getattr(torch.backends.cuda.matmul, "fp32_precision" if "cuda" in found[0] else "allow_tf32")
    found.append(settings())
    return {"settings": found, "inside": inside}

for name, before in json.loads(sys.argv[1]).items():
    for allowed in (False, True):
        if os.fork() == 0:
            print(json.dumps([name, allowed, examine(before, allowed)]), flush=True)
            os._exit(0)
        assert os.wait()[1] == 0, (name, allowed)
"""


def run(environment):
    command = [sys.executable, "-c", SCRIPT, json.dumps(EARLIER_SETTINGS)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == 2 * len(EARLIER_SETTINGS)
    return results


@pytest.mark.integration
@pytest.mark.parametrize("override", ["0", "1"])
def test_solver_tf32_overrides_earlier_tf32_settings(override, monkeypatch):
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", override)
    for name, allowed, found in run(dict(os.environ)):
        expected = {"old": [allowed] * 3}
        if NEW_API:
            expected |= {"cuda": ["tf32" if allowed else "ieee"] * 3, "cpu": ["ieee"] * 3}
        assert found["settings"] == [expected] * 3, (name, allowed)
        assert found["inside"] == ("ieee" if NEW_API else False), (name, allowed)


@pytest.mark.integration
@pytest.mark.skipif(not NEW_API, reason="needs PyTorch 2.9")
def test_plain_pytorch_allow_tf32_false_leaves_tf32_on_in_convolutions():
    """Negative control: ``allow_tf32 = False`` leaves convolutions in TF32, and reading the flag raises an error."""
    script = (
        "import torch; torch.backends.fp32_precision = 'tf32'; torch.backends.cudnn.allow_tf32 = False; "
        "print(torch.backends.cudnn.conv.fp32_precision); torch.backends.cudnn.allow_tf32"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["tf32"] and "RuntimeError" in done.stderr


@pytest.mark.parametrize("allowed", [False, True])
def test_set_tf32_sets_allow_tf32_in_pytorch_versions_without_fp32_precision(allowed, monkeypatch):
    matmul, cudnn = SimpleNamespace(allow_tf32=True), SimpleNamespace(allow_tf32=True)
    backends = SimpleNamespace(cuda=SimpleNamespace(matmul=matmul), cudnn=cudnn, mkldnn=SimpleNamespace())
    precision = []
    fake = SimpleNamespace(backends=backends, set_float32_matmul_precision=precision.append)
    monkeypatch.setattr(tf32, "torch", fake)
    tf32.set_tf32(allowed)
    assert (vars(matmul), vars(cudnn), precision) == ({"allow_tf32": allowed}, {"allow_tf32": allowed}, ["highest"])
    with pytest.raises(KeyError), tf32.without_tf32():
        assert matmul.allow_tf32 is False
        raise KeyError
    assert matmul.allow_tf32 is allowed


CUDA_SCRIPT = """
import sys
import torch
from fastamp.amp.tf32 import set_tf32

exec(sys.argv[1])
set_tf32(False)
torch.manual_seed(0)
images, filters = torch.randn(8, 64, 16, 16), torch.randn(64, 64, 3, 3)
rows = torch.randn(256, 512)
for function, args in ((torch.conv2d, (images, filters)), (torch.mm, (rows, rows.t()))):
    exact = function(*(value.double() for value in args))
    error = (function(*(value.cuda() for value in args)).cpu() - exact).abs().max() / exact.abs().max()
    assert error < 1e-5, (function, error)  # about 3e-4 in TF32
"""


@pytest.mark.cuda
@pytest.mark.parametrize("before", list(EARLIER_SETTINGS))
def test_convolutions_and_products_on_cuda_are_float32_without_tf32(before):
    subprocess.run([sys.executable, "-c", CUDA_SCRIPT, EARLIER_SETTINGS[before]], check=True)
