"""Build the optimizer with its parameter groups, and the gradient clipping, from ``SOLVER``."""

import functools
import inspect
import logging
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from fastamp.amp.step import Clip
from fastamp.solver.clip import clip_gradients
from fastamp.solver.lr_schedule import learning_rate_factor
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
    """Return the trainable parameters, one group for each role.

    A role is the part of the model (``heads``, or the first component of the module's name), the kind (``weight``,
    ``norm`` or ``bias``), and the globs of ``LR_FACTORS`` that match. It does not depend on the values of learning
    rates and weight decays, so the groups stay the same when these change, e.g. in population based training.

    Norm layers decay by ``WEIGHT_DECAY_NORM`` and biases, those of norm layers too, by ``WEIGHT_DECAY_BIAS``; biases'
    learning rate is times ``BIAS_LR_FACTOR``, that of everything in the heads times ``HEADS_LR_FACTOR``, and that of
    the parameters whose names match a glob of ``LR_FACTORS`` times its factor; all that apply are multiplied, and with
    what ``LR_SCALING`` makes of the batch size. Parameters of modules with an optimizer of their own are excluded.

    Returns:
        Groups with ``role``, ``params``, ``weight_decay``, ``lr`` and ``base_lr``; the schedule sets ``lr`` from
        ``base_lr``.

    Raises:
        ConfigError: a glob of ``LR_FACTORS`` that matches no parameter, or a factor that is not a number from 0 up.
    """
    solver = cfg.SOLVER
    elsewhere = {id(p) for _, module in _with_own_optimizer(model) for p in module.parameters()}
    base_lr = solver.BASE_LR * learning_rate_factor(cfg)
    factors = _learning_rate_factors(solver.LR_FACTORS, [name for name, _ in model.named_parameters()])
    groups: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen or id(parameter) in elsewhere:
                continue
            seen.add(id(parameter))
            lr, weight_decay, kind = base_lr, solver.WEIGHT_DECAY, "weight"
            if isinstance(module, _NORM_LAYERS):
                weight_decay, kind = solver.WEIGHT_DECAY_NORM, "norm"
            if name == "bias":
                lr *= solver.BIAS_LR_FACTOR
                weight_decay, kind = solver.WEIGHT_DECAY_BIAS, "bias"
            part = module_name.partition(".")[0]
            if "heads" in module_name:
                lr *= solver.HEADS_LR_FACTOR
                part = "heads"
            full_name = f"{module_name}.{name}" if module_name else name
            words = [part, kind]
            for pattern, factor in factors.items():
                if fnmatchcase(full_name, pattern):
                    lr *= factor
                    words.append(pattern)
            role = " ".join(words).strip()
            group = groups.setdefault(
                role, {"role": role, "params": [], "lr": lr, "base_lr": lr, "weight_decay": weight_decay}
            )
            group["params"].append(parameter)
    return list(groups.values())


def _learning_rate_factors(factors: dict[str, Any], names: list[str]) -> dict[str, float]:
    """Return ``SOLVER.LR_FACTORS``, checked against the names of the model's parameters."""
    for pattern, factor in factors.items():
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise ConfigError(
                f"SOLVER.LR_FACTORS: the factor of {pattern!r} is {factor!r}; it must be a number of at least 0"
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"SOLVER.LR_FACTORS: {pattern!r} matches no parameter of the model.{did_you_mean(pattern, names)}"
            )
    return dict(factors)


def optimizer_names() -> list[str]:
    """Return the optimizers of torch.optim that ``SOLVER.OPT`` takes; `LAMB`, of timm, comes on top."""
    return [
        key
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and key not in _NOT_FOR_THIS_LOOP
    ]


def _optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class that ``SOLVER.OPT`` names.

    Raises:
        ConfigError: there is none, or it needs timm and that is not installed.
    """
    if name.lower() == "lamb":
        try:
            from timm.optim import Lamb
        except ImportError as error:
            raise ConfigError(
                f'SOLVER.OPT {name} comes from timm, which is not installed.\n  fix: pip install "fastamp[timm]"'
            ) from error
        return Lamb
    choices = optimizer_names()
    if name not in choices:
        raise ConfigError(
            f"SOLVER.OPT: {name!r} is no optimizer of torch.optim that trains here."
            f"{did_you_mean(name, [*choices, 'LAMB'])}\n  choices: {', '.join(choices)}, LAMB"
        )
    return getattr(torch.optim, name)


def build_optimizer(cfg: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that ``SOLVER.OPT`` names, of torch's or timm's LAMB, over the model's parameter groups.

    ``SOLVER.OPT_ARGS`` are further keyword arguments of its constructor; MOMENTUM and NESTEROV are SGD's. The fused
    implementation is used where the optimizer and the device have it, else foreach.

    Raises:
        ConfigError: there is no such optimizer, it refuses an argument, or nothing is trainable.
    """
    solver, base_lr = cfg.SOLVER, cfg.SOLVER.BASE_LR * learning_rate_factor(cfg)
    optimizer_class = _optimizer_class(solver.OPT)
    name = optimizer_class.__name__
    groups = parameter_groups(cfg, model)
    if not groups:
        raise ConfigError("no parameter of the model is trainable: all of it is frozen (requires_grad)")
    defaults: dict[str, Any] = {}
    if name == "SGD":
        defaults = {"momentum": cfg.SOLVER.MOMENTUM, "nesterov": cfg.SOLVER.NESTEROV}
    elif name == "Lamb":
        defaults = {"max_grad_norm": None}  # clipping comes before the step, by SOLVER.CLIP_GRADIENTS
    options = defaults | dict(cfg.SOLVER.OPT_ARGS)
    accepted = inspect.signature(optimizer_class).parameters
    _check_options(name, dict(cfg.SOLVER.OPT_ARGS), accepted)
    # Fused SGD fails on a group of which some parameters have a momentum already, and others, frozen so far, have none.
    implementations = [{"foreach": True}, {}] if name == "SGD" else [{"fused": True}, {"foreach": True}, {}]
    for fast in implementations:
        if any(key not in accepted for key in fast) or (
            fast and options.keys() & {"fused", "foreach", "differentiable"}
        ):
            continue
        try:
            optimizer = optimizer_class(groups, lr=base_lr, **options, **fast)
        except RuntimeError as error:
            if fast:
                continue  # this implementation is not for these options or this device
            raise ConfigError(f"SOLVER.OPT {name} refuses its options: {error} (see SOLVER.OPT_ARGS)") from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"SOLVER.OPT {name} refuses its options: {error} (see SOLVER.OPT_ARGS)") from error
        break
    if solver.LR_SCALING != "none":
        logger.info(
            "learning rate: SOLVER.BASE_LR %g, meant for %d images a step, is %g for %d x %d (%s)",
            solver.BASE_LR,
            solver.REFERENCE_BATCH,
            base_lr,
            solver.IMS_PER_BATCH,
            solver.ACCUM_STEPS,
            solver.LR_SCALING,
        )
    logger.info(
        "optimizer: %s%s, %d groups, %d parameters",
        name,
        f" ({next(iter(fast))})" if fast else "",
        len(groups),
        sum(p.numel() for group in groups for p in group["params"]),
    )
    return optimizer


def build_own_optimizers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers of the modules that bring their own, under the module's name with ``.optimizer``.

    Such a module has a method ``build_optimizer()`` that returns one over its parameters. Parameter groups with
    ``scheduled`` False keep their learning rate.
    """
    return {f"{name}.optimizer": module.build_optimizer() for name, module in _with_own_optimizer(model)}


def build_optimizers(cfg: Any, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Return ``build_optimizer``'s as ``optimizer``, and those of ``build_own_optimizers``."""
    return {"optimizer": build_optimizer(cfg, model)} | build_own_optimizers(model)


def _with_own_optimizer(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "build_optimizer")]


def _check_options(name: str, options: dict[str, Any], accepted: Mapping[str, inspect.Parameter]) -> None:
    """Check ``SOLVER.OPT_ARGS`` against the optimizer's signature.

    Raises:
        ConfigError: an argument that it does not have, that has a key of its own, or a value of another type.
    """
    for key, value in options.items():
        if key in ("params", "lr", "weight_decay"):
            raise ConfigError(
                f"SOLVER.OPT_ARGS: {key} has keys of its own, SOLVER.BASE_LR, WEIGHT_DECAY and their factors"
            )
        if key not in accepted:
            raise ConfigError(
                f"SOLVER.OPT_ARGS: {name} has no argument {key!r}.{did_you_mean(key, accepted)}\n"
                f"  choices: {', '.join(key for key in accepted if key not in ('params', 'lr', 'weight_decay'))}"
            )
        default = accepted[key].default
        if isinstance(default, bool):
            fits = isinstance(value, bool)
        elif isinstance(default, int | float):
            fits = isinstance(value, int | float) and not isinstance(value, bool)
        elif isinstance(default, tuple):
            fits = isinstance(value, tuple | list) and len(value) == len(default)
        else:
            continue
        if not fits:
            raise ConfigError(f"SOLVER.OPT_ARGS: {key} of {name} is {value!r}; its default is {default!r}")


def build_gradient_clipping(cfg: Any) -> Clip | None:
    """Return ``clip(gradients, total_norm)`` for ``SOLVER.CLIP_GRADIENTS``, None when it is off."""
    clip = cfg.SOLVER.CLIP_GRADIENTS
    if not clip.ENABLED:
        return None
    return functools.partial(
        clip_gradients, clip_type=clip.CLIP_TYPE, clip_value=clip.CLIP_VALUE, norm_type=clip.NORM_TYPE
    )
