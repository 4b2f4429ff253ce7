"""Failures that occur only with two processes, in plain PyTorch and in fastamp: failing_ranks.py FOLDER RANK.

Each process writes FOLDER/rank<RANK>.pth: scenario -> history on that rank.
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

from fastamp.amp.checks import check_replicas
from fastamp.engine import HookBase, SimpleTrainer
from fastamp.utils.errors import TrainingError

STEPS = 6
BAD_STEP = 2


class Record(HookBase):
    """Hook that records the tensors of the model and the loss scale after each step."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []

    def after_step(self) -> None:
        self.keep(self.trainer.model, self.trainer.metrics.flush()["loss_scale"])

    def keep(self, model: nn.Module, scale: float) -> None:
        self.history.append({"scale": scale, "model": values(model)})


def ours(model: nn.Module, batches: list[Any], dtype: torch.dtype, **options: Any) -> list[dict[str, Any]]:
    """Train with fastamp and return the history."""
    record = Record()
    trainer = make_trainer(model, [sgd(model)], batches, dtype, **options)
    trainer.register_hooks([record])
    trainer.train(0, 1, len(batches))
    return record.history


def plain(
    model: nn.Module, parallel: nn.Module, batches: list[Any], dtype: torch.dtype, **options: Any
) -> list[dict[str, Any]]:
    """Train with a plain PyTorch loop, with one scaler per process, and return the history."""
    record, optimizer, scaler = Record(), sgd(model), plain_scaler(**options)
    for batch in batches:
        plain_step(parallel, optimizer, batch, dtype, scaler)
        record.keep(model, scaler.get_scale())
    return record.history


def overflow(dtype: torch.dtype, rank: int, bad_rank: int) -> dict[str, Any]:
    """Train with a batch whose gradients overflow on one rank only."""
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
    """Net with a second head, whose input is the detached features times a factor from the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Features()
        self.second = nn.Linear(16, 4)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        features, losses = self.net(batch)
        logits = self.second(features.detach() * batch["factor"]).float()
        return losses | {"loss_second": nn.functional.cross_entropy(logits, batch["targets"])}


class Features(Net):
    """Net that also returns its features."""

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        features = self.body(batch["images"])
        return features, self.losses(self.head(features).float(), batch)


def second_head_outside(model: TwoHeads) -> TwoHeads:
    """Wrap all modules except the second head in DDP."""
    parallel = copy.copy(model)
    parallel._modules = model._modules | {"net": DistributedDataParallel(model.net)}
    return parallel


class HeadOutside(SimpleTrainer):
    """Trainer that excludes the second head from DDP."""

    def wrap_parallel(self, model: nn.Module) -> nn.Module:
        return second_head_outside(model)


def head_outside(dtype: torch.dtype, rank: int) -> dict[str, Any]:
    """Train with equal batches on both ranks, except for one infinite input to the second head on rank 1."""
    batches = [make_batch(seed) | {"factor": torch.ones(())} for seed in range(STEPS)]
    if rank == 1:
        batches[BAD_STEP]["factor"] = torch.tensor(float("inf"))
    model = make_net(TwoHeads)
    seen = {"plain": plain(model, second_head_outside(model), batches, dtype)}
    return seen | {"ours": ours(make_net(TwoHeads), batches, dtype, kind=HeadOutside)}


class Centers(Net):
    """Net with float32 class centers far from the features, so that their gradients exceed 1."""

    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.full((4, 16), 4.0))

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        features = self.body(batch["images"])
        distances = self.centers[batch["targets"]] - features.detach().float()
        losses = self.losses(self.head(features).float(), batch)
        return losses | {"loss_center": distances.square().sum()}


def hooked(hook: Any, model: nn.Module) -> DistributedDataParallel:
    """Wrap a model in DDP with a communication hook."""
    parallel = DistributedDataParallel(model)
    parallel.register_comm_hook(None, hook)
    return parallel


class Fp16Hook(SimpleTrainer):
    """Trainer that communicates gradients in float16."""

    def wrap_parallel(self, model: nn.Module) -> nn.Module:
        return hooked(fp16_compress_hook, model)


class Bf16Hook(SimpleTrainer):
    """Trainer that communicates gradients in bfloat16."""

    def wrap_parallel(self, model: nn.Module) -> nn.Module:
        return hooked(bf16_compress_hook, model)


class InnerFp16Hook(SimpleTrainer):
    """Trainer that communicates gradients in float16, with DDP nested in another module."""

    def wrap_parallel(self, model: nn.Module) -> nn.Module:
        return nn.Sequential(hooked(fp16_compress_hook, model))


def compression(dtype: torch.dtype, rank: int) -> dict[str, Any]:
    """Train while gradients are communicated in low precision."""
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


class RankLosses(Net):
    """Net with a second loss on rank 1 that has no effect on the gradients."""

    def losses(self, logits: torch.Tensor, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        losses = super().losses(logits, batch)
        return losses | ({"loss_extra": logits.sum() * 0} if dist.get_rank() else {})


class ShardedHead(TwoHeads):
    """Model whose second head is declared to differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.second.sharded = True


def divergence(dtype: torch.dtype, rank: int) -> dict[str, Any]:
    """Train with different batches per rank: with a head outside DDP, and with different losses per rank."""
    batches = [make_batch(seed=10 * step + rank) | {"factor": torch.ones(())} for step in range(STEPS)]
    model = make_net(TwoHeads)
    seen: dict[str, Any] = {"plain": plain(model, second_head_outside(model), batches, dtype)}
    model = make_net(RankLosses)
    seen["plain losses"] = plain(model, DistributedDataParallel(model), batches, dtype)
    for name, net, kind in (
        ("drift", TwoHeads, HeadOutside),
        ("sharded", ShardedHead, HeadOutside),
        ("losses", RankLosses, SimpleTrainer),
    ):
        try:
            seen[name] = ours(make_net(net), batches, dtype, kind=kind)
        except TrainingError as error:
            seen[name] = str(error)
    return seen


def additional_layer(rank: int) -> str:
    """Return the message of the check of replicas if rank 1 has a layer that rank 0 does not have."""
    model = nn.Sequential(nn.Linear(1, 1))
    nn.init.constant_(model[0].weight, float("nan"))  # NaN on all ranks is not a difference
    nn.init.constant_(model[0].bias, 0.0 if rank else -0.0)
    if rank:
        model.append(nn.Linear(1, 1, bias=False))
    try:
        check_replicas(model, ["loss_cls"])
    except TrainingError as error:
        return str(error)
    return ""


def main(folder: Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    seen: dict[str, Any] = {"additional layer": {"message": additional_layer(rank)}}
    for dtype in LOW:
        for bad_rank in (0, 1):
            seen[f"overflow on rank {bad_rank}, {dtype}"] = overflow(dtype, rank, bad_rank)
        seen[f"head outside, {dtype}"] = head_outside(dtype, rank)
        seen[f"compression, {dtype}"] = compression(dtype, rank)
        seen[f"divergence, {dtype}"] = divergence(dtype, rank)
    seen["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.save(seen, folder / f"rank{rank}.pth")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
