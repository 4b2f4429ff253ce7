"""Train or resume the tiny config, and kill the process: killable_run.py OUTPUT_DIR MOMENT [KEY VALUE ...]."""

import os
import signal
import sys
from pathlib import Path

import file_tracker  # noqa: F401
import tiny

import fastamp.checkpoint.checkpointer as checkpoint
from fastamp.engine import DefaultTrainer, HookBase, default_setup


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DieInStep(HookBase):
    """Hook that kills the process in the third epoch, one iteration after a checkpoint."""

    def after_step(self) -> None:
        if self.trainer.iter == 2 * self.trainer.iters_per_epoch + 3:
            die()


def main(output_dir: str, moment: str, *opts: str) -> None:
    options = ("SOLVER.CHECKPOINT_ITERS", "5", "SOLVER.CHECKPOINT_KEEP", "2")
    cfg = tiny.tiny_config(Path(output_dir), "SOLVER.AMP", "bf16", "DATALOADER.NUM_WORKERS", "1", *options, *opts)
    default_setup(cfg)
    trainer = DefaultTrainer(cfg)
    trainer.resume_or_load(resume=True)
    if moment == "step":
        trainer.trainer.register_hooks([DieInStep()])
    elif moment == "save":
        replace, count = os.replace, iter(range(100))

        def replace_until_third_checkpoint(source: str, target: str) -> None:
            if str(target).endswith(".pth") and next(count) == 2:
                die()
            replace(source, target)

        checkpoint.os.replace = replace_until_third_checkpoint
    elif moment == "evaluation":
        trainer.eval_hook.evaluate = die
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
