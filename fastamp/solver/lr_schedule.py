"""The learning rate as a pure function of the epoch and of the steps taken."""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastamp.utils.registry import Registry

SCHEDULE_REGISTRY = Registry("SOLVER.SCHED")

Decay = Callable[[float, int], float]
"""``decay(base_lr, epochs) -> lr`` after so many epochs of the epoch schedule."""


@SCHEDULE_REGISTRY.register("MultiStepLR")
def multi_step(*, steps: Sequence[int], gamma: float, **_: object) -> Decay:
    """Multiply by ``gamma`` at each of ``steps``, in epochs of the schedule."""
    ordered = sorted(steps)
    return lambda base_lr, epochs: base_lr * gamma ** bisect.bisect_right(ordered, epochs)


@SCHEDULE_REGISTRY.register("CosineAnnealingLR")
def cosine(*, length: int, eta_min: float, **_: object) -> Decay:
    """Half a cosine from the base rate down to ``eta_min`` (Loshchilov & Hutter 2017, arXiv:1608.03983).

    ``length`` is in epochs of the schedule; the rate stays at ``eta_min`` after it.
    """

    def decay(base_lr: float, epochs: int) -> float:
        share = min(epochs / max(length, 1), 1.0)
        return eta_min + (base_lr - eta_min) * (1 + math.cos(math.pi * share)) / 2

    return decay


def warmup_factor(method: str, steps_taken: int, *, length: int, start: float) -> float:
    """Return the factor on the learning rate during warm-up, 1.0 after it.

    Args:
        method: ``"linear"``, ``"constant"`` or ``"exp"``.
        steps_taken: optimizer steps taken so far.
        length: ``SOLVER.WARMUP_ITERS``, in steps.
        start: ``SOLVER.WARMUP_FACTOR``, at the first step.
    """
    if steps_taken >= length:
        return 1.0
    share = steps_taken / length
    return {"linear": start * (1 - share) + share, "constant": start, "exp": start ** (1 - share)}[method]


@dataclass(frozen=True)
class LearningRateSchedule:
    """Warm-up by steps, then a decay by epochs.

    With ``after_warmup``, FastReID's meaning, the decay counts only the epochs at whose end the warm-up iterations are
    done and the delay is over: a step at 40 with ten epochs of warm-up is taken at epoch 49. Otherwise it counts
    all epochs.

    Attributes:
        decay: the epoch schedule.
        iters_per_epoch: iterations in an epoch.
        warmup_method, warmup_iters, warmup_start: see ``warmup_factor``.
        delay_epochs: the decay does not begin before these are over (``after_warmup`` only).
        after_warmup: see above.
    """

    decay: Decay
    iters_per_epoch: int
    warmup_method: str = "linear"
    warmup_iters: int = 0
    warmup_start: float = 0.1
    delay_epochs: int = 0
    after_warmup: bool = True

    def epochs_of_decay(self, epoch: int) -> int:
        """Return how many epochs the decay has advanced when epoch ``epoch`` (from 0) begins."""
        if not self.after_warmup:
            return epoch
        first = max(math.ceil(self.warmup_iters / self.iters_per_epoch), self.delay_epochs + 1, 1)
        return max(0, epoch - first + 1)

    def learning_rate(self, base_lr: float, *, epoch: int, steps_taken: int) -> float:
        """Return the learning rate of the next step.

        Args:
            base_lr: of the parameter group.
            epoch: the current epoch, from 0.
            steps_taken: optimizer steps taken so far; a skipped step does not advance the warm-up.
        """
        factor = warmup_factor(self.warmup_method, steps_taken, length=self.warmup_iters, start=self.warmup_start)
        return factor * self.decay(base_lr, self.epochs_of_decay(epoch))
