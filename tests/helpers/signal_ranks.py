"""Stop several processes by a signal to the last one: signal_ranks.py FOLDER PROCESSES CASE

Each process trains a small model for two epochs of five iterations with ``CHECKPOINT_MINUTES``. The last process sends
itself SIGTERM at the time given by CASE: ``step``, ``evaluation`` (at the end of the first epoch) or ``never``. With
``no verdict``, ``run_step`` is overridden and computes no verdict, and the signal comes in a step. The clock of rank 0
advances one minute per iteration, and checkpoints are due every three minutes.

Each process writes FOLDER/rank<RANK>.json: iteration and signal of the interruption, names of the checkpoints, and the
collectives called from Python in each iteration, and at the end of each epoch.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from forked import run_forked
from loops import make_batch, make_net, make_trainer, sgd

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.engine import HookBase
from fastamp.engine.hooks import PeriodicCheckpointer, StopOnSignal
from fastamp.utils import comm
from fastamp.utils.command_line import TrainingInterrupted

EPOCH = 5
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "barrier", "reduce", "all_gather_into_tensor")


class CountCollectives(HookBase):
    """Hook that lists the collectives of each iteration, and those of saving hooks at the end of each epoch."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        for name in COLLECTIVES:
            self._wrap(name, getattr(dist, name))

    def _wrap(self, name, function):
        def counted(*args, **kwargs):
            if self.steps:
                self.steps[-1].append(name)
            return function(*args, **kwargs)

        setattr(dist, name, counted)

    def before_step(self) -> None:
        self.steps.append([])

    def after_epoch(self) -> None:
        self.steps.append([])


class SendSignal(HookBase):
    """Hook that sends SIGTERM to the last process, before the hooks that save are called."""

    def __init__(self, case: str) -> None:
        self.case = case

    def _send(self) -> None:
        if comm.get_rank() == comm.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def before_step(self) -> None:
        if self.case in ("step", "no verdict") and self.trainer.iter == 1:
            self._send()

    def after_epoch(self) -> None:
        if self.case == "evaluation" and self.trainer.epoch == 0:
            self._send()


def main(folder: Path, case: str) -> None:
    model, rank = make_net(), comm.get_rank()
    trainer = make_trainer(model, [sgd(model)], [make_batch(rank)] * (2 * EPOCH), torch.float32)
    if case == "no verdict":
        trainer.run_step = lambda: None
    checkpointer = Checkpointer(model, folder, trainer=trainer)
    saved, save = [], checkpointer.save
    checkpointer.save = lambda name: (saved.append(name), save(name))[1]
    counts, stop = CountCollectives(), StopOnSignal(checkpointer)
    # Only the clock of rank 0 counts.
    minutes = PeriodicCheckpointer(
        checkpointer, 10, minutes=3, clock=lambda: 60.0 * trainer.iter if rank == 0 else 1e6 * trainer.iter
    )
    trainer.register_hooks([counts, SendSignal(case), minutes, stop])
    stopped = None
    try:
        with stop.watching():
            trainer.train(0, 2, EPOCH)
    except TrainingInterrupted as interruption:
        stopped = [trainer.iter, interruption.signal_number]
    found = {"stopped": stopped, "saved": saved, "collectives": counts.steps}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_forked(main, int(sys.argv[2]), Path(sys.argv[1]), Path(sys.argv[1]), sys.argv[3])
