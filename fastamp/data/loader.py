"""Data loaders with worker processes: signal handling, device prefetching and error messages."""

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
from fastamp.utils.errors import DataError, UserError, system_cause
from fastamp.utils.plural import plural
from fastamp.utils.signals import set_handler

logger = logging.getLogger(__name__)


_SHARED_MEMORY = "/dev/shm"
# File descriptors kept free in a worker: for an image file, the socket of the transfer, a log file.
_SPARE_DESCRIPTORS = 6


class _WorkerError:
    """User error that a worker returns instead of a batch, because PyTorch adds a traceback to raised errors."""

    def __init__(self, error: UserError) -> None:
        self.error_class = type(error)
        self.message = str(error)


class _PackedBatch:
    """Batch pickled by a worker, with its tensors in shared memory.

    PyTorch pickles a batch in a background thread of the worker. On an error, for example if shared memory is full,
    that thread prints a traceback and drops the batch, so that the main process waits forever. Pickling in the worker's
    main thread sends the error to the main process instead.

    Args:
        batch: tensors and picklable values.

    Raises:
        OSError, RuntimeError: if shared memory or file descriptors are exhausted.
    """

    def __init__(self, batch: dict[str, Any]) -> None:
        # Each tensor needs two file descriptors: one for its memory and one for the transfer. Checked first: without a
        # free one, the transferring thread could not answer the main process, which would wait forever.
        _check_descriptors(2 * _count_tensors(batch) + _SPARE_DESCRIPTORS)
        self._pickled = bytes(ForkingPickler.dumps(batch))
        self._error: Exception | None = None

    def unpack(self) -> dict[str, Any]:
        """Unpickle the batch; can be called only once.

        Raises:
            OSError, EOFError, RuntimeError: if the worker has exited, or too many files are open.
        """
        if self._error is not None:
            raise self._error
        return ForkingPickler.loads(self._pickled)

    def pin_memory(self) -> "dict[str, Any] | _PackedBatch":
        """Unpickle the batch into pinned memory; called in PyTorch's pin-memory thread.

        If this fails, return the packed batch, whose method ``unpack`` raises the error in the main thread.
        """
        try:
            return pin_memory(self.unpack())
        except Exception as error:
            self._error = error  # raised again in the main thread
            return self


class _BatchDataset(Dataset):
    """Wrapper around a dataset that returns user errors to the main process instead of raising them in a worker."""

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
    """Base class of data loaders.

    On a CUDA device, the next batch is copied on a separate stream while the current one is processed. If
    INPUT.AUGMENT_ON is ``device``, the next batch is also augmented on that stream.

    Attributes:
        dataset: dataset to load from.
        batch_sampler: iterable that yields the list of sample keys of each batch.
        device: device to which the images are moved.
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
            pin_memory=device.type == "cuda",
            persistent_workers=persistent and num_workers > 0,
            worker_init_fn=start_worker,
            # Fork starts workers in milliseconds and needs no `if __name__ == "__main__"` in the user's script. It is
            # safe here because workers use neither CUDA nor thread pools. Other systems lack it, or it is not safe.
            multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
            # Otherwise the workers' seeds, which are not used, would be drawn from the global generator.
            generator=torch.Generator(),
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches, with images on ``device``.

        Raises:
            DataError: if an image cannot be read, a worker is killed, or shared memory, open files or processes are
                exhausted.
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
            del batches  # stops the workers even if a traceback keeps this frame alive

    def _prefetch(self) -> Iterator[dict[str, Any]]:
        """Yield each batch after starting the transfer of the next batch to the device."""
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
        """Make the current CUDA stream wait for the copy; keep the batch allocated until the stream has used it."""
        present = torch.cuda.current_stream(self.device)
        present.wait_event(done)
        batch["images"].record_stream(present)
        return batch

    def _to_device(self, batch: dict[str, Any] | _PackedBatch | _WorkerError) -> dict[str, Any]:
        """Unpack a batch, move its images to the device, and augment them unless the worker has done so."""
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
    """Infinite loader for training; ``start_at`` sets the first batch."""

    def __init__(
        self, dataset: ReidDataset, batch_sampler: EpochBatchSampler, *, num_workers: int, device: torch.device
    ) -> None:
        # One iteration covers the whole training, so workers need not persist.
        super().__init__(dataset, batch_sampler, num_workers=num_workers, persistent=False, device=device)

    @property
    def iters_per_epoch(self) -> int:
        """Number of batches in an epoch."""
        return self.batch_sampler.iters_per_epoch

    @property
    def start_iter(self) -> int:
        """Index of the first batch of the next iterator, counted from the start of training."""
        return self.batch_sampler.start_iter

    def start_at(self, start_iter: int) -> None:
        """Let the next iterator start at batch ``start_iter``, counted from the start of training."""
        self.batch_sampler.start_at(start_iter)


class TestLoader(_Loader):
    """Loader for this rank's part of a test set.

    Images are loaded in order. Worker processes are kept alive between evaluations.
    """

    __test__ = False  # not a pytest class

    def __init__(
        self, dataset: ReidDataset, batch_sampler: InferenceSampler, *, num_workers: int, device: torch.device
    ) -> None:
        super().__init__(dataset, batch_sampler, num_workers=num_workers, persistent=True, device=device)

    def __len__(self) -> int:
        return len(self.batch_sampler)


def worker_count(key: str, requested: int) -> int:
    """Limit the number of workers to the number of available CPU cores.

    Args:
        key: config key that sets the number of workers, for the log.
        requested: number of workers; 0 loads in the calling process.

    Returns:
        ``requested``, or the number of available CPU cores if that is smaller.
    """
    cores = available_cores()
    if requested > cores:
        limit = plural(cores, "worker")
        logger.info("%s is %d; limited to %s, the number of available CPU cores", key, requested, limit)
    return min(requested, cores)


@contextmanager
def explain_lost_workers(*, fetching: bool = False) -> Iterator[None]:
    """Context manager that converts PyTorch's error about a dead worker to a DataError.

    PyTorch's signal handler can raise this error anywhere in the main thread.

    Args:
        fetching: if True, also convert errors about broken connections, which occur if a worker dies while a batch is
            fetched. Default False.
    """
    try:
        yield
    except (RuntimeError, EOFError, ConnectionError) as error:
        reason = str(error).strip()
        if isinstance(error, RuntimeError):
            lost = bool(re.match(r"DataLoader worker \(pid.* (is killed by signal|exited unexpectedly)", reason))
            if "killed by signal" in str(error.__cause__):
                reason = str(error.__cause__).strip()
        else:
            lost = fetching and not reason.startswith("Caught ")  # raised in the worker
            reason = (lost and _dead_worker_message()) or f"{type(error).__name__} while fetching a batch"
        if not lost:
            raise
        cause, fix = "the worker crashed or ran out of memory", "set DATALOADER.NUM_WORKERS to 0 to see the error"
        if "Killed" in reason:
            cause = "probably killed by the operating system, which ran out of memory (see dmesg)"
            fix = "reduce DATALOADER.NUM_WORKERS, or set DATALOADER.CACHE to disk instead of ram"
        elif "Bus error" in reason:
            cause = "shared memory (/dev/shm), which transfers batches from workers, is full"
            fix = "increase shared memory (docker run --shm-size 8g, or --ipc host), or reduce DATALOADER.NUM_WORKERS"
        raise DataError(
            f"a data loading worker exited unexpectedly.\n  found: {reason}\n  cause: {cause}\n  fix:   {fix}"
        ) from error


@contextmanager
def explain_exhausted_resources() -> Iterator[None]:
    """Context manager that raises DataError instead of errors about too little shared memory or too many open files.

    Failures to start a process are converted as well.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        number, reason = error.errno if isinstance(error, OSError) else None, system_cause(error)
        if reason.startswith("Caught "):  # raised in the worker; its traceback follows
            reason = reason.splitlines()[-1]
        workers = "use fewer workers (DATALOADER.NUM_WORKERS, TEST.NUM_WORKERS; 0 loads in the main process)"
        if number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in reason or "ancdata" in reason:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            cause = f"too many open files; the limit is {limit} per process (ulimit -n)"
            fix = f"raise the limit (ulimit -n 4096, docker run --ulimit nofile=4096), or {workers}"
        elif number == errno.ENOSPC or re.match("unable to (open|resize|allocate|mmap)", reason):  # PyTorch's message
            usage = f"{_SHARED_MEMORY}{_shared_memory_usage()}"
            cause = f"shared memory, which transfers batches from workers, is full or too small for a batch: {usage}"
            fix = f"increase shared memory (docker run --shm-size 8g, or --ipc host), or {workers}"
        elif number in (errno.EAGAIN, errno.ENOMEM):
            cause, fix = "cannot start another process: too many processes, or out of memory", workers
        else:
            raise
        raise DataError(f"data loading failed.\n  found: {reason}\n  cause: {cause}\n  fix:   {fix}") from error


def _shared_memory_usage() -> str:
    """Describe the free and total size of shared memory."""
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        return ""
    return f" ({usage.free / 2**20:.1f} of {usage.total / 2**20:.1f} MiB are free)"


def _check_descriptors(count: int) -> None:
    """Raise OSError if this process cannot open ``count`` more files."""
    try:
        # Counted instead of opened: other threads of a worker may need one meanwhile.
        used = len(os.listdir("/dev/fd"))
    except FileNotFoundError:
        logger.debug("cannot count the open files of a process on this system")
        return
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and used + count > limit:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _check_workers_can_start(count: int, context: Any) -> None:
    """Raise OSError if the queues and pipes of ``count`` workers cannot be created.

    Checked in advance because PyTorch's loader does not clean up after such an error.
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
    """Count the tensors in nested dictionaries and sequences."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return int(isinstance(value, torch.Tensor))
    return sum(map(_count_tensors, value))


def _dead_worker_message() -> str:
    """Wait up to 1 s for PyTorch's signal handler to report a dead worker; return its message or ""."""
    try:
        time.sleep(1)
    except RuntimeError as error:
        return str(error).strip()
    return ""


def _identity_collate(batch: Any) -> Any:
    return batch


def start_worker(worker: int) -> None:
    """Initialize a worker: use one thread, and ignore signals sent to the whole process group.

    The main process handles these signals.
    """
    torch.set_num_threads(1)
    set_handler(signal.SIG_IGN, (signal.SIGINT, signal.SIGUSR1))
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_on_parent_sigterm, daemon=True).start()


def _exit_on_parent_sigterm() -> None:
    """Exit this worker on SIGTERM from its parent, and ignore SIGTERM from other processes.

    To stop a job, a scheduler signals all processes of the job, but the main process still needs its workers to finish
    the current step.
    """
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)
