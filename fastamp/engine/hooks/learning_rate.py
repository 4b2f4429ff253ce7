"""Learning rate schedule."""

from typing import TYPE_CHECKING

from fastamp.engine.hooks.base import HookBase
from fastamp.solver import LearningRateSchedule

if TYPE_CHECKING:
    from fastamp.engine.train_loop import SimpleTrainer


class LRScheduler(HookBase):
    """Set the learning rate of each parameter group before each step.

    Groups with ``scheduled=False`` keep their learning rate.

    Args:
        schedule: computes the learning rate from the base learning rate, the epoch, and the number of applied steps.
    """

    trainer: "SimpleTrainer"

    def __init__(self, schedule: LearningRateSchedule) -> None:
        self.schedule = schedule

    def before_train(self) -> None:
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("base_lr", group["lr"])  # for custom optimizers

    def before_step(self) -> None:
        trainer = self.trainer
        for optimizer in trainer.optimizers:
            for group in optimizer.param_groups:
                if not group.get("scheduled", True):
                    continue
                group["lr"] = self.schedule.learning_rate(
                    group["base_lr"], epoch=trainer.epoch, steps_taken=trainer.steps_taken
                )
        trainer.metrics.latest(lr=trainer.optimizers[0].param_groups[0]["lr"])
