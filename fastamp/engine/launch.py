"""Start the processes of a training, and end them together.

torch.distributed.elastic is not used, since with PyTorch 2.6, the oldest supported version, a run could not save after
a signal: the agent has no handler for SIGUSR1, which ends it at once with code 138 while the ranks still save, and it
kills the ranks 30 s after SIGINT or SIGTERM, also where a checkpoint takes 60 s to write. Neither can be configured
there; later versions have ``signals_to_handle`` and ``shutdown_timeout``. An agent sees the processes of its machine
alone: a failure on another machine, or under ``RANK`` and ``WORLD_SIZE`` without an agent, needs ``monitor`` anyway.
"""

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
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from fastamp.engine import torchrun
from fastamp.engine.command_line import print_exit_message, run_and_capture
from fastamp.engine.failure_monitor import (
    GRACE_SECONDS,
    FailureMonitor,
    Outcome,
    connect,
    is_consequence,
    select_causes,
)
from fastamp.utils import comm
from fastamp.utils.env import available_cores
from fastamp.utils.errors import ConfigError
from fastamp.utils.signals import handling, set_handler

_READY = "ready"
_POLL_SECONDS = 0.5


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
    otherwise if ``MODEL.DEVICE`` says so. When one fails all end, on every machine, with its error and exit code.

    Args:
        main_func: a function that a new process can import.
        num_gpus_per_machine, num_machines, machine_rank: processes on each machine, and which machine this is, from 0.
        dist_url: where the processes meet, e.g. ``tcp://127.0.0.1:29500``; None is a free port of this machine.
        args: of ``main_func``.

    Returns:
        What ``main_func`` returned; None where it ran in other processes.

    Raises:
        ConfigError: numbers that do not fit each other, or several machines without a ``dist_url``.
        SystemExit: a process that was started failed, with its exit code. Under torchrun the process itself ends.
    """
    if torchrun.is_worker():
        torchrun.exit_with_agent()
    if int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ:
        local_rank, local_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))

        def report_causes(causes: list[Outcome]) -> None:
            # The first remaining process of each machine reports.
            first, lost = comm.get_rank() - local_rank, {cause.rank for cause in causes if cause.kind == "lost"}
            if all(rank in lost for rank in range(first, comm.get_rank())):
                for cause in causes:
                    print_exit_message(cause)

        wait = torchrun.wait_for_other_agents if torchrun.is_worker() else None
        return _run_in_group(main_func, args, local_rank, local_size, report_causes, wait, init_method="env://")
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


def _run_in_group(
    main_func: Callable[..., Any],
    args: tuple[Any, ...],
    local_rank: int,
    local_size: int,
    report_causes: Callable[[list[Outcome]], None],
    wait_before_exit: Callable[[], None] | None = None,
    **group: Any,
) -> Any:
    """Return what ``main_func(*args)`` returns with the process group up; a failure ends this process and all others.

    Args:
        local_rank, local_size: which of this machine's processes this is, and how many these are.
        report_causes: gets the causes before this process ends.
        wait_before_exit: returns when it may end after a failure; None ends it at once.
        group: of ``init_process_group``. Tensors on the host travel by gloo, those on CUDA devices by NCCL.

    Raises:
        ConfigError: the processes could not meet.
    """
    backend = "gloo"
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        torch.cuda.set_device(local_rank)  # before anything communicates, or all would use the first device
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(backend, **group)
        host = urlsplit(group["init_method"]).hostname or os.environ.get("MASTER_ADDR")
        connections = connect("127.0.0.1" if dist.get_world_size() == local_size else host)
        monitor = FailureMonitor(connections, report_causes, wait_before_exit)
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"the processes of the training could not meet ({str(error).splitlines()[0]}).\n"
            "  fix: check --dist-url, --num-machines and --machine-rank, or torchrun's --rdzv-endpoint"
        ) from error
    results: list[Any] = []

    def run() -> None:
        results.append(main_func(*args))
        comm.synchronize()

    outcome = _run_and_capture_all(run)
    if outcome.code:
        monitor.fail(outcome)
    monitor.close()
    # Together, and when nothing uses the group any more: of gloo's groups, one that a DDP model still held did not come
    # down once in 14 runs.
    gc.collect()
    dist.destroy_process_group()
    return results[0] if results else None


def _run_and_capture_all(command: Callable[[], Any]) -> Outcome:
    """Run ``command``; see ``run_and_capture``. A bug is an outcome too, with its traceback."""
    try:
        return run_and_capture(command)
    except SystemExit as stop:
        return Outcome(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
    except BaseException as error:
        kind = "consequence" if is_consequence(error) else "cause"
        return Outcome(1, traceback.format_exc().rstrip(), kind=kind)


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
    ranks: list[_RankProcess] = []

    def forward(number: int, frame: Any) -> None:
        for rank in ranks:
            rank.signal(number)

    with _environment(OMP_NUM_THREADS=threads), handling(forward):
        for local_rank in range(local_size):
            rank = machine_rank * local_size + local_rank
            group = {"init_method": dist_url, "world_size": num_machines * local_size, "rank": rank}
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker, args=(main_func, local_rank, local_size, group, sys.argv, args, sender)
            )
            # A process that starts would print a traceback for a Ctrl-C while it imports.
            with handling(signal.SIG_IGN, [signal.SIGINT]):
                process.start()
            sender.close()  # so that the end of the process ends the pipe
            ranks.append(_RankProcess(rank, process, receiver))
        deadline = None
        while any(rank.outcomes is None for rank in ranks) and (deadline is None or time.monotonic() < deadline):
            waiting = [rank for rank in ranks if rank.outcomes is None]
            # Not the end of the pipe alone: what the process has forked, e.g. to load data, may hold that open.
            ready = multiprocessing.connection.wait([rank.pipe for rank in waiting], _POLL_SECONDS)
            for rank in waiting:
                if rank.pipe in ready or rank.process.exitcode is not None:
                    rank.receive()
            if deadline is None and any(rank.failed for rank in ranks):
                # The cause reaches all together; whoever is not yet there to hear it says nothing.
                deadline = time.monotonic() + 2 * GRACE_SECONDS
        failed = any(rank.failed for rank in ranks)
        if failed:
            for rank in ranks:
                rank.process.kill()  # waiting in a collective, one would not notice anything gentler
        for rank in ranks:
            rank.process.join()
    if failed:
        # What became of a lost process of this machine is known best here.
        local = {each.rank: each for rank in ranks for each in rank.outcomes or () if each.rank == rank.number}
        outcomes = [each for rank in ranks for each in rank.outcomes or ()]
        causes = select_causes(local.get(each.rank, each) if each.kind == "lost" else each for each in outcomes)
        for cause in causes:
            print_exit_message(cause)
        raise SystemExit(causes[0].code)


class _RankProcess:
    """A process that was started, and how it ended.

    Args:
        number: its rank.
        process: the process.
        pipe: where it says that it is ready, and later how all ended, as far as it knows.
    """

    def __init__(self, number: int, process: Any, pipe: Any) -> None:
        self.number, self.process, self.pipe = number, process, pipe
        self.ready = False
        self.signalled: int | None = None
        self.outcomes: list[Outcome] | None = None

    @property
    def failed(self) -> bool:
        """Whether it is known to have ended with another code than 0."""
        return any(outcome.code for outcome in self.outcomes or ())

    def receive(self) -> None:
        """Take what the process has sent, or find out how it ended without a word."""
        try:
            message = self.pipe.recv() if self.pipe.poll() else None
        except EOFError:
            message = None
        if message is None:
            self.process.join()
            self.outcomes = [self._outcome_from_exit_code(self.process.exitcode)]
        elif message == _READY:
            self.ready = True
        else:
            self.outcomes = message

    def _outcome_from_exit_code(self, code: int) -> Outcome:
        if code >= 0:
            return Outcome(code, f"the process of rank {self.number} ended with code {code}", self.number, "lost")
        if self.signalled:
            return Outcome(128 + self.signalled, "interrupted", self.number, "lost")
        message = f"the process of rank {self.number} was ended by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            message += ", e.g. by the system when memory ran out (its log, dmesg, would say so)"
        return Outcome(128 - code, message, self.number, "lost")

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
    set_handler(signal.SIG_DFL, [signal.SIGINT])
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    pipe.send(_READY)
    outcome = _run_and_capture_all(lambda: _run_in_group(main_func, args, local_rank, local_size, pipe.send, **group))
    pipe.send([replace(outcome, rank=group["rank"])])
    sys.exit(outcome.code)


def _exit_with_parent() -> None:
    """End this process when the one that started it is gone, e.g. killed, and could neither stop nor signal it."""
    multiprocessing.parent_process().join()
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)


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
