"""Failures that need two processes, plainly and with fastamp: failing_ranks.py FOLDER RANK.

Each of the two writes FOLDER/rank<RANK>.pth: scenario -> what was seen on that rank.
"""

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from loops import LOW, Net, autocast, make_batch, make_net, make_trainer, plain_scaler, plain_step, sgd, spoil, values
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from fastamp.engine import HookBase, SimpleTrainer
from fastamp.utils.errors import TrainingError

STEPS = 6
BAD_STEP = 2


class Record(HookBase):
    """Keeps the model's values and the loss scale after each step."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []

    def after_step(self) -> None:
        self.keep(self.trainer.model, self.trainer.metrics.flush()["loss_scale"])

    def keep(self, model: nn.Module, scale: float) -> None:
        self.history.append({"scale": scale, "model": values(model)})


def ours(model: nn.Module, batches: list[Any], dtype: torch.dtype, **options: Any) -> list[dict[str, Any]]:
    """Return the history of fastamp's training."""
    record = Record()
    trainer = make_trainer(model, [sgd(model)], batches, dtype, **options)
    trainer.register_hooks([record])
    trainer.train(0, 1, len(batches))
    return record.history


def plain(
    model: nn.Module, parallel: nn.Module, batches: list[Any], dtype: torch.dtype, **options: Any
) -> list[dict[str, Any]]:
    """Return the history of PyTorch's loop, where each process has a scaler of its own."""
    record, optimizer, scaler = Record(), sgd(model), plain_scaler(**options)
    for batch in batches:
        plain_step(parallel, optimizer, batch, dtype, scaler)
        record.keep(model, scaler.get_scale())
    return record.history


def overflow(dtype: torch.dtype, rank: int, bad_rank: int) -> dict[str, Any]:
    """The batch of one rank overflows."""
    batches = [make_batch(seed=10 * step + rank) for step in range(STEPS)]
    if rank == bad_rank:
        batches[BAD_STEP] = spoil(batches[BAD_STEP])
    model = make_net(normalize=True)
    seen = {"plain": plain(model, DistributedDataParallel(model), batches, dtype, init_scale=8.0)}
    model.eval()
    with torch.no_grad(), autocast(dtype):
        seen["plain evaluation"] = model(make_batch())
    return seen | {"ours": ours(make_net(normalize=True), batches, dtype, init_scale=8.0)}


class TwoHeads(nn.Module):
    """Net, and a second head on its detached features, times the batch's factor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Features()
        self.second = nn.Linear(16, 4)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        features, losses = self.net(batch)
        logits = self.second(features.detach() * batch["factor"]).float()
        return losses | {"loss_second": nn.functional.cross_entropy(logits, batch["targets"])}


class Features(Net):
    """Net with its features."""

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        features = self.body(batch["images"])
        return features, self.losses(self.head(features).float(), batch)


def second_head_outside(model: TwoHeads) -> TwoHeads:
    """Return the model with DDP around all but the second head."""
    parallel = copy.copy(model)
    parallel._modules = model._modules | {"net": DistributedDataParallel(model.net)}
    return parallel


class HeadOutside(SimpleTrainer):
    """Leaves the second head out of DDP."""

    def wrap_parallel(self, model: nn.Module) -> nn.Module:
        return second_head_outside(model)


def head_outside(dtype: torch.dtype, rank: int) -> dict[str, Any]:
    """Both ranks have the same batches, but that once the second head's input is infinite on rank 1."""
    batches = [make_batch(seed) | {"factor": torch.ones(())} for seed in range(STEPS)]
    if rank == 1:
        batches[BAD_STEP]["factor"] = torch.tensor(float("inf"))
    model = make_net(TwoHeads)
    seen = {"plain": plain(model, second_head_outside(model), batches, dtype)}
    return seen | {"ours": ours(make_net(TwoHeads), batches, dtype, kind=HeadOutside)}


class Centers(Net):
    """Also pulls a center of each class, a float32 parameter far off, to the features: its gradients are above 1."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.full((4, 16), 4.0))

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        features = self.body(batch["images"])
        distances = self.centers[batch["targets"]] - features.detach().float()
        losses = self.losses(self.head(features).float(), batch)
        return losses | {"loss_center": distances.square().sum()}


def hooked(hook: Any, model: nn.Module) -> DistributedDataParallel:
    """Return DDP with a communication hook."""
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(None, hook)
    return parallel


class Fp16Hook(SimpleTrainer):
    """Sends gradients in float16."""

    def wrap_parallel(self, model: nn.Module) -> nn.Module:
        return hooked(fp16_compress_hook, model)


class Bf16Hook(SimpleTrainer):
    """Sends gradients in bfloat16."""

    def wrap_parallel(self, model: nn.Module) -> nn.Module:
        return hooked(bf16_compress_hook, model)


class InnerFp16Hook(SimpleTrainer):
    """Sends gradients in float16, by a DDP model inside another module."""

    def wrap_parallel(self, model: nn.Module) -> nn.Module:
        return nn.Sequential(hooked(fp16_compress_hook, model))


def compression(dtype: torch.dtype, rank: int) -> dict[str, Any]:
    """Gradients are sent in low precision."""
    batches = [make_batch(seed=10 * step + rank) for step in range(STEPS)]
    seen: dict[str, Any] = {}
    for name, hook in (("fp16", fp16_compress_hook), ("bf16", bf16_compress_hook)):
        model = make_net(Centers)
        seen[f"plain {name}"] = plain(model, hooked(hook, model), batches, dtype)
    model = make_net(Centers)
    seen["plain"] = plain(model, DistributedDataParallel(model), batches, dtype)
    for kind in (Fp16Hook, Bf16Hook, InnerFp16Hook, SimpleTrainer):
        try:
            seen[kind.__name__] = ours(make_net(Centers), batches, dtype, kind=kind)
        except TrainingError as error:
            seen[kind.__name__] = str(error)
    return seen


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    seen = {}
    for dtype in LOW:
        for bad_rank in (0, 1):
            seen[f"overflow on rank {bad_rank}, {dtype}"] = overflow(dtype, rank, bad_rank)
        seen[f"head outside, {dtype}"] = head_outside(dtype, rank)
        seen[f"compression, {dtype}"] = compression(dtype, rank)
    torch.save(seen, folder / f"rank{rank}.pth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
