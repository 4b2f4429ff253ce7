#!/usr/bin/env python
"""Train with an explicit loop, as a starting point for custom training loops.

Components, command line and final weights equal those of train_net.py. Features that train_net.py implements
with hooks (freezing, weight averages, precise batch norm, accumulation, best model, TensorBoard, signals) are omitted.
"""

import argparse
import logging
import sys
from typing import Any

from train_net import argument_parser, setup

from fastamp.amp import OptimizationStep, PrecisionPolicy
from fastamp.amp.checks import check_finite
from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.config import CfgNode
from fastamp.diagnostics.precision_diagnostics import PrecisionDiagnostics
from fastamp.engine import ConfigText, DefaultTrainer, launch, run_command_line
from fastamp.modeling.training_state import set_class_counts, set_epoch
from fastamp.solver import OptimizerState, build_gradient_clipping, build_lr_schedule, build_optimizers
from fastamp.utils import comm
from fastamp.utils.env import RandomState
from fastamp.utils.errors import ConfigError

logger = logging.getLogger("fastamp.plain_train_net")

UNSUPPORTED = [f"SOLVER.{name}" for name in ("TRAINER", "ACCUM_STEPS", "EMA", "SWA", "BEST_METRIC", "AMP.ON_FAILURE")]
UNSUPPORTED += [f"SOLVER.FREEZE_{unit}" for unit in ("ITERS", "EPOCHS", "FC_ITERS")] + ["SOLVER.AMP.PREFLIGHT fallback"]
UNSUPPORTED += [f"SOLVER.CHECKPOINT_{unit}" for unit in ("ITERS", "MINUTES", "KEEP")]
UNSUPPORTED += ["LOG_ACTIVATION_STATS", "TEST.PRECISE_BN"]


class Progress(dict):
    """Checkpoint entry with the training progress."""

    state_dict = dict.copy

    def load_state_dict(self, state: dict[str, int]) -> None:
        if (before := state["iters_per_epoch"]) != (now := self["iters_per_epoch"]):
            raise ValueError(f"expected {before} iterations per epoch, got {now}: SOLVER.IMS_PER_BATCH or data changed")
        self.update(state)


def train(cfg: CfgNode, resume: bool) -> dict[str, Any]:
    """Train the model of ``cfg`` and return the metrics of the last evaluation."""
    loader = DefaultTrainer.build_train_loader(cfg)
    cfg = DefaultTrainer.build_run_config(cfg, loader.dataset)
    model = DefaultTrainer.build_model(cfg)
    set_class_counts(model, loader)
    comm.broadcast([*model.parameters(), *model.buffers()])  # initialized on each rank
    optimizers, schedule = build_optimizers(cfg, model), build_lr_schedule(cfg, loader.iters_per_epoch)
    groups = [group for opt in optimizers.values() for group in opt.param_groups if group.get("scheduled", True)]
    policy = PrecisionPolicy.from_config(cfg, next(model.parameters()).device)
    logger.info("precision: %s", policy.describe())
    step = OptimizationStep.from_config(cfg, model, list(optimizers.values()), policy, build_gradient_clipping(cfg))
    precision_diagnostics = PrecisionDiagnostics.from_config(cfg)
    progress = Progress(iteration=0, steps_taken=0, iters_per_epoch=loader.iters_per_epoch)
    parts = {name: OptimizerState(opt, model) for name, opt in optimizers.items()} | {"random": RandomState()}
    parts |= {"step": step, "progress": progress, "config": ConfigText(cfg)}
    checks: dict[str, Any] = {"min_match": cfg.MODEL.WEIGHTS_MIN_MATCH, "policy": policy, "check": check_finite}
    checkpointer = Checkpointer(model, cfg.OUTPUT_DIR, **checks, **parts)
    last = checkpointer.last_checkpoint() if resume else None
    if resume and last is None:
        logger.warning("no checkpoint found in %s: a new run starts\n  fix: correct OUTPUT_DIR", cfg.OUTPUT_DIR)
    if last:
        checkpointer.resume(last)
    elif cfg.MODEL.WEIGHTS:
        checkpointer.load(cfg.MODEL.WEIGHTS)
    results: dict[str, Any] | None = None  # empty on ranks other than 0
    parallel_model = comm.data_parallel(model)  # DDP among several processes, else the model itself
    model.train()
    loader.start_at(progress["iteration"])
    total = cfg.SOLVER.MAX_EPOCH * loader.iters_per_epoch
    for iteration, batch in zip(range(progress["iteration"], total), loader, strict=False):
        set_epoch(model, epoch := iteration // loader.iters_per_epoch)
        for group in groups:
            group["lr"] = schedule.learning_rate(group["base_lr"], epoch=epoch, steps_taken=progress["steps_taken"])
        if iteration == loader.start_iter:
            precision_diagnostics.before_first_step(step, batch, policy, iteration=iteration)
        precision_diagnostics.record(batch, first=True)
        step.zero_grad()  # also copies the buffers that the forward pass modifies
        with policy.autocast():
            losses = parallel_model(batch)
        step.scale(losses).backward()
        gradients = step.unscale()
        verdict = step.check_finite(gradients)  # on all ranks
        if verdict.ok:
            step.clip_gradients(gradients)
            step.apply(gradients)
        else:
            step.skip()  # restores the buffers
        step.update_scale(verdict.ok)
        precision_diagnostics.check_skips(step, policy, iteration=iteration)
        progress.update(iteration=iteration + 1, steps_taken=progress["steps_taken"] + verdict.ok)

        if (iteration + 1) % cfg.LOG_PERIOD == 0:
            losses = {"loss": sum(losses.values()), **losses}
            terms = "  ".join(f"{name} {loss.item():.4g}" for name, loss in losses.items())
            norm, skipped = verdict.grad_norm, step.skipped_total
            logger.info("iter %d/%d  %s  grad_norm %.3g  skipped %d", iteration + 1, total, terms, norm, skipped)
        epochs_done, within = divmod(iteration + 1, loader.iters_per_epoch)
        if within == 0 and (epochs_done % cfg.TEST.EVAL_PERIOD == 0 or epochs_done == cfg.SOLVER.MAX_EPOCH):
            comm.broadcast(model.buffers())
            results = DefaultTrainer.test(cfg, model)
        if within == 0 and (epochs_done == cfg.SOLVER.MAX_EPOCH or epochs_done % cfg.SOLVER.CHECKPOINT_PERIOD == 0):
            name = "model_final" if epochs_done == cfg.SOLVER.MAX_EPOCH else f"model_{epoch:04d}"
            logger.info("saved %s", checkpointer.save(name))
    return DefaultTrainer.test(cfg, model) if results is None else results  # None: already complete


def main(args: argparse.Namespace) -> dict[str, Any]:
    """Train or evaluate, and return the metrics."""
    cfg = setup(args)
    if args.eval_only:
        return DefaultTrainer.test_weights(cfg)
    changed = {key.path for key, value in cfg.keys_below() if value != key.default}
    changed |= {f"SOLVER.AMP.PREFLIGHT {cfg.SOLVER.AMP.PREFLIGHT}"}
    for name in UNSUPPORTED:
        if name in changed or f"{name}.ENABLED" in changed:
            raise ConfigError(f"{name} is not supported by plain_train_net.py.\n  fix: train with tools/train_net.py")
    return train(cfg, args.resume)


if __name__ == "__main__":
    args = argument_parser().parse_args()
    numbers = (args.num_gpus, args.num_machines, args.machine_rank, args.dist_url)
    sys.exit(run_command_line(lambda: launch(main, *numbers, args=(args,))))
