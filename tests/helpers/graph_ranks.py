"""Train with GraphTrainer: graph_ranks.py FOLDER PROCESSES KEY VALUE ... Each process saves FOLDER/RANK.pth."""

import sys
from pathlib import Path

import tiny
import torch
from forked import run_forked

from fastamp.config import read_config
from fastamp.engine import DefaultTrainer, HookBase
from fastamp.utils import comm


class Graphs(HookBase):
    """Record the graph of each step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def before_step(self) -> None:
        self.seen.append(torch.from_numpy(self.trainer.sampler.nearest.copy()))


def main(folder: Path, options: list[str]) -> None:
    torch.manual_seed(0)
    trainer, graphs = DefaultTrainer(read_config("", tiny.tiny_options(folder / "run", *options))), Graphs()
    trainer.resume_or_load(resume=False)
    trainer.register_hooks([graphs])
    trainer.train()
    parameters = dict(trainer.model.named_parameters())
    torch.save({"graphs": graphs.seen, "parameters": parameters}, folder / f"{comm.get_rank()}.pth")


if __name__ == "__main__":
    run_forked(main, int(sys.argv[2]), Path(sys.argv[1]), Path(sys.argv[1]), sys.argv[3:])
