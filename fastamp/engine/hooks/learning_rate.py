"""The learning rate of each step."""

from fastamp.engine.hooks.base import HookBase
from fastamp.solver import LearningRateSchedule


class LRScheduler(HookBase):
    """Set each parameter group's learning rate before each step, but for those that are not ``scheduled``.

    Args:
        schedule: a pure function of the epoch and of the steps taken, so that there is nothing to save.
    """

    def __init__(self, schedule: LearningRateSchedule) -> None:
        self.schedule = schedule

    def before_train(self) -> None:
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("base_lr", group["lr"])  # an optimizer that somebody else built

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
