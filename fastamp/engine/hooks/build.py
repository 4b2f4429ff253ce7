"""Build the training hooks from a config."""

import logging

from torch import nn

from fastamp.config import CfgNode
from fastamp.contracts import EpochUser
from fastamp.engine.hooks.activations import ActivationMonitor
from fastamp.engine.hooks.averaging import EMA, SWA
from fastamp.engine.hooks.base import HookBase
from fastamp.engine.hooks.epoch import SetEpoch
from fastamp.engine.hooks.freeze import FreezeClassifier, FreezeLayers, freeze_length
from fastamp.engine.hooks.learning_rate import LRScheduler
from fastamp.engine.unreached import describe_unreached_events
from fastamp.solver import WeightAverage, build_lr_schedule, swa_start

logger = logging.getLogger(__name__)


def build_training_hooks(
    cfg: CfgNode, model: nn.Module, average: WeightAverage | None, iters_per_epoch: int
) -> list[HookBase]:
    """Build the hooks for the learning rate, the epoch in modules, freezing, weight averages and activation statistics.

    The hooks are in this order.

    Args:
        cfg: config of the run.
        model: model to train.
        average: weight average for ``SOLVER.EMA`` or ``SOLVER.SWA``; None if neither is enabled.
        iters_per_epoch: number of iterations in an epoch.

    Returns:
        The hooks.

    Raises:
        ConfigError: if a module or classifier to freeze is not found in the model.
    """
    for name in ("WARMUP", "FREEZE"):
        epochs, iterations = cfg.SOLVER[f"{name}_EPOCHS"], cfg.SOLVER[f"{name}_ITERS"]
        if epochs and iterations:
            logger.warning(
                "SOLVER.%s_ITERS=%d has no effect because SOLVER.%s_EPOCHS=%d.\n  fix: set one of the two keys to 0",
                name,
                iterations,
                name,
                epochs,
            )
    freezing = freeze_length(cfg, iters_per_epoch)
    if bool(cfg.MODEL.FREEZE_LAYERS) != bool(freezing):
        logger.warning(
            "no layers are frozen: freezing requires MODEL.FREEZE_LAYERS and either SOLVER.FREEZE_ITERS or "
            "SOLVER.FREEZE_EPOCHS.\n  fix: to freeze layers, set the missing key; otherwise, remove the key that is set"
        )
    if events := describe_unreached_events(cfg, iters_per_epoch):
        logger.warning("%s", events)
    hooks: list[HookBase] = [LRScheduler(build_lr_schedule(cfg, iters_per_epoch))]
    if any(isinstance(module, EpochUser) for module in model.modules()):
        hooks.append(SetEpoch(model))
    if cfg.MODEL.FREEZE_LAYERS:
        hooks.append(FreezeLayers(model, cfg.MODEL.FREEZE_LAYERS, freezing))
    if cfg.SOLVER.FREEZE_FC_ITERS:
        hooks.append(FreezeClassifier(model, cfg.SOLVER.FREEZE_FC_ITERS))
    if average and cfg.SOLVER.EMA.ENABLED:
        hooks.append(EMA(average, cfg.SOLVER.EMA.DECAY, warmup=cfg.SOLVER.EMA.WARMUP))
    if average and cfg.SOLVER.SWA.ENABLED:
        swa = cfg.SOLVER.SWA
        hooks.append(SWA(average, start=swa_start(cfg), period=swa.PERIOD, initial_weight=swa.INITIAL_WEIGHT))
    if cfg.LOG_ACTIVATION_STATS:
        hooks.append(ActivationMonitor(model, cfg.LOG_PERIOD))
    return hooks
