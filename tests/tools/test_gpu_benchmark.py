"""GPU benchmark: the plan and its limits, continuation of an earlier run, targets, and toy measurements on a CPU."""

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from fastamp.amp import checks
from fastamp.utils.errors import ConfigError, UserError

FOLDER = Path(__file__).parents[2] / "tools/benchmark"
SETUP = {"toy": True, "seconds": 0.05}


@pytest.fixture(scope="module")
def gpu():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        spec = importlib.util.spec_from_file_location("gpu_benchmark", FOLDER / "gpu.py")
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "gpu_benchmark", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def setup(gpu, tmp_path):
    return gpu.Setup(torch.device("cpu"), folder=tmp_path, limit=60, **SETUP)


@pytest.fixture
def plan(gpu, monkeypatch):
    """Function that replaces the measurements, given as name -> function; each has a limit of 5 s."""

    def replace(limit=5, **functions):
        measurements = [gpu.Measurement("networks", name, limit, run) for name, run in functions.items()]
        monkeypatch.setattr(gpu, "MEASUREMENTS", measurements)

    monkeypatch.setattr(gpu, "describe_device", lambda setup: {"device": "Some H100", "environment": ""})
    return replace


def run(gpu, output, *opts):
    code = gpu.main(["--device", "cpu", "--toy", "--output", str(output), *opts])
    return code, json.loads(output.read_text())["results"]


def fail(setup):
    raise ValueError("bad value")


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("R50 batch 64", {"bf16 of bare", "float32 of bare", "bf16 images/s", "bf16 x float32"}),
        ("R50, the read", {"cost of the read at batch 64", "cost of the read at batch 256"}),
        ("R50 extraction", {"images/s", "x float32"}),
        ("ranking, size of MSMT17", {"s", "x product", "re-ranking s"}),
        ("R50 batch 256 from files", {"of compute"}),
        ("R50 extraction from files", {"images/s"}),
    ],
)
def test_gpu_benchmark_measurements_run_on_cpu_with_toy_sizes(gpu, setup, name, figures, monkeypatch):
    monkeypatch.setenv("FASTAMP_DATASETS", "unused")  # is set by the measurements
    (measurement,) = (measurement for measurement in gpu.MEASUREMENTS if measurement.name == name)
    found = measurement.run(setup)
    assert figures <= found.keys()
    assert all(value > 0 for figure, value in found.items() if not figure.startswith("cost of the read"))


@pytest.mark.integration
def test_second_gpu_benchmark_run_continues_with_missing_and_then_failed_measurements(gpu, plan, tmp_path):
    log = tmp_path / "calls"

    def record(name, result):
        def measure(setup):
            with log.open("a") as file:
                file.write(name)
            return result(setup)

        return measure

    plan(a=record("a", lambda setup: {"s": 1.0}), b=record("b", fail))
    code, results = run(gpu, tmp_path / "gpu.json")
    assert code == 1 and results["a"]["figures"] == {"s": 1.0} and "ValueError: bad value" in results["b"]["error"]
    assert "ValueError: bad value" in (tmp_path / "gpu.log").read_text()
    plan(**{name: record(name, lambda setup: {"s": 2.0}) for name in "abc"})
    code, results = run(gpu, tmp_path / "gpu.json")
    assert code == 0 and {name: results[name]["figures"]["s"] for name in "abc"} == {"a": 1.0, "b": 2.0, "c": 2.0}
    assert log.read_text() == "abcb"


@pytest.mark.integration
def test_measurement_and_its_processes_end_at_its_limit(gpu, plan, tmp_path):
    def hang(setup):
        (tmp_path / "child").write_text(str(os.fork()))
        time.sleep(60)

    plan(hang=hang, after=lambda setup: {"s": 1.0}, limit=1)
    _, results = run(gpu, tmp_path / "gpu.json")
    assert "limit" in results["hang"]["error"] and results["after"]["figures"] == {"s": 1.0}
    child = Path("/proc", (tmp_path / "child").read_text(), "status")
    assert not child.exists() or "zombie" in child.read_text()


@pytest.mark.integration
def test_measurement_whose_process_dies_is_an_error(gpu, plan, tmp_path):
    plan(dies=lambda setup: os._exit(3))
    assert "3" in run(gpu, tmp_path / "gpu.json")[1]["dies"]["error"]


@pytest.mark.integration
def test_measurement_starts_only_if_its_limit_fits_into_the_budget(gpu, plan, tmp_path):
    plan(a=lambda setup: {"s": 1.0})
    gpu.main(["--device", "cpu", "--toy", "--budget", "4", "--output", str(tmp_path / "gpu.json")])
    assert not (tmp_path / "gpu.json").exists()
    assert "a" in run(gpu, tmp_path / "gpu.json", "--budget", "20")[1]


@pytest.mark.integration
def test_figures_of_a_failed_measurement_are_kept(gpu, plan, tmp_path):
    def measure(setup):
        raise gpu.Failure("one test failed", {"failed": 1.0})

    plan(tests=measure)
    code, results = run(gpu, tmp_path / "gpu.json")
    assert code == 1 and results["tests"]["figures"] == {"failed": 1.0} and results["tests"]["error"]


@pytest.mark.integration
def test_gpu_benchmark_does_not_mix_results_of_two_devices_or_of_toy_runs(gpu, plan, tmp_path, monkeypatch):
    plan(a=lambda setup: {"s": 2.0})
    run(gpu, tmp_path / "gpu.json")
    with pytest.raises(ConfigError, match="--output"):
        gpu.main(["--device", "cpu", "--output", str(tmp_path / "gpu.json")])
    monkeypatch.setattr(gpu, "describe_device", lambda setup: {"device": "Some H200", "environment": ""})
    with pytest.raises(ConfigError, match="--output"):
        run(gpu, tmp_path / "gpu.json")


@pytest.mark.integration
def test_gpu_benchmark_raises_for_a_missing_device_or_measurement(gpu, tmp_path):
    with pytest.raises(UserError, match="--device"):
        gpu.main(["--device", "unknown", "--output", str(tmp_path / "gpu.json")])
    with pytest.raises(ConfigError, match="--match"):
        gpu.main(["--match", "unknown", "--plan"])


def test_plan_lists_all_measurements_in_ten_minutes_and_starts_none(gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "run_limited", lambda *args, **setup: pytest.fail("started a measurement"))
    output = tmp_path / "gpu.json"
    output.write_text(json.dumps({"results": {"R50 batch 64": {"figures": {}}, "demo": {"error": "failed"}}}))
    assert gpu.main(["--plan", "--output", str(output)]) == 0
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()]
    assert [row[1] for row in rows[2:] if row[1]] == [measurement.name for measurement in gpu.MEASUREMENTS]
    assert {row[1]: row[4] for row in rows[2:] if row[4]} == {"R50 batch 64": "done", "demo": "failed"}
    assert 0 < sum(measurement.limit for measurement in gpu.MEASUREMENTS) <= 600


@pytest.mark.integration
def test_run_tests_counts_outcomes_and_other_reasons_to_skip(gpu, setup, tmp_path):
    file = tmp_path / "test_outcomes.py"
    marked = "import pytest\npytestmark = pytest.mark.cuda\n"
    file.write_text(
        f"{marked}def test_a(): pass\n"
        "def test_b(): assert 0\n"
        "def test_c(): pytest.skip('needs a CUDA device')\n"
        "def test_d(): pytest.skip('needs more')\n"
        "@pytest.mark.slow\ndef test_e(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  cuda\n  slow\n")
    with pytest.raises(gpu.Failure, match="test_b") as failure:
        gpu.run_tests(setup, [file], "-c", str(tmp_path / "pytest.ini"))
    assert failure.value.figures == {"passed": 1, "failed": 1, "skipped": 2, "skipped for another reason": 1}
    file.write_text(f"{marked}import os\ndef test_a(): pass\ndef test_b(): os.kill(os.getpid(), 2)\n")
    with pytest.raises(gpu.Failure, match="exit code 2") as failure:  # interrupted, as at the limit
        gpu.run_tests(setup, [file], "-c", str(tmp_path / "pytest.ini"))
    assert failure.value.figures["passed"] == 1


def test_all_tests_with_the_mark_cuda_are_measured(gpu, setup, monkeypatch):
    measured = []
    monkeypatch.setattr(gpu, "run_tests", lambda setup, files: measured.extend(path.name for path in files))
    gpu.cuda_tests(setup)
    gpu.fake_tensor_tests(setup)
    assert {"test_cuda.py", "test_fake_cuda.py", "test_distributed_cuda.py", "test_tf32.py"} <= set(measured)
    assert len(measured) == len(set(measured))


def test_step_without_read_has_no_checks_of_the_first_steps(gpu, setup, monkeypatch):
    cfg = setup.config("R50", 8, "bf16")
    step = gpu.step_without_read(cfg, gpu.RepeatedBatch(cfg, setup.device))
    monkeypatch.setattr(checks, "_reaches", lambda *args: pytest.fail("traced the autograd graph"))
    step()


def test_table_compares_figures_with_the_targets_of_the_device(gpu):
    figures = {"bf16 images/s": 4500.0, "bf16 of bare": 0.9, "bf16 x float32": 2.6, "bf16 MiB": 900.0}
    results = {"R50 batch 256": {"figures": figures}, "demo": {"error": "ended\nmore"}}

    def verdicts(device):
        table = gpu.format_results({"toy": False, "device": device, "results": results})
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line]
        return {row[1]: row[4] for row in rows[2:]}

    expected = {"bf16 of bare": "missed", "bf16 x float32": "reached", "bf16 MiB": "", "error": "failed"}
    assert verdicts("NVIDIA H100 80GB HBM3") == {**expected, "bf16 images/s": "reached"}
    assert verdicts("NVIDIA H200") == {**expected, "bf16 images/s": "missed"}
    assert verdicts("other") == {**expected, "bf16 images/s": ""}


def test_gpu_benchmark_targets_name_existing_measurements(gpu):
    assert {target.name for target in gpu.TARGETS} <= {"", *(measurement.name for measurement in gpu.MEASUREMENTS)}
