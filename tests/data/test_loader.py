"""Workers that run out of shared memory, open files or processes end the run with a message, and never hang it."""

import errno
import gc
import multiprocessing
import os
import resource
import subprocess
import sys
import threading

import preloaded
import pytest
import torch

from fastamp.data import build_reid_test_loader, build_reid_train_loader, loader
from fastamp.data.loader import explain_exhausted_resources
from fastamp.utils.errors import DataError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the resources of a running process")


@pytest.fixture(autouse=True)
def end_a_hang():
    """End the test process when a loader waits forever for a batch."""
    timer = threading.Timer(300, os._exit, (99,))
    timer.start()
    yield
    timer.cancel()
    gc.collect()  # ends the workers, which the traceback of an expected error holds


@pytest.fixture
def train_cfg(cfg):
    cfg.DATALOADER.NUM_WORKERS = 1
    return cfg


def started(batches):
    """Return an iterator that has yielded its first batch, and its worker's process number."""
    others = set(multiprocessing.active_children())
    batches = iter(batches)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    return batches, worker.pid


def take_until_error(batches):
    """Take batches until one raises, but not for ever."""
    with pytest.raises(DataError) as raised:
        for _ in range(1000):
            next(batches)
    return str(raised.value)


@pytest.mark.parametrize("test_set", [False, True])
def test_shared_memory_that_is_full(market, train_cfg, test_set):
    """A limit of the file size has the effect of a full /dev/shm, for which a test would need a file system."""
    train_cfg.INPUT.SIZE_TEST = (256, 128)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    train_cfg.TEST.NUM_WORKERS = 1
    batches = build_reid_test_loader(train_cfg, "Market1501")[0] if test_set else build_reid_train_loader(train_cfg)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(DataError, match=r"(?s)found: .*cause: the shared memory.* free.*fix: .*--shm-size"):
            next(iter(batches))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))


def test_shared_memory_that_fills_up_later(market, train_cfg):
    batches, worker = started(build_reid_train_loader(train_cfg))
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (100, 100))
    message = take_until_error(batches)
    assert "/dev/shm, is full" in message and "--shm-size" in message and "NUM_WORKERS" in message


@pytest.mark.parametrize("free", [0, 2, 8])
def test_open_files_that_run_out_in_a_worker(market, train_cfg, free):
    batches, worker = started(build_reid_train_loader(train_cfg))
    limit = len(os.listdir(f"/proc/{worker}/fd")) + free
    resource.prlimit(worker, resource.RLIMIT_NOFILE, (limit, limit))
    message = take_until_error(batches)
    assert "too many files are open" in message and "ulimit -n" in message


def test_an_image_that_open_files_do_not_suffice_for_is_not_skipped(market, cfg):
    cfg.DATALOADER.ON_CORRUPT = "skip"
    batches = build_reid_train_loader(cfg)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            next(iter(batches))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("free", range(0, 42, 7))
def test_open_files_that_run_out_in_the_main_process(market, train_cfg, free):
    """However many are free, there is a batch or a message."""
    train_cfg.DATALOADER.NUM_WORKERS = 2
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    batches = build_reid_train_loader(train_cfg)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + free, hard))
    held = []
    try:
        with pytest.raises(DataError, match="too many files are open"):
            for batch in batches:
                held.append(batch)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_error_in_the_thread_that_pins_memory_is_raised_in_the_main_thread(monkeypatch):
    batch = loader._PackedBatch({"images": torch.zeros(2, 3, 4, 4)})
    with monkeypatch.context() as patch:
        patch.setattr(loader, "pin_memory", lambda batch: 1 / 0)
        pinned = batch.pin_memory()
    with pytest.raises(ZeroDivisionError):
        pinned.unpack()
    monkeypatch.setattr(loader, "pin_memory", lambda batch: batch | {"pinned": True})
    assert loader._PackedBatch({"images": torch.zeros(2, 3, 4, 4)}).pin_memory()["pinned"]


@pytest.mark.parametrize(
    "error, cause",
    [
        (OSError(errno.EMFILE, "Too many open files"), "too many files are open"),
        (OSError("Caught OSError in DataLoader worker 0.\nOSError: [Errno 24] Too many open files"), "too many files"),
        (RuntimeError("received 0 items of ancdata"), "too many files are open"),
        (OSError(errno.ENOSPC, "No space left on device"), "the shared memory"),
        (RuntimeError("unable to allocate shared memory(shm) for file <t>: No space left (28)"), "the shared memory"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "cannot start another process"),
    ],
)
def test_causes(error, cause):
    with pytest.raises(DataError, match=f"(?s)cause: .*{cause}.*fix: .*NUM_WORKERS"), explain_exhausted_resources():
        raise error


def test_other_errors_pass():
    for error in (OSError(errno.EBADF, "Bad file descriptor"), RuntimeError("a bug"), ConnectionResetError()):
        with pytest.raises(type(error)), explain_exhausted_resources():
            raise error


MOUNT = ["unshare", "--mount", "sh", "-c"]


def can_mount():
    """Return whether this process may mount a small file system of its own on /dev/shm."""
    try:
        return subprocess.run([*MOUNT, "mount -t tmpfs -o size=1m tmpfs /dev/shm"], capture_output=True).returncode == 0
    except OSError:
        return False


SMALL_SHM = """
import ctypes, subprocess, sys
from pathlib import Path
import tiny
from fastamp.engine import DefaultTrainer, run_command_line
size, folder, *options = sys.argv[1:]
assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
mount = ["mount", "-t", "tmpfs", "-o", "size=" + ("4k" if size == "0k" else size), "tmpfs", "/dev/shm"]
for command in (["mount", "--make-rprivate", "/"], mount):
    subprocess.run(command, check=True)
if size == "0k":
    Path("/dev/shm/full").write_bytes(bytes(4096))
cfg = tiny.tiny_config(Path(folder), *options)
sys.exit(run_command_line(lambda: DefaultTrainer(cfg).train()))
"""


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount file systems")
@pytest.mark.parametrize("size", ["0k", "64k", "1m"])
def test_training_with_a_small_dev_shm(demo_root, tmp_path, size):
    """No room for a semaphore, for a batch, for a second batch."""
    script = tmp_path / "small_shm.py"
    script.write_text(SMALL_SHM)
    options = ["INPUT.SIZE_TRAIN", "(384, 192)", "DATALOADER.NUM_WORKERS", "2", "SOLVER.AMP", "off"]
    run = preloaded.run(script, size, tmp_path, *options, FASTAMP_DATASETS=str(demo_root))
    assert run.returncode == 2, run.stderr
    assert "error: loading data failed." in run.stderr and "--shm-size" in run.stderr
    assert "Traceback" not in run.stderr, run.stderr


def test_batches_are_the_same_as_without_workers(market, train_cfg):
    """Also what is nested, as the parameters of an augmentation that is left to the device."""
    train_cfg.INPUT.AUGMENT_ON = "device"
    with_workers = next(iter(build_reid_train_loader(train_cfg)))
    train_cfg.DATALOADER.NUM_WORKERS = 0
    without = next(iter(build_reid_train_loader(train_cfg)))
    assert torch.equal(with_workers["images"], without["images"]) and with_workers.keys() == without.keys()
