"""Processes of a group without an import for each: forked from one that has imported, and computed nothing yet."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist


def run_forked(function: Callable[..., Any], processes: int, folder: Path, *args: Any, backend: str = "gloo") -> None:
    """Call ``function(*args)`` in each of a group of processes, which meet in ``folder``.

    Raises:
        SystemExit: one failed.
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
