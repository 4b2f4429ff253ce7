"""Build optimizers, parameter groups and gradient clipping as configured in ``SOLVER``."""

import functools
import inspect
import logging
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from fastamp.amp.row_update import ROW_OPTIMIZERS
from fastamp.amp.step import Clip
from fastamp.config import CfgNode
from fastamp.contracts import LayeredModule
from fastamp.layers import PartialFC
from fastamp.solver.clip import clip_gradients
from fastamp.solver.lr_schedule import learning_rate_factor
from fastamp.utils.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

# The base class; optimizers that need a closure, sparse gradients or two-dimensional parameters.
_NOT_FOR_THIS_LOOP = ("Optimizer", "LBFGS", "SparseAdam", "Muon")
_FIX_OPTIONS = "change SOLVER.OPT_ARGS, or choose another SOLVER.OPT"
_NORM_LAYERS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.LocalResponseNorm,
)


@runtime_checkable
class OptimizerOwner(Protocol):
    """Module whose parameters have their own optimizer, such as centers of classes."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Build the optimizer."""


@runtime_checkable
class PartlyDecayed(Protocol):
    """Module with parameters that are not subject to weight decay, such as decay rates of a recurrence.

    Attributes:
        without_weight_decay: names of these parameters in the module.
    """

    without_weight_decay: tuple[str, ...]


def parameter_groups(cfg: CfgNode, model: nn.Module) -> list[dict[str, Any]]:
    """Group the trainable parameters by role.

    A role consists of the part of the model (``heads``, or the first component of the module's name), the kind of
    parameter (``weight``, ``norm``, ``bias`` or ``undecayed``), and the globs of ``LR_FACTORS`` that match the
    parameter's name. Roles do not depend on the values of learning rates and weight decays. The groups therefore stay
    the same when these values change, e.g. in population-based training.

    Biases are the parameters with ``bias`` in their name, e.g. tables of relative position biases, as in TransReID. The
    weight decay is ``WEIGHT_DECAY_NORM`` for norm layers, ``WEIGHT_DECAY_BIAS`` for all biases including those of norm
    layers, 0 for ``PartlyDecayed.without_weight_decay``, and ``WEIGHT_DECAY`` otherwise. The learning rate is
    ``BASE_LR`` times ``BIAS_LR_FACTOR`` for biases, ``HEADS_LR_FACTOR`` for the heads, the factor of each matching glob
    of ``LR_FACTORS``, ``LAYER_DECAY ** n`` for parameters of the backbone with n layers after them (see
    ``_layers_after``), and the factor that ``LR_SCALING`` derives from the batch size. Parameters of modules with a
    ``build_optimizer`` method are excluded.

    Args:
        cfg: config; reads ``SOLVER``.
        model: model to optimize.

    Returns:
        Groups with ``role``, ``params``, ``weight_decay``, ``lr`` and ``base_lr``. The schedule computes ``lr`` from
        ``base_lr``.

    Raises:
        ConfigError: if a glob of ``LR_FACTORS`` matches no parameter, or its factor is not a finite number >= 0; or if
            ``LAYER_DECAY`` is not 1 and the backbone does not define its layers.
    """
    solver = cfg.SOLVER
    layers_after = _layers_after(cfg, model) if solver.LAYER_DECAY != 1 else {}
    elsewhere = {id(p) for module in model.modules() if isinstance(module, OptimizerOwner) for p in module.parameters()}
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
            if isinstance(module, PartlyDecayed) and name in module.without_weight_decay:
                weight_decay, kind = 0.0, "undecayed"
            elif "bias" in name:  # as in TransReID: also in_proj_bias and relative_position_bias_table
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
            if id(parameter) in layers_after:
                lr *= solver.LAYER_DECAY ** layers_after[id(parameter)]
                words.append(f"layer -{layers_after[id(parameter)]}")
            role = " ".join(words).strip()
            group = groups.setdefault(
                role, {"role": role, "params": [], "lr": lr, "base_lr": lr, "weight_decay": weight_decay}
            )
            group["params"].append(parameter)
    return list(groups.values())


def _layers_after(cfg: CfgNode, model: nn.Module) -> dict[int, int]:
    """Count the layers after each parameter of the backbone, for layer-wise learning-rate decay.

    For a backbone with L blocks, ``LayeredModule.layer_groups`` returns L + 1 lists of modules and parameters: one list
    per block, and the modules after the last block, e.g. the final norm. Its other parameters,
    e.g. the embeddings of patches and positions, belong to the layer before the first block. As in BEiT (Bao et al.
    2022, arXiv:2106.08254) and MAE (He et al. 2022, arXiv:2111.06377), L + 1 layers follow the embeddings, L the first
    block, one the last block, and none the final norm. The blocks that JPMHead copies to the heads are not counted.

    Returns:
        ``id(parameter)`` -> number of layers; parameters outside the backbone are missing.

    Raises:
        ConfigError: if no module of the model defines its layers.
    """
    counts: dict[int, int] = {}
    for module in model.modules():
        groups = module.layer_groups() if isinstance(module, LayeredModule) else []
        if not groups:
            continue
        counts |= dict.fromkeys(map(id, module.parameters()), len(groups))
        for number, group in enumerate(groups, start=1):
            for member in group:
                parameters = [member] if isinstance(member, nn.Parameter) else member.parameters()
                counts |= dict.fromkeys(map(id, parameters), len(groups) - number)
        logger.info(
            "layer-wise learning-rate decay %g over %d blocks: factors from %.3g for the embedding to 1 for the heads",
            cfg.SOLVER.LAYER_DECAY,
            len(groups) - 1,
            cfg.SOLVER.LAYER_DECAY ** len(groups),
        )
    if not counts:
        raise ConfigError(
            f"SOLVER.LAYER_DECAY is {cfg.SOLVER.LAYER_DECAY:g}, but the layers of MODEL.BACKBONE.NAME="
            f"{cfg.MODEL.BACKBONE.NAME} in {cfg.MODEL.META_ARCHITECTURE} are not defined. Backbones with layers: "
            "build_vit_backbone, build_swin_backbone, build_solider_backbone, build_vmamba_backbone, "
            "build_clip_vit_backbone, build_clip_resnet_backbone, build_resnet_backbone, build_resnext_backbone and "
            "timm's models with blocks.\n"
            "  fix: set SOLVER.LAYER_DECAY to 1, or choose another MODEL.BACKBONE.NAME"
        )
    return counts


def _learning_rate_factors(factors: dict[str, Any], names: list[str]) -> dict[str, float]:
    """Return ``SOLVER.LR_FACTORS`` after checking that the factors are valid and each glob matches a parameter name."""
    for pattern, factor in factors.items():
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise ConfigError(
                f"SOLVER.LR_FACTORS: expected a finite factor of at least 0 for {pattern!r}, got {factor!r}.\n"
                "  fix: set a number such as 0.1"
            )
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"SOLVER.LR_FACTORS: no parameter in the model has a name like {pattern!r}."
                f"{did_you_mean(pattern, names)}\n"
                "  fix: correct or remove this pattern; `model.named_parameters()` lists the names"
            )
    return dict(factors)


def optimizer_names() -> list[str]:
    """List the names of the ``torch.optim`` optimizers that ``SOLVER.OPT`` supports, without timm's ``LAMB``."""
    return [
        key
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and key not in _NOT_FOR_THIS_LOOP
    ]


def _optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Look up the optimizer class of ``SOLVER.OPT``.

    Raises:
        ConfigError: if the name is unknown, or if it is LAMB and timm is not installed.
    """
    if name.lower() == "lamb":
        try:
            from timm.optim import Lamb
        except ImportError as error:
            raise ConfigError(
                f'SOLVER.OPT={name} requires timm, which is not installed.\n  fix: pip install "fastamp[timm]"'
            ) from error
        return Lamb
    choices = optimizer_names()
    if name not in choices:
        raise ConfigError(
            f"SOLVER.OPT: unknown optimizer {name!r}."
            f"{did_you_mean(name, [*choices, 'LAMB'])}\n  choices: {', '.join(choices)}, LAMB"
        )
    return getattr(torch.optim, name)


def _no_graph_capture() -> None:
    """Replace PyTorch's check for the capture of CUDA graphs."""


def build_optimizer(cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer ``SOLVER.OPT`` over the parameter groups of a model.

    ``SOLVER.OPT_ARGS`` are passed to the constructor of the optimizer; ``SOLVER.MOMENTUM`` and ``SOLVER.NESTEROV`` only
    apply to SGD. The fused implementation is used if the optimizer and the device support it, otherwise the foreach
    implementation.

    Args:
        cfg: config; reads ``SOLVER``.
        model: model to optimize.

    Returns:
        An optimizer of ``torch.optim``, or timm's LAMB.

    Raises:
        ConfigError: if the optimizer is unknown or rejects an argument, or if the model has no trainable parameters.
    """
    solver, base_lr = cfg.SOLVER, cfg.SOLVER.BASE_LR * learning_rate_factor(cfg)
    optimizer_class = _optimizer_class(solver.OPT)
    name = optimizer_class.__name__
    if name not in ROW_OPTIMIZERS and any(isinstance(module, PartialFC) for module in model.modules()):
        raise ConfigError(
            f"SOLVER.OPT={name} is not supported with MODEL.HEADS.PFC.ENABLED: its update of a class center depends on "
            "other centers, which are sampled and divided among the processes.\n"
            f"  fix: set SOLVER.OPT to one of {', '.join(ROW_OPTIMIZERS)}"
        )
    groups = parameter_groups(cfg, model)
    if not groups:
        raise ConfigError(
            f"the model has no trainable parameters: none of {len([*model.parameters()])} requires a gradient.\n"
            "  fix: set requires_grad to True for the parameters to train"
        )
    defaults: dict[str, Any] = {}
    if name == "SGD":
        defaults = {"momentum": cfg.SOLVER.MOMENTUM, "nesterov": cfg.SOLVER.NESTEROV}
    elif name == "Lamb":
        defaults = {"max_grad_norm": None}  # SOLVER.CLIP_GRADIENTS clips before the step
    options = defaults | dict(cfg.SOLVER.OPT_ARGS)
    accepted = inspect.signature(optimizer_class).parameters
    _check_options(name, dict(cfg.SOLVER.OPT_ARGS), accepted)
    # Fused SGD fails if some parameters of a group have a momentum buffer and others, frozen until now, do not.
    implementations: list[dict[str, Any]] = (
        [{"foreach": True}, {}] if name == "SGD" else [{"fused": True}, {"foreach": True}, {}]
    )
    for fast in implementations:
        if any(key not in accepted for key in fast) or (
            fast and options.keys() & {"fused", "foreach", "differentiable"}
        ):
            continue
        try:
            optimizer = optimizer_class(groups, lr=base_lr, **options, **fast)  # type: ignore[call-arg]
        except RuntimeError as error:
            if fast:
                continue  # unsupported with these options or on this device
            raise ConfigError(f"invalid arguments for SOLVER.OPT={name}: {error}.\n  fix: {_FIX_OPTIONS}") from error
        except (ValueError, TypeError) as error:
            raise ConfigError(f"invalid arguments for SOLVER.OPT={name}: {error}.\n  fix: {_FIX_OPTIONS}") from error
        break
    if all(p.device.type == "cpu" for group in groups for p in group["params"]):
        # Since PyTorch 2.13, optimizers such as Adam examine the current CUDA stream at each step, which initializes
        # CUDA and takes memory of the GPU even if all parameters are on the CPU.
        untyped: Any = optimizer
        untyped._accelerator_graph_capture_health_check = _no_graph_capture
    if solver.LR_SCALING != "none":
        logger.info(
            "scaled the learning rate from %g for %d images per step (SOLVER.BASE_LR, SOLVER.REFERENCE_BATCH) to %g "
            "for %d x %d images (SOLVER.IMS_PER_BATCH x SOLVER.ACCUM_STEPS); SOLVER.LR_SCALING is %s",
            solver.BASE_LR,
            solver.REFERENCE_BATCH,
            base_lr,
            solver.IMS_PER_BATCH,
            solver.ACCUM_STEPS,
            solver.LR_SCALING,
        )
    logger.info(
        "optimizer: %s%s, %d parameter groups, %d learnable parameters",
        name,
        f" ({next(iter(fast))})" if fast else "",
        len(groups),
        sum(p.numel() for group in groups for p in group["params"]),
    )
    return optimizer


def build_own_optimizers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Build a separate optimizer for each module that defines a ``build_optimizer`` method.

    ``build_optimizer()`` returns an optimizer over the parameters of its module. The learning rate of parameter groups
    with ``scheduled=False`` is constant.

    Returns:
        ``"<module name>.optimizer"`` -> optimizer of this module.
    """
    return {
        f"{name}.optimizer": module.build_optimizer()
        for name, module in model.named_modules()
        if isinstance(module, OptimizerOwner)
    }


def build_optimizers(cfg: CfgNode, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Build all optimizers of a model: the main one, named ``"optimizer"``, and those of ``build_own_optimizers``."""
    return {"optimizer": build_optimizer(cfg, model)} | build_own_optimizers(model)


def _check_options(name: str, options: dict[str, Any], accepted: Mapping[str, inspect.Parameter]) -> None:
    """Check ``SOLVER.OPT_ARGS`` against the optimizer's signature.

    Raises:
        ConfigError: if an argument is unknown, has a value of the wrong type, or must be set by another config key.
    """
    for key, value in options.items():
        if key in ("params", "lr", "weight_decay"):
            raise ConfigError(
                f"SOLVER.OPT_ARGS must not contain {key}.\n"
                "  fix: set SOLVER.BASE_LR, SOLVER.WEIGHT_DECAY or the corresponding factors, e.g. SOLVER.LR_FACTORS"
            )
        if key not in accepted:
            raise ConfigError(
                f"SOLVER.OPT_ARGS: {name} does not support the argument {key!r}.{did_you_mean(key, accepted)}\n"
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
            raise ConfigError(
                f"SOLVER.OPT_ARGS: the {name} argument {key!r} must have the same type as its default {default!r}, "
                f"got {value!r}.\n  fix: set {key} to a value of type {type(default).__name__}, or remove it"
            )


def build_gradient_clipping(cfg: CfgNode) -> Clip | None:
    """Build the function ``clip(gradients, total_norm)`` from ``SOLVER.CLIP_GRADIENTS``; None if clipping is off."""
    clip = cfg.SOLVER.CLIP_GRADIENTS
    if not clip.ENABLED:
        return None
    return functools.partial(
        clip_gradients, clip_type=clip.CLIP_TYPE, clip_value=clip.CLIP_VALUE, norm_type=clip.NORM_TYPE
    )
