"""Norms of gradients whose rows are divided among the ranks."""

from collections.abc import Sequence

import torch

from fastamp.utils import comm


def norms_over_ranks(norms: torch.Tensor, sharded: Sequence[int], order: float = 2.0) -> torch.Tensor:
    """Replace the norms of this rank's rows with the norms of the rows of all ranks.

    Args:
        norms: (N,), norm of each gradient on this rank.
        sharded: indices of the gradients whose rows are divided among the ranks; equal on all ranks.
        order: order p of the norms; inf for the maximum absolute value. Default 2.

    Returns:
        (N,); ``norms`` if ``sharded`` is empty or in a single process.
    """
    if not sharded or not comm.is_distributed():
        return norms
    index = torch.tensor(list(sharded), device=norms.device)
    local_norms = norms[index].double()
    if order == float("inf"):
        whole = comm.all_reduce_max(local_norms)
    else:
        whole = comm.all_reduce_sum(local_norms.pow(order)).pow(1 / order)
    return norms.index_copy(0, index, whole.to(norms.dtype))
