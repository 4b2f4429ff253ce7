"""Methods of FastReID's ``DefaultTrainer`` for subclasses written for FastReID."""

import inspect
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from fastamp.amp import requested_device, resolve_device
from fastamp.data.custom_loader import CustomTrainLoader
from fastamp.fastreid.solver import build_lr_scheduler
from fastamp.utils.errors import ConfigError

if TYPE_CHECKING:
    from fastamp.engine import HookBase

logger = logging.getLogger(__name__)

CALLED = ("before_train", "after_train", "before_epoch", "after_epoch", "before_step", "after_step")
"""Methods that ``DefaultTrainer`` calls if a subclass overrides them."""

NOT_CALLED = {
    "run_step": "register a subclass of AMPTrainer in TRAINER_REGISTRY, and set SOLVER.TRAINER to its name",
    "_write_metrics": "override record_metrics of a trainer registered in TRAINER_REGISTRY",
}
"""Method of FastReID's trainers that fastamp does not call -> what to do instead."""


class FastReIDMethods:
    """Base class of ``DefaultTrainer`` with the methods and attributes of FastReID's trainer.

    A subclass may override the methods in ``CALLED``; they are called after those of the hooks. Their implementations
    here do nothing, so that ``super().after_step()`` works. A class that defines a method in ``NOT_CALLED`` triggers a
    warning.
    """

    cfg: Any
    optimizer: Optimizer
    trainer: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in NOT_CALLED.keys() & vars(cls).keys():
            warnings.warn(
                f"{cls.__name__}.{name} is never called: FastReID's method {name} has no counterpart.\n"
                f"  fix: {NOT_CALLED[name]}",
                stacklevel=2,
            )

    def _do_nothing(self) -> None:
        """Do nothing; a subclass may override any of the methods in ``CALLED``."""

    before_train = after_train = before_epoch = after_epoch = before_step = after_step = _do_nothing

    @property
    def iter(self) -> int:
        """Current iteration, from 0."""
        return self.trainer.iter

    @property
    def epoch(self) -> int:
        """Current epoch, from 0."""
        return self.trainer.epoch

    @property
    def start_iter(self) -> int:
        """First iteration of the run; above 0 after a resume."""
        return self.trainer.start_iter

    @property
    def start_epoch(self) -> int:
        """First epoch of the run; above 0 after a resume."""
        return self.start_iter // self.iters_per_epoch

    @property
    def max_epoch(self) -> int:
        """Number of epochs."""
        return self.cfg.SOLVER.MAX_EPOCH

    @property
    def max_iter(self) -> int:
        """Number of iterations."""
        return self.max_epoch * self.iters_per_epoch

    @property
    def _trainer(self) -> Any:
        return self.trainer

    @property
    def _hooks(self) -> list[Any]:
        return self.trainer._hooks  # noqa: SLF001

    @property
    def iters_per_epoch(self) -> int:
        """Number of iterations in an epoch."""
        return self.trainer.iters_per_epoch

    @property
    def storage(self) -> Any:
        """Metrics of the run; see ``fastamp.fastreid.events.EventStorage``."""
        return self.trainer.storage

    @classmethod
    def build_lr_scheduler(cls, cfg: Any, optimizer: Optimizer, iters_per_epoch: int) -> Any:
        """Build FastReID's schedulers; only used if a subclass overrides this method or reads ``scheduler``."""
        return build_lr_scheduler(cfg, optimizer, iters_per_epoch)

    @cached_property
    def scheduler(self) -> Any:
        """Result of ``build_lr_scheduler``."""
        arguments = (self.cfg, self.optimizer, self.iters_per_epoch)
        accepted = len(inspect.signature(self.build_lr_scheduler).parameters)  # 2 up to FastReID v1.0
        return self.build_lr_scheduler(*arguments[:accepted])

    def with_own_schedulers(self, hooks: Sequence["HookBase"]) -> list["HookBase"]:
        """Replace the ``LRScheduler`` in ``hooks`` if the class of this trainer overrides ``build_lr_scheduler``."""
        if not overrides(self, "build_lr_scheduler", FastReIDMethods):
            return list(hooks)
        from fastamp.engine.hooks import LRScheduler
        from fastamp.fastreid.hooks import SchedulerHook  # fastamp.engine imports this module

        scheduler_hook = SchedulerHook(self.optimizer, self.scheduler)
        return [scheduler_hook if isinstance(hook, LRScheduler) else hook for hook in hooks]

    def hooks_of_overridden_methods(self) -> Iterator["HookBase"]:
        """Yield a hook that calls the methods in ``CALLED`` that the class of this trainer overrides, if any."""
        from fastamp.engine import HookBase  # fastamp.engine imports this module

        class _TrainerMethods(HookBase):
            """Hook that calls methods of the trainer, which are set as attributes of the instance."""

        overridden = [name for name in CALLED if overrides(self, name, FastReIDMethods)]
        if overridden:
            hook = _TrainerMethods()
            vars(hook).update({name: getattr(self, name) for name in overridden})
            yield hook


def overrides(trainer: Any, name: str, base: type) -> bool:
    """Return True if the class of ``trainer`` overrides the method ``name`` of ``base``."""
    overriding, inherited = (inspect.getattr_static(cls, name) for cls in (type(trainer), base))
    return overriding is not inherited


def results_by_dataset(results: Any, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Convert the return value of FastReID's ``test``: dataset name -> metrics; empty if there are no results."""
    if not results:
        return {}
    if not all(isinstance(metrics, Mapping) for metrics in results.values()):
        results = {next(iter(names)): results}
    numbers = (int, float)
    return {
        name: {
            metric: value.item() if hasattr(value, "item") else value
            for metric, value in metrics.items()
            if isinstance(value, numbers) or hasattr(value, "item") or isinstance(value, Mapping)
        }
        for name, metrics in results.items()
    }


def build_writers_of(trainer: Any, start_iter: int) -> list[Any]:
    """Call ``build_writers`` of a trainer, which has no parameter in FastReID."""
    parameters = inspect.signature(trainer.build_writers).parameters
    return trainer.build_writers(*((start_iter,) if parameters else ()))


def as_train_loader(loader: Any, cfg: Any) -> Any:
    """Return a training loader with the attributes that ``DefaultTrainer`` requires.

    Args:
        loader: return value of ``build_train_loader``. A ``torch.utils.data.DataLoader`` over a map-style dataset is
            wrapped.
        cfg: config; the length of an epoch is computed from SOLVER.IMS_PER_BATCH.

    Raises:
        ConfigError: if ``loader`` lacks an attribute and is not a ``DataLoader``.
    """
    missing = [name for name in ("iters_per_epoch", "start_at") if not hasattr(loader, name)]
    if not missing:
        return loader
    if isinstance(loader, torch.utils.data.DataLoader):
        on_cuda = resolve_device(requested_device(cfg)).type == "cuda"
        return CustomTrainLoader.wrap(loader, batch_size=cfg.SOLVER.IMS_PER_BATCH, pin_memory=on_cuda, seed=cfg.SEED)
    raise ConfigError(
        f"build_train_loader returned {type(loader).__name__} without {', '.join(missing)}.\n"
        "  fix: return the result of build_reid_train_loader(cfg, train_set=...), or a torch.utils.data.DataLoader"
    )


def only_optimizer(built: Any) -> Optimizer:
    """Return the optimizer from the return value of ``build_optimizer``, which FastReID's method returns in a tuple."""
    return built[0] if isinstance(built, tuple) else built
