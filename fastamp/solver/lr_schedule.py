"""The learning rate as a pure function of the epoch and of the steps taken."""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fastamp.utils.errors import ConfigError
from fastamp.utils.moved import moved_names
from fastamp.utils.registry import Registry

SCHEDULE_REGISTRY = Registry("SOLVER.SCHED")

__getattr__ = moved_names(__name__, {"HeldSchedule": "fastamp.solver.lr_schedule.ConstantTailSchedule"})


class LearningRateSchedule(Protocol):
    """What sets the learning rate; it has no state, so that there is nothing to save."""

    def learning_rate(self, base_lr: float, *, epoch: int, steps_taken: int) -> float:
        """Return the learning rate of the next step.

        Args:
            base_lr: of the parameter group.
            epoch: the current epoch, from 0.
            steps_taken: optimizer steps taken so far; a skipped step advances nothing that counts steps.
        """


def learning_rate_factor(cfg: Any) -> float:
    """Return by what ``SOLVER.LR_SCALING`` multiplies learning rates, for the images of a step.

    Linear is Goyal et al. 2017, arXiv:1706.02677; the square root, for adaptive optimizers, is Malladi et
    al. 2022, arXiv:2205.10287 (whose rule changes the other constants of Adam too).
    """
    solver = cfg.SOLVER
    ratio = solver.IMS_PER_BATCH * solver.ACCUM_STEPS / solver.REFERENCE_BATCH
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[solver.LR_SCALING]


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
    fraction = steps_taken / length
    return {"linear": start * (1 - fraction) + fraction, "constant": start, "exp": start ** (1 - fraction)}[method]


def warmup_length(cfg: Any, iters_per_epoch: int) -> int:
    """Return the length of the warm-up in iterations: ``SOLVER.WARMUP_EPOCHS``, or where that is 0 ``WARMUP_ITERS``."""
    return cfg.SOLVER.WARMUP_EPOCHS * iters_per_epoch or cfg.SOLVER.WARMUP_ITERS


@dataclass(frozen=True)
class EpochSchedule:
    """A warm-up, then a decay over epochs.

    With ``after_warmup``, FastReID's meaning, the decay counts only the epochs at whose end the warm-up iterations are
    done and the delay is over: a step at 40 with ten epochs of warm-up is taken at epoch 49. Otherwise it counts
    all epochs.

    Attributes:
        decay: ``decay(base_lr, epochs) -> lr`` after so many epochs of the decay, a fraction where ``update`` is
            "iteration".
        iters_per_epoch: iterations in an epoch.
        warmup_method, warmup_iters, warmup_start: see ``warmup_factor``.
        delay_epochs: the decay does not begin before these are over (``after_warmup`` only).
        after_warmup: see above.
        update: "mixed", "iteration" or "epoch", see ``SOLVER.LR_UPDATE``.
    """

    decay: Callable[[float, float], float]
    iters_per_epoch: int
    warmup_method: str = "linear"
    warmup_iters: int = 0
    warmup_start: float = 0.1
    delay_epochs: int = 0
    after_warmup: bool = True
    update: str = "mixed"

    @classmethod
    def from_config(cls, cfg: Any, decay: Callable[[float, float], float], iters_per_epoch: int) -> "EpochSchedule":
        """Return ``decay`` behind the warm-up of ``SOLVER``."""
        solver = cfg.SOLVER
        return cls(
            decay=decay,
            iters_per_epoch=iters_per_epoch,
            warmup_method=solver.WARMUP_METHOD,
            warmup_iters=warmup_length(cfg, iters_per_epoch),
            warmup_start=solver.WARMUP_FACTOR,
            delay_epochs=solver.DELAY_EPOCHS,
            after_warmup=solver.EPOCH_SCHEDULE == "after_warmup",
            update=solver.LR_UPDATE,
        )

    @property
    def warmup_epochs(self) -> int:
        """Epochs until the warm-up is over."""
        return math.ceil(self.warmup_iters / self.iters_per_epoch)

    @property
    def epochs_before_decay(self) -> float:
        """Epochs that the decay does not count."""
        if not self.after_warmup:
            return 0
        return {
            "mixed": max(self.warmup_epochs, self.delay_epochs + 1, 1) - 1,
            "iteration": max(self.warmup_iters / self.iters_per_epoch, self.delay_epochs),
            "epoch": max(self.warmup_epochs + 1, self.delay_epochs) - 1,
        }[self.update]

    def learning_rate(self, base_lr: float, *, epoch: int, steps_taken: int) -> float:
        """Return the learning rate of the next step; see ``LearningRateSchedule``."""
        passed, warmed, length = epoch, steps_taken, self.warmup_iters
        if self.update == "iteration":
            passed = steps_taken / self.iters_per_epoch
        elif self.update == "epoch":
            warmed, length = epoch, self.warmup_epochs
        factor = warmup_factor(self.warmup_method, warmed, length=length, start=self.warmup_start)
        return factor * self.decay(base_lr, max(0, passed - self.epochs_before_decay))


@SCHEDULE_REGISTRY.register("MultiStepLR")
def build_multi_step(cfg: Any, *, iters_per_epoch: int) -> EpochSchedule:
    """Multiply by ``GAMMA`` at each of ``STEPS``, in epochs of the decay."""
    ordered, gamma = sorted(cfg.SOLVER.STEPS), cfg.SOLVER.GAMMA
    return EpochSchedule.from_config(
        cfg, lambda base_lr, epochs: base_lr * gamma ** bisect.bisect_right(ordered, epochs), iters_per_epoch
    )


@SCHEDULE_REGISTRY.register("CosineAnnealingLR")
def build_cosine(cfg: Any, *, iters_per_epoch: int) -> EpochSchedule:
    """Half a cosine from the base rate to ``ETA_MIN_LR``, both scaled (Loshchilov & Hutter 2017, arXiv:1608.03983).

    It ends with the training, and with a training that is shorter than warm-up and delay it never begins.
    """
    solver, before, delay = cfg.SOLVER, 0, 0
    warmup = warmup_length(cfg, iters_per_epoch) / iters_per_epoch
    if solver.EPOCH_SCHEDULE == "after_warmup":
        # Once an epoch, as FastReID v1.0.0, the last epoch has ETA_MIN_LR; otherwise the end of the last one would.
        warmup = {"mixed": math.ceil(warmup), "iteration": warmup, "epoch": math.ceil(warmup) + 1}[solver.LR_UPDATE]
        before = max(warmup, solver.DELAY_EPOCHS)
    elif solver.LR_UPDATE == "iteration":
        before = delay = solver.DELAY_EPOCHS
    length, eta_min = max(solver.MAX_EPOCH - before, 1), solver.ETA_MIN_LR * learning_rate_factor(cfg)

    def decay(base_lr: float, epochs: float) -> float:
        fraction, lowest = (
            min(max(epochs - delay, 0) / length, 1.0),
            min(eta_min, base_lr),
        )  # a group's rate never rises
        return lowest + (base_lr - lowest) * (1 + math.cos(math.pi * fraction)) / 2

    return EpochSchedule.from_config(cfg, decay, iters_per_epoch)


@SCHEDULE_REGISTRY.register("ConstantLR")
def build_constant(cfg: Any, *, iters_per_epoch: int) -> EpochSchedule:
    """Stay at the base rate after warm-up."""
    return EpochSchedule.from_config(cfg, lambda base_lr, epochs: base_lr, iters_per_epoch)


@dataclass(frozen=True)
class OneCycleSchedule:
    """Up to the base rate and down again, both by half a cosine over steps (Smith & Topin 2018, arXiv:1708.07120).

    The rates are those of ``torch.optim.lr_scheduler.OneCycleLR``; momentum stays as it is.

    Attributes:
        total_steps: of the whole training.
        rise: share of the steps until the base rate is reached.
        start: rate at the first step, as a share of the base rate.
        end: rate at the last step, as a share of the base rate.
    """

    total_steps: int
    rise: float
    start: float
    end: float

    def learning_rate(self, base_lr: float, *, epoch: int, steps_taken: int) -> float:
        """Return the learning rate of the next step; see ``LearningRateSchedule``."""
        peak, last = self.rise * self.total_steps - 1, self.total_steps - 1
        if steps_taken <= peak:
            fraction, low = steps_taken / peak if peak > 0 else 1.0, self.start
        else:
            fraction, low = max(last - steps_taken, 0) / (last - peak), self.end
        return base_lr * (low + (1 - low) * (1 - math.cos(math.pi * fraction)) / 2)


@SCHEDULE_REGISTRY.register("OneCycleLR")
def build_one_cycle(cfg: Any, *, iters_per_epoch: int) -> OneCycleSchedule:
    """Return the schedule of ``SOLVER.ONE_CYCLE``; the warm-up keys have no meaning for it."""
    cycle = cfg.SOLVER.ONE_CYCLE
    return OneCycleSchedule(
        total_steps=cfg.SOLVER.MAX_EPOCH * iters_per_epoch,
        rise=cycle.PCT_START,
        start=1 / cycle.DIV_FACTOR,
        end=1 / (cycle.DIV_FACTOR * cycle.FINAL_DIV_FACTOR),
    )


@dataclass(frozen=True)
class ConstantTailSchedule:
    """Another schedule up to some epoch, a constant rate from there on, as weight averaging wants it.

    Attributes:
        before: the schedule until then.
        first_epoch: the first epoch, from 0, of the constant rate.
        factor: the constant rate as a share of the base rate.
    """

    before: LearningRateSchedule
    first_epoch: int
    factor: float

    def learning_rate(self, base_lr: float, *, epoch: int, steps_taken: int) -> float:
        """Return the learning rate of the next step; see ``LearningRateSchedule``."""
        if epoch < self.first_epoch:
            return self.before.learning_rate(base_lr, epoch=epoch, steps_taken=steps_taken)
        return base_lr * self.factor


def swa_start(cfg: Any) -> int:
    """Return after how many epochs ``SOLVER.SWA`` begins to average.

    Raises:
        ConfigError: that is beyond the training's end.
    """
    start, epochs = cfg.SOLVER.SWA.START_EPOCH, cfg.SOLVER.MAX_EPOCH
    if start == -1:
        return epochs * 3 // 4
    if start >= epochs:
        raise ConfigError(
            f"SOLVER.SWA.START_EPOCH is {start}, but the training ends after {epochs} epochs (SOLVER.MAX_EPOCH): "
            "nothing would be averaged"
        )
    return start


def build_lr_schedule(cfg: Any, iters_per_epoch: int) -> LearningRateSchedule:
    """Return the schedule of ``SOLVER``.

    Args:
        cfg: the config.
        iters_per_epoch: iterations (optimizer steps) of an epoch.

    Raises:
        ConfigError: an unknown schedule.
    """
    schedule = SCHEDULE_REGISTRY.build(cfg.SOLVER.SCHED, cfg, iters_per_epoch=iters_per_epoch)
    swa = cfg.SOLVER.SWA
    if swa.ENABLED and swa.LR_FACTOR > 0:
        return ConstantTailSchedule(schedule, swa_start(cfg), swa.LR_FACTOR)
    return schedule
