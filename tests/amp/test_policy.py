"""Precision policy: selection of the dtype and the device, and checks that autocast has an effect."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

from fastamp.amp import PrecisionPolicy, policy, resolve_device
from fastamp.config import get_cfg
from fastamp.utils.errors import ConfigError, TrainingError

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


def make(**amp):
    cfg = get_cfg()
    for key, value in amp.items():
        cfg.SOLVER.AMP[key] = value
    return PrecisionPolicy.from_config(cfg, CPU)


def test_amp_off_computes_in_float32_without_autocast():
    chosen = make(ENABLED=False, DTYPE="float16")
    assert chosen.dtype == torch.float32 and not chosen.enabled and not chosen.needs_loss_scaling
    with chosen.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.parametrize("native, dtype", [((True, "native"), torch.bfloat16), ((False, "none here"), torch.float32)])
def test_auto_dtype_on_cpu_depends_on_native_bfloat16(monkeypatch, caplog, native, dtype):
    monkeypatch.setattr(policy, "native_bfloat16", lambda device: native)
    monkeypatch.setattr("logging.Logger.propagate", True, raising=False)
    chosen = make(ENABLED=True)
    assert chosen.dtype == dtype
    assert native[1] in chosen.describe()


@pytest.mark.parametrize("native, dtype", [(True, torch.bfloat16), (False, torch.float16)])
def test_auto_dtype_on_cuda_depends_on_native_bfloat16(monkeypatch, native, dtype):
    monkeypatch.setattr(policy, "native_bfloat16", lambda device: (native, "a reason"))
    assert policy.auto_dtype(torch.device("cuda"))[0] == dtype


@pytest.mark.parametrize("name, dtype", [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_configured_dtype_is_used_on_cpu(name, dtype):
    chosen = make(ENABLED=True, DTYPE=name)
    assert chosen.dtype == dtype
    assert chosen.needs_loss_scaling == (dtype == torch.float16)
    with chosen.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert chosen.state_dict()["dtype"] == name


def test_checked_autocast_raises_if_no_operation_runs_in_low_precision():
    model = nn.Linear(4, 4)
    chosen = make(ENABLED=True, DTYPE="bfloat16")
    with chosen.checked_autocast():
        model(torch.ones(1, 4))
    with pytest.raises(TrainingError, match="SOLVER.AMP .*bfloat16"), chosen.checked_autocast():
        torch.ones(3).exp()


def test_policy_rejects_model_on_another_device_type():
    """Without the check, autocast for CUDA leaves a model on the CPU in float32, without an error."""
    model = nn.Linear(4, 4)
    wrong = PrecisionPolicy("cuda", torch.bfloat16, "wrong on purpose")
    with pytest.warns(UserWarning) if not torch.cuda.is_available() else torch.no_grad(), wrong.autocast():
        assert model(torch.ones(1, 4)).dtype == torch.float32
    with pytest.raises(TrainingError, match=r"cuda.* on cpu"):
        wrong.check_model(model)


def test_policy_rejects_model_with_float16_parameters():
    with pytest.raises(TrainingError, match=r"2 .*weight, bias"):
        make(ENABLED=True, DTYPE="float16").check_model(nn.Linear(2, 2).half())


def test_evaluation_policy_follows_eval_dtype():
    trained = make(ENABLED=True, DTYPE="bfloat16")
    assert trained.for_evaluation("same") is trained
    assert trained.for_evaluation("float32").dtype == torch.float32


def test_resolve_device_rejects_unknown_device_names():
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type in ("cpu", "cuda", "mps")
    for name in ("gpu", "cudaa", "xla"):
        with pytest.raises(ConfigError, match=f"MODEL.DEVICE: .*'{name}'"):
            resolve_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_resolve_device_raises_if_cuda_is_not_available():
    with pytest.raises(ConfigError, match=r"MODEL.DEVICE .*'cuda'"):
        resolve_device("cuda")


def calls_outside_amp(root=ROOT):
    """Yield ``"file:line"`` for each use of autocast, GradScaler or ``.half()`` outside ``fastamp/amp``."""
    for folder in ("fastamp", "tools", "projects"):
        for path in (root / folder).rglob("*.py"):
            # The benchmarks compare with PyTorch's own loop; scripts written for FastReID may have a step of their own.
            names = (
                "tools/benchmark/gpu.py",
                "tools/benchmark/step_overhead.py",
                "fastamp/fastreid/engine/train_loop.py",
            )
            if path.is_relative_to(root / "fastamp/amp") or path in [root / name for name in names]:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom):
                    names = {alias.name for alias in node.names}
                    found = (node.module or "").startswith("torch") and names & {"autocast", "GradScaler"}
                    found = found or node.module == "torch.cuda.amp"
                elif isinstance(node, ast.Import):
                    found = any(alias.name == "torch.cuda.amp" for alias in node.names)
                elif isinstance(node, ast.Attribute):
                    owner = getattr(node.value, "id", getattr(node.value, "attr", ""))
                    found = node.attr in ("GradScaler", "half") or (
                        node.attr == "autocast" and owner in ("torch", "amp")
                    )
                else:
                    found = False
                if found:
                    yield f"{path}:{node.lineno}"


def test_only_the_amp_package_uses_autocast_grad_scaler_and_half():
    assert list(calls_outside_amp()) == []


def test_search_finds_autocast_calls_outside_the_amp_package(tmp_path, subtests):
    cases = [
        "torch.autocast('cpu')",
        "torch.amp.autocast('cpu')",
        "torch.cuda.amp.autocast()",
        "torch.amp.GradScaler('cpu')",
        "model.half()",
        "import torch.cuda.amp",
        "from torch import autocast",
        "from torch.amp import GradScaler as S",
        "from torch.cuda.amp import autocast",
    ]
    for call in cases:
        with subtests.test(call=call):
            for folder in ("fastamp/amp", "fastamp/engine", "tools", "projects/Other"):
                (tmp_path / folder).mkdir(parents=True, exist_ok=True)
                (tmp_path / folder / "file.py").write_text(f"{call}\nwith policy.autocast():\n    pass\n")
            found = {str(Path(place).parent.relative_to(tmp_path)) for place in calls_outside_amp(tmp_path)}
            assert found == {"fastamp/engine", "tools", "projects/Other"}
