"""Hooks of FastReID for subclasses of ``DefaultTrainer`` that build their own hooks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fastamp.engine import hooks
from fastamp.evaluation.precise_bn import update_bn_statistics
from fastamp.fastreid.engine.train_loop import POINTS, HookBase
from fastamp.fastreid.evaluation.testing import flatten_results_dict
from fastamp.fastreid.utils.precision_bn import get_bn_modules
from fastamp.utils import comm

__all__ = [
    "CallbackHook",
    "EvalHook",
    "IterationTimer",
    "LRScheduler",
    "LayerFreeze",
    "PeriodicCheckpointer",
    "PeriodicWriter",
    "PreciseBN",
]


class CallbackHook(HookBase):
    """Hook that calls functions of the trainer.

    Args:
        before_train, after_train, before_epoch, after_epoch, before_step, after_step: function with the trainer as its
            argument. Default None.
    """

    def __init__(self, **functions: Callable[[Any], None] | None) -> None:
        for name, function in functions.items():
            if name not in POINTS:
                raise TypeError(f"CallbackHook: unknown argument {name!r}")
            if function is not None:
                vars(self)[name] = lambda function=function: function(self.trainer)


class IterationTimer(HookBase):
    """Hook without effect: the trainer itself measures ``time`` and ``data_time``.

    Args:
        warmup_iter: ignored.
    """

    def __init__(self, warmup_iter: int = 3) -> None:
        pass


class LayerFreeze(HookBase, hooks.FreezeLayers):
    """Freeze layers of the model in the first iterations, with FastReID's arguments; see ``FreezeLayers``."""

    def __init__(self, model: nn.Module, freeze_layers: Sequence[str] | str, freeze_iters: int) -> None:
        super().__init__(model, [freeze_layers] if isinstance(freeze_layers, str) else freeze_layers, freeze_iters)


class PreciseBN(HookBase):
    """Recompute batch norm statistics before each evaluation; see ``fastamp.evaluation.update_bn_statistics``.

    ``TEST.PRECISE_BN`` does the same.

    Args:
        model: model with batch norm layers.
        data_loader: training batches.
        num_iter: number of batches.
    """

    def __init__(self, model: nn.Module, data_loader: Iterable[Any], num_iter: int) -> None:
        self.model, self.data_loader, self.num_iter = model, data_loader, num_iter

    def after_epoch(self) -> None:
        if self.trainer.epoch + 1 == self.trainer.max_epoch or (
            (self.trainer.epoch + 1) % self.trainer.cfg.TEST.EVAL_PERIOD == 0
        ):
            self.update_stats()

    def update_stats(self) -> None:
        """Recompute the statistics, if the model has batch norm layers in training mode."""
        if get_bn_modules(self.model):
            update_bn_statistics(self.model, self.data_loader, self.num_iter, policy=self.trainer.policy)


class LRScheduler(HookBase):
    """Step the schedulers of ``build_lr_scheduler``.

    ``warmup_sched`` is stepped after each of the first ``SOLVER.WARMUP_ITERS`` iterations, and ``lr_sched`` after each
    later epoch, from ``SOLVER.DELAY_EPOCHS`` on.

    Args:
        optimizer: optimizer of the schedulers.
        schedulers: schedulers by name; a single scheduler is used as ``lr_sched``.
    """

    def __init__(self, optimizer: Optimizer, schedulers: Any) -> None:
        self.optimizer = optimizer
        self.schedulers = dict(schedulers) if isinstance(schedulers, Mapping) else {"lr_sched": schedulers}
        self._rates: list[float] = []

    def before_train(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate  # of the checkpoint; the optimizer has those of the config

    def before_step(self) -> None:
        groups = self.optimizer.param_groups
        largest = max(groups, key=lambda group: len(group["params"]))
        self.trainer.storage.put_scalar("lr", largest["lr"], smoothing_hint=False)
        self._steps = self.trainer.steps_taken

    def after_step(self) -> None:
        skipped = self.trainer.steps_taken == self._steps
        if "warmup_sched" in self.schedulers and self._in_warmup() and not skipped:
            self.schedulers["warmup_sched"].step()

    def after_epoch(self) -> None:
        solver = self.trainer.cfg.SOLVER
        after_warmup = "warmup_sched" not in self.schedulers or self.trainer.iter + 1 > solver.WARMUP_ITERS
        if "lr_sched" in self.schedulers and after_warmup and self.trainer.epoch + 1 > solver.DELAY_EPOCHS:
            self.schedulers["lr_sched"].step()

    def _in_warmup(self) -> bool:
        return self.trainer.iter + 1 <= self.trainer.cfg.SOLVER.WARMUP_ITERS

    def state_dict(self) -> dict[str, Any]:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return {"rates": rates} | {name: scheduler.state_dict() for name, scheduler in self.schedulers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rates = state["rates"]
        for name, scheduler in self.schedulers.items():
            if name in state:
                scheduler.load_state_dict(state[name])


class PeriodicWriter(HookBase):
    """Call ``write()`` of writers periodically and at the end of each epoch.

    Args:
        writers: writers with ``write()`` and ``close()``.
        period: period in iterations. Default 20.
    """

    def __init__(self, writers: Sequence[Any], period: int = 20) -> None:
        self.writers, self.period = list(writers), int(period)

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if done % self.period == 0 and done % self.trainer.iters_per_epoch:
            self.after_epoch()

    def after_epoch(self) -> None:
        for writer in self.writers:
            writer.write()

    def after_train(self) -> None:
        for writer in self.writers:
            writer.close()


class EvalHook(HookBase):
    """Evaluate every ``eval_period`` epochs and after the last one, and put the numbers into the storage.

    Args:
        eval_period: period in epochs; 0: only after the last one.
        eval_function: returns nested metrics, e.g. ``{"Market1501": {"mAP": 85.9}}``.
    """

    def __init__(self, eval_period: int, eval_function: Callable[[], Mapping[str, Any] | None]) -> None:
        self._period, self._func = eval_period, eval_function

    def _do_eval(self) -> None:
        results = flatten_results_dict(self._func() or {})
        numbers = {k: float(v) for k, v in results.items() if isinstance(v, int | float) or hasattr(v, "item")}
        self.trainer.storage.put_scalars(smoothing_hint=False, **numbers)
        comm.synchronize()

    def after_epoch(self) -> None:
        done = self.trainer.epoch + 1
        if (self._period and done % self._period == 0) or done == self.trainer.max_epoch:
            self._do_eval()


class PeriodicCheckpointer(HookBase, hooks.PeriodicCheckpointer):
    """Save checkpoints; see ``fastamp.engine.hooks.PeriodicCheckpointer``.

    Args:
        checkpointer: writes the files.
        period: period in epochs.
        max_epoch: ignored; it is that of the trainer.
        options: see ``fastamp.engine.hooks.PeriodicCheckpointer``.
    """

    def __init__(self, checkpointer: Any, period: int, max_epoch: int | None = None, **options: Any) -> None:
        super().__init__(checkpointer, period, **options)
