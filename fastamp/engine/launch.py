"""Launch the processes of a distributed run and shut them down together.

``torch.distributed.elastic`` is not used because of its agent in PyTorch 2.6, the oldest supported version. That agent
has no handler for SIGUSR1: it exits with code 138 while the ranks are still saving. It also kills the ranks 30 s after
SIGINT or SIGTERM, although writing a checkpoint may take 60 s. Neither is configurable in that version (later versions
have ``signals_to_handle`` and ``shutdown_timeout``). An agent monitors only the processes on its machine.
Detecting a failure on another machine, or in a run that sets ``RANK`` and ``WORLD_SIZE`` without an agent, therefore
requires ``failure_monitor`` in any case.
"""

import gc
import logging
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from fastamp.config import read_config
from fastamp.engine import torchrun
from fastamp.engine.failure_monitor import (
    GRACE_SECONDS,
    FailureMonitor,
    connect,
    is_consequence,
    is_timeout,
    select_causes,
)
from fastamp.utils import comm
from fastamp.utils.command_line import Outcome, print_exit_message, run_and_capture
from fastamp.utils.env import available_cores
from fastamp.utils.errors import ConfigError, UserError
from fastamp.utils.signals import handling, set_handler

_READY = "ready"
_POLL_SECONDS = 0.5

_group_timeout: timedelta | None = None


def launch(
    main_func: Callable[..., Any],
    num_gpus_per_machine: int = 1,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str | None = None,
    args: tuple[Any, ...] = (),
    timeout: timedelta | None = None,
    device: str | None = None,
) -> Any:
    """Run ``main_func(*args)`` in every process of a run, with the process group initialized.

    Under torchrun, all processes have already been started, and ``main_func`` runs in the current process. Otherwise,
    ``launch`` starts ``num_gpus_per_machine`` processes, or runs ``main_func`` in the current process if the run has
    only one process. If the machine has enough CUDA devices, each process selects its own. If a process fails, its
    error is printed, and all processes on all machines exit with its exit code.

    ``timeout`` and ``device`` are needed before ``main_func`` reads the config. By default, they are read from the
    config that ``args`` names, if one of ``args`` has the attributes ``config_file`` and ``opts``, as the arguments of
    ``default_argument_parser``.

    Args:
        main_func: function that other processes can import.
        num_gpus_per_machine: processes per machine. Default 1.
        num_machines: number of machines. Default 1.
        machine_rank: index of this machine, 0..num_machines-1. Default 0.
        dist_url: rendezvous address, e.g. ``tcp://127.0.0.1:29500``. None and ``"auto"`` select a free port of this
            machine.
        args: arguments of ``main_func``.
        timeout: timeout of the rendezvous and of each collective. Default: see above and ``DIST_TIMEOUT_MINUTES``;
            without a config, PyTorch's default.
        device: ``MODEL.DEVICE``. Processes on a CPU do not use CUDA. Default: see above; without a config, ``"auto"``.

    Returns:
        The result of ``main_func``; None if it ran in other processes.

    Raises:
        ConfigError: if the number of processes or machines or the machine rank is invalid, if ``dist_url`` is missing
            in a run on several machines, or if the rendezvous fails.
        SystemExit: if a process started by this function fails; the code is the exit code of that process. Under
            torchrun, the current process exits without raising.
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
        group: dict[str, Any] = {"init_method": "env://", "timeout": timeout, "device": device}
        return _run_in_group(main_func, args, local_rank, local_size, report_causes, wait, **group)
    if num_gpus_per_machine < 1 or num_machines < 1 or not 0 <= machine_rank < num_machines:
        raise ConfigError(
            "invalid number of GPUs or machines, or invalid machine rank: expected at least one GPU, at least one "
            "machine, and 0 <= machine rank < number of machines.\n"
            f"  found: --num-gpus {num_gpus_per_machine} --num-machines {num_machines} --machine-rank {machine_rank}\n"
            "  fix: correct these three options; the first machine has rank 0"
        )
    if num_gpus_per_machine * num_machines == 1:
        return main_func(*args)
    if dist_url in (None, "auto"):
        if num_machines > 1:
            raise ConfigError(
                f"--num-machines {num_machines} requires --dist-url.\n"
                "  fix: add --dist-url tcp://<address of machine 0>:29500"
            )
        dist_url = f"tcp://127.0.0.1:{_free_port()}"
    group = {"init_method": dist_url, "timeout": timeout, "device": device}
    _spawn(main_func, num_gpus_per_machine, num_machines, machine_rank, group, args)
    return None


def group_timeout() -> timedelta | None:
    """Return the timeout with which ``launch`` initialized the process group; None for PyTorch's default."""
    return _group_timeout


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
    *,
    timeout: timedelta | None = None,
    device: str | None = None,
    **group: Any,
) -> Any:
    """Initialize the process group and run ``main_func(*args)``. If this fails, all processes of the run exit.

    Args:
        local_rank, local_size: rank within this machine, and number of processes on it.
        report_causes, wait_before_exit: see ``FailureMonitor``.
        timeout, device: see ``launch``.
        group: further keyword arguments of ``init_process_group``. CPU tensors use gloo, CUDA tensors NCCL.

    Raises:
        ConfigError: if the rendezvous fails.
    """
    global _group_timeout
    failure = None
    if timeout is None or device is None:
        try:
            configured = _read_settings(args)
            timeout, device = timeout or configured[0], device or configured[1]
        except Exception as error:
            failure = error  # raised below, so that it is reported once for all ranks
    backend = "gloo"
    uses_cuda = device is None or device.startswith(("auto", "cuda"))
    if uses_cuda and torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        torch.cuda.set_device(local_rank)  # before the first collective, or all ranks would use device 0
        backend = "cpu:gloo,cuda:nccl"
        group["device_id"] = torch.device("cuda", local_rank)
    if timeout is not None:
        group["timeout"] = timeout
    _group_timeout = timeout
    try:
        dist.init_process_group(backend, **group)
        host = urlsplit(group["init_method"]).hostname or os.environ.get("MASTER_ADDR")
        connections = connect("127.0.0.1" if dist.get_world_size() == local_size else host)
        monitor = FailureMonitor(connections, report_causes, wait_before_exit)
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"rendezvous of the training processes failed: {str(error).splitlines()[0]}.\n"
            "  fix: check --dist-url, --num-machines and --machine-rank, or torchrun's --rdzv-endpoint"
        ) from error
    results: list[Any] = []

    def run() -> None:
        if failure is not None:
            raise failure
        results.append(main_func(*args))
        comm.synchronize()

    outcome = _run_and_capture_all(run)
    if outcome.code:
        monitor.fail(outcome)
    monitor.close()
    # Release DDP models first: a gloo group still referenced by one failed to shut down in 1 of 14 runs.
    gc.collect()
    dist.destroy_process_group()
    return results[0] if results else None


@runtime_checkable
class CommandLine(Protocol):
    """Parsed arguments of ``default_argument_parser``."""

    config_file: str
    opts: Sequence[str]


def _read_settings(args: tuple[Any, ...]) -> tuple[timedelta | None, str]:
    """Read ``timeout`` and ``device`` of ``launch`` from the config that ``args`` names.

    If the config is invalid, the defaults are returned: ``main_func`` may define further keys; else it reports the
    error.
    """
    named = next((arg for arg in args if isinstance(arg, CommandLine)), None)
    if named is None:
        return None, "auto"
    plugin = vars(named).get("plugin", "")
    before = logging.root.manager.disable
    logging.disable()  # main_func reads the config again, and logs the same lines
    try:
        cfg = read_config(named.config_file, named.opts or [], plugin=plugin)
    except UserError:
        if plugin:  # it is not run again
            raise
        return None, "auto"
    finally:
        logging.disable(before)
    minutes = cfg.DIST_TIMEOUT_MINUTES
    return timedelta(minutes=minutes) if minutes else None, cfg.MODEL.DEVICE


def _run_and_capture_all(command: Callable[[], Any]) -> Outcome:
    """Run ``command`` like ``run_and_capture``, but return the traceback and code 1 for any other exception."""
    try:
        return run_and_capture(command)
    except SystemExit as stop:
        return Outcome(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
    except BaseException as error:
        text = traceback.format_exc().rstrip()
        if is_timeout(error):
            return Outcome(1, text, kind="timeout")
        return Outcome(1, text, kind="consequence" if is_consequence(error) else "cause")


def _spawn(
    main_func: Callable[..., Any],
    local_size: int,
    num_machines: int,
    machine_rank: int,
    group: dict[str, Any],
    args: Any,
) -> None:
    """Run ``main_func`` in ``local_size`` new processes; if one fails, end the others and print the cause.

    Raises:
        SystemExit: if a process fails.
    """
    context = multiprocessing.get_context("spawn")
    # Divide the cores among the processes.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // local_size))
    ranks: list[_RankProcess] = []

    def forward(number: int, frame: Any) -> None:
        for rank in ranks:
            rank.signal(number)

    with _environment(OMP_NUM_THREADS=threads), handling(forward):
        for local_rank in range(local_size):
            number = machine_rank * local_size + local_rank
            process_options = {"world_size": num_machines * local_size, "rank": number}
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker,
                args=(main_func, local_rank, local_size, group | process_options, sys.argv, args, sender),
            )
            # Ctrl-C during the imports of the new process would print a traceback.
            with handling(signal.SIG_IGN, [signal.SIGINT]):
                process.start()
            sender.close()  # the pipe then closes when the process exits
            ranks.append(_RankProcess(number, process, receiver))
        deadline = None
        while any(rank.outcomes is None for rank in ranks) and (deadline is None or time.monotonic() < deadline):
            waiting = [rank for rank in ranks if rank.outcomes is None]
            # The exit code is checked as well: forked children, e.g. data loader workers, may keep the pipe open.
            ready = multiprocessing.connection.wait([rank.pipe for rank in waiting], _POLL_SECONDS)
            for rank in waiting:
                if rank.pipe in ready or rank.process.exitcode is not None:
                    rank.receive()
            if deadline is None and any(rank.failed for rank in ranks):
                # The failure monitor notifies all ranks at once; ranks that are not connected yet report nothing.
                deadline = time.monotonic() + 2 * GRACE_SECONDS
        failed = any(rank.failed for rank in ranks)
        if failed:
            for rank in ranks:
                rank.process.kill()  # a process blocked in a collective ignores SIGTERM
        for rank in ranks:
            rank.process.join()
    if failed:
        # For lost processes of this machine, the exit code is more precise than the report of rank 0.
        local = {
            outcome.rank: outcome for rank in ranks for outcome in rank.outcomes or () if outcome.rank == rank.number
        }
        outcomes = [outcome for rank in ranks for outcome in rank.outcomes or ()]
        causes = select_causes(
            local.get(outcome.rank, outcome) if outcome.kind == "lost" else outcome for outcome in outcomes
        )
        for cause in causes:
            print_exit_message(cause)
        raise SystemExit(causes[0].code)


class _RankProcess:
    """Process that was started for one rank, and the outcome of the process.

    Args:
        number: rank of the process.
        process: the process.
        pipe: connection on which the process sends ``_READY``, and later the list of outcomes.
    """

    def __init__(self, number: int, process: Any, pipe: Any) -> None:
        self.number, self.process, self.pipe = number, process, pipe
        self.ready = False
        self.signaled: int | None = None
        self.outcomes: list[Outcome] | None = None

    @property
    def failed(self) -> bool:
        """True if a reported outcome has a nonzero exit code."""
        return any(outcome.code for outcome in self.outcomes or ())

    def receive(self) -> None:
        """Receive a message. If the process exited without sending one, derive the outcome from its exit code."""
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
            return Outcome(code, f"the process of rank {self.number} exited with code {code}", self.number, "lost")
        if self.signaled:
            return Outcome(128 + self.signaled, "interrupted", self.number, "lost")
        message = f"the process of rank {self.number} was terminated by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            message += ", e.g. by the out-of-memory killer (check dmesg)"
        return Outcome(128 - code, message, self.number, "lost")

    def signal(self, number: int) -> None:
        """Forward a signal to the process, or send SIGTERM if the process has not yet installed its handlers."""
        if self.process.exitcode is None:
            self.signaled = number
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
    """Run one rank and send its outcome through ``pipe``. The environment names its place, as under torchrun."""
    sys.argv = argv
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_size))
    # Only the parent receives Ctrl-C from the terminal; it forwards it like the signals of a scheduler.
    os.setpgid(0, 0)
    set_handler(signal.SIG_DFL, [signal.SIGINT])
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    pipe.send(_READY)
    outcome = _run_and_capture_all(lambda: _run_in_group(main_func, args, local_rank, local_size, pipe.send, **group))
    pipe.send([replace(outcome, rank=group["rank"])])
    sys.exit(outcome.code)


def _exit_with_parent() -> None:
    """Exit when the parent process has ended without forwarding a signal, e.g. because the parent was killed."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
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
