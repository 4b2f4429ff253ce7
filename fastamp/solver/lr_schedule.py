"""Learning-rate schedules, as pure functions of the epoch and the number of optimizer steps."""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fastamp.config import CfgNode
from fastamp.utils.errors import ConfigError
from fastamp.utils.registry import Registry


class LearningRateSchedule(Protocol):
    """Stateless learning-rate schedule."""

    def learning_rate(self, base_lr: float, *, epoch: int, steps_taken: int) -> float:
        """Compute the learning rate of the next step.

        Args:
            base_lr: base learning rate of the parameter group.
            epoch: current epoch, from 0.
            steps_taken: optimizer steps taken so far; skipped steps are not counted.
        """


@runtime_checkable
class WarmupSchedule(Protocol):
    """Schedule with a warm-up of ``warmup_iters`` iterations."""

    warmup_iters: int


SCHEDULE_REGISTRY = Registry("SOLVER.SCHED")


def learning_rate_factor(cfg: CfgNode) -> float:
    """Compute the learning-rate factor that ``SOLVER.LR_SCALING`` derives from the number of images per step.

    ``linear`` follows Goyal et al. 2017, arXiv:1706.02677; ``sqrt``, for adaptive optimizers, follows Malladi et al.
    2022, arXiv:2205.10287 (their rule also scales the other constants of Adam).
    """
    solver = cfg.SOLVER
    ratio = solver.IMS_PER_BATCH * solver.ACCUM_STEPS / solver.REFERENCE_BATCH
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[solver.LR_SCALING]


def warmup_factor(method: str, steps_taken: int, *, length: int, start: float) -> float:
    """Compute the learning-rate factor of the warm-up. The factor is 1.0 after the warm-up.

    Args:
        method: ``"linear"``, ``"constant"`` or ``"exp"``.
        steps_taken: optimizer steps taken so far.
        length: length of the warm-up in steps, ``SOLVER.WARMUP_ITERS``.
        start: factor at the first step, ``SOLVER.WARMUP_FACTOR``.
    """
    if steps_taken >= length:
        return 1.0
    fraction = steps_taken / length
    return {"linear": start * (1 - fraction) + fraction, "constant": start, "exp": start ** (1 - fraction)}[method]


def warmup_length(cfg: CfgNode, iters_per_epoch: int) -> int:
    """Compute the length of the warm-up in iterations: ``SOLVER.WARMUP_EPOCHS`` if not 0, else ``WARMUP_ITERS``."""
    return cfg.SOLVER.WARMUP_EPOCHS * iters_per_epoch or cfg.SOLVER.WARMUP_ITERS


@dataclass(frozen=True)
class EpochSchedule:
    """Warm-up followed by a decay over epochs.

    If ``after_warmup`` is True, as in FastReID, the decay counts only epochs that end after the warm-up iterations and
    the delay: with ten epochs of warm-up, a decay step at 40 is applied at epoch 49. Otherwise, the decay counts all
    epochs.

    Attributes:
        decay: ``decay(base_lr, epochs) -> lr``; ``epochs`` is the number of epochs that the decay counts, fractional if
            ``update`` is ``"iteration"``.
        iters_per_epoch: iterations per epoch.
        warmup_method, warmup_iters, warmup_start: see ``warmup_factor``.
        delay_epochs: number of epochs before the decay starts (``after_warmup`` only).
        after_warmup: count epochs from the end of the warm-up.
        update: ``"mixed"``, ``"iteration"`` or ``"epoch"``, see ``SOLVER.LR_UPDATE``.
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
    def from_config(cls, cfg: CfgNode, decay: Callable[[float, float], float], iters_per_epoch: int) -> "EpochSchedule":
        """Build a schedule with the given ``decay`` and with the warm-up, delay and update settings in ``SOLVER``."""
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
        """Length of the warm-up in epochs, rounded up."""
        return math.ceil(self.warmup_iters / self.iters_per_epoch)

    @property
    def epochs_before_decay(self) -> float:
        """Number of epochs at the start of training that the decay does not count."""
        if not self.after_warmup:
            return 0
        return {
            "mixed": max(self.warmup_epochs, self.delay_epochs + 1, 1) - 1,
            "iteration": max(self.warmup_iters / self.iters_per_epoch, self.delay_epochs),
            "epoch": max(self.warmup_epochs + 1, self.delay_epochs) - 1,
        }[self.update]

    def learning_rate(self, base_lr: float, *, epoch: int, steps_taken: int) -> float:
        """Compute the learning rate of the next step; see ``LearningRateSchedule``."""
        passed: float = epoch
        warmed, length = steps_taken, self.warmup_iters
        if self.update == "iteration":
            passed = steps_taken / self.iters_per_epoch
        elif self.update == "epoch":
            warmed, length = epoch, self.warmup_epochs
        factor = warmup_factor(self.warmup_method, warmed, length=length, start=self.warmup_start)
        return factor * self.decay(base_lr, max(0, passed - self.epochs_before_decay))


@SCHEDULE_REGISTRY.register("MultiStepLR")
def build_multi_step(cfg: CfgNode, *, iters_per_epoch: int) -> EpochSchedule:
    """Multiply the rate by ``SOLVER.GAMMA`` at each epoch in ``SOLVER.STEPS``, counted as in ``EpochSchedule``."""
    ordered, gamma = sorted(cfg.SOLVER.STEPS), cfg.SOLVER.GAMMA
    return EpochSchedule.from_config(
        cfg, lambda base_lr, epochs: base_lr * gamma ** bisect.bisect_right(ordered, epochs), iters_per_epoch
    )


@SCHEDULE_REGISTRY.register("CosineAnnealingLR")
def build_cosine(cfg: CfgNode, *, iters_per_epoch: int) -> EpochSchedule:
    """Anneal from the base rate to ``SOLVER.ETA_MIN_LR`` by half a cosine (Loshchilov & Hutter 2017, arXiv:1608.03983).

    Both rates are scaled by ``SOLVER.LR_SCALING``. The annealing ends at the end of training. If training ends before
    the warm-up or the delay does, the rate is not annealed.
    """
    solver, before, delay = cfg.SOLVER, 0, 0
    warmup = warmup_length(cfg, iters_per_epoch) / iters_per_epoch
    if solver.EPOCH_SCHEDULE == "after_warmup":
        # With one update per epoch, as in FastReID v1.0.0, the whole last epoch uses ETA_MIN_LR, not only its end.
        warmup = {"mixed": math.ceil(warmup), "iteration": warmup, "epoch": math.ceil(warmup) + 1}[solver.LR_UPDATE]
        before = max(warmup, solver.DELAY_EPOCHS)
    elif solver.LR_UPDATE == "iteration":
        before = delay = solver.DELAY_EPOCHS
    length, eta_min = max(solver.MAX_EPOCH - before, 1), solver.ETA_MIN_LR * learning_rate_factor(cfg)

    def decay(base_lr: float, epochs: float) -> float:
        fraction, lowest = (
            min(max(epochs - delay, 0) / length, 1.0),
            min(eta_min, base_lr),
        )  # never above a group's base rate
        return lowest + (base_lr - lowest) * (1 + math.cos(math.pi * fraction)) / 2

    return EpochSchedule.from_config(cfg, decay, iters_per_epoch)


@SCHEDULE_REGISTRY.register("ConstantLR")
def build_constant(cfg: CfgNode, *, iters_per_epoch: int) -> EpochSchedule:
    """Keep the base rate constant after warm-up."""
    return EpochSchedule.from_config(cfg, lambda base_lr, epochs: base_lr, iters_per_epoch)


@dataclass(frozen=True)
class RampedExponentialSchedule:
    """Linear ramp by epochs, then exponential decay by epochs towards a lowest rate, as in MiewID.

    Attributes:
        ramp_epochs: epochs until the base rate is reached.
        start: rate of the first epoch divided by the base rate.
        gamma: factor by which the distance to the lowest rate decreases per epoch.
        lowest: lowest rate.
        stride: epochs of the schedule per epoch of the training. MiewID's program has 2 instead of 1: its rate peaks in
            half of the ramp, below the base rate, and then decays with the square of ``gamma``.
        iters_per_epoch: iterations per epoch. Default 1.
    """

    ramp_epochs: int
    start: float
    gamma: float
    lowest: float
    stride: int = 1
    iters_per_epoch: int = 1

    @property
    def warmup_iters(self) -> int:
        """Iterations until the base rate is reached."""
        return math.ceil(self.ramp_epochs / self.stride) * self.iters_per_epoch

    def learning_rate(self, base_lr: float, *, epoch: int, steps_taken: int) -> float:
        """Compute the learning rate of the next step; see ``LearningRateSchedule``."""
        passed = self.stride * epoch
        if passed < self.ramp_epochs:
            return base_lr * (self.start + (1 - self.start) * passed / self.ramp_epochs)
        lowest = min(self.lowest, base_lr)
        return lowest + (base_lr - lowest) * self.gamma ** (passed - self.ramp_epochs)


@SCHEDULE_REGISTRY.register("RampedExponentialLR")
def build_ramped_exponential(cfg: CfgNode, *, iters_per_epoch: int) -> RampedExponentialSchedule:
    """Build the schedule from WARMUP_EPOCHS, WARMUP_FACTOR, GAMMA, ETA_MIN_LR and SCHEDULE_STRIDE in ``SOLVER``."""
    solver = cfg.SOLVER
    return RampedExponentialSchedule(
        ramp_epochs=solver.WARMUP_EPOCHS,
        start=solver.WARMUP_FACTOR,
        gamma=solver.GAMMA,
        lowest=solver.ETA_MIN_LR * learning_rate_factor(cfg),
        stride=solver.SCHEDULE_STRIDE,
        iters_per_epoch=iters_per_epoch,
    )


@dataclass(frozen=True)
class EpochCosineSchedule:
    """Linear warm-up and cosine, constant within an epoch, with first and last rates that all groups share.

    The rates are those of the programs that descend from TransReID (He et al. 2021, arXiv:2102.04378). Epochs are
    counted from 1 in both formulas: the peak is not reached, and the last epoch has the lowest rate.

    Attributes:
        warmup_epochs: number W of epochs of the warm-up; epochs before W are in it.
        total_epochs: number of epochs of the cosine, including the warm-up.
        first: rate from which the warm-up rises.
        lowest: rate of the last epoch.
        iters_per_epoch: iterations per epoch. Default 1.
    """

    warmup_epochs: int
    total_epochs: int
    first: float
    lowest: float
    iters_per_epoch: int = 1

    @property
    def warmup_iters(self) -> int:
        """Iterations until the warm-up ends."""
        return max(self.warmup_epochs - 1, 0) * self.iters_per_epoch

    def learning_rate(self, base_lr: float, *, epoch: int, steps_taken: int) -> float:
        """Compute the learning rate of the next step; see ``LearningRateSchedule``."""
        number = epoch + 1
        if number < self.warmup_epochs:
            return self.first + (base_lr - self.first) * number / self.warmup_epochs
        fraction = min(number / self.total_epochs, 1.0)
        return self.lowest + (base_lr - self.lowest) * (1 + math.cos(math.pi * fraction)) / 2


@SCHEDULE_REGISTRY.register("EpochCosineLR")
def build_epoch_cosine(cfg: CfgNode, *, iters_per_epoch: int) -> EpochCosineSchedule:
    """Build the schedule from WARMUP_EPOCHS, WARMUP_FACTOR, BASE_LR, ETA_MIN_LR and MAX_EPOCH in ``SOLVER``.

    The first rate of all groups is ``WARMUP_FACTOR * BASE_LR``; their last rate is ``ETA_MIN_LR``.
    """
    solver, factor = cfg.SOLVER, learning_rate_factor(cfg)
    return EpochCosineSchedule(
        warmup_epochs=solver.WARMUP_EPOCHS,
        total_epochs=max(solver.MAX_EPOCH, 1),
        first=solver.WARMUP_FACTOR * solver.BASE_LR * factor,
        lowest=solver.ETA_MIN_LR * factor,
        iters_per_epoch=iters_per_epoch,
    )


@dataclass(frozen=True)
class OneCycleSchedule:
    """1cycle policy with cosine annealing (Smith & Topin 2018, arXiv:1708.07120).

    The learning rates equal those of ``torch.optim.lr_scheduler.OneCycleLR``; momentum is constant.

    Attributes:
        total_steps: number of training steps.
        rise: fraction of the steps in which the rate increases, in 0..1.
        start: rate at the first step divided by the base rate.
        end: rate at the last step divided by the base rate.
    """

    total_steps: int
    rise: float
    start: float
    end: float

    def learning_rate(self, base_lr: float, *, epoch: int, steps_taken: int) -> float:
        """Compute the learning rate of the next step; see ``LearningRateSchedule``."""
        peak, last = self.rise * self.total_steps - 1, self.total_steps - 1
        if steps_taken <= peak:
            fraction, low = steps_taken / peak if peak > 0 else 1.0, self.start
        else:
            fraction, low = max(last - steps_taken, 0) / (last - peak), self.end
        return base_lr * (low + (1 - low) * (1 - math.cos(math.pi * fraction)) / 2)


@SCHEDULE_REGISTRY.register("OneCycleLR")
def build_one_cycle(cfg: CfgNode, *, iters_per_epoch: int) -> OneCycleSchedule:
    """Build the 1cycle schedule from ``SOLVER.ONE_CYCLE``; the ``SOLVER.WARMUP_*`` keys are ignored."""
    cycle = cfg.SOLVER.ONE_CYCLE
    return OneCycleSchedule(
        total_steps=cfg.SOLVER.MAX_EPOCH * iters_per_epoch,
        rise=cycle.PCT_START,
        start=1 / cycle.DIV_FACTOR,
        end=1 / (cycle.DIV_FACTOR * cycle.FINAL_DIV_FACTOR),
    )


@dataclass(frozen=True)
class ConstantTailSchedule:
    """Schedule that becomes constant at a given epoch, for stochastic weight averaging.

    Attributes:
        before: schedule before ``first_epoch``.
        first_epoch: first epoch with the constant rate, from 0.
        factor: constant rate divided by the base rate.
    """

    before: LearningRateSchedule
    first_epoch: int
    factor: float

    def learning_rate(self, base_lr: float, *, epoch: int, steps_taken: int) -> float:
        """Compute the learning rate of the next step; see ``LearningRateSchedule``."""
        if epoch < self.first_epoch:
            return self.before.learning_rate(base_lr, epoch=epoch, steps_taken=steps_taken)
        return base_lr * self.factor


def swa_start(cfg: CfgNode) -> int:
    """Compute the 0-based index of the first epoch that ``SOLVER.SWA`` averages.

    Raises:
        ConfigError: if training ends before this epoch.
    """
    start, epochs = cfg.SOLVER.SWA.START_EPOCH, cfg.SOLVER.MAX_EPOCH
    if start == -1:
        return epochs * 3 // 4
    if start >= epochs:
        raise ConfigError(
            f"SOLVER.SWA.START_EPOCH is {start}, but training ends after {epochs} epochs (SOLVER.MAX_EPOCH): "
            "no weights would be averaged.\n"
            "  fix: set SOLVER.SWA.START_EPOCH to a smaller epoch, or to -1 for the last quarter of training"
        )
    return start


def build_lr_schedule(cfg: CfgNode, iters_per_epoch: int) -> LearningRateSchedule:
    """Build the learning-rate schedule ``SOLVER.SCHED``.

    Args:
        cfg: config; reads ``SOLVER``.
        iters_per_epoch: iterations (optimizer steps) per epoch.

    Raises:
        ConfigError: if the schedule is unknown.
    """
    schedule = SCHEDULE_REGISTRY.build(cfg.SOLVER.SCHED, cfg, iters_per_epoch=iters_per_epoch)
    swa = cfg.SOLVER.SWA
    if swa.ENABLED and swa.LR_FACTOR > 0:
        return ConstantTailSchedule(schedule, swa_start(cfg), swa.LR_FACTOR)
    return schedule
