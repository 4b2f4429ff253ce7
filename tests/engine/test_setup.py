"""The config key DETERMINISTIC sets CUBLAS_WORKSPACE_CONFIG before the first matrix product in the process."""

import json
import os
import subprocess
import sys

import pytest

from fastamp.amp.device_errors import IN_TRAINING, explain_device_error

pytestmark = pytest.mark.integration

NAME = "CUBLAS_WORKSPACE_CONFIG"

# PyTorch checks the variable on CUDA only at the first matrix product of the process, and then refuses later ones in
# deterministic mode. The script does the same on a CPU, and runs each case in a new process.
SCRIPT = f"""
import functools, json, os, sys, traceback
import torch
from torch.overrides import TorchFunctionMode

from fastamp.cli import main
from fastamp.config import read_config
from fastamp.engine import default_setup

@functools.cache
def environment_is_valid():
    return os.environ.get("{NAME}") in (":4096:8", ":16:8")

class Cublas(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("linear", "mm", "matmul"):
            valid = environment_is_valid()
            if torch.are_deterministic_algorithms_enabled() and not valid:
                raise RuntimeError("not deterministic because it uses CuBLAS")
        return function(*args, **(kwargs or {{}}))

def run(first, value, options):
    os.environ.pop("{NAME}", None)
    if value is not None:
        os.environ["{NAME}"] = value
    matrix = torch.ones(2, 2)
    with Cublas():
        if first == "product":
            torch.mm(matrix, matrix)
        elif first == "doctor":
            main(["doctor", "--env", *options])
        default_setup(read_config("", options))
        torch.mm(matrix, matrix)
    return os.environ.get("{NAME}")

for number, case in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        try:
            found = run(*case)
        except BaseException as error:
            found = f"{{type(error).__name__}}: {{error}}"
        with open(sys.argv[2] + str(number), "w") as file:
            json.dump(found, file)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run each case in a new process and return the results.

    A case is (first command, value of CUBLAS_WORKSPACE_CONFIG, value of DETERMINISTIC). The result is the value of
    CUBLAS_WORKSPACE_CONFIG at the end, or the error.
    """
    folder = tmp_path_factory.mktemp("cublas")
    cases = [
        *[(first, value, "True") for first in ("setup", "doctor") for value in (None, "", ":4096:8", ":16:8", "8")],
        ("doctor", None, "False"),
        ("setup", ":4096:2:16:8", "True"),
        ("setup", ":4096:2:16:8", "False"),
        ("product", None, "True"),
    ]
    options = [
        ["MODEL.DEVICE", "cpu", "OUTPUT_DIR", str(folder / "run"), "DETERMINISTIC", deterministic[2]]
        for deterministic in cases
    ]
    arguments = [(first, value, opts) for (first, value, _), opts in zip(cases, options, strict=True)]
    command = [sys.executable, "-c", SCRIPT, json.dumps(arguments), str(folder / "result")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return {case: json.loads((folder / f"result{number}").read_text()) for number, case in enumerate(cases)}


@pytest.mark.parametrize("first", ["setup", "doctor"])
def test_deterministic_sets_cublas_workspace_config_before_first_matrix_product(first, results):
    assert results[first, None, "True"] == results[first, "", "True"] == ":4096:8"
    for kept in (":4096:8", ":16:8"):
        assert results[first, kept, "True"] == kept


@pytest.mark.parametrize("first, value", [("setup", "8"), ("doctor", "8"), ("setup", ":4096:2:16:8")])
def test_invalid_cublas_workspace_config_raises_config_error(first, value, results):
    error = results[first, value, "True"]
    assert error.startswith("ConfigError")
    assert all(word in error for word in (NAME, repr(value), "DETERMINISTIC", "fix:"))


def test_cublas_workspace_config_is_unchanged_if_deterministic_is_false(results):
    assert results["doctor", None, "False"] is None
    assert results["setup", ":4096:2:16:8", "False"] == ":4096:2:16:8"


def test_matrix_product_before_deterministic_setup_raises_explained_error(results):
    assert "uses CuBLAS" in results["product", None, "True"]
    error = RuntimeError(
        "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
        "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses "
        "CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set an environment "
        "variable before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or "
        "CUBLAS_WORKSPACE_CONFIG=:16:8."
    )
    explained = str(explain_device_error(error, "iteration 7", {}, IN_TRAINING))
    assert all(word in explained for word in ("DETERMINISTIC", "iteration 7", f"{NAME}=:4096:8", "fix:"))


CUDA_SCRIPT = """
import sys
import torch
from fastamp.cli import main
from fastamp.config import read_config
from fastamp.engine import default_setup

main(["doctor", "--env", *sys.argv[1:]])
default_setup(read_config("", sys.argv[1:]))
matrix = torch.ones(2, 2, device="cuda")
print((matrix @ matrix).sum().item())
"""


@pytest.mark.cuda
def test_cublas_is_deterministic_after_the_doctor(tmp_path, monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    options = ["MODEL.DEVICE", "cuda", "OUTPUT_DIR", str(tmp_path), "DETERMINISTIC", "True"]
    done = subprocess.run([sys.executable, "-c", CUDA_SCRIPT, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "8.0" in done.stdout, done.stderr
