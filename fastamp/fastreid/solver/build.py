"""FastReID's optimizers and learning-rate schedulers."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fastamp.config import CfgNode
from fastamp.solver import build
from fastamp.solver.lr_schedule import EpochSchedule, build_lr_schedule, warmup_factor
from fastamp.utils.errors import ConfigError


class _Scheduler:
    """Learning rates as a function of the number of calls of ``step``.

    Args:
        optimizer: optimizer whose learning rates are set.
        learning_rate: function (base learning rate, number of calls) -> learning rate.
    """

    def __init__(self, optimizer: Optimizer, learning_rate: Callable[[float, int], float]) -> None:
        self.optimizer, self._learning_rate, self._calls = optimizer, learning_rate, 0

    def set(self) -> None:
        """Set the learning rate of each parameter group."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(group.setdefault("base_lr", group["lr"]), self._calls)

    def step(self) -> None:
        """Advance by one iteration or epoch, and set the learning rates."""
        self._calls += 1
        self.set()

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        """Return the number of calls of ``step``."""
        return {"calls": self._calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the number of calls. The learning rates are part of the optimizer's state."""
        self._calls = state["calls"]


def build_lr_scheduler(cfg: CfgNode, optimizer: Optimizer, iters_per_epoch: int) -> dict[str, _Scheduler]:
    """Build schedulers for a custom training loop; ``DefaultTrainer`` does not use them.

    Args:
        cfg: config; reads SOLVER.
        optimizer: optimizer whose learning rates are set.
        iters_per_epoch: iterations per epoch.

    Returns:
        ``warmup_sched``, whose ``step`` is called after each iteration of the warm-up, and ``lr_sched``, whose ``step``
        is called after each epoch that ends after the warm-up and after ``SOLVER.DELAY_EPOCHS`` epochs. The learning
        rates are set for the first iteration.

    Raises:
        ConfigError: if the schedule is not a warm-up followed by a decay over epochs.
    """
    schedule = build_lr_schedule(cfg, iters_per_epoch)
    if not isinstance(schedule, EpochSchedule):
        raise ConfigError(
            f"build_lr_scheduler: expected a schedule over epochs, got SOLVER.SCHED={cfg.SOLVER.SCHED} with "
            f"SOLVER.SWA.ENABLED={cfg.SOLVER.SWA.ENABLED}.\n"
            "  fix: use fastamp.solver.build_lr_schedule, or set SOLVER.SCHED to MultiStepLR, SOLVER.SWA to False"
        )

    def warmup(base_lr: float, calls: int) -> float:
        length, start = schedule.warmup_iters, schedule.warmup_start
        return base_lr * warmup_factor(schedule.warmup_method, calls, length=length, start=start)

    schedulers = {"lr_sched": _Scheduler(optimizer, schedule.decay), "warmup_sched": _Scheduler(optimizer, warmup)}
    schedulers["warmup_sched"].set()
    return schedulers


class _Unpacked:
    """Mixin for an optimizer that can be unpacked as ``(optimizer, parameters)``; the parameters are None."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self, None))


def build_optimizer(cfg: CfgNode, model: nn.Module, contiguous: bool = True) -> Optimizer:
    """Build the optimizer of a model; see ``fastamp.solver.build_optimizer``.

    Args:
        cfg: config; reads SOLVER.
        model: model to optimize.
        contiguous: ignored: the parameters are not copied to a flat buffer, see ``ContiguousParams``.

    Returns:
        The optimizer. As FastReID's releases return either an optimizer or a pair, it can be unpacked as the pair
        ``(optimizer, None)``.
    """
    optimizer = build.build_optimizer(cfg, model)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Unpacked, kind), {})
    return optimizer
