"""Run of a small network in two stages, of its head and then of all layers: two_stages.py FOLDER PROCESSES.

Each process runs it once as a whole and once in parts, and writes FOLDER/<RANK>.json: whether the weights are the same.
"""

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from forked import run_forked
from loops import Net, make_batch, make_net, make_trainer, same, values
from torch import nn

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.engine import HookBase, SimpleTrainer, Stage
from fastamp.engine.hooks import LRScheduler, PeriodicCheckpointer, PeriodicWriter, StopOnSignal
from fastamp.engine.stages import Stages
from fastamp.solver import OptimizerState
from fastamp.utils import comm

HEAD, ALL = (2, 3), (3, 4)
"""Number of epochs, and of iterations in each, of the stages."""


class Stopped(Exception):
    """Raised to simulate a killed process."""


class StopAt(HookBase):
    """Raise ``Stopped`` before an iteration, counted from the start of the run."""

    every_stage = True

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def before_step(self) -> None:
        if self.trainer.iters_before + self.trainer.iter == self.iteration:
            raise Stopped


class Rows:
    """Writer that keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def write(self, iteration: int, metrics: dict[str, Any]) -> None:
        self.rows.append((iteration, metrics))


class Batches:
    """Infinite loader whose batches depend on their number and the rank."""

    def __init__(self, length: int, seed: int, width: int = 8) -> None:
        self.iters_per_epoch, self.seed, self.width, self.start = length, seed, width, 0

    def start_at(self, batch: int) -> None:
        self.start = batch

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in itertools.count(self.start):
            batch = make_batch(10_000 * self.seed + 100 * comm.get_rank() + number)
            yield batch | {"images": batch["images"].repeat(1, self.width // 8)}


class HeadLosses(nn.Module):
    """Loss of the head of a network for given features (B, 16)."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.head = net.head

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"loss_head": nn.functional.cross_entropy(self.head(batch["images"]).float(), batch["targets"])}


class Falling:
    """Schedule whose rate falls with the epoch."""

    def learning_rate(self, base_lr: float, *, epoch: int, steps_taken: int) -> float:
        return base_lr / (1 + epoch)


class Run:
    """The run, whose checkpoints are written after each iteration.

    Attributes:
        net: the network.
        stages, checkpointer, stop: as in ``DefaultTrainer``.
        rows: what the writer received.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, hooks: tuple[HookBase, ...] = ()) -> None:
        self.net, writer = make_net(), Rows()
        head = HeadLosses(self.net)
        first = make_trainer(head, [torch.optim.Adam(head.parameters(), lr=0.01)], Batches(HEAD[1], 1, 16), dtype)
        last = make_trainer(
            self.net, [torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)], Batches(ALL[1], 2), dtype
        )
        for trainer, (_, length) in ((first, HEAD), (last, ALL)):
            trainer.set_data(length, images_per_batch=8)
            trainer.register_hooks([LRScheduler(Falling())])
        self.stages = Stages([Stage("head", first, HEAD[0]), Stage("training", last, ALL[0])])
        optimizer = OptimizerState(last.optimizers[0], self.net)
        self.checkpointer = Checkpointer(self.net, folder, trainer=self.stages, optimizer=optimizer)
        self.stop, self.rows = StopOnSignal(self.checkpointer), writer.rows
        periodic = PeriodicCheckpointer(self.checkpointer, 2, iterations=1)
        self.stages.register_hooks(
            [PeriodicWriter(2, [writer], device=torch.device("cpu")), periodic, self.stop, *hooks]
        )

    @property
    def last(self) -> SimpleTrainer:
        """Training loop of the last stage."""
        return self.stages.left()[-1].trainer

    def train(self) -> dict[str, torch.Tensor]:
        """Resume from the newest checkpoint, if there is one, and return the final weights."""
        path = self.checkpointer.last_checkpoint()
        if path is not None:
            self.checkpointer.resume(path)
        for stage in self.stages.left():
            self.stages.train(stage)
        return values(self.net)


def train_in_parts(folder: Path, stops: list[int], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Run with an interruption before each of the iterations, and return the final weights."""
    for stop in stops:
        try:
            Run(folder, dtype, (StopAt(stop),)).train()
        except Stopped:
            continue
        raise AssertionError(f"the run did not reach iteration {stop}")
    return Run(folder, dtype).train()


def main(folder: Path) -> None:
    whole = Run(folder / "whole").train()
    parts = train_in_parts(folder / "parts", [2, 6, 11])
    (folder / f"{comm.get_rank()}.json").write_text(json.dumps(same(whole, parts)))


if __name__ == "__main__":
    run_forked(main, int(sys.argv[2]), Path(sys.argv[1]), Path(sys.argv[1]))
