"""Build optimizer, clipping and schedule from ``SOLVER``."""

import functools
import inspect
import logging
import math
from typing import Any

import torch
from torch import nn

from fastamp.amp.step import Clip
from fastamp.solver.clip import clip_gradients
from fastamp.solver.lr_schedule import SCHEDULE_REGISTRY, LearningRateSchedule
from fastamp.utils.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

# The base class, one that calls the model several times a step, those for sparse or two-dimensional gradients.
_NOT_FOR_THIS_LOOP = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
_NORM_LAYERS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
)


def parameter_groups(cfg: Any, model: nn.Module) -> list[dict[str, Any]]:
    """Return the trainable parameters, merged into one group for each learning-rate factor and weight decay.

    Norm layers decay by ``WEIGHT_DECAY_NORM`` and biases, those of norm layers too, by ``WEIGHT_DECAY_BIAS``; biases'
    learning rate is times ``BIAS_LR_FACTOR``, that of everything in the heads times ``HEADS_LR_FACTOR``.

    Returns:
        Groups with ``params``, ``weight_decay``, ``lr`` and ``base_lr``; the schedule sets ``lr`` from ``base_lr``.
    """
    solver = cfg.SOLVER
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            lr, weight_decay = solver.BASE_LR, solver.WEIGHT_DECAY
            if isinstance(module, _NORM_LAYERS):
                weight_decay = solver.WEIGHT_DECAY_NORM
            if name == "bias":
                lr *= solver.BIAS_LR_FACTOR
                weight_decay = solver.WEIGHT_DECAY_BIAS
            if "heads" in module_name:
                lr *= solver.HEADS_LR_FACTOR
            group = groups.setdefault(
                (lr, weight_decay), {"params": [], "lr": lr, "base_lr": lr, "weight_decay": weight_decay}
            )
            group["params"].append(parameter)
    return list(groups.values())


def build_optimizer(cfg: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Return the torch optimizer that ``SOLVER.OPT`` names over the model's parameter groups.

    ``SOLVER.OPT_ARGS`` are further keyword arguments of its constructor; MOMENTUM and NESTEROV are SGD's. The fused
    implementation is used where the optimizer and the device have it, else foreach.

    Raises:
        ConfigError: torch.optim has no such optimizer, it refuses an argument, or nothing is trainable.
    """
    name = cfg.SOLVER.OPT
    choices = [
        key
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and key not in _NOT_FOR_THIS_LOOP
    ]
    if name not in choices:
        raise ConfigError(
            f"SOLVER.OPT: {name!r} is no optimizer of torch.optim that trains here.{did_you_mean(name, choices)}\n"
            f"  choices: {', '.join(choices)}"
        )
    groups = parameter_groups(cfg, model)
    if not groups:
        raise ConfigError("no parameter of the model is trainable: all of it is frozen (requires_grad)")
    optimizer_class = getattr(torch.optim, name)
    options = dict(cfg.SOLVER.OPT_ARGS)
    if name == "SGD":
        options = {"momentum": cfg.SOLVER.MOMENTUM, "nesterov": cfg.SOLVER.NESTEROV} | options
    accepted = inspect.signature(optimizer_class).parameters
    unknown = [key for key in options if key not in accepted]
    if unknown:
        raise ConfigError(
            f"SOLVER.OPT_ARGS: {name} has no argument {unknown[0]!r}.{did_you_mean(unknown[0], accepted)}\n"
            f"  choices: {', '.join(key for key in accepted if key not in ('params', 'lr', 'weight_decay'))}"
        )
    for fast in ({"fused": True}, {"foreach": True}, {}):
        if any(key not in accepted or key in options for key in fast):
            continue
        try:
            optimizer = optimizer_class(groups, lr=cfg.SOLVER.BASE_LR, **options, **fast)
        except RuntimeError:
            if not fast:
                raise
            continue  # this implementation is not for these options or this device
        except (ValueError, TypeError) as error:
            raise ConfigError(f"SOLVER.OPT {name} refuses its options: {error} (see SOLVER.OPT_ARGS)") from error
        break
    logger.info(
        "optimizer: %s%s, %d groups, %d parameters",
        name,
        f" ({next(iter(fast))})" if fast else "",
        len(groups),
        sum(p.numel() for group in groups for p in group["params"]),
    )
    return optimizer


def build_gradient_clipping(cfg: Any) -> Clip | None:
    """Return ``clip(gradients, total_norm)`` for ``SOLVER.CLIP_GRADIENTS``, None when it is off."""
    clip = cfg.SOLVER.CLIP_GRADIENTS
    if not clip.ENABLED:
        return None
    return functools.partial(
        clip_gradients, clip_type=clip.CLIP_TYPE, clip_value=clip.CLIP_VALUE, norm_type=clip.NORM_TYPE
    )


def build_lr_schedule(cfg: Any, iters_per_epoch: int) -> LearningRateSchedule:
    """Return the schedule of ``SOLVER``.

    Raises:
        ConfigError: an unknown schedule.
    """
    solver = cfg.SOLVER
    after_warmup = solver.EPOCH_SCHEDULE == "after_warmup"
    before = max(math.ceil(solver.WARMUP_ITERS / iters_per_epoch), solver.DELAY_EPOCHS) if after_warmup else 0
    decay = SCHEDULE_REGISTRY.get(solver.SCHED)(
        steps=solver.STEPS, gamma=solver.GAMMA, length=solver.MAX_EPOCH - before, eta_min=solver.ETA_MIN_LR
    )
    return LearningRateSchedule(
        decay=decay,
        iters_per_epoch=iters_per_epoch,
        warmup_method=solver.WARMUP_METHOD,
        warmup_iters=solver.WARMUP_ITERS,
        warmup_start=solver.WARMUP_FACTOR,
        delay_epochs=solver.DELAY_EPOCHS,
        after_warmup=after_warmup,
    )
