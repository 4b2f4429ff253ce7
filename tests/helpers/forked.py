"""Fork the processes of a group to avoid importing PyTorch in each; the parent must not have run an operator yet."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from fastamp.engine import launch


def launch_forked(main: Callable[..., Any], *numbers: Any, args: tuple[Any, ...]) -> None:
    """Call ``launch`` such that it forks processes instead of spawning them."""
    fork = multiprocessing.get_context("fork")
    with mock.patch("multiprocessing.get_context", lambda method: fork):
        launch(main, *numbers, args=args)


def run_forked(function: Callable[..., Any], processes: int, folder: Path, *args: Any, backend: str = "gloo") -> None:
    """Call ``function(*args)`` in a process group of forked processes.

    Args:
        function: called in each process.
        processes: number of processes.
        folder: folder for the rendezvous file.
        args: arguments of ``function``.
        backend: backend of the process group. Default ``"gloo"``.

    Raises:
        SystemExit: if a process failed.
    """
    children = []
    for rank in range(processes):
        child = os.fork()
        if child:
            children.append(child)
            continue
        try:
            meeting = f"file://{folder}/meeting_of_{processes}"
            dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=processes)
            function(*args)
            dist.barrier()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    if any(statuses):
        raise SystemExit(1)
