"""Rank, world size and the few collectives that fastamp uses; all are no-ops in a single process."""

import torch
import torch.distributed as dist


def is_distributed() -> bool:
    """Whether a process group of more than one process is up."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def get_rank() -> int:
    """This process's number, 0 when there is one process only."""
    return dist.get_rank() if is_distributed() else 0


def get_world_size() -> int:
    """The number of processes, at least 1."""
    return dist.get_world_size() if is_distributed() else 1


def is_main_process() -> bool:
    """Whether this process writes files and prints results."""
    return get_rank() == 0


def synchronize() -> None:
    """Wait until every process has come here."""
    if is_distributed():
        dist.barrier()


def all_reduce_min(tensor: torch.Tensor) -> torch.Tensor:
    """Return the element-wise minimum of ``tensor`` over all ranks (``tensor`` itself when alone)."""
    if not is_distributed():
        return tensor
    reduced = tensor.clone()
    dist.all_reduce(reduced, op=dist.ReduceOp.MIN)
    return reduced
