"""Losses of pytorch-metric-learning (Musgrave et al. 2020, arXiv:2008.09164), named ``pml/<Name>``."""

import inspect
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fastamp.amp import force_fp32
from fastamp.config import CfgNode, Key
from fastamp.contracts import Loss
from fastamp.utils.errors import ConfigError, did_you_mean, optional_package

KEYS = (
    Key(
        "MODEL.LOSSES.PML.ARGS",
        {},
        "pytorch-metric-learning: arguments of losses and miner, by class, e.g. {TripletMarginLoss: {margin: 0.1}}.",
        nested=True,
    ),
    Key("MODEL.LOSSES.PML.MINER", "", "pytorch-metric-learning: name of the miner that selects pairs; '' for none."),
    Key("MODEL.LOSSES.PML.SCALE", 1.0, "pytorch-metric-learning: weight of each loss in the total loss.", low=0),
)

PML = "pml/"

# Base classes; a loss that wraps another loss; losses for pairs of views without labels; a loss that keeps the graph of
# the previous step in its histogram and fails in the second step; a miner for data that are already triplets.
_EXCLUDED = (
    "BaseMetricLossFunction",
    "BaseMiner",
    "GenericPairLoss",
    "ManifoldLoss",
    "VICRegLoss",
    "DynamicSoftMarginLoss",
    "EmbeddingsAlreadyPackagedAsTriplets",
)
# Arguments that are objects of the package, which a config cannot express.
_OBJECT_ARGUMENTS = (
    "distance",
    "reducer",
    "embedding_regularizer",
    "weight_regularizer",
    "weight_init_func",
    "collect_stats",
)


class PMLLoss(nn.Module, Loss):
    """pytorch-metric-learning loss, computed in float32 from the ``features`` of a head.

    Learned weights of the loss, e.g. the proxies of ``ProxyAnchorLoss``, are parameters of this module.

    Args:
        loss: module with ``forward(embeddings, labels, indices_tuple) -> scalar``.
        miner: module with ``forward(embeddings, labels) -> indices_tuple``; None uses all pairs.
        loss_name: name of the loss in the logs.
        scale: weight of this loss in the total loss.
        indexes_classes: whether the loss uses the labels as indices, e.g. of its proxies; see
            ``ImageModel.set_label_range``. Default False.
    """

    over_pairs = True

    def __init__(
        self,
        *,
        loss: nn.Module,
        miner: nn.Module | None,
        loss_name: str,
        scale: float = 1.0,
        indexes_classes: bool = False,
    ) -> None:
        super().__init__()
        self.indexes_classes = indexes_classes
        self.loss, self.miner = loss, miner
        self.loss_name, self.scale = loss_name, scale
        # These parameters depend on the identities of the training set, as classifiers do.
        self.classifiers = tuple(f"loss.{name}" for name, _ in loss.named_parameters())

    @force_fp32
    def forward(self, outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
        features = outputs["features"]
        pairs = self.miner(features, targets) if self.miner else None
        return self.scale * self.loss(features, targets, pairs)


def build_pml_loss(cfg: CfgNode, name: str, *, feature_dim: int) -> PMLLoss | None:
    """Build the loss ``name`` of pytorch-metric-learning with the arguments in ``MODEL.LOSSES.PML.ARGS``.

    The number of classes and the width of the features are passed to losses that require them.

    Args:
        cfg: the config.
        name: class name, e.g. ``"TripletMarginLoss"``.
        feature_dim: width of the features.

    Returns:
        The loss. None if the loss requires the number of classes, but the model is built without classes (for
        evaluation only).

    Raises:
        ConfigError: if the package is not installed, the loss or miner is unknown, or an argument is invalid.
    """
    losses, miners = _import_package(name)
    args, miner = cfg.MODEL.LOSSES.PML.ARGS, cfg.MODEL.LOSSES.PML.MINER
    selected = {name.removeprefix(PML) for name in cfg.MODEL.LOSSES.NAME if name.startswith(PML)} | {miner}
    unused = [key for key in args if key.partition(".")[0] not in selected]
    if unused:
        raise ConfigError(
            f"MODEL.LOSSES.PML.ARGS: {unused[0]!r} is not in MODEL.LOSSES.NAME or MODEL.LOSSES.PML.MINER."
            f"{did_you_mean(unused[0].partition('.')[0], filter(None, selected))}\n"
            "  fix: correct the class name, or remove the entry from MODEL.LOSSES.PML.ARGS"
        )
    unnested = [key for key in args if "." not in key]
    if unnested:
        raise ConfigError(
            f"MODEL.LOSSES.PML.ARGS: {unnested[0]} is {args[unnested[0]]!r}; expected a mapping of argument names to "
            f"values.\n  fix: name the argument, e.g. {{{unnested[0]}: {{margin: 0.1}}}}"
        )
    kind = _get_class("MODEL.LOSSES.NAME", PML, losses, "losses", name)
    needed = [key for key, p in _parameters(kind).items() if p.default is p.empty]
    fixed = {"num_classes": cfg.MODEL.HEADS.NUM_CLASSES, "embedding_size": feature_dim, "descriptors_dim": feature_dim}
    fixed = {key: value for key, value in fixed.items() if key in needed}
    if fixed.get("num_classes") == 0:
        return None
    return PMLLoss(
        loss=_instantiate(kind, _arguments(args, name), fixed),
        miner=_instantiate(
            _get_class("MODEL.LOSSES.PML.MINER", "", miners, "miners", miner), _arguments(args, miner), {}
        )
        if miner
        else None,
        loss_name=f"loss_{_snake_case(name.removesuffix('Loss'))}",
        scale=cfg.MODEL.LOSSES.PML.SCALE,
        indexes_classes="num_classes" in fixed,
    )


def _import_package(name: str) -> tuple[ModuleType, ModuleType]:
    with optional_package(f"MODEL.LOSSES.NAME={PML}{name} requires pytorch-metric-learning", "metric-learning"):
        from pytorch_metric_learning import losses, miners
    return losses, miners


def _get_class(key: str, prefix: str, module: ModuleType, base: str, name: str) -> type[nn.Module]:
    """Look up a class in ``losses`` or ``miners`` of pytorch-metric-learning."""
    choices = _supported(module, base)
    if name not in choices:
        raise ConfigError(
            f"{key}: {prefix + name!r} is not one of the supported {base} of pytorch-metric-learning."
            f"{did_you_mean(prefix + name, [prefix + choice for choice in choices])}\n"
            f"  choices: {', '.join(prefix + choice for choice in sorted(choices))}"
        )
    return choices[name]


def _supported(module: ModuleType, base: str) -> dict[str, Any]:
    parent = module.BaseMetricLossFunction if base == "losses" else module.BaseMiner
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, parent) and name not in _EXCLUDED
    }


def supported_names() -> tuple[list[str], list[str]]:
    """List the supported losses and miners of pytorch-metric-learning; empty lists if it is not installed."""
    try:
        losses, miners = _import_package("")
    except ConfigError:
        return [], []
    return sorted(_supported(losses, "losses")), sorted(_supported(miners, "miners"))


def _arguments(args: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Select the arguments of a class: ``{"TripletMarginLoss.margin": 0.1}`` -> ``{"margin": 0.1}``."""
    return {key.removeprefix(f"{name}."): value for key, value in args.items() if key.startswith(f"{name}.")}


def _parameters(kind: type) -> dict[str, inspect.Parameter]:
    """Collect the constructor arguments of a class, including those that it passes to its base classes."""
    signature: dict[str, inspect.Parameter] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
        signature |= {p.name: p for p in named if p.name not in signature}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return signature


def _instantiate(kind: type[nn.Module], given: dict[str, Any], fixed: dict[str, Any]) -> nn.Module:
    accepted = [key for key in _parameters(kind) if key not in fixed and key not in _OBJECT_ARGUMENTS]
    prefix = f"MODEL.LOSSES.PML.ARGS: {kind.__name__}"
    choices = f"\n  choices: {', '.join(accepted)}" if accepted else ""
    for key in given:
        if key not in accepted:
            raise ConfigError(f"{prefix} does not support the argument {key!r}.{did_you_mean(key, accepted)}{choices}")
    try:
        return kind(**fixed | given)
    except Exception as error:  # the package validates arguments by several exception types, including AssertionError
        raise ConfigError(f"{prefix}: invalid arguments {given}: {error}{choices}") from error


def _snake_case(name: str) -> str:
    return re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
