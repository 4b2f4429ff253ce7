"""GPU benchmark with toy sizes on a CPU: measured values, targets and continuation of an earlier run."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from fastamp.amp import checks

FOLDER = Path(__file__).parents[2] / "tools/benchmark"


@pytest.fixture(scope="module")
def gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        spec = importlib.util.spec_from_file_location("gpu_benchmark", FOLDER / "gpu.py")
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "gpu_benchmark", module)
        spec.loader.exec_module(module)
        yield module


def run(gpu, output, part, match, *opts):
    toy = ["--device", "cpu", "--toy", "--seconds", "0.05", "--output", str(output)]
    gpu.main(["--part", part, "--match", match, *toy, *opts])
    return json.loads(output.read_text())["results"]


@pytest.mark.parametrize(
    ("part", "match", "figure"),
    [
        ("train", "R50 batch 64 bf16", "of bare"),
        ("train", "R18 batch 64 bf16, the read", "cost of the read"),
        ("train", "files", "of compute"),
        ("infer", "ViT-B", "x float32"),
        ("infer", "files", "images/s"),
        ("rank", "market1501 ranking", "ratio"),
        ("rank", "market1501 re-ranking", "ratio"),
    ],
)
def test_gpu_benchmark_measurements_run_on_cpu_with_toy_sizes(gpu, part, match, figure, tmp_path):
    results = run(gpu, tmp_path / "gpu.json", part, match)
    assert all(figures[figure] is not None for name, figures in results[part].items() if "read" not in name)


def test_second_gpu_benchmark_run_continues_after_last_finished_measurement(gpu, tmp_path, monkeypatch):
    calls = []
    planned = {"a": lambda setup: calls.append("a") or {"images/s": 2.0}, "b": lambda setup: calls.append("b") or 1 / 0}
    monkeypatch.setattr(gpu, "measurements", lambda part: planned)
    with pytest.raises(ZeroDivisionError):
        run(gpu, tmp_path / "gpu.json", "train", "")
    planned["b"] = lambda setup: calls.append("b") or {"images/s": 3.0}
    assert run(gpu, tmp_path / "gpu.json", "train", "")["train"] == {"a": {"images/s": 2.0}, "b": {"images/s": 3.0}}
    assert calls == ["a", "b", "b"]


def test_gpu_benchmark_does_not_mix_toy_results_with_others(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "measurements", lambda part: {"a": lambda setup: {"images/s": 2.0}})
    run(gpu, tmp_path / "gpu.json", "train", "")
    with pytest.raises(SystemExit):
        gpu.main(["--part", "train", "--device", "cpu", "--output", str(tmp_path / "gpu.json")])
    assert "--output" in capsys.readouterr().err


def test_step_without_read_has_no_checks_of_the_first_steps(gpu, monkeypatch):
    setup = gpu.Setup(torch.device("cpu"), toy=True, seconds=0.05)
    cfg = setup.config("R18", 8, "bf16")
    step = gpu.fastamp_step(cfg, gpu.RepeatedBatch(cfg, setup.device), read=False)
    monkeypatch.setattr(checks, "_reaches", lambda *args: pytest.fail("traced the autograd graph"))
    step()


def test_gpu_benchmark_table_compares_measured_values_with_targets(gpu):
    results = {
        "train": {
            "R50 batch 256 float32": {"images/s": 1000.0},
            "R50 batch 256 bf16": {"images/s": 2600.0, "of bare": 0.9, "reads/step": 1.0},
        }
    }
    gpu.add_ratios(results)
    assert results["train"]["R50 batch 256 bf16"]["x float32"] == 2.6
    assert "x float32" not in results["train"]["R50 batch 256 float32"]
    verdicts = {
        tuple(cell.strip() for cell in line.strip("|").split("|")[:4:3])
        for line in gpu.tables(results).splitlines()
        if "reached" in line or "missed" in line
    }
    assert verdicts == {
        ("R50 batch 256 bf16: of bare", "missed"),
        ("R50 batch 256 bf16: x float32", "reached"),
        ("R50 batch 256 bf16: images/s", "reached"),
        ("R50 batch 256 bf16: reads/step", "reached"),
    }


def test_gpu_benchmark_targets_name_existing_measurements(gpu):
    assert all(target.name in gpu.measurements(target.part) for target in gpu.TARGETS)
