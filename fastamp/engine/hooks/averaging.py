"""Hooks for weight averages: EMA and SWA."""

import logging
from typing import TYPE_CHECKING, Any

from fastamp.engine.hooks.base import HookBase
from fastamp.solver import WeightAverage

if TYPE_CHECKING:
    from fastamp.engine.train_loop import SimpleTrainer

logger = logging.getLogger(__name__)


class EMA(HookBase):
    """Update an exponential moving average of the weights after each optimizer step that is not skipped.

    With warm-up, update number t = 0, 1, ... uses the decay min(``decay``, 1 - (1 + t)^(-2/3)), as timm's
    ``ModelEmaV3`` does by default. Without warm-up, the initial weights contribute to the average with the factor
    ``decay``^n after n steps.

    Args:
        average: the average to update.
        decay: factor of the previous average in each update, 0..1.
        warmup: increase the decay from 0. Default True.
    """

    trainer: "SimpleTrainer"

    def __init__(self, average: WeightAverage, decay: float, *, warmup: bool = True) -> None:
        self.average = average
        self.decay = decay
        self.warmup = warmup

    def before_train(self) -> None:
        self._steps = self.trainer.steps_taken
        if self.average.updates == 0:
            self.average.restart()  # weights may have been loaded since its construction

    def after_step(self) -> None:
        if self.trainer.steps_taken > self._steps:  # skipped steps do not change the weights
            self._steps = self.trainer.steps_taken
            limit = 1 - (1 + self.average.updates) ** (-2 / 3) if self.warmup else 1
            self.average.update(1 - min(self.decay, limit))

    def state_dict(self) -> dict[str, Any]:
        return {"warmup": self.warmup}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["warmup"] != self.warmup:
            self.warmup = not self.warmup
            logger.info(
                "SOLVER.EMA.WARMUP cannot change on resume: using %s, as at the start of this run",
                self.warmup,
            )


class SWA(HookBase):
    """Update the mean of the weights at the end of epochs (Izmailov et al. 2018, arXiv:1803.05407).

    With ``initial_weight`` w > 0, the final average is w * initial weights + (1 - w) * mean of the weights of the
    epochs. If only the last epoch is averaged, this is WiSE-FT (Wortsman et al. 2022, arXiv:2109.01903).

    Args:
        average: the average to update.
        start: number of epochs at the start of training that are excluded from averaging.
        period: update period in epochs, counted from ``start``. The average is also updated after the last epoch.
        initial_weight: fraction of the weights at the start of training in the final average, 0..1. Default 0.
    """

    trainer: "SimpleTrainer"

    def __init__(self, average: WeightAverage, *, start: int, period: int, initial_weight: float = 0.0) -> None:
        self.average = average
        self.start = start
        self.period = period
        self.initial_weight = initial_weight

    def before_train(self) -> None:
        if self.trainer.steps_taken == 0:
            self.average.restart()  # weights may have been loaded since its construction

    def after_epoch(self) -> None:
        done = self.trainer.epoch + 1 - self.start
        if done > 0 and (done % self.period == 0 or self.trainer.epoch + 1 == self.trainer.max_epoch):
            updates = -(-(self.trainer.max_epoch - self.start) // self.period)
            kept = 1 - self.initial_weight
            # The initial weights count as much as updates * initial_weight / kept updates.
            self.average.update(kept / (updates * self.initial_weight + kept * (self.average.updates + 1)))
