"""Hooks that average the weights over the training."""

from fastamp.engine.hooks.base import HookBase
from fastamp.solver import WeightAverage


class EMA(HookBase):
    """Exponential moving average of the weights, over the steps that were taken.

    Args:
        average: is updated.
        decay: share of the average that a step keeps, 0..1.
    """

    def __init__(self, average: WeightAverage, decay: float) -> None:
        self.average = average
        self.decay = decay

    def before_train(self) -> None:
        self._steps = self.trainer.steps_taken
        if self.average.updates == 0:
            self.average.restart()  # weights may have been loaded since it was made

    def after_step(self) -> None:
        if self.trainer.steps_taken > self._steps:  # a skipped step changed nothing
            self._steps = self.trainer.steps_taken
            self.average.update(1 - self.decay)


class SWA(HookBase):
    """Mean of the weights at the ends of epochs (Izmailov et al. 2018, arXiv:1803.05407).

    Args:
        average: is updated.
        start: epochs that are left out at first.
        period: every so many epochs, and after the last one.
    """

    def __init__(self, average: WeightAverage, *, start: int, period: int) -> None:
        self.average = average
        self.start = start
        self.period = period

    def after_epoch(self) -> None:
        done = self.trainer.epoch + 1 - self.start
        if done > 0 and (done % self.period == 0 or self.trainer.epoch + 1 == self.trainer.max_epoch):
            self.average.update(1 / (self.average.updates + 1))
