"""AMP tests that need a CUDA device: synchronizations, random states, memory, training and the doctor."""

import amp_doctor
import pytest
import tiny
import torch
import train_net
from benchmark.device_waits import count_device_waits
from loops import make_batch, make_net, sgd

from fastamp.amp import LossScaler, OptimizationStep, PrecisionPolicy, resolve_device
from fastamp.amp.checks import FIRST_STEPS
from fastamp.amp.policy import auto_dtype
from fastamp.diagnostics.isolated_passes import IsolatedPasses
from fastamp.diagnostics.nan_locator import locate_in_training
from fastamp.diagnostics.preflight import preflight
from fastamp.diagnostics.profiling import measure_cost, measure_layers

pytestmark = pytest.mark.cuda
LOW = [torch.bfloat16, torch.float16]


def on_device():
    model = make_net().cuda()
    return model, {
        key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in make_batch().items()
    }


def policy(dtype):
    return PrecisionPolicy("cuda", dtype)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_applied_optimizer_step_synchronizes_once_on_cuda(dtype):
    model, batch = on_device()
    step = OptimizationStep(model, [sgd(model)], scaler=LossScaler(init_scale=64.0) if dtype == torch.float16 else None)
    for number in range(FIRST_STEPS + 3):
        with count_device_waits() as waits:
            step.zero_grad()
            with policy(dtype).autocast():
                losses = model(batch)
            step.scale(losses).backward()
            assert step.finish().ok
        assert waits.count == 1, (number, waits.messages)


@pytest.mark.parametrize("dtype", [*LOW, torch.float32])
def test_preflight_restores_the_model_and_random_states_on_cuda(dtype):
    model, batch = on_device()
    states = torch.get_rng_state(), torch.cuda.get_rng_state()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert preflight(model, batch, policy=policy(dtype), scaler=LossScaler()).problem == ""
    assert torch.equal(states[0], torch.get_rng_state()) and torch.equal(states[1], torch.cuda.get_rng_state())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_nan_locator_finds_float16_overflow_on_cuda():
    model, batch = on_device()
    with IsolatedPasses(model, batch) as passes:
        assert locate_in_training(passes, policy(torch.float16), scale=1.0) is None
        assert all(layer.limit_share < 1 for layer in measure_layers(passes, policy(torch.float16)))
        assert measure_cost(passes, policy(torch.bfloat16)).memory > 0
    with torch.no_grad():
        model.head.weight.mul_(1e7)
    with IsolatedPasses(model, batch) as passes:
        found = locate_in_training(passes, policy(torch.float16), scale=1.0)
    assert found.kind == "forward overflow" and found.module == "head"


def test_auto_dtype_is_bfloat16_on_cuda_devices_with_native_support():
    dtype, reason = auto_dtype(resolve_device("cuda"))
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    assert dtype == (torch.bfloat16 if native else torch.float16) and "bfloat16" in reason


@pytest.mark.parametrize("precision", ["off", "bf16", "fp16"])
def test_train_and_resume_exit_with_0_on_cuda(demo, tmp_path, precision):
    if precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this device has no native bfloat16")
    options = tiny.tiny_options(tmp_path, "MODEL.DEVICE", "cuda", "SOLVER.AMP", precision, "SOLVER.MAX_EPOCH", "2")
    assert train_net.cli(options) == 0
    assert train_net.cli(["--resume", *options, "SOLVER.MAX_EPOCH", "3"]) == 0


def test_doctor_exits_with_0_on_cuda(demo, tmp_path):
    assert amp_doctor.cli(["--env", "MODEL.DEVICE", "cuda"]) == 0
    options = tiny.tiny_options(tmp_path, "MODEL.DEVICE", "cuda", "SOLVER.AMP", "True", "SOLVER.MAX_EPOCH", "1")
    assert amp_doctor.cli(options) == 0
