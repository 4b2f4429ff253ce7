"""Rows of sharded parameters in checkpoints: a checkpoint holds all rows, whatever the number of processes."""

from collections.abc import Mapping

import torch
from torch import nn

from fastamp.utils import comm
from fastamp.utils.sharding import RowShard, row_shards


def gather_rows(state: Mapping[str, torch.Tensor], shards: Mapping[str, RowShard]) -> dict[str, torch.Tensor]:
    """Replace the rows of this rank with those of all ranks. Must be called on every rank.

    Args:
        state: name -> tensor, e.g. a state dict.
        shards: parameter name -> rows of this rank, as ``row_shards`` returns them.

    Returns:
        ``state``, in which the tensors named in ``shards`` have all rows, on the CPU.
    """
    return {name: comm.gather_rows(value) if name in shards else value for name, value in state.items()}


def select_rows(
    state: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor], shards: Mapping[str, RowShard]
) -> dict[str, torch.Tensor]:
    """Replace the tensors that have all rows with the rows of this rank; other tensors are returned unchanged.

    Args:
        state: name -> tensor of a checkpoint.
        local: name -> tensor of this rank, whose number of rows is selected.
        shards: see ``gather_rows``.
    """
    selected = dict(state)
    for name in shards.keys() & state.keys():
        shard, value = shards[name], state[name]
        if value.dim() and len(value) == shard.total:
            # Copied, because a view would keep all rows in memory.
            selected[name] = value[shard.start : shard.start + len(local[name])].clone()
    return selected


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a model with all rows of sharded parameters. Must be called on every rank."""
    state = model.state_dict()
    shards = row_shards(model)
    return gather_rows(state, shards) if shards else state


def full_state_form(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a model in which sharded parameters have their full shape, on the meta device."""
    state = model.state_dict()
    for name, shard in row_shards(model).items():
        state[name] = torch.empty(shard.total, *state[name].shape[1:], dtype=state[name].dtype, device="meta")
    return state


def load_full_state(model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
    """Load a state dict with all rows of sharded parameters into the model of this rank."""
    shards = row_shards(model)
    model.load_state_dict(select_rows(state, model.state_dict(), shards) if shards else state, strict=strict)
