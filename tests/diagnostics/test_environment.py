"""Tests of the environment report: queries, reported problems, table and smoke training."""

import ctypes
import io
import json
import logging
import random
import warnings

import numpy as np
import pytest
import tiny
import torch
import train_net

from fastamp.amp import PrecisionPolicy
from fastamp.data.image_decoder import image_decoder
from fastamp.diagnostics import environment, environment_queries, smoke_train
from fastamp.diagnostics.environment import inspect_environment
from fastamp.diagnostics.environment_queries import runs_on
from fastamp.diagnostics.smoke_train import SmokeTrainResult
from fastamp.engine import default_setup
from fastamp.utils import comm
from fastamp.utils.env import random_state

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def policy(dtype, device_type="cpu"):
    return PrecisionPolicy(device_type, dtype, "of a test")


def raising(error):
    """Create a function that raises ``error``."""

    def function(*args, **kwargs):
        raise error

    return function


@pytest.fixture
def no_gpu(monkeypatch):
    """Simulate a machine without a GPU or driver, with a PyTorch build for CUDA 13.2."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", raising(RuntimeError("CUDA is not available\nmore")))
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(environment_queries, "driver_cuda", lambda: None)
    monkeypatch.setattr(environment_queries, "driver_version", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def row(report, check):
    """Return the text in column "found" of one row of the table."""
    cells = [[cell.strip() for cell in line.split("|")[1:4]] for line in report.table().splitlines()]
    start = [cell[0] for cell in cells].index(check)
    end = next((n for n in range(start + 1, len(cells)) if cells[n][0]), len(cells))
    return " ".join(cell[1] for cell in cells[start:end])


@pytest.fixture
def gpu(no_gpu):
    """Simulate a machine with a GPU of compute capability 8.6 and a PyTorch build that supports it."""
    no_gpu.setattr(torch.cuda, "is_available", lambda: True)
    no_gpu.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    no_gpu.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    no_gpu.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    no_gpu.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**30, 4 * 2**30))
    no_gpu.setattr(environment_queries, "native_bfloat16", lambda device: (True, "Some GPU has native bfloat16"))
    no_gpu.setattr(environment, "auto_dtype", lambda device: (torch.bfloat16, "Some GPU has native bfloat16"))
    no_gpu.setattr(environment, "smoke_train", lambda policy, device: SmokeTrainResult(10, 0, 1.5, 0.5))
    no_gpu.setattr(environment_queries, "driver_cuda", lambda: (13, 0))
    no_gpu.setattr(environment_queries, "driver_version", lambda: "580.65.06")
    no_gpu.setattr(environment_queries, "loaded_driver_version", lambda: "580.65.06")
    return no_gpu


def test_environment_report_on_cpu_lists_no_problems():
    report = inspect_environment(CPU, asked="cpu", train=True)
    assert report.problems == [] and report.unknown == {}
    assert {"fastamp", "Python", "torch", "torchvision", "numpy"} == set(report.versions)
    assert {"float32", "bfloat16", "float16"} == set(report.support) == set(report.loops)
    for loop in report.loops.values():
        assert loop.taken + loop.skipped == smoke_train.STEPS and loop.taken > 0 and not loop.error
        assert loop.last_loss < 0.5 * loop.first_loss
    assert 0 < report.free_memory <= report.total_memory
    assert f"torch {torch.__version__}" in row(report, "versions") and row(report, "device").startswith("cpu")
    assert report.platform in row(report, "platform") and report.auto[1] in row(report, "SOLVER.AMP.DTYPE auto")
    assert json.loads(json.dumps(report.as_dict()))["loops"]["float16"]["error"] == ""
    table = report.table()
    assert [cell.strip() for cell in table.splitlines()[0].split("|")] == ["", "check", "found", "verdict", ""]
    assert "ten steps in float16" in table and "problem" not in table


def test_environment_report_runs_smoke_training_only_on_request(monkeypatch):
    monkeypatch.setattr(environment, "smoke_train", raising(AssertionError("trained")))
    report = inspect_environment(CPU, asked="cpu")
    assert report.loops == {} and report.problems == [] and "ten steps" not in report.table()
    assert report.image_decoder == str(image_decoder())
    with pytest.raises(AssertionError, match="trained"):
        inspect_environment(CPU, train=True)


@pytest.mark.cuda
def test_environment_report_on_real_gpu_lists_no_problems():
    before = torch.cuda.get_rng_state()
    report = inspect_environment(CUDA, train=True)
    assert report.problems == [] and report.driver_fits and report.capability_fits
    assert {"float32", "bfloat16", "float16"} <= set(report.loops)
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_environment_report_changes_no_random_states_and_logs_nothing(caplog):
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    np.random.standard_normal()  # the generator caches the second number of each pair
    before = random_state()
    flags = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.DEBUG), torch.no_grad():
        warnings.simplefilter("always")
        report = inspect_environment(CPU, asked="cpu", train=True)
        assert report.problems == [] and not torch.is_grad_enabled()
        # PyTorch warns about a missing device type.
        smoke_train.smoke_train(policy(torch.bfloat16, "cuda"), CPU)
    assert warned == [] and caplog.text == ""
    after = random_state()
    assert set(before) == set(after)
    for name, state in before.items():
        same = all(np.array_equal(a, b) for a, b in zip(state, after[name], strict=True))
        assert same, name
    assert flags == (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


def test_smoke_training_result_is_independent_of_seed_and_default_dtype():
    expected = smoke_train.smoke_train(policy(torch.bfloat16), CPU)
    try:
        torch.manual_seed(5)
        torch.set_default_dtype(torch.float64)
        assert smoke_train.smoke_train(policy(torch.bfloat16), CPU) == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_smoke_training_in_a_process_group_uses_no_collectives(monkeypatch):
    monkeypatch.setattr(comm.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(comm.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(comm.dist, "all_reduce", raising(AssertionError("a collective")))
    with pytest.raises(AssertionError, match="a collective"):
        comm.all_reduce_min(torch.ones(1))
    assert smoke_train.smoke_train(policy(torch.float32), CPU).error == ""


def test_smoke_training_reports_autocast_without_effect():
    loop = smoke_train.smoke_train(policy(torch.bfloat16, "cuda"), CPU)
    assert "bfloat16 under autocast for cuda" in loop.error


def test_smoke_training_allows_some_skipped_steps_with_loss_scaling(monkeypatch, caplog):
    monkeypatch.setattr(smoke_train, "LossScaler", lambda: smoke_train.step.LossScaler(init_scale=2.0**20))
    loop = smoke_train.smoke_train(policy(torch.float16), CPU)
    assert loop.skipped > 0 and loop.taken > 0 and loop.error == "" and caplog.text == ""


def test_smoke_training_reports_an_error_if_all_steps_are_skipped(monkeypatch, caplog):
    monkeypatch.setattr(smoke_train.F, "cross_entropy", lambda logits, targets: logits.sum() * float("inf"))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loop = smoke_train.smoke_train(policy(dtype), CPU)
        assert loop.taken == 0 and "10 of 10 steps were skipped" in loop.error
    assert caplog.text == ""


def test_smoke_training_reports_an_error_if_loss_does_not_decrease(monkeypatch, caplog):
    sgd = torch.optim.SGD
    monkeypatch.setattr(torch.optim, "SGD", lambda parameters, lr: sgd(parameters, lr=0.0))
    assert "did not decrease in 10 steps" in smoke_train.smoke_train(policy(torch.float32), CPU).error
    assert caplog.text == ""


@pytest.mark.parametrize(
    "broken, parts",
    [
        (("float16",), ["in float16 on cpu", "SOLVER.AMP.DTYPE bfloat16 or SOLVER.AMP False"]),
        (("bfloat16", "float16"), ["in bfloat16 on cpu", "SOLVER.AMP False"]),
        (("float32", "bfloat16", "float16"), ["on cpu in float32", "reinstall PyTorch"]),
    ],
)
def test_environment_report_lists_failed_smoke_training_as_problem(no_gpu, broken, parts):
    convolve = torch.nn.functional.conv2d

    def conv2d(images, *args, **kwargs):
        out = convolve(images, *args, **kwargs)
        if str(out.dtype).removeprefix("torch.") in broken:
            raise RuntimeError("not implemented\nfor this device")
        return out

    no_gpu.setattr(smoke_train.F, "conv2d", conv2d)
    report = inspect_environment(CPU, train=True)
    assert len(report.problems) == (1 if "float32" in broken else len(broken))
    for part in (*parts, "found: RuntimeError: not implemented\n"):
        assert part in report.problems[0]
    assert report.table().count("| problem") == len(broken)
    for name in report.loops:
        assert row(report, f"ten steps in {name}").startswith("RuntimeError") is (name in broken)


def test_environment_report_lists_no_problem_if_no_gpu_exists(no_gpu):
    report = inspect_environment(CPU)
    assert report.problems == []
    assert row(report, "PyTorch built for") == "CUDA 13.2" and row(report, "driver") == "no NVIDIA driver"


def test_environment_report_on_simulated_gpu_lists_no_problems(gpu):
    report = inspect_environment(CUDA)
    assert report.problems == [] and report.driver_fits is True and report.capability_fits is True
    assert row(report, "device") == "cuda (Some GPU, compute capability 8.6)"
    assert row(report, "memory") == "3.0 of 4.0 GiB free" and row(report, "PyTorch built for") == "CUDA 13.2"
    assert row(report, "driver") == "NVIDIA driver 580.65.06 for CUDA 13.0"
    assert {name: support.state for name, support in report.support.items()} == dict.fromkeys(
        ("float32", "tf32", "bfloat16", "float16"), "native"
    )


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_cpu_only_pytorch_is_reported_as_a_problem_if_a_driver_exists(no_gpu, device):
    no_gpu.setattr(torch.version, "cuda", None)
    no_gpu.setattr(environment_queries, "driver_cuda", lambda: (12, 4))
    report = inspect_environment(device)
    (problem,) = report.problems
    for part in ("NVIDIA driver for CUDA 12.4", "RuntimeError: CUDA is not available\n"):
        assert part in problem
    assert "built for CUDA 12 " in problem
    assert row(report, "PyTorch built for") == "CPU only"
    assert row(report, "driver") == "NVIDIA driver for CUDA 12.4"
    assert "| problem" in report.table()
    # A run on the CPU needs no GPU.
    assert inspect_environment(CPU, asked="cpu").problems == []


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_driver_too_old_for_pytorch_is_reported_as_a_problem(no_gpu, device):
    no_gpu.setattr(environment_queries, "driver_cuda", lambda: (12, 4))
    no_gpu.setattr(environment_queries, "driver_version", lambda: "550.54.15")
    report = inspect_environment(device)
    (problem,) = report.problems
    assert "NVIDIA driver 550.54.15 for CUDA 12.4" in problem and "built for CUDA 13.2" in problem
    assert "driver for CUDA 13 or a PyTorch built for CUDA 12" in problem
    assert report.driver_fits is False


def test_missing_driver_is_reported_as_a_problem_if_cuda_is_requested(no_gpu):
    report = inspect_environment(CUDA, asked="cuda", train=True)
    (problem,) = report.problems
    assert "MODEL.DEVICE is cuda" in problem and "no NVIDIA driver" in problem and "MODEL.DEVICE to auto" in problem
    assert report.loops == {} and report.support == {} and report.auto is None
    assert "SOLVER.AMP.DTYPE auto" not in report.table()
    # Also in a report on the CPU, which the doctor prints if the device is missing.
    report = inspect_environment(CPU, asked="cuda:1", train=True)
    assert "MODEL.DEVICE is cuda:1" in report.problems[0] and report.loops["float32"].error == ""


def test_environment_table_wraps_long_cells(no_gpu):
    no_gpu.setattr(torch.cuda, "init", raising(RuntimeError("many words " * 20)))
    table = inspect_environment(CUDA).table()
    assert table.count("many words") == 20 and table.count("| problem") == 1
    assert {len(line) for line in table.splitlines()} == {len(table.splitlines()[0])} and "\n|  " in table
    assert len(table.splitlines()[0]) < 130


def test_gpu_that_pytorch_cannot_use_is_reported_as_a_problem(no_gpu):
    no_gpu.setattr(environment_queries, "driver_cuda", lambda: (13, 0))
    # A driver library without a GPU, e.g. on a login node, is not a problem.
    assert inspect_environment(CPU).problems == []
    no_gpu.setattr(environment_queries, "driver_version", lambda: "580.65.06")
    assert "CUDA_VISIBLE_DEVICES" in inspect_environment(CPU).problems[0]
    no_gpu.setenv("CUDA_VISIBLE_DEVICES", "")
    assert inspect_environment(CPU).problems == []
    assert "CUDA_VISIBLE_DEVICES is ''" in inspect_environment(CUDA).problems[0]


def test_gpu_with_unsupported_compute_capability_is_reported_as_a_problem(gpu):
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    gpu.setattr(
        environment, "smoke_train", lambda policy, device: SmokeTrainResult(error="no kernel image is available")
    )
    report = inspect_environment(CUDA, train=True)
    (problem,) = report.problems
    assert "Some GPU" in problem and "compute capability 6.1; the build supports sm_80 sm_90" in problem
    assert "a PyTorch built for sm_61" in problem
    assert row(report, "ten steps in bfloat16") == "no kernel image is available"
    assert report.support["tf32"].state == "no" and report.support["float16"].state == "slow"


@pytest.mark.parametrize(
    "arch, yes, no",
    [
        ("sm_80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        ("sm_86", [(8, 6), (8, 9)], [(8, 0)]),
        ("compute_80", [(8, 0), (9, 0), (12, 0)], [(7, 5)]),
        ("sm_90a", [(9, 0)], [(10, 0)]),
        ("sm_100a", [(10, 0)], [(10, 3)]),
        ("compute_90a", [(9, 0)], [(10, 0)]),
        ("compute_100f", [(10, 0), (10, 3)], [(12, 0)]),
        ("sm_120", [(12, 0), (12, 1)], [(10, 0), (13, 0)]),
        ("gfx90a", [], [(9, 0)]),
    ],
)
def test_build_architectures_run_only_on_compatible_compute_capabilities(arch, yes, no):
    assert all(runs_on(arch, capability) for capability in yes)
    assert not any(runs_on(arch, capability) for capability in no)


@pytest.mark.parametrize(
    "flags, state", [({"avx512_fp16"}, "native"), ({"asimdhp", "fphp"}, "native"), ({"avx512f", "f16c"}, "slow")]
)
def test_float16_support_on_cpu_depends_on_cpu_flags(monkeypatch, flags, state):
    monkeypatch.setattr(environment_queries, "cpu_flags", lambda: flags)
    assert environment_queries.supported(CPU)["float16"].state == state


class Library:
    """Fake of the NVIDIA driver library."""

    def __init__(self, status, version):
        self.status, self.version = status, version

    def cuDriverGetVersion(self, pointer):
        pointer._obj.value = self.version
        return self.status


def test_cuda_version_of_driver_is_read_from_driver_library(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(0, 12040))
    assert environment_queries.driver_cuda() == (12, 4)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(34, 0))
    with pytest.raises(RuntimeError, match="error 34"):
        environment_queries.driver_cuda()
    monkeypatch.setattr(ctypes, "CDLL", raising(OSError("no such library")))
    assert environment_queries.driver_cuda() is None


@pytest.mark.integration
def test_driver_version_is_read_from_nvidia_smi(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment_queries.driver_version() is None
    program.write_text("#!/bin/sh\necho 535.104.05\necho 535.104.05\n")
    program.chmod(0o755)
    assert environment_queries.driver_version() == "535.104.05"
    program.write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    with pytest.raises(RuntimeError, match="No devices were found"):
        environment_queries.driver_version()


@pytest.mark.parametrize(
    "text, version",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build\n",
            "570.86.10",
        ),
        ("another format\n", "from nvidia-smi"),
        (None, "from nvidia-smi"),
    ],
)
def test_loaded_driver_version_is_read_from_nvidia_smi_if_proc_is_unreadable(monkeypatch, text, version):
    opened = (lambda *_, **__: io.StringIO(text)) if text else raising(FileNotFoundError("no such file"))
    monkeypatch.setattr(environment_queries, "driver_version", lambda: "from nvidia-smi")
    monkeypatch.setattr(environment_queries, "open", opened, raising=False)
    assert environment_queries.loaded_driver_version() == version


def test_environment_report_lists_failed_queries(no_gpu):
    fail = raising(OSError("cannot be read\nat all"))
    no_gpu.setattr(environment_queries, "driver_cuda", lambda: (13, 0))
    for name in ("driver_version", "memory", "supported", "versions", "device_name"):
        no_gpu.setattr(environment_queries, name, fail)
    no_gpu.setattr(torch.cuda, "get_arch_list", fail)
    no_gpu.setattr(environment_queries, "system", fail)
    report = inspect_environment(CPU, train=True)
    assert report.unknown["memory"] == "OSError: cannot be read" and row(report, "memory") == "memory unknown"
    assert len(report.unknown) == 7 and row(report, "system") == "OSError: cannot be read"
    assert report.table().count("| unknown") == 7
    assert report.problems == [] and report.loops["float32"].error == ""


@pytest.mark.integration
def test_training_log_starts_with_environment_report(demo, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(environment, "smoke_train", raising(AssertionError("trained")))
    assert train_net.cli(tiny.tiny_options(tmp_path, "SOLVER.MAX_EPOCH", "1")) == 0
    log = (tmp_path / "log.txt").read_text()
    table = inspect_environment(CPU, asked="cpu").table().splitlines()
    written = log.splitlines()[1 : 1 + len(table)]

    assert [line for line in written if "| memory" not in line] == [line for line in table if "| memory" not in line]
    assert "fix:" not in log.partition("config:")[0]


def test_training_log_warns_about_environment_problems(no_gpu, demo, tmp_path):
    no_gpu.setattr(environment_queries, "driver_cuda", lambda: (12, 4))
    default_setup(tiny.tiny_config(tmp_path, "MODEL.DEVICE", "auto"))
    log = (tmp_path / "log.txt").read_text()
    assert "WARNING: PyTorch cannot use a GPU" in log and "MODEL.DEVICE is auto" in log
