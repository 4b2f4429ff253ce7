"""What tests share: the smallest demo set, and random generators that start alike."""

import logging
import os

# Each of several test processes has a core; set before torch counts them.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import tiny
import torch


@pytest.fixture(scope="session")
def demo_root(tmp_path_factory):
    """A data root that holds the smallest demo set."""
    root = tmp_path_factory.mktemp("datasets")
    tiny.make_demo(root)
    return root


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
    yield
    logger = logging.getLogger("fastamp")
    logger.propagate = True
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
