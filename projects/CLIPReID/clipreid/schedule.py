"""Learning-rate schedule of CLIP-ReID's second stage."""

import bisect
from dataclasses import dataclass

from fastamp.config import CfgNode
from fastamp.solver.lr_schedule import SCHEDULE_REGISTRY


@dataclass(frozen=True)
class EpochMultiStepSchedule:
    """Linear warm-up and steps, constant within an epoch; epochs are counted from 1.

    Attributes:
        warmup_epochs: number W of epochs; epochs before W are in the warm-up.
        start: factor from which the warm-up rises.
        steps: epochs from which the rate is multiplied by ``gamma``, in increasing order.
        gamma: factor of a step.
    """

    warmup_epochs: int
    start: float
    steps: tuple[int, ...]
    gamma: float

    def learning_rate(self, base_lr: float, *, epoch: int, steps_taken: int) -> float:
        """Compute the learning rate of the next step; see ``fastamp.solver.LearningRateSchedule``."""
        number, factor = epoch + 1, 1.0
        if number < self.warmup_epochs:
            factor = self.start + (1 - self.start) * number / self.warmup_epochs
        return base_lr * factor * self.gamma ** bisect.bisect_right(self.steps, number)


@SCHEDULE_REGISTRY.register("EpochMultiStepLR")
def build_epoch_multi_step(cfg: CfgNode, *, iters_per_epoch: int) -> EpochMultiStepSchedule:
    """Build the schedule from WARMUP_EPOCHS, WARMUP_FACTOR, STEPS and GAMMA in ``SOLVER``."""
    solver = cfg.SOLVER
    return EpochMultiStepSchedule(
        warmup_epochs=solver.WARMUP_EPOCHS,
        start=solver.WARMUP_FACTOR,
        steps=tuple(sorted(solver.STEPS)),
        gamma=solver.GAMMA,
    )
