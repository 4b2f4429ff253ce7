"""Declaration of parameters whose rows are divided among the ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@dataclass(frozen=True)
class RowShard:
    """Rows of a parameter that this rank holds: ``start`` and the following ones, out of ``total`` on all ranks.

    A ``ShardedModule`` declares such parameters. Checks that compare ranks, DDP and the initial broadcast then skip
    them, gradient norms are computed over all ranks, and checkpoints contain all rows.

    Attributes:
        start: index of the first row of this rank.
        total: number of rows on all ranks.
    """

    start: int
    total: int


@runtime_checkable
class ShardedModule(Protocol):
    """Module with parameters whose rows are divided: name -> rows, e.g. ``{"weight": RowShard(10, 30)}``.

    Every rank declares the same names.
    """

    row_shards: Mapping[str, RowShard]


def divide_rows(total: int, rank: int, world_size: int) -> tuple[int, int]:
    """Divide ``total`` rows among ranks: ``(start, count)`` of one rank. The first ranks hold one row more."""
    count, more = divmod(total, world_size)
    return rank * count + min(rank, more), count + (rank < more)


def row_shards(model: nn.Module) -> dict[str, RowShard]:
    """Collect the declarations of all modules: full parameter name -> RowShard."""
    return {
        f"{path}.{name}" if path else name: shard
        for path, module in model.named_modules()
        if isinstance(module, ShardedModule)
        for name, shard in module.row_shards.items()
    }


def replicated_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters and buffers that are equal on all ranks: all except those in ``row_shards``."""
    sharded = row_shards(model)
    yield from (parameter for name, parameter in model.named_parameters() if name not in sharded)
    yield from model.buffers()
