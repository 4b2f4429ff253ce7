"""FastReID's functions for distributed training."""

import os
from typing import Any

import torch
import torch.distributed as dist

from fastamp.utils import comm
from fastamp.utils.comm import get_rank, get_world_size, is_main_process, synchronize

__all__ = [
    "all_gather",
    "gather",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "is_main_process",
    "reduce_dict",
    "shared_random_seed",
    "synchronize",
]


def get_local_rank() -> int:
    """Return the rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def get_local_size() -> int:
    """Return the number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", comm.get_world_size()))


def gather(data: Any, dst: int = 0, group: Any = None) -> list[Any]:
    """Gather picklable objects of all ranks on rank ``dst``; other ranks get an empty list."""
    if not comm.is_distributed():
        return [data]
    gathered = [None] * comm.get_world_size() if comm.get_rank() == dst else None
    dist.gather_object(data, gathered, dst=dst, group=group)
    return gathered or []


def all_gather(data: Any, group: Any = None) -> list[Any]:
    """Gather picklable objects of all ranks on each rank."""
    if not comm.is_distributed():
        return [data]
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, data, group=group)
    return gathered


def shared_random_seed() -> int:
    """Draw a random seed on rank 0, and return it on all ranks."""
    return int(comm.broadcast_scalar(int(torch.randint(2**31, ()).item())))


@torch.no_grad()
def reduce_dict(input_dict: dict[str, torch.Tensor], average: bool = True) -> dict[str, torch.Tensor]:
    """Average (or add) scalar tensors over the ranks.

    Args:
        input_dict: name -> scalar tensor; the same names on all ranks.
        average: divide by the number of ranks. Default True.

    Returns:
        Name -> result, on all ranks.
    """
    if not comm.is_distributed() or not input_dict:
        return input_dict
    names = sorted(input_dict)
    total = comm.all_reduce_sum(torch.stack([input_dict[name] for name in names]))
    return dict(zip(names, total / comm.get_world_size() if average else total, strict=True))
