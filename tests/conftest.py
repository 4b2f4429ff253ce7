"""What tests share: the smallest demo set, and random generators that start alike."""

import contextlib
import fcntl
import logging
import os

# Each of several test processes has a core; set before torch counts them.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# With AMX, some of oneDNN's bfloat16 convolutions are wrong on small maps (fastamp/amp/README.md): tests go without, so
# that they say the same on every CPU. DNNL_MAX_CPU_ISA=ALL tests with it.
os.environ.setdefault("DNNL_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import tiny
import torch


@pytest.fixture(scope="session")
def demo_root(tmp_path_factory):
    """A data root that holds the smallest demo set."""
    root = tmp_path_factory.mktemp("datasets")
    tiny.make_demo(root)
    return root


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """A context of a folder's name: the folder, which all test processes share, and whether it is yet to be filled."""
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
def demo(demo_root, monkeypatch):
    """Make that data root the one in use."""
    monkeypatch.setenv("FASTAMP_DATASETS", str(demo_root))
    return demo_root


@pytest.fixture(scope="session")
def run_folder(demo_root, tmp_path_factory):
    """The OUTPUT_DIR of a run of one epoch in bf16."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTAMP_DATASETS", str(demo_root))
        tiny.train(folder, "SOLVER.AMP", "bf16")
    return folder


@pytest.fixture(scope="session")
def checkpoint(run_folder):
    """The ``model_best.pth`` of that run."""
    return run_folder / "model_best.pth"


@pytest.fixture(autouse=True)
def fresh_state():
    """Each test starts from the same random state and leaves no log handlers behind."""
    torch.manual_seed(0)
    logger = logging.getLogger("fastamp")
    logger.setLevel(logging.INFO)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("fastamp."):  # a tool silences some of them for the rest of its process
            logging.getLogger(name).setLevel(logging.NOTSET)
    yield
    logger.propagate = True
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
