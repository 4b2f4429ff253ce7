"""Shared fixtures: the smallest demo dataset, a run on it, and seeded random generators."""

import contextlib
import fcntl
import functools
import logging
import multiprocessing.process
import os
import subprocess

# One core per test process; set before torch counts the cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# With AMX, some bfloat16 convolutions of oneDNN are incorrect on small maps (docs/guides/mixed-precision.md). Tests
# disable it, for equal results on every CPU; DNNL_MAX_CPU_ISA=ALL enables it.
os.environ.setdefault("DNNL_MAX_CPU_ISA", "AVX512_CORE_BF16")

import compiled_steps

# Imported here because it may start a process: the first import of the fonts on a machine, and NumPy 1.26.
import matplotlib.font_manager  # noqa: F401
import numpy.testing  # noqa: F401
import pytest
import tiny
import torch
from components import unregister_projects

from fastamp.engine import DefaultTrainer
from fastamp.inference import Predictor

UNGUARDED_MARKS = {"end_to_end", "integration", "slow", "tune", "export", "extras", "cuda"}
guard = {"on": False}


def pytest_configure():
    """Let default tests fail if they train or start a process, except for those with the mark end_to_end."""

    def guarded(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            if guard["on"]:
                pytest.fail("a default test trains or starts a process; fix: the mark integration")
            return function(*args, **kwargs)

        return call

    for owner, name in (
        (DefaultTrainer, "train"),
        (subprocess.Popen, "__init__"),
        (multiprocessing.process.BaseProcess, "start"),
        (os, "fork"),
    ):
        setattr(owner, name, guarded(getattr(owner, name)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Guard a default test and its fixtures."""
    marks = {mark.name for mark in item.iter_markers()}
    guard["on"] = not marks & UNGUARDED_MARKS
    try:
        return (yield)
    finally:
        guard["on"] = False


def pytest_collection_modifyitems(items):
    """Skip the tests with the mark cuda on a machine without a CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_generate_tests(metafunc):
    """Run the tests of failures a second time, with compiled models."""
    if metafunc.definition.get_closest_marker("failure"):
        compiled = pytest.param(True, id="compiled", marks=[pytest.mark.export])
        metafunc.parametrize("compiled_models", [pytest.param(False, id="eager"), compiled], indirect=True)


@pytest.fixture(autouse=True)
def compiled_models(request, monkeypatch):
    """Compile the models that ``OptimizationStep`` trains, in compiled runs of tests with the mark failure.

    Returns:
        True in such a run.
    """
    if not getattr(request, "param", False):
        return False
    torch.compiler.reset()
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "disabled", True)  # its records are not warnings
    compiled_steps.install(monkeypatch.setattr)
    monkeypatch.setenv(compiled_steps.VARIABLE, "1")  # for processes that the test starts
    return True


@pytest.fixture(scope="session")
def demo_root(tmp_path_factory):
    """Data root that contains the smallest demo dataset."""
    root = tmp_path_factory.mktemp("datasets")
    tiny.make_demo(root)
    return root


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Context manager that yields a folder shared by all test processes, and True if the caller must fill it."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    @contextlib.contextmanager
    def open_folder(name):
        folder = root / name
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            missing = not (folder / "done").exists()
            folder.mkdir(exist_ok=True)
            yield folder, missing
            (folder / "done").touch()

    return open_folder


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Empty working folder."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def datasets_root(tmp_path, monkeypatch):
    """Set FASTAMP_DATASETS to the temporary folder of the test, and return it."""
    monkeypatch.setenv("FASTAMP_DATASETS", str(tmp_path))
    return tmp_path


@pytest.fixture
def demo(demo_root, monkeypatch):
    """Set FASTAMP_DATASETS to the data root with the demo dataset, and return it."""
    monkeypatch.setenv("FASTAMP_DATASETS", str(demo_root))
    return demo_root


@pytest.fixture
def input_error(request):
    """Function that calls a command with invalid input, ``input_error(command, *args)``, and returns its message."""
    captured = request.getfixturevalue("capfd" if "capfd" in request.fixturenames else "capsys")

    def call(command, *args):
        captured.readouterr()
        assert command(*args) == 2
        message = captured.readouterr().err
        assert "Traceback" not in message
        return message

    return call


@pytest.fixture(scope="session")
def run_folder(demo_root, tmp_path_factory):
    """OUTPUT_DIR of a one-epoch bfloat16 run."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTAMP_DATASETS", str(demo_root))
        patch.setitem(guard, "on", False)
        tiny.train(folder, "SOLVER.AMP", "bf16")
    return folder


@pytest.fixture(scope="session")
def checkpoint(run_folder):
    """``model_best.pth`` of ``run_folder``."""
    return run_folder / "model_best.pth"


@pytest.fixture(scope="module")
def predictor(checkpoint):
    return Predictor(checkpoint, device="cpu")


@pytest.fixture(autouse=True)
def fresh_state():
    """Seed PyTorch's generator and reset log levels before each test, and remove log handlers after it."""
    torch.manual_seed(0)
    logger = logging.getLogger("fastamp")
    logger.setLevel(logging.INFO)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("fastamp."):  # some tools silence loggers of their process
            logging.getLogger(name).setLevel(logging.NOTSET)
    yield
    logger.propagate = True
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


@pytest.fixture(scope="module")
def unregistered():
    """Remove the components and modules of projects that the tests of a file import."""
    with unregister_projects():
        yield
