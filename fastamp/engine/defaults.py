"""Default trainer, built from a config."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastamp.amp import PrecisionPolicy
from fastamp.amp.checks import NonFiniteParameters, check_finite
from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.config import CfgNode, check_is_config
from fastamp.data.custom_loader import as_train_loader
from fastamp.data.loader import explain_lost_workers
from fastamp.data.random_splits import test_set_of
from fastamp.data.rank_agreement import check_equal_on_all_ranks
from fastamp.diagnostics import environment_queries
from fastamp.engine import hooks
from fastamp.engine.builders import Builders
from fastamp.engine.evaluation import EvaluationOutput, describe_protocol, evaluate_sets, unwrap_single
from fastamp.engine.hooks.base import HookBase
from fastamp.engine.hooks.build import build_training_hooks
from fastamp.engine.loggers import build_writers, check_loggers, closing_writers
from fastamp.engine.previous_runs import move_earlier_run
from fastamp.engine.reporting import history_of, items_of, source_of, to_json, write_training_report
from fastamp.engine.run_state import (
    ConfigText,
    SamplingState,
    TrainerPolicy,
    describe_last_checkpoint,
    labels_checksum,
    recovery_hint,
)
from fastamp.engine.setup import check_links
from fastamp.engine.speed import input_fix, peak_flops
from fastamp.engine.stages import Stage, Stages
from fastamp.engine.summary import summarize_run
from fastamp.engine.train_loop import TRAINER_REGISTRY, SimpleTrainer
from fastamp.evaluation import update_bn_statistics
from fastamp.modeling.training_state import set_class_counts
from fastamp.report import Run
from fastamp.solver import OptimizerState, build_own_optimizers
from fastamp.utils import comm
from fastamp.utils.env import RandomState
from fastamp.utils.errors import WriteError, writing
from fastamp.utils.files import write_atomically
from fastamp.utils.lock import lock_folder, unlock_folder
from fastamp.utils.logger import end_run_in_log, log_to_console, log_to_file
from fastamp.utils.sharding import replicated_tensors
from fastamp.zoo import warn_of_differences, with_local_files

logger = logging.getLogger(__name__)


class DefaultTrainer(Builders):
    """Trainer that builds the model, data loaders, optimizers, training loop and hooks from a config.

    Override a ``build_`` method in a subclass to replace one component. The training loop is ``self.trainer``; its
    class is looked up in ``TRAINER_REGISTRY``.

    Args:
        cfg: config of the run. The trainer uses a copy. If ``MODEL.HEADS.NUM_CLASSES`` is 0, the copy contains the
            number of training identities instead.

    Raises:
        UserError: if the config, the data or the weights are invalid. No files are written in this case.
    """

    def __init__(self, cfg: CfgNode) -> None:
        check_is_config(cfg)
        log_to_console()
        check_loggers(cfg)
        warn_of_differences(cfg)
        cfg = with_local_files(cfg)
        folder = Path(cfg.OUTPUT_DIR) / "profile"
        self._profile = [hooks.Profile(cfg.SOLVER.PROFILE, folder)] if cfg.SOLVER.PROFILE else []
        self.data_loader = as_train_loader(self.build_train_loader(cfg), cfg)
        check_equal_on_all_ranks(self.data_loader.dataset, "the training set")
        self.cfg = cfg = self.build_run_config(cfg, self.data_loader.dataset)
        # Built before the model, so that missing images and test sets that cannot be evaluated fail early.
        self.test_loaders = self._build_test_loaders(cfg)
        self.best_metric = self.build_best_metric()
        self.precise_bn_loader = self.build_precise_bn_loader(cfg)
        self.model = self.build_model(cfg)
        set_class_counts(self.model, self.data_loader)
        # Ranks have different seeds, e.g. for dropout, but need the same initial weights.
        comm.broadcast(replicated_tensors(self.model))
        self.optimizers = self.build_optimizers()
        self.optimizer = self.optimizers["optimizer"]
        self.trainer = self.build_trainer()
        last = Stage("training", self.trainer, cfg.SOLVER.MAX_EPOCH, self.data_loader)
        self.stages = Stages([*self.trainer.earlier_stages, last])
        self.average = self.build_weight_average(cfg, self.model)
        self.checkpointer = self.build_checkpointer()
        self.writers: list[Any] = []
        self.eval_hook = self.build_eval_hook()
        self.stop = hooks.StopOnSignal(self.checkpointer)
        self._last = EvaluationOutput()
        self._last_iteration = -1
        self._applied = "model"  # weights that are in the model: "model", or "ema" or "swa" during their evaluation
        self._resumed: Path | None = None
        self.register_hooks(self.build_hooks())

    @property
    def policy(self) -> PrecisionPolicy:
        """Precision policy currently used for training; a fallback to a safer precision replaces it."""
        return self.trainer.policy

    def resume_or_load(self, resume: bool = True, *, folder: str | Path | None = None) -> None:
        """Resume from the newest valid checkpoint. If there is no checkpoint, load ``MODEL.WEIGHTS``, if set.

        Args:
            resume: whether to search for a checkpoint. Default True.
            folder: folder to search for checkpoints. Default OUTPUT_DIR.

        Raises:
            WeightsError: if all checkpoints are damaged or do not match the model, or if the weights are missing or
                damaged.
        """
        self._resumed = last = self.checkpointer.last_checkpoint(folder) if resume else None
        if last is not None:
            extra = self.checkpointer.resume(last)
            if "average" in extra:
                logger.warning(
                    "discarding the weight average (%s) in %s: neither SOLVER.EMA nor SOLVER.SWA is enabled.\n"
                    "  fix: to continue it, enable it as in the earlier run",
                    extra["average"]["kind"],
                    last,
                )
            logger.info("resuming from %s, saved after iteration %d", last, self.stages.start_iter)
        elif self.cfg.MODEL.WEIGHTS:
            extra = self.checkpointer.load(self.cfg.MODEL.WEIGHTS)
            self.policy.compare(extra.get("policy"), "these weights were trained")
        if resume and last is None:
            logger.warning(
                "no checkpoint found in %s: starting a new run.\n"
                "  fix: to resume another run, set OUTPUT_DIR to its folder",
                folder or self.checkpointer.save_dir,
            )

    def train(self) -> dict[str, Any]:
        """Train and return the metrics of the last evaluation. Rank 0 locks OUTPUT_DIR during training.

        Returns:
            Metrics of the test set, or a dict of dataset name -> metrics for several test sets; empty on ranks other
            than 0.

        Raises:
            UserError: if another process has locked OUTPUT_DIR, a file cannot be written, or training fails.
        """
        output_dir = Path(self.cfg.OUTPUT_DIR)
        if comm.is_main_process():
            lock_folder(output_dir, "OUTPUT_DIR")
        try:
            with writing(output_dir):
                output_dir.mkdir(parents=True, exist_ok=True)
            check_links(output_dir)
            with log_to_file(output_dir, rank=comm.get_rank()):
                return self._train()
        finally:
            end_run_in_log()
            unlock_folder(output_dir)

    def _train(self) -> dict[str, Any]:
        cfg, start = self.cfg, self.stages.start_iter
        output_dir = Path(cfg.OUTPUT_DIR)
        if start == 0 and self._resumed is None:
            move_earlier_run(output_dir)
        if comm.is_main_process():
            self.checkpointer.remove_leftovers()
            write_atomically(output_dir / "config.yaml", lambda file: file.write(cfg.saved_text().encode()))
            self.open_writers()
        if not self.stages.left():
            logger.info(
                "training is already complete: only evaluating\n  fix: to continue training, increase SOLVER.MAX_EPOCH"
            )
            with closing_writers(self.writers):
                return unwrap_single(self._evaluate_finished_run())
        began = time.monotonic()
        try:
            with closing_writers(self.writers), self.stop.watching(), explain_lost_workers():
                for stage in self.stages.left():
                    self.stages.train(stage)
        except NonFiniteParameters as error:
            raise NonFiniteParameters(f"{error}\n  {describe_last_checkpoint(self.checkpointer)}") from error
        except WriteError as error:
            hint = recovery_hint(self.checkpointer, has_best=self.eval_hook.best is not None)
            raise WriteError(f"{error}\n{hint}") from error
        if comm.is_main_process():
            summarize_run(cfg, self.eval_hook.results, seconds=time.monotonic() - began, resumed=start > 0)
        return unwrap_single(self.eval_hook.results)

    def _evaluate_finished_run(self) -> dict[str, dict[str, Any]]:
        """Evaluate a completed run.

        If the run was stopped before its last evaluation, save ``model_final`` and, if its score is the best,
        ``model_best``.
        """
        end = self.cfg.SOLVER.MAX_EPOCH * self.trainer.iters_per_epoch
        self.trainer.move_to(end - 1, self.cfg.SOLVER.MAX_EPOCH)
        if self.trainer.start_iter > end or self._resumed is None or self._resumed.stem == "model_final":
            with self.evaluated_weights():
                results = self.evaluate()
        else:
            self.eval_hook.after_epoch()
            results = self.eval_hook.results
            logger.info("saved %s", self.checkpointer.save("model_final"))
        if run := self._pop_run():
            write_training_report(run)
        return results

    def register_hooks(self, hooks_: Iterable[HookBase]) -> None:
        """Register hooks in addition to those of ``build_hooks``; see ``TrainerBase.register_hooks`` for the order."""
        self.stages.register_hooks(hooks_)

    def evaluate(self, loaders: dict[str, tuple[Any, int]] | None = None) -> dict[str, dict[str, Any]]:
        """Evaluate the current weights of the model in the precision set by ``SOLVER.AMP.EVAL_DTYPE``.

        Args:
            loaders: dataset name -> (test loader, number of query images). Default: all test sets.

        Returns:
            Dataset name -> metrics; empty on ranks other than 0.
        """
        policy = self.policy.for_evaluation(self.cfg.SOLVER.AMP.EVAL_DTYPE)
        comm.broadcast(self.model.buffers())  # batch-norm statistics differ between ranks
        check_finite(self.model)
        self._last = replace(self.evaluate_loaders(policy, loaders or self.test_loaders), weights=self._applied)
        self._last_iteration = self.trainer.iter
        results = self._last.results
        if not self.cfg.TEST.REPORT:
            self._last.sets.clear()  # only needed for the report
        return results

    def evaluate_loaders(self, policy: PrecisionPolicy, loaders: dict[str, tuple[Any, int]]) -> EvaluationOutput:
        """Evaluate the model on the test sets in ``loaders``; see ``evaluate``."""
        return evaluate_sets(self.cfg, self.model, policy, loaders, self.build_test)

    def _pop_run(self) -> Run | None:
        """Return the data for the report on the last evaluation and delete it; return None if it is already deleted."""
        cfg, sets = self.cfg, list(self._last.sets)
        self._last.sets.clear()
        if not sets:
            return None
        return Run(
            cfg=cfg,
            weights=f"after epoch {self.trainer.epoch + 1} of {cfg.SOLVER.MAX_EPOCH}",
            protocol=describe_protocol(cfg, self.policy.for_evaluation(cfg.SOLVER.AMP.EVAL_DTYPE)),
            policy=self.policy,
            device=next(self.model.parameters()).device,
            sets=sets,
            train=items_of(self.data_loader),
            history=history_of(cfg.OUTPUT_DIR),
            train_source=source_of(self.data_loader),
            clusters=self.trainer.cluster_sheets(),
        )

    def _checkpoint_notes(self) -> dict[str, Any]:
        """Return the checkpoint entries with the versions, and with the results of the last evaluation.

        There are no results if training has continued since then.
        """
        notes: dict[str, Any] = {"versions": environment_queries.versions()}
        if self._last.results and self._last_iteration == self.trainer.iter:
            policy = self.policy.for_evaluation(self.cfg.SOLVER.AMP.EVAL_DTYPE)
            notes["evaluation"] = {
                "weights": self._last.weights,
                "protocol": describe_protocol(self.cfg, policy),
                "metrics": to_json(self._last.results),
            }
            if self._last.pairs:
                notes["pairs"] = self._last.pairs
        return notes

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Return a context manager within which the model has the weights to evaluate.

        The weights are the EMA weights if ``SOLVER.EMA.EVALUATE`` is True, the SWA weights after the last epoch, and
        the trained weights otherwise. On entry, the batch-norm statistics are re-estimated if ``TEST.PRECISE_BN`` is
        enabled or SWA weights are evaluated, unless these are the initial weights. On exit, the trained weights are
        restored. Statistics that were re-estimated for averaged weights are stored in the average; for trained weights,
        they remain in the model.
        """
        cfg, average = self.cfg, self.average
        last = self.trainer.epoch + 1 == cfg.SOLVER.MAX_EPOCH
        if average and not (cfg.SOLVER.EMA.EVALUATE if average.kind == "ema" else last and average.updates > 0):
            average = None
        with average.applied() if average else nullcontext():
            if average:
                self._applied = average.kind
                logger.info("evaluating the weight average (%s, %d updates)", average.kind, average.updates)
            if self.precise_bn_loader is not None:
                update_bn_statistics(
                    self.model, self.precise_bn_loader, cfg.TEST.PRECISE_BN.NUM_ITER, policy=self.policy
                )
            elif average and average.kind == "swa" and cfg.SOLVER.SWA.INITIAL_WEIGHT < 1:
                # The batch-norm statistics were collected with other weights than the average.
                update_bn_statistics(
                    self.model,
                    self.build_train_loader(cfg),
                    self.trainer.batches_before(self.trainer.iters_per_epoch),
                    policy=self.policy,
                )
            try:
                yield
            finally:
                self._applied = "model"

    def build_hooks(self) -> list[HookBase]:
        """Build the training hooks in the order in which they are registered."""
        cfg = self.cfg
        return [
            *build_training_hooks(cfg, self.model, self.average, self.trainer.iters_per_epoch),
            *self._profile,
            *([hooks.CompilationMonitor(self.model)] if cfg.MODEL.COMPILE != "off" else []),
            hooks.SpeedMonitor(self.model, partial(input_fix, cfg), peak=peak_flops),
            hooks.PeriodicWriter(cfg.LOG_PERIOD, self.writers, device=next(self.model.parameters()).device),
            self.eval_hook,
            hooks.PeriodicCheckpointer(
                self.checkpointer,
                cfg.SOLVER.CHECKPOINT_PERIOD,
                iterations=cfg.SOLVER.CHECKPOINT_ITERS,
                minutes=cfg.SOLVER.CHECKPOINT_MINUTES,
                keep=cfg.SOLVER.CHECKPOINT_KEEP,
            ),
            *([hooks.ReportHook(self._pop_run, self.writers)] if cfg.TEST.REPORT else []),
            self.stop,
        ]

    def build_trainer(self) -> SimpleTrainer:
        """Build the training loop selected by ``SOLVER.TRAINER``."""
        cfg, name = self.cfg, self.cfg.SOLVER.TRAINER
        if name == "auto":
            name = "AMPTrainer" if cfg.SOLVER.AMP.ENABLED else "SimpleTrainer"
        parts = {"model": self.model, "data_loader": self.data_loader, "optimizers": list(self.optimizers.values())}
        trainer = TRAINER_REGISTRY.build(name, cfg, **parts)
        iters_per_epoch = -(-self.data_loader.iters_per_epoch // cfg.SOLVER.ACCUM_STEPS)
        trainer.set_data(iters_per_epoch, labels_checksum(self.data_loader), images_per_batch=cfg.SOLVER.IMS_PER_BATCH)
        logger.info("%s, precision: %s", name, trainer.policy.describe())
        return trainer

    def build_best_metric(self) -> hooks.BestMetric:
        """Parse ``SOLVER.BEST_METRIC`` and check that the evaluators report this metric."""
        reported = {
            test_set_of(name, self.cfg.DATASETS.TESTS): self.build_test(self.cfg, name, test)[1].metric_names()
            for name, test in self.test_loaders.items()
        }
        return hooks.BestMetric.by_name(self.cfg.SOLVER.BEST_METRIC, reported)

    def build_checkpointer(self, parts: dict[str, Any] | None = None) -> Checkpointer:
        """Build the checkpointer that saves the model and ``parts`` (default: ``checkpoint_parts()``) to OUTPUT_DIR."""
        cfg = self.cfg
        return Checkpointer(
            self.model,
            cfg.OUTPUT_DIR,
            min_match=cfg.MODEL.WEIGHTS_MIN_MATCH,
            base=cfg.MODEL.LORA.BASE,
            check=check_finite,
            notes=self._checkpoint_notes,
            **(self.checkpoint_parts() if parts is None else parts),
        )

    def checkpoint_parts(self) -> dict[str, Any]:
        """Return the objects in a checkpoint other than the model: name -> object with a ``state_dict`` method."""
        average = {"average": self.average} if self.average else {}
        optimizers = {name: OptimizerState(optimizer, self.model) for name, optimizer in self.optimizers.items()}
        run = {"random": RandomState(), "policy": TrainerPolicy(self.trainer), "config": ConfigText(self.cfg)}
        if (sampling := SamplingState(self.model)).modules:
            run |= {"sampling": sampling}
        return average | optimizers | {"trainer": self.stages} | run

    def build_best_checkpointer(self) -> Checkpointer:
        """Return the checkpointer that saves the best model."""
        return self.checkpointer

    def build_eval_hook(self) -> hooks.EvalHook:
        """Build the hook that evaluates the model and saves the best one."""
        period, checkpointer = self.cfg.TEST.EVAL_PERIOD, self.build_best_checkpointer()
        return hooks.EvalHook(
            period,
            self.evaluate,
            checkpointer,
            self.writers,
            self.best_metric,
            self.evaluated_weights,
            at_start=self.cfg.TEST.EVAL_START,
        )

    def build_writers(self) -> list[Any]:
        """Build the writers of ``metrics.json`` and of the loggers in ``LOGGERS``, from ``stages.start_iter`` on."""
        return build_writers(self.cfg, self.stages.start_iter)

    def open_writers(self) -> None:
        """Add the writers of ``build_writers`` to ``writers``. Called on rank 0 when the training starts."""
        self.writers += self.build_writers()

    def build_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Build the optimizers by name: ``"optimizer"``, and those that modules of the model build themselves."""
        return {"optimizer": self.build_optimizer(self.cfg, self.model)} | build_own_optimizers(self.model)
