"""Train the tiny config in one or several processes: ranks.py [FLAGS] OUTPUT_DIR PROCESSES KEY VALUE ..

Several processes are forked from this one, which is faster; ``--spawn`` spawns them as in normal use. Under torchrun,
PROCESSES is ignored. The parameters after each step are saved to OUTPUT_DIR/steps.pth.
"""

import argparse
import sys
from pathlib import Path

import tiny
import torch
from forked import launch_forked

from fastamp.engine import DefaultTrainer, HookBase, default_setup, launch, run_command_line
from fastamp.utils import comm
from fastamp.utils.errors import DataError, WriteError


class RecordSteps(HookBase):
    """Hook that records the parameters after each step."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / "steps.pth"
        self.steps: list[dict[str, torch.Tensor]] = []

    def after_step(self) -> None:
        self.steps.append({name: p.detach().clone() for name, p in self.trainer.model.named_parameters()})

    def after_train(self) -> None:
        if comm.is_main_process():
            torch.save(self.steps, self.path)


class Fault(HookBase):
    """Hook that injects a fault into the third iteration."""

    def __init__(self, name: str) -> None:
        self.name = name

    def before_step(self) -> None:
        vars(self.trainer.step).pop("scale", None)
        if self.name.endswith("from the first on") and self.trainer.iter == 0:
            self.make_infinite()
        if self.trainer.iter != 2:
            return
        if self.name == f"error on rank {comm.get_rank()}":
            raise DataError(f"the image of rank {comm.get_rank()} cannot be read")
        if self.name == f"full disk on rank {comm.get_rank()}":
            raise WriteError("model_0000.pth cannot be written")
        if self.name == "error on all ranks":
            raise DataError("no rank can read its image")
        if self.name == "infinite loss on rank 1" and comm.get_rank() == 1:
            step = self.trainer.step
            scale = step.scale
            # The gradients are finite, so that the other rank cannot detect it from them.
            step.scale = lambda losses, weight: scale({k: v + float("inf") for k, v in losses.items()}, weight)
        if self.name == "infinite images on rank 1":
            self.make_infinite()
        if self.name == f"signal on rank {comm.get_rank()}":
            hook = next(hook for hook in self.trainer._hooks if type(hook).__name__ == "StopOnSignal")
            hook.received = 15

    def make_infinite(self) -> None:
        """Set all following images on rank 1 to infinity."""
        if comm.get_rank() == 1:
            batches = self.trainer._batches or iter(self.trainer.data_loader)
            self.trainer._batches = ({**batch, "images": batch["images"] + float("inf")} for batch in batches)


def main(output_dir: str, resume: bool, fault: str, options: list[str]) -> None:
    cfg = tiny.tiny_config(Path(output_dir), *options)
    default_setup(cfg)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=resume)
    trainer.register_hooks([RecordSteps(Path(output_dir))])
    if fault:
        # Before StopOnSignal, which runs at the end of the same step.
        trainer.trainer.register_hooks([Fault(fault)])
    trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("output_dir")
    parser.add_argument("processes", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fault", default="")
    parser.add_argument("--spawn", action="store_true")
    parser.add_argument("options", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = (args.output_dir, args.resume, args.fault, args.options)
    start = launch if args.spawn else launch_forked
    sys.exit(run_command_line(lambda: start(main, args.processes, args=command)))
