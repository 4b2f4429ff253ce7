"""Averages of the weights: EMA and SWA."""

from fastamp.engine.hooks.base import HookBase
from fastamp.solver import WeightAverage


class EMA(HookBase):
    """Exponential moving average of the weights over the optimizer steps, without skipped ones.

    Args:
        average (WeightAverage): the average to update.
        decay (float): decay per step, 0..1.
    """

    def __init__(self, average: WeightAverage, decay: float) -> None:
        self.average = average
        self.decay = decay

    def before_train(self) -> None:
        self._steps = self.trainer.steps_taken
        if self.average.updates == 0:
            self.average.restart()  # weights may have been loaded since its construction

    def after_step(self) -> None:
        if self.trainer.steps_taken > self._steps:  # skipped steps do not change the weights
            self._steps = self.trainer.steps_taken
            self.average.update(1 - self.decay)


class SWA(HookBase):
    """Mean of the weights at the ends of epochs (Izmailov et al. 2018, arXiv:1803.05407).

    Args:
        average (WeightAverage): the average to update.
        start (int): number of epochs before the first update.
        period (int): update period in epochs; also updated after the last epoch.
    """

    def __init__(self, average: WeightAverage, *, start: int, period: int) -> None:
        self.average = average
        self.start = start
        self.period = period

    def after_epoch(self) -> None:
        done = self.trainer.epoch + 1 - self.start
        if done > 0 and (done % self.period == 0 or self.trainer.epoch + 1 == self.trainer.max_epoch):
            self.average.update(1 / (self.average.updates + 1))
