"""Scheduled events that a run does not reach, because it is too short."""

import math
from collections.abc import Iterator
from typing import Any

from fastamp.config import CfgNode
from fastamp.engine.hooks.freeze import freeze_length
from fastamp.modeling.losses import LOSS_REGISTRY
from fastamp.solver.lr_schedule import SCHEDULE_REGISTRY, WarmupSchedule
from fastamp.utils.plural import plural

FIX = (
    "train longer (SOLVER.MAX_EPOCH), or reduce these values; for a few hundred images, see finetune/small_set, whose "
    "schedule has the length of the run"
)


def find_unreached_events(cfg: CfgNode, iters_per_epoch: int) -> list[str]:
    """List the scheduled events of a run that would happen only after its end.

    Args:
        cfg: config of the run.
        iters_per_epoch: number of iterations (optimizer steps) in an epoch.

    Returns:
        ``KEY value: consequence`` for each event.
    """
    epochs = cfg.SOLVER.MAX_EPOCH
    total = epochs * iters_per_epoch
    return [
        *_learning_rate_events(cfg, iters_per_epoch),
        *_freezing_events(cfg, total, iters_per_epoch),
        *_average_and_loss_events(cfg),
        *_periodic_events(cfg, total),
    ]


def describe_unreached_events(cfg: CfgNode, iters_per_epoch: int) -> str:
    """Return one message with the scheduled events of a run that would happen only after its end; "" if there are none.

    See ``find_unreached_events`` for the arguments.
    """
    events = find_unreached_events(cfg, iters_per_epoch)
    epochs = plural(cfg.SOLVER.MAX_EPOCH, "epoch")
    end = f"the run ends after {plural(cfg.SOLVER.MAX_EPOCH * iters_per_epoch, 'iteration')} ({epochs})"
    lines = "\n  ".join(events)
    return f"{end}, before {plural(len(events), 'scheduled event')}:\n  {lines}\n  fix: {FIX}" if events else ""


def _learning_rate_events(cfg: CfgNode, iters_per_epoch: int) -> Iterator[str]:
    solver = cfg.SOLVER
    schedule: Any = SCHEDULE_REGISTRY.build(solver.SCHED, cfg, iters_per_epoch=iters_per_epoch)
    if isinstance(schedule, WarmupSchedule) and schedule.warmup_iters >= solver.MAX_EPOCH * iters_per_epoch:
        key = "SOLVER.WARMUP_EPOCHS" if solver.WARMUP_EPOCHS else "SOLVER.WARMUP_ITERS"
        yield _event(cfg, key, "the learning rate does not reach SOLVER.BASE_LR")
    if solver.SCHED == "MultiStepLR":
        first = math.ceil(schedule.epochs_before_decay)
        if late := [step for step in sorted(solver.STEPS) if first + step >= solver.MAX_EPOCH]:
            counted = f" (counted from epoch {first}, the end of warm-up and delay)" if first else ""
            steps = f"{', '.join(map(str, late))} of {list(solver.STEPS)}{counted}"
            yield f"SOLVER.STEPS {steps}: the learning rate does not decrease there"
    applies = solver.EPOCH_SCHEDULE == "after_warmup" or solver.LR_UPDATE == "iteration"
    if solver.SCHED == "CosineAnnealingLR" and applies and solver.DELAY_EPOCHS >= solver.MAX_EPOCH:
        yield _event(cfg, "SOLVER.DELAY_EPOCHS", "the learning rate does not decrease")


def _freezing_events(cfg: CfgNode, total: int, iters_per_epoch: int) -> Iterator[str]:
    layers, solver = ", ".join(cfg.MODEL.FREEZE_LAYERS), cfg.SOLVER
    if layers and solver.FREEZE_EPOCHS != -1 and freeze_length(cfg, iters_per_epoch) >= total:
        key = "SOLVER.FREEZE_EPOCHS" if solver.FREEZE_EPOCHS else "SOLVER.FREEZE_ITERS"
        yield _event(cfg, key, f"{layers} stays frozen to the end; SOLVER.FREEZE_EPOCHS -1 if this is intended")
    if total <= solver.FREEZE_FC_ITERS:
        yield _event(cfg, "SOLVER.FREEZE_FC_ITERS", "the classifier is frozen from the start")


def _average_and_loss_events(cfg: CfgNode) -> Iterator[str]:
    starts = {"SOLVER.SWA.START_EPOCH": "no weights are averaged"} if cfg.SOLVER.SWA.ENABLED else {}
    for name in cfg.MODEL.LOSSES.NAME:
        if name in LOSS_REGISTRY and (key := LOSS_REGISTRY.get(name).start_epoch_key):
            starts[key] = f"{name} does not apply in full"
    for key, consequence in starts.items():
        if _value(cfg, key) >= cfg.SOLVER.MAX_EPOCH:
            yield _event(cfg, key, consequence)


def _periodic_events(cfg: CfgNode, total: int) -> Iterator[str]:
    for key, length, consequence in (
        ("TEST.EVAL_PERIOD", cfg.SOLVER.MAX_EPOCH, "only the last epoch is evaluated"),
        ("SOLVER.CHECKPOINT_PERIOD", cfg.SOLVER.MAX_EPOCH, "no checkpoint is saved before the end"),
        ("SOLVER.CHECKPOINT_ITERS", total, "no additional checkpoint is saved"),
        ("LOG_PERIOD", total, "metrics are logged only at the end"),
    ):
        if _value(cfg, key) > length:
            yield _event(cfg, key, consequence)
    if cfg.SOLVER.PROFILE and cfg.SOLVER.PROFILE[0] > total:
        yield _event(cfg, "SOLVER.PROFILE", "no iteration is profiled")


def _event(cfg: CfgNode, key: str, consequence: str) -> str:
    return f"{key} {_value(cfg, key)}: {consequence}"


def _value(cfg: CfgNode, key: str) -> Any:
    node: Any = cfg
    for part in key.split("."):
        node = node[part]
    return node
