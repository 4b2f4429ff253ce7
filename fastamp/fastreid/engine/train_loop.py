"""FastReID's training loops."""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fastamp.amp import LossScaler
from fastamp.config import get_cfg
from fastamp.engine import hooks, train_loop, trainer_base
from fastamp.fastreid.overrides import overrides, warn_of_uncalled_methods
from fastamp.fastreid.utils.events import RunStorage

POINTS = ("before_train", "after_train", "before_epoch", "after_epoch", "before_step", "after_step")
"""Methods of hooks and trainers that FastReID calls."""


class HookBase(hooks.HookBase):
    """Base class of hooks. In a run of ``DefaultTrainer``, ``trainer`` is the ``DefaultTrainer``, as in FastReID."""

    trainer: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        warn_of_uncalled_methods(cls, HookBase)


class MethodsHook(HookBase):
    """Hook that calls the methods of a trainer that its class overrides.

    Args:
        owner: the trainer.
        base: class whose methods do nothing.
    """

    def __init__(self, owner: Any, base: type) -> None:
        vars(self).update({name: getattr(owner, name) for name in POINTS if overrides(type(owner), name, base)})


class Points:
    """Methods that a trainer may override; they are called after those of the hooks. Here, they do nothing."""

    def _do_nothing(self) -> None:
        """Do nothing; a subclass may override the method."""

    before_train = after_train = before_epoch = after_epoch = before_step = after_step = _do_nothing


class TrainerBase(Points, trainer_base.TrainerBase):
    """Training loop with FastReID's arguments; a subclass defines ``run_step``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        if not isinstance(self, TrainerBase):
            return  # a DefaultTrainer whose __init__ builds its parts
        super().__init__(*args, **options)
        self.storage = RunStorage(self)
        self.register_hooks([MethodsHook(self, Points)])

    def register_hooks(self, added: Iterable[hooks.HookBase | None]) -> None:
        """Add hooks; None is ignored."""
        super().register_hooks([hook for hook in added if hook is not None])

    def train(self, start_epoch: int, max_epoch: int, iters_per_epoch: int) -> None:
        """Run the epochs ``start_epoch`` to ``max_epoch - 1``."""
        with self.storage:
            super().train(start_epoch * iters_per_epoch, max_epoch, iters_per_epoch)


class StepMethods:
    """Attributes of a training loop that steps written for FastReID use."""

    next_batch: Any
    storage: Any

    @property
    def _data_loader_iter(self) -> Iterator[dict[str, Any]]:
        return iter(self.next_batch, None)

    def _write_metrics(self, loss_dict: dict[str, torch.Tensor], data_time: float, prefix: str = "") -> None:
        """Record the losses of a step."""
        self.storage.put_losses(loss_dict, data_time, prefix)


class SimpleTrainer(StepMethods, TrainerBase, train_loop.SimpleTrainer):
    """Trainer in float32 with FastReID's arguments; the step is that of ``fastamp.engine.SimpleTrainer``.

    Args:
        model: model in training mode, which returns a dict of losses.
        data_loader: infinite iterable of batches.
        optimizer: the optimizer, or a list of optimizers.
        param_wrapper: ignored; see ``ContiguousParams``.
        options: see ``fastamp.engine.SimpleTrainer``; ``policy`` is float32 by default.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[dict[str, Any]],
        optimizer: Optimizer | list[Optimizer],
        param_wrapper: Any = None,
        **options: Any,
    ) -> None:
        model = model.module if isinstance(model, DistributedDataParallel) else model
        cfg = get_cfg()
        cfg.SOLVER.AMP.ENABLED = True
        policy = options.pop("policy", None) or self.build_policy(cfg, next(model.parameters()).device)
        options.setdefault("scaler", LossScaler.from_config(cfg, policy))
        optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        super().__init__(model, data_loader, optimizers, policy=policy, **options)
        self.param_wrapper = param_wrapper

    @property
    def optimizer(self) -> Optimizer:
        """The first optimizer."""
        return self.optimizers[0]


def build_grad_scaler(model: nn.Module) -> torch.amp.GradScaler:
    """Build PyTorch's loss scaler for a custom step; it is disabled on the CPU, as ``torch.cuda.amp.autocast`` is."""
    device = next(model.parameters()).device.type
    return torch.amp.GradScaler(device, enabled=device == "cuda")


class AMPTrainer(SimpleTrainer, train_loop.AMPTrainer):
    """Trainer in mixed precision with FastReID's arguments; see ``fastamp.engine.AMPTrainer``.

    Args:
        model, data_loader, optimizer, param_wrapper, options: see ``SimpleTrainer``.
        grad_scaler: used by a ``run_step`` of a subclass only; the step of this class uses the loss scaler of the
            policy. Default None: a ``torch.amp.GradScaler``.
    """

    def __init__(
        self,
        model: nn.Module,
        data_loader: Iterable[dict[str, Any]],
        optimizer: Optimizer | list[Optimizer],
        param_wrapper: Any = None,
        grad_scaler: Any = None,
        **options: Any,
    ) -> None:
        if grad_scaler is not None and type(self).run_step is AMPTrainer.run_step:
            warnings.warn(
                f"{type(self).__name__}: grad_scaler has no effect: the trainer has its own loss scaler.\n"
                "  fix: set the keys of SOLVER.AMP",
                stacklevel=2,
            )
        super().__init__(model, data_loader, optimizer, param_wrapper, **options)
        self.grad_scaler = grad_scaler or build_grad_scaler(self.model)
