"""Methods of FastReID's ``DefaultTrainer`` for subclasses written for FastReID."""

import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from fastamp.amp import requested_device, resolve_device
from fastamp.data.custom_loader import CustomTrainLoader
from fastamp.utils.errors import ConfigError

if TYPE_CHECKING:
    from fastamp.engine import HookBase

logger = logging.getLogger(__name__)

CALLED = ("before_train", "after_train", "before_epoch", "after_epoch", "before_step", "after_step")
"""Methods that ``DefaultTrainer`` calls if a subclass overrides them."""

NOT_CALLED = {
    "run_step": "register a subclass of AMPTrainer in TRAINER_REGISTRY, and set SOLVER.TRAINER to its name",
    "build_lr_scheduler": "register a schedule in SCHEDULE_REGISTRY, and set SOLVER.SCHED to its name",
    "_write_metrics": "override record_metrics of a trainer registered in TRAINER_REGISTRY",
}
"""Method of FastReID's trainers that fastamp does not call -> what to do instead."""


class FastReIDMethods:
    """Base class of ``DefaultTrainer`` with the methods and attributes of FastReID's trainer.

    A subclass may override the methods in ``CALLED``; they are called after those of the hooks. Their implementations
    here do nothing, so that ``super().after_step()`` works. A class that defines a method in ``NOT_CALLED`` triggers a
    warning.
    """

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
    def max_epoch(self) -> int:
        """Number of epochs."""
        return self.trainer.max_epoch

    @property
    def iters_per_epoch(self) -> int:
        """Number of iterations in an epoch."""
        return self.trainer.iters_per_epoch

    @property
    def storage(self) -> Any:
        """Metrics of the run; see ``fastamp.compat.events.EventStorage``."""
        return self.trainer.storage

    def hooks_of_overridden_methods(self) -> Iterator["HookBase"]:
        """Yield a hook that calls the methods in ``CALLED`` that the class of this trainer overrides, if any."""
        from fastamp.engine import HookBase  # fastamp.engine imports this module

        class _TrainerMethods(HookBase):
            """Hook that calls methods of the trainer, which are set as attributes of the instance."""

        overridden = [name for name in CALLED if getattr(type(self), name) is not getattr(FastReIDMethods, name)]
        if overridden:
            hook = _TrainerMethods()
            vars(hook).update({name: getattr(self, name) for name in overridden})
            yield hook


def as_train_loader(loader: Any, cfg: Any) -> Any:
    """Return a training loader with the attributes that ``DefaultTrainer`` requires.

    Args:
        loader: return value of ``build_train_loader``. A ``torch.utils.data.DataLoader`` over a map-style dataset is
            wrapped.
        cfg (CfgNode): config; the length of an epoch is computed from SOLVER.IMS_PER_BATCH.

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
