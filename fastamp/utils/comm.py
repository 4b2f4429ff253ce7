"""Rank, world size and collectives. In a single process, collectives return their input."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastamp.utils.sharding import row_shards

_as_single_process = False


def is_distributed() -> bool:
    """Return True if a process group with more than one process is initialized."""
    return not _as_single_process and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def get_rank() -> int:
    """Return the rank of this process; 0 in a single process."""
    return dist.get_rank() if is_distributed() else 0


def get_world_size() -> int:
    """Return the number of processes, at least 1."""
    return dist.get_world_size() if is_distributed() else 1


def is_main_process() -> bool:
    """Return True on rank 0, which writes files and prints results."""
    return get_rank() == 0


@contextmanager
def as_single_process() -> Iterator[None]:
    """Act as a single process inside the context, e.g. on one rank only, or after the other ranks have ended."""
    global _as_single_process
    before, _as_single_process = _as_single_process, True
    try:
        yield
    finally:
        _as_single_process = before


@contextmanager
def main_process_first() -> Iterator[None]:
    """Run the body of the context in the main process first, then in the other processes."""
    if not is_main_process():
        synchronize()
    try:
        yield
    finally:
        if is_main_process():
            synchronize()


def transport_device() -> torch.device:
    """Return the device for collectives on data in CPU memory: the CPU if the process group supports it, else CUDA."""
    return torch.device("cpu" if "cpu" in dist.get_backend_config() else "cuda")


def synchronize() -> None:
    """Wait for all processes (barrier)."""
    if is_distributed():
        dist.all_reduce(torch.zeros(1, device=transport_device()))


def all_reduce_min(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the element-wise minimum of ``tensor`` over all ranks."""
    return _all_reduce(tensor, dist.ReduceOp.MIN) if is_distributed() else tensor


def all_reduce_max(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the element-wise maximum of ``tensor`` over all ranks."""
    return _all_reduce(tensor, dist.ReduceOp.MAX) if is_distributed() else tensor


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the element-wise sum of ``tensor`` over all ranks."""
    return _all_reduce(tensor, dist.ReduceOp.SUM) if is_distributed() else tensor


def _all_reduce(tensor: torch.Tensor, operation: "dist.ReduceOp.RedOpType") -> torch.Tensor:
    reduced = tensor.clone()
    dist.all_reduce(reduced, op=operation)
    return reduced


def max_over_ranks(number: float) -> float:
    """Compute the maximum of ``number`` over all ranks."""
    if not is_distributed():
        return number
    value = torch.tensor(number, dtype=torch.float64, device=transport_device())
    return _all_reduce(value, dist.ReduceOp.MAX).item()


def any_across_ranks(flag: bool) -> bool:
    """Return True if ``flag`` is true on at least one rank."""
    return bool(max_over_ranks(flag))


class RankMaxima:
    """Compute maxima of numbers over all ranks, in the same all-reduce as the verdict of a step.

    A separate all-reduce of each number would block the host in every step. Each rank reads its numbers when the
    verdict is computed; see ``OptimizationStep.check_finite``. If no verdict was computed in this iteration, ``get``
    reads the number itself, and with several processes also reduces it.
    """

    def __init__(self) -> None:
        self._numbers: dict[Hashable, Callable[[], float]] = {}
        self._maxima: dict[Hashable, float] = {}

    def register(self, key: Hashable, number: Callable[[], float]) -> None:
        """Register a number for which ``get`` returns the maximum over all ranks.

        All ranks must register the same keys in the same order.

        Args:
            key: key for ``get``.
            number: function that returns the number of this rank: at least 0, and exactly representable in float32.
        """
        self._numbers[key] = number

    def local(self) -> list[float]:
        """Return the numbers of this rank, in the order of registration; an empty list in a single process."""
        return [float(number()) for number in self._numbers.values()] if is_distributed() else []

    def store(self, maxima: Sequence[float]) -> None:
        """Store the maxima over all ranks of the numbers that ``local`` returns."""
        self._maxima = dict(zip(self._numbers, maxima, strict=False))

    def discard(self) -> None:
        """Discard the stored maxima, at the start of an iteration."""
        self._maxima = {}

    def get(self, key: Hashable) -> float:
        """Return the maximum over all ranks. All ranks must call this method in the same iteration."""
        return self._maxima[key] if key in self._maxima else max_over_ranks(self._numbers[key]())


def sum_over_ranks(numbers: Sequence[float]) -> list[float]:
    """Compute the element-wise sum of ``numbers`` over all ranks."""
    if not is_distributed():
        return list(numbers)
    return all_reduce_sum(torch.tensor(numbers, dtype=torch.float64, device=transport_device())).tolist()


def broadcast_scalar(number: float) -> float:
    """Broadcast ``number`` from the main process to all ranks, and return it."""
    if not is_distributed():
        return number
    value = torch.tensor(number, dtype=torch.float64, device=transport_device())
    dist.broadcast(value, 0)
    return value.item()


def shard_range(count: int, multiple: int = 1) -> tuple[int, int]:
    """Compute ``(start, end)`` of this rank's shard of ``count`` rows. Shards start at multiples of ``multiple``."""
    parts = -(-count // multiple)
    bounds = [min(count, parts * rank // get_world_size() * multiple) for rank in (get_rank(), get_rank() + 1)]
    return bounds[0], bounds[1]


def gather_rows(column: torch.Tensor) -> torch.Tensor:
    """Gather the rows of all ranks in rank order, on the CPU. Ranks may have different numbers of rows."""
    if not is_distributed():
        return column.cpu()
    return torch.cat([part.cpu() for part in _parts_of_ranks(column.to(transport_device()))])


def _parts_of_ranks(rows: torch.Tensor) -> list[torch.Tensor]:
    """Gather the rows of each rank, on their device, which is that of the process group."""
    counts = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(get_world_size())]
    dist.all_gather(counts, torch.tensor([len(rows)], device=rows.device))
    lengths = torch.cat(counts).tolist()
    padded = rows.new_zeros(max(lengths), *rows.shape[1:])
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.uses_parameters = False  # for ``check_losses``
        ctx.rows = slice(get_rank() * len(rows), (get_rank() + 1) * len(rows))
        parts = [torch.empty_like(rows) for _ in range(get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        # All ranks compute the same loss and gradient. The factor compensates for DDP's average over ranks.
        return gradient[ctx.rows] * get_world_size()


def all_gather(rows: torch.Tensor) -> torch.Tensor:
    """Gather the rows of all ranks in rank order, on their device, with gradients for the rows of this rank.

    Intended for losses that each rank computes from the rows of all ranks, in a model wrapped in DDP.

    Args:
        rows: (N, ...), with the same shape on all ranks.

    Returns:
        (world size * N, ...)
    """
    return _AllGather.apply(rows) if is_distributed() else rows


class _AllGatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.uses_parameters = False  # for ``check_losses``
        parts = _parts_of_ranks(rows)
        start = sum(map(len, parts[: get_rank()]))
        ctx.rows = slice(start, start + len(rows))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _all_reduce(gradient, dist.ReduceOp.SUM)[ctx.rows] * get_world_size()


def all_gather_parts(rows: torch.Tensor) -> torch.Tensor:
    """Gather the rows of all ranks for a loss of which each rank computes a part.

    In contrast to ``all_gather``, the number of rows may differ between ranks, and the gradient of a row is the sum of
    its gradients on all ranks, times the number of ranks, because DDP then averages the gradients of the parameters.

    Args:
        rows: (N, ...) on the device of the process group; only N may differ between ranks.

    Returns:
        (sum of N over all ranks, ...), in rank order.
    """
    return _AllGatherParts.apply(rows) if is_distributed() else rows


_single_process_group: Any = None


def single_process_group() -> Any:
    """Return a process group that contains only this process. The first call is a collective operation of all ranks."""
    global _single_process_group
    if _single_process_group is None:
        _single_process_group, _ = dist.new_subgroups(group_size=1)
    return _single_process_group


def gather_bytes(data: bytes) -> list[bytes]:
    """Gather the bytes of all ranks in rank order; lengths may differ."""
    if not is_distributed():
        return [data]
    lengths = gather_rows(torch.tensor([len(data)])).tolist()
    joined = gather_rows(torch.from_numpy(np.frombuffer(data, np.uint8).copy())).numpy().tobytes()
    ends = list(itertools.accumulate(lengths))
    return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def select_text(text: str, order: float = 0) -> tuple[int, str]:
    """Select the non-empty text with the lowest ``order`` among all ranks; the lowest rank wins a tie.

    Returns:
        ``(rank, text)``; ``(-1, "")`` if the texts of all ranks are empty.
    """
    orders = gather_rows(torch.tensor([order], dtype=torch.float64)).tolist()
    texts = [message.decode() for message in gather_bytes(text.encode())]
    messages = [(orders[rank], rank, text) for rank, text in enumerate(texts) if text]
    return min(messages)[1:] if messages else (-1, "")


def select_message(text: str, order: float = 0) -> str:
    """Select a message as in ``select_text``; with several processes, prefix it with the rank that it is from."""
    rank, chosen = select_text(text, order)
    return f"on rank {rank}: {chosen}" if chosen and get_world_size() > 1 else chosen


def broadcast(tensors: Iterable[torch.Tensor]) -> None:
    """Broadcast tensors from the main process, in place."""
    if is_distributed():
        for tensor in tensors:
            dist.broadcast(tensor.detach(), 0)


def data_parallel(model: nn.Module) -> nn.Module:
    """Wrap ``model`` in DDP; in a single process, or if all its parameters are frozen, return the model itself.

    Before each forward pass, DDP broadcasts the buffers that may differ between ranks from rank 0: the statistics of
    batch norm, which each rank computes from its own images, and the buffers of unknown modules. Buffers of
    ``SyncBatchNorm``, counters of batches, and buffers that a module lists in ``equal_on_all_ranks()`` are equal on all
    ranks and are not broadcast.

    DDP neither broadcasts parameters whose rows are divided among the ranks (``row_shards``) nor averages their
    gradients: each rank computes the exact gradients of its own rows.
    """
    sharded = row_shards(model)
    if not is_distributed() or not any(p.requires_grad for name, p in model.named_parameters() if name not in sharded):
        return model
    # Without any other buffers, DDP broadcasts none. Its argument broadcast_buffers is deprecated since PyTorch 2.15.
    ignored = sorted({*_equal_buffers(model), *sharded})
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    # With bucket views, gradients are not copied to and from the buckets, and need half the memory.
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


@runtime_checkable
class RankConstants(Protocol):
    """Module with buffers that are equal on all ranks without a broadcast, such as constants."""

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return their names."""


def _equal_buffers(model: nn.Module) -> set[str]:
    """Return the names of the buffers that have equal values on all ranks without a broadcast."""
    names = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, nn.SyncBatchNorm):
            names |= {prefix + name for name, _ in module.named_buffers(recurse=False)}
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            names.add(f"{prefix}num_batches_tracked")
        if isinstance(module, RankConstants):
            names |= {prefix + name for name in module.equal_on_all_ranks()}
    return names


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Create a context without gradient synchronization of a ``data_parallel`` model."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
