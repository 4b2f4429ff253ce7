"""Start the processes of a training, and end them together."""

import gc
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fastamp.engine.command_line import GRACE_SECONDS, Outcome, outcome_of, say
from fastamp.utils import comm
from fastamp.utils.env import available_cores
from fastamp.utils.errors import ConfigError

_READY = "ready"


def launch(
    main_func: Callable[..., Any],
    num_gpus_per_machine: int = 1,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str | None = None,
    args: tuple[Any, ...] = (),
) -> Any:
    """Call ``main_func(*args)`` in each process of the training, with the process group up.

    Under torchrun this process is one of them. Otherwise one process for each of ``num_gpus_per_machine`` is
    started, or none when that is one. Each has its own CUDA device where there are that many, and computes on the CPU
    otherwise if ``MODEL.DEVICE`` says so.

    Args:
        main_func: a function that a new process can import.
        num_gpus_per_machine, num_machines, machine_rank: processes on each machine, and which machine this is, from 0.
        dist_url: where the processes meet, e.g. ``tcp://127.0.0.1:29500``; None is a free port of this machine.
        args: of ``main_func``.

    Returns:
        What ``main_func`` returned; None where it ran in other processes.

    Raises:
        ConfigError: numbers that do not fit each other, or several machines without a ``dist_url``.
        SystemExit: a process that was started failed, with its exit code.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ:
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        with _process_group(local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", 1)), init_method="env://"):
            return main_func(*args)
    if num_gpus_per_machine < 1 or num_machines < 1 or not 0 <= machine_rank < num_machines:
        raise ConfigError(
            f"--num-gpus {num_gpus_per_machine} --num-machines {num_machines} --machine-rank {machine_rank}: expected "
            "at least one GPU and one machine, and a rank from 0 up to, not including, the number of machines"
        )
    if num_gpus_per_machine * num_machines == 1:
        return main_func(*args)
    if dist_url in (None, "auto"):
        if num_machines > 1:
            raise ConfigError("several machines need --dist-url, e.g. tcp://<address of machine 0>:29500")
        dist_url = f"tcp://127.0.0.1:{_free_port()}"
    _spawn(main_func, num_gpus_per_machine, num_machines, machine_rank, dist_url, args)
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _process_group(local_rank: int, local_size: int, **group: Any) -> Iterator[None]:
    """Keep a process group up inside, with gloo for tensors on the host and NCCL for those on CUDA devices."""
    backend = "gloo"
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        torch.cuda.set_device(local_rank)  # before anything communicates, or all would use the first device
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, **group)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"the processes of the training could not meet ({str(error).splitlines()[0]}).\n"
            "  fix: check --dist-url, --num-machines and --machine-rank, or torchrun's --rdzv-endpoint"
        ) from error
    yield
    # Not after an error: the other ranks may be waiting, and NCCL would wait for them. All together, and when nothing
    # uses the group any more: of gloo's groups, one that a DDP model still held did not come down once in 14 runs.
    comm.synchronize()
    gc.collect()
    dist.destroy_process_group()


def _spawn(
    main_func: Callable[..., Any], local_size: int, num_machines: int, machine_rank: int, dist_url: str, args: Any
) -> None:
    """Run ``main_func`` in ``local_size`` new processes; when one fails, end the others and say why.

    Raises:
        SystemExit: one failed.
    """
    context = multiprocessing.get_context("spawn")
    # What PyTorch shares among cores, the processes have to share.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // local_size))
    ranks: list[_Rank] = []
    with _environment(OMP_NUM_THREADS=threads), _signals_forwarded(ranks):
        for local_rank in range(local_size):
            rank = machine_rank * local_size + local_rank
            group = {"init_method": dist_url, "world_size": num_machines * local_size, "rank": rank}
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker, args=(main_func, local_rank, local_size, group, sys.argv, args, sender)
            )
            with _sigint_ignored():
                process.start()
            sender.close()  # so that the end of the process ends the pipe
            ranks.append(_Rank(rank, process, receiver))
        deadline = None
        while any(rank.outcome is None for rank in ranks) and (deadline is None or time.monotonic() < deadline):
            open_pipes = [rank.pipe for rank in ranks if rank.outcome is None]
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            for pipe in multiprocessing.connection.wait(open_pipes, left):
                next(rank for rank in ranks if rank.pipe is pipe).receive()
            if deadline is None and any(rank.outcome and rank.outcome.code for rank in ranks):
                # What is wrong for all is soon said by all; whoever waits for a lost one says nothing.
                deadline = time.monotonic() + GRACE_SECONDS
        failed = [rank for rank in ranks if rank.outcome and rank.outcome.code]
        if failed:
            for rank in ranks:
                rank.process.kill()  # waiting in a collective, one would not notice anything gentler
        for rank in ranks:
            rank.process.join()
    if failed:
        for message in dict.fromkeys(rank.outcome.message for rank in failed):
            number = next(rank.number for rank in failed if rank.outcome.message == message)
            say(message, number)
        raise SystemExit(min(failed, key=lambda rank: not rank.outcome.message).outcome.code)


class _Rank:
    """A process that was started, and how it ended.

    Args:
        number: its rank.
        process: the process.
        pipe: where it says that it is ready, and later what its outcome is.
    """

    def __init__(self, number: int, process: Any, pipe: Any) -> None:
        self.number, self.process, self.pipe = number, process, pipe
        self.ready = False
        self.signalled: int | None = None
        self.outcome: Outcome | None = None

    def receive(self) -> None:
        """Take what the process has sent, or find out how it ended without sending an outcome."""
        try:
            message = self.pipe.recv()
        except EOFError:
            self.process.join()
            code = self.process.exitcode or 0
            if code < 0 and self.signalled:
                self.outcome = Outcome(128 + self.signalled, "interrupted")
            elif code < 0:
                name = signal.Signals(-code).name
                self.outcome = Outcome(128 - code, f"the process of rank {self.number} was ended by {name}")
            else:
                self.outcome = Outcome(code)
            return
        if message == _READY:
            self.ready = True
        else:
            self.outcome = message

    def signal(self, number: int) -> None:
        """Pass a signal on; a process that is not ready for it is ended."""
        if self.process.exitcode is None:
            self.signalled = number
            os.kill(self.process.pid, number if self.ready else signal.SIGTERM)


def _worker(
    main_func: Callable[..., Any],
    local_rank: int,
    local_size: int,
    group: dict[str, Any],
    argv: list[str],
    args: Any,
    pipe: Any,
) -> None:
    """Be one process of the training, and report how it ended."""
    sys.argv = argv
    # A terminal's Ctrl-C goes to the first process alone, which passes it on as it does a scheduler's signal.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    pipe.send(_READY)

    def run() -> None:
        with _process_group(local_rank, local_size, **group):
            main_func(*args)

    try:
        outcome = outcome_of(run)
    except Exception:  # a bug of ours or of the user's own code
        traceback.print_exc()
        outcome = Outcome(1)
    pipe.send(outcome)
    if outcome.code:
        # While this process is there, those that wait for it do not fail in their turn, with errors that mislead.
        time.sleep(10 * GRACE_SECONDS)
    sys.exit(outcome.code)


@contextmanager
def _sigint_ignored() -> Iterator[None]:
    """For a process that starts inside, which would otherwise print a traceback for a Ctrl-C while it imports."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _signals_forwarded(ranks: list["_Rank"]) -> Iterator[None]:
    """Pass SIGINT and SIGTERM on to the processes, and leave it to them what these do."""

    def forward(number: int, frame: Any) -> None:
        for rank in ranks:
            rank.signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
