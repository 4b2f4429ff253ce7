"""Data loading that runs out of shared memory, open files or processes raises an error and never hangs."""

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
def abort_on_hang():
    """Abort the test process if a loader waits forever for a batch."""
    timer = threading.Timer(300, os._exit, (99,))
    timer.start()
    yield
    timer.cancel()
    gc.collect()  # stops workers that the traceback of an expected error keeps alive


@pytest.fixture
def train_cfg(cfg):
    cfg.DATALOADER.NUM_WORKERS = 1
    return cfg


def start_worker(batches):
    """Return an iterator after its first batch, and the process ID of its worker."""
    children_before = set(multiprocessing.active_children())
    batches = iter(batches)
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - children_before
    return batches, worker.pid


def take_until_error(batches):
    """Fetch up to 1000 batches until one raises DataError; return its message."""
    with pytest.raises(DataError) as raised:
        for _ in range(1000):
            next(batches)
    return str(raised.value)


@pytest.mark.integration
@pytest.mark.parametrize("test_set", [False, True])
def test_full_shared_memory_error_names_cause_and_fix(market, train_cfg, test_set):
    """The test limits file sizes, which has the same effect as a full /dev/shm."""
    train_cfg.INPUT.SIZE_TEST = (256, 128)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    train_cfg.TEST.NUM_WORKERS = 1
    batches = build_reid_test_loader(train_cfg, "Market1501")[0] if test_set else build_reid_train_loader(train_cfg)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(DataError, match=r"(?s)found: .*cause: .*/dev/shm.* free.*fix: .*--shm-size"):
            next(iter(batches))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))


@pytest.mark.integration
def test_shared_memory_filled_after_first_batch_raises_data_error(market, train_cfg):
    batches, worker = start_worker(build_reid_train_loader(train_cfg))
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (100, 100))
    message = take_until_error(batches)
    assert "/dev/shm" in message and "--shm-size" in message and "NUM_WORKERS" in message


@pytest.mark.integration
@pytest.mark.parametrize("free", [0, 2, 8])
def test_too_many_open_files_in_worker_raises_data_error(market, train_cfg, free):
    batches, worker = start_worker(build_reid_train_loader(train_cfg))
    limit = len(os.listdir(f"/proc/{worker}/fd")) + free
    resource.prlimit(worker, resource.RLIMIT_NOFILE, (limit, limit))
    message = take_until_error(batches)
    assert "too many open files" in message and "ulimit -n" in message


def test_too_many_open_files_error_is_not_treated_as_corrupt_image(market, cfg):
    cfg.DATALOADER.ON_CORRUPT = "skip"
    batches = build_reid_train_loader(cfg)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            next(iter(batches))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.integration
@pytest.mark.parametrize("free", range(0, 42, 7))
def test_too_many_open_files_in_main_process_raises_data_error(market, train_cfg, free):
    """For any number of free file descriptors, the loader raises an error instead of waiting forever."""
    train_cfg.DATALOADER.NUM_WORKERS = 2
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    batches = build_reid_train_loader(train_cfg)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + free, hard))
    batches_kept = []
    try:
        with pytest.raises(DataError, match="too many open files"):
            for batch in batches:
                batches_kept.append(batch)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_pin_memory_error_is_raised_in_the_main_thread(monkeypatch):
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
        (OSError(errno.EMFILE, "Too many open files"), "too many open files"),
        (
            OSError("Caught OSError in DataLoader worker 0.\nOSError: [Errno 24] Too many open files"),
            "too many open files",
        ),
        (RuntimeError("received 0 items of ancdata"), "too many open files"),
        (OSError(errno.ENOSPC, "No space left on device"), "shared memory"),
        (RuntimeError("unable to allocate shared memory(shm) for file <t>: No space left (28)"), "shared memory"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "cannot start another process"),
    ],
)
def test_exhausted_resource_error_names_the_cause(error, cause):
    with pytest.raises(DataError, match=f"(?s)cause: .*{cause}.*fix: .*NUM_WORKERS"), explain_exhausted_resources():
        raise error


def test_errors_unrelated_to_exhausted_resources_are_reraised():
    for error in (OSError(errno.EBADF, os.strerror(errno.EBADF)), RuntimeError("a bug"), ConnectionResetError()):
        with pytest.raises(type(error)), explain_exhausted_resources():
            raise error


MOUNT = ["unshare", "--mount", "sh", "-c"]


def can_mount():
    """Return True if this process can mount a small file system on /dev/shm."""
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


@pytest.mark.integration
@pytest.mark.skipif(not can_mount(), reason="needs permission to mount file systems")
@pytest.mark.parametrize("size", ["0k", "64k", "1m"])
def test_training_with_too_small_dev_shm_exits_with_2(demo_root, tmp_path, size):
    """0 KiB is too small for a semaphore, 64 KiB for one batch, and 1 MiB for a second batch."""
    script = tmp_path / "small_shm.py"
    script.write_text(SMALL_SHM)
    options = ["INPUT.SIZE_TRAIN", "(384, 192)", "DATALOADER.NUM_WORKERS", "2", "SOLVER.AMP", "off"]
    run = preloaded.run(script, size, tmp_path, *options, FASTAMP_DATASETS=str(demo_root))
    assert run.returncode == 2, run.stderr
    assert "error: data loading failed" in run.stderr and "--shm-size" in run.stderr
    assert "Traceback" not in run.stderr, run.stderr


@pytest.mark.integration
def test_batches_with_device_augmentation_do_not_depend_on_workers(market, train_cfg):
    """With INPUT.AUGMENT_ON device, batches contain nested augmentation parameters."""
    train_cfg.INPUT.AUGMENT_ON = "device"
    with_workers = next(iter(build_reid_train_loader(train_cfg)))
    train_cfg.DATALOADER.NUM_WORKERS = 0
    without = next(iter(build_reid_train_loader(train_cfg)))
    assert torch.equal(with_workers["images"], without["images"]) and with_workers.keys() == without.keys()
