"""Batches from worker processes, which leave signals and errors to the trainer's process."""

import errno
import logging
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from fastamp.data.dataset import ReidDataset
from fastamp.data.samplers import EpochBatchSampler, InferenceSampler, SampleKey
from fastamp.utils.env import available_cores
from fastamp.utils.errors import DataError, UserError
from fastamp.utils.moved import moved_names
from fastamp.utils.signals import set_handler

logger = logging.getLogger(__name__)

__getattr__ = moved_names(
    __name__,
    {
        "exhausted_resources_explained": "fastamp.data.loader.explain_exhausted_resources",
        "lost_workers_explained": "fastamp.data.loader.explain_lost_workers",
    },
)

_SHARED_MEMORY = "/dev/shm"
# File descriptors that stay free in a worker: for an image file, for the socket that hands descriptors over, for a log.
_SPARE_DESCRIPTORS = 6


class _WorkerError:
    """A user's error on its way from a worker; PyTorch would put the worker's traceback into the message."""

    def __init__(self, error: UserError) -> None:
        self.error_class = type(error)
        self.message = str(error)


class _PackedBatch:
    """A batch that a worker has pickled, its tensors in shared memory.

    Left to PyTorch, a batch is pickled in a thread of the worker that prints an error and drops the batch, e.g. when
    shared memory is full, and the main process waits for that batch forever. Pickled here, in the worker's main
    thread, the error reaches the main process instead of the batch.

    Args:
        batch: tensors, and what can be pickled.

    Raises:
        OSError, RuntimeError: no shared memory, or too many open files.
    """

    def __init__(self, batch: dict[str, Any]) -> None:
        # Each tensor needs one descriptor for its memory and one to hand over. Checked first: without a spare one the
        # thread that hands them over could not answer the main process, which would wait for it.
        _check_descriptors(2 * _count_tensors(batch) + _SPARE_DESCRIPTORS)
        self._pickled = bytes(ForkingPickler.dumps(batch))
        self._error: Exception | None = None

    def unpack(self) -> dict[str, Any]:
        """Return the batch; once.

        Raises:
            OSError, EOFError, RuntimeError: the worker is gone, or too many files are open.
        """
        if self._error is not None:
            raise self._error
        return ForkingPickler.loads(self._pickled)

    def pin_memory(self) -> "dict[str, Any] | _PackedBatch":
        """Return the batch in pinned memory; PyTorch calls this in a thread."""
        try:
            return pin_memory(self.unpack())
        except Exception as error:
            self._error = error  # raised in the main thread, which explains it
            return self


class _BatchDataset(Dataset):
    """The data set as workers fetch from it: a batch, or why there is none."""

    def __init__(self, dataset: ReidDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, keys: Sequence[SampleKey]) -> dict[str, Any] | _PackedBatch | _WorkerError:
        try:
            batch = self.dataset.__getitems__(keys)
            if get_worker_info() is None:
                return batch
            with explain_exhausted_resources():
                return _PackedBatch(batch)
        except UserError as error:
            return _WorkerError(error)


class _Loader:
    """Iterate over a data set's batches.

    On a CUDA device the next batch is copied, and augmented where that was left to do, on a stream of its own while
    the device computes on the last.

    Attributes:
        dataset: where the batches come from.
        batch_sampler: which keys are in them.
        device: that images are to be on.
    """

    def __init__(
        self, dataset: ReidDataset, batch_sampler: Any, *, num_workers: int, persistent: bool, device: torch.device
    ) -> None:
        self.dataset = dataset
        self.batch_sampler = batch_sampler
        self.num_workers = num_workers
        self.device = device
        self._loader = DataLoader(
            _BatchDataset(dataset),
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            collate_fn=_identity_collate,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=persistent and num_workers > 0,
            worker_init_fn=_start_worker,
            # Fork starts workers in milliseconds and needs nothing of the user's script; the workers touch neither
            # CUDA nor a thread pool, which are what makes it dangerous. Not to be had, or not safe, elsewhere.
            multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
            # The workers' seeds, which nothing here uses, would be drawn from the global generator.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches.

        Raises:
            DataError: an image cannot be read, a worker was killed, or shared memory, open files or processes ran out.
        """
        with explain_exhausted_resources():
            if self.num_workers:
                _check_workers_can_start(self.num_workers, self._loader.multiprocessing_context or multiprocessing)
            batches = self._prefetch() if self.device.type == "cuda" else map(self._to_device, self._loader)
        explained = explain_exhausted_resources if self.num_workers else nullcontext
        try:
            while True:
                with explain_lost_workers(fetching=True), explained():
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch
        finally:
            del batches  # ends the workers, also while the traceback of an error holds this frame

    def _prefetch(self) -> Iterator[dict[str, Any]]:
        """Yield the batches, each when the work on the next has been handed to the device."""
        side = torch.cuda.Stream(self.device)
        ready: list[tuple[dict[str, Any], torch.cuda.Event]] = []
        for fetched in self._loader:
            with torch.cuda.stream(side):
                ready.append((self._to_device(fetched), side.record_event()))
            if len(ready) > 1:
                yield self._wait_for_copy(*ready.pop(0))
        for batch, done in ready:
            yield self._wait_for_copy(batch, done)

    def _wait_for_copy(self, batch: dict[str, Any], done: "torch.cuda.Event") -> dict[str, Any]:
        """Make the present stream wait for the batch, and the batch's memory for the present stream."""
        present = torch.cuda.current_stream(self.device)
        present.wait_event(done)
        batch["images"].record_stream(present)
        return batch

    def _to_device(self, batch: dict[str, Any] | _PackedBatch | _WorkerError) -> dict[str, Any]:
        """Return the batch with its images on the device, and augmented."""
        if isinstance(batch, _WorkerError):
            raise batch.error_class(batch.message)
        if isinstance(batch, _PackedBatch):
            batch = batch.unpack()
        batch["images"] = batch["images"].to(self.device, non_blocking=True)
        parameters = batch.pop("augmentation", None)
        if parameters is not None:
            batch["images"] = self.dataset.transforms.augment.apply(batch["images"], parameters)
        return batch


class TrainLoader(_Loader):
    """Endless training batches, see ``start_at`` for the first one."""

    def __init__(
        self, dataset: ReidDataset, batch_sampler: EpochBatchSampler, *, num_workers: int, device: torch.device
    ) -> None:
        # One iteration lasts as long as the training, so there is nothing to persist for.
        super().__init__(dataset, batch_sampler, num_workers=num_workers, persistent=False, device=device)

    @property
    def iters_per_epoch(self) -> int:
        """Batches in an epoch."""
        return self.batch_sampler.iters_per_epoch

    @property
    def start_iter(self) -> int:
        """Index of the first batch of the next iteration over the loader, counted from the start of the training."""
        return self.batch_sampler.start_iter

    @start_iter.setter
    def start_iter(self, start_iter: int) -> None:
        warnings.warn("loader.start_iter = N is now loader.start_at(N)", DeprecationWarning, stacklevel=2)
        self.start_at(start_iter)

    def start_at(self, start_iter: int) -> None:
        """Start the next iteration over the loader at batch ``start_iter``, counted from the start of the training."""
        self.batch_sampler.start_at(start_iter)


class TestLoader(_Loader):
    """This rank's part of a test set, in order; its workers stay for the next evaluation."""

    __test__ = False  # for pytest, which would take the name for a test's

    def __init__(
        self, dataset: ReidDataset, batch_sampler: InferenceSampler, *, num_workers: int, device: torch.device
    ) -> None:
        super().__init__(dataset, batch_sampler, num_workers=num_workers, persistent=True, device=device)

    def __len__(self) -> int:
        return len(self.batch_sampler)


def worker_count(key: str, requested: int) -> int:
    """Return how many workers to start: as many as requested, but no more than there are cores to run them.

    Args:
        key: the config key that requested, for messages.
        requested: 0 loads in the calling process.
    """
    cores = available_cores()
    if requested > cores:
        logger.info("%s is %d; starting %d, as many as there are cores", key, requested, cores)
    return min(requested, cores)


@contextmanager
def explain_lost_workers(*, fetching: bool = False) -> Iterator[None]:
    """Turn PyTorch's error that a worker is dead, which reaches the main thread wherever it is, into a DataError.

    Args:
        fetching: a batch is being taken from a worker, whose connection may break first.
    """
    try:
        yield
    except (RuntimeError, EOFError, ConnectionError) as error:
        found = str(error).strip()
        if isinstance(error, RuntimeError):
            lost = re.match(r"DataLoader worker \(pid.* (is killed by signal|exited unexpectedly)", found)
            if "killed by signal" in str(error.__cause__):
                found = str(error.__cause__).strip()
        else:
            lost = fetching and not found.startswith("Caught ")  # that one was raised in the worker
            found = (lost and _dead_worker_message()) or f"{type(error).__name__} while a batch was taken from it"
        if not lost:
            raise
        cause, fix = "it crashed, or was killed, e.g. for want of memory", "DATALOADER.NUM_WORKERS 0 shows where"
        if "Killed" in found:
            cause = "the system ends processes when memory runs out (its log, dmesg, would say so)"
            fix = "fewer DATALOADER.NUM_WORKERS, or DATALOADER.CACHE disk instead of ram"
        elif "Bus error" in found:
            cause = "the shared memory in which workers hand batches over, /dev/shm, is full"
            fix = "a larger one (docker run --shm-size 8g, or --ipc host), or fewer DATALOADER.NUM_WORKERS"
        raise DataError(
            f"a process that loads data has ended.\n  found: {found}\n  cause: {cause}\n  fix:   {fix}"
        ) from error


@contextmanager
def explain_exhausted_resources() -> Iterator[None]:
    """Turn errors about shared memory, open files and processes, which workers need, into a DataError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        number = getattr(error, "errno", None)
        found = getattr(error, "strerror", None) or str(error).strip()
        if found.startswith("Caught "):  # raised in the worker; its traceback follows
            found = found.splitlines()[-1]
        workers = "fewer workers (DATALOADER.NUM_WORKERS, TEST.NUM_WORKERS; 0 loads in the main process)"
        if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in found or "ancdata" in found:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            cause = f"too many files are open; the limit is {limit} for each process (ulimit -n)"
            fix = f"a higher limit (ulimit -n 4096, docker run --ulimit nofile=4096), or {workers}"
        elif number == errno.ENOSPC or re.match("unable to (open|resize|allocate|mmap)", found):  # PyTorch's words
            where = f"the shared memory in which workers hand batches over, {_SHARED_MEMORY}"
            cause = f"{where}, is full or too small for a batch{_shared_memory_usage()}"
            fix = f"a larger one (docker run --shm-size 8g, or --ipc host), or {workers}"
        elif number in (errno.EAGAIN, errno.ENOMEM):
            cause, fix = "the system cannot start another process: too many run, or memory is full", workers
        else:
            raise
        raise DataError(f"loading data failed.\n  found: {found}\n  cause: {cause}\n  fix:   {fix}") from error


def _shared_memory_usage() -> str:
    """Return how large shared memory is, and how much of it is free."""
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        return ""
    return f" ({usage.free / 2**20:.1f} of {usage.total / 2**20:.1f} MiB are free)"


def _check_descriptors(count: int) -> None:
    """Raise OSError unless this process may open ``count`` more files."""
    try:
        # Counted, not tried: other threads of a worker may need a descriptor meanwhile.
        used = len(os.listdir("/dev/fd"))
    except FileNotFoundError:
        logger.debug("the open files of a process cannot be counted on this system")
        return
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and used + count > limit:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _check_workers_can_start(count: int, context: Any) -> None:
    """Raise OSError unless there is room for the queues and the pipes of ``count`` workers.

    PyTorch's loader does not clean up after an error among these.
    """
    queues = []
    try:
        for _ in range(count + 1):
            queues.append(context.Queue())
        _check_descriptors(4 * count + _SPARE_DESCRIPTORS)
    finally:
        for queue in queues:
            queue.close()


def _count_tensors(value: Any) -> int:
    """Return how many tensors are in nested dictionaries and sequences."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return int(isinstance(value, torch.Tensor))
    return sum(map(_count_tensors, value))


def _dead_worker_message() -> str:
    """Return PyTorch's error on a worker whose connection broke, which a signal brings a moment later; else nothing."""
    try:
        time.sleep(1)
    except RuntimeError as error:
        return str(error).strip()
    return ""


def _identity_collate(batch: Any) -> Any:
    return batch


def _start_worker(worker: int) -> None:
    """Leave signals, which reach whole process groups, to the main process, and compute on one core."""
    torch.set_num_threads(1)
    set_handler(signal.SIG_IGN, (signal.SIGINT, signal.SIGUSR1))
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_parent_sigterm, daemon=True).start()


def _exit_on_parent_sigterm() -> None:
    """End this worker on SIGTERM from its parent, and ignore it from others.

    A scheduler that stops a job signals every process in it; the main one needs its workers to finish the step.
    """
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
