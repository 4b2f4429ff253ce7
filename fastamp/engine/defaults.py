"""The ordinary run: the trainer that builds everything from a config."""

import logging
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fastamp.amp import PrecisionPolicy
from fastamp.amp.health import check_finite
from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.checkpoint.evaluated_weights import load_evaluated_weights
from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.config import CfgNode, describe_changes
from fastamp.data import build_reid_test_loader, build_reid_train_loader
from fastamp.data.loader import lost_workers_explained
from fastamp.diagnostics.locate import describe_evaluation
from fastamp.engine import hooks
from fastamp.engine.command_line import resume_command
from fastamp.engine.hooks.freeze import freeze_length
from fastamp.engine.hooks.report import ReportHook
from fastamp.engine.reporting import (
    evaluated_set,
    history_of,
    items_of,
    report,
    report_of_weights,
    write_metrics,
)
from fastamp.engine.train_loop import TRAINER_REGISTRY, HookBase
from fastamp.evaluation import Protocol, ReidEvaluator, inference_on_dataset, print_results, update_bn_statistics
from fastamp.evaluation.evaluator import DatasetEvaluator
from fastamp.modeling import build_model
from fastamp.report import EvaluatedSet, Run
from fastamp.solver import (
    OptimizerState,
    WeightAverage,
    build_lr_schedule,
    build_optimizer,
    build_own_optimizers,
    swa_start,
)
from fastamp.utils import comm
from fastamp.utils.env import RandomState
from fastamp.utils.errors import ConfigError, UserError, WeightsError, WriteError
from fastamp.utils.events import JSONWriter, TensorboardXWriter
from fastamp.utils.files import folder_name, write_atomically
from fastamp.utils.lock import lock_folder, unlock_folder

logger = logging.getLogger(__name__)


class DefaultTrainer:
    """Everything that a config describes, built and wired: model, loaders, optimizer, loop and hooks.

    Subclass it and override a ``build_`` method to change one part; the loop itself is ``self.trainer``, built through
    ``TRAINER_REGISTRY``.

    Args:
        cfg: ``MODEL.HEADS.NUM_CLASSES`` 0 is replaced, in a copy, by the number of training identities.

    Raises:
        UserError: the config, the data or the weights are wrong; nothing has been written then.
    """

    def __init__(self, cfg: CfgNode) -> None:
        self.data_loader = self.build_train_loader(cfg)
        self.cfg = cfg = self.auto_scale_hyperparams(cfg, self.data_loader.dataset.num_classes)
        self.model = self.build_model(cfg)
        # Seeded by rank, so that dropout differs, and the initial weights must not.
        comm.broadcast([*self.model.parameters(), *self.model.buffers()])
        self.optimizer = self.build_optimizer(cfg, self.model)
        optimizers = {"optimizer": self.optimizer} | build_own_optimizers(self.model)
        name = cfg.SOLVER.TRAINER
        if name == "auto":
            name = "AMPTrainer" if cfg.SOLVER.AMP.ENABLED else "SimpleTrainer"
        self.trainer = TRAINER_REGISTRY.build(
            name, cfg, model=self.model, data_loader=self.data_loader, optimizers=list(optimizers.values())
        )
        self.trainer.iters_per_epoch = -(-self.data_loader.iters_per_epoch // cfg.SOLVER.ACCUM_STEPS)
        labels = getattr(self.data_loader.dataset, "labels", None)
        if labels is not None:
            self.trainer.labels_checksum = zlib.crc32(np.array(labels, dtype=np.int64).tobytes())
        logger.info("%s, precision: %s", name, self.policy.describe())
        # Fails here, before a long training, when a test set is missing.
        self.test_loaders = {name: self.build_test_loader(cfg, name) for name in cfg.DATASETS.TESTS}
        reported = {
            name: self.build_evaluator(cfg, num_query).metric_names()
            for name, (_, num_query) in self.test_loaders.items()
        }
        self.best_metric = hooks.BestMetric.by_name(cfg.SOLVER.BEST_METRIC, reported)
        self.precise_bn_loader = self.build_precise_bn_loader(cfg)
        self.average = self.build_weight_average(cfg, self.model)
        self.checkpointer = Checkpointer(
            self.model,
            cfg.OUTPUT_DIR,
            min_match=cfg.MODEL.WEIGHTS_MIN_MATCH,
            check=check_finite,
            notes=self._pair_scores,
            **({"average": self.average} if self.average else {}),
            **{name: OptimizerState(optimizer, self.model) for name, optimizer in optimizers.items()},
            trainer=self.trainer,
            random=RandomState(),
            policy=_PolicyOf(self.trainer),
            config=ConfigText(cfg),
        )
        self._pairs: tuple[int, dict[str, Any]] = (-1, {})
        self._resumed: Path | None = None
        self.stop = hooks.StopOnSignal(self.checkpointer)
        self.writers: list[Any] = []
        self._evaluated: list[EvaluatedSet] = []
        self.eval_hook = hooks.EvalHook(
            cfg.TEST.EVAL_PERIOD,
            self.evaluate,
            self.checkpointer,
            self.writers,
            self.best_metric,
            self.evaluated_weights,
        )
        self.trainer.register_hooks(self.build_hooks())

    @property
    def policy(self) -> PrecisionPolicy:
        """The trainer's precision policy."""
        return self.trainer.policy

    def resume_or_load(self, resume: bool = True) -> None:
        """Continue from the newest whole checkpoint when asked to and there is one, else load ``MODEL.WEIGHTS`` if set.

        Raises:
            WeightsError: no checkpoint is whole, or it is of another model; the weights are missing or damaged.
        """
        self._resumed = last = self.checkpointer.last_checkpoint() if resume else None
        if last is not None:
            extra = self.checkpointer.resume(last)
            if "average" in extra:
                logger.warning("the %s of the weights in %s is not continued", extra["average"]["kind"], last)
            logger.info("resuming from %s at iteration %d", last, self.trainer.start_iter)
        elif self.cfg.MODEL.WEIGHTS:
            extra = self.checkpointer.load(self.cfg.MODEL.WEIGHTS)
            self.policy.compare(extra.get("policy"), "these weights were trained")
        if resume and last is None:
            logger.warning("nothing to resume in %s: starting from the beginning", self.checkpointer.save_dir)

    def train(self) -> dict[str, Any]:
        """Train to the end and return the last evaluation's metrics; rank 0 has the lock of OUTPUT_DIR meanwhile.

        Raises:
            UserError: another process writes into OUTPUT_DIR, a file cannot be written, or training fails.
        """
        output_dir = self.cfg.OUTPUT_DIR
        if comm.is_main_process():
            lock_folder(output_dir, "OUTPUT_DIR")
        try:
            return self._train()
        finally:
            unlock_folder(output_dir)

    def _train(self) -> dict[str, Any]:
        cfg, start = self.cfg, self.trainer.start_iter
        output_dir = Path(cfg.OUTPUT_DIR)
        self.data_loader.start_iter = self.trainer.batches_before(start)
        if comm.is_main_process():
            if start == 0 and (output_dir / "last_checkpoint").exists():
                logger.warning("%s holds an earlier run, whose files are overwritten as this one goes on", output_dir)
            output_dir.mkdir(parents=True, exist_ok=True)
            self.checkpointer.remove_leftovers()
            write_atomically(output_dir / "config.yaml", lambda file: file.write(cfg.dump().encode()))
            self.writers += self.build_writers(start)
        logger.info(
            "training from iteration %d: %d epochs of %d iterations",
            start,
            cfg.SOLVER.MAX_EPOCH,
            self.trainer.iters_per_epoch,
        )
        if start >= cfg.SOLVER.MAX_EPOCH * self.trainer.iters_per_epoch:
            logger.info("nothing is left to train, a larger SOLVER.MAX_EPOCH would go on; evaluating")
            try:
                return _flat(self._evaluate_the_end(start))
            finally:
                self._close_writers()
        try:
            with self.stop.watching(), lost_workers_explained():
                self.trainer.train(start, cfg.SOLVER.MAX_EPOCH, self.trainer.iters_per_epoch)
        except WriteError as error:
            raise WriteError(f"{error}\n{self._what_is_whole()}") from error
        finally:
            self._close_writers()
        return _flat(self.eval_hook.results)

    def _evaluate_the_end(self, start: int) -> dict[str, dict[str, Any]]:
        """Return the results of a run that is trained to its end; save what its last evaluation did not come to."""
        trainer, epochs = self.trainer, self.cfg.SOLVER.MAX_EPOCH
        trainer.epoch = epochs - 1
        if start > epochs * trainer.iters_per_epoch or self._resumed is None or self._resumed.stem == "model_final":
            with self.evaluated_weights():
                results = self.evaluate()
        else:
            trainer.iter, trainer.max_epoch = start - 1, epochs
            self.eval_hook.after_epoch()
            results = self.eval_hook.results
            logger.info("saved %s", self.checkpointer.save("model_final"))
        if self._evaluated:
            report(self._run())
        return results

    def _close_writers(self) -> None:
        for writer in self.writers:
            writer.close()
        self.writers.clear()

    def _what_is_whole(self) -> str:
        """Return what to do when a file could not be written."""
        try:
            with comm.alone():  # the other ranks, which could write, are somewhere else
                last = self.checkpointer.last_checkpoint()
        except WeightsError as error:
            return f"  {error}"
        best = self._whole_best()
        if last is None:
            return (
                f"  {best or 'nothing was saved before'}\n"
                f"  fix: make room, or choose another OUTPUT_DIR than {self.cfg.OUTPUT_DIR}"
            )
        best = f"  {best}\n" if best else ""
        return (
            f"  the checkpoint before is whole: {last}\n{best}  fix: make room, then resume with:\n  {resume_command()}"
        )

    def _whole_best(self) -> str:
        """Return a sentence about this run's ``model_best.pth``; empty if it has none that is whole."""
        path = Path(self.cfg.OUTPUT_DIR) / "model_best.pth"
        try:
            best = read_checkpoint(path, lazily=True)["best"] if self.eval_hook.best is not None else None
            return f"the best model is whole: {path} ({best['metric']} {best['value']:.2f})" if best else ""
        except (WeightsError, KeyError, TypeError, ValueError):
            return ""

    def register_hooks(self, hooks_: Iterable[HookBase]) -> None:
        """Add hooks after those of ``build_hooks``."""
        self.trainer.register_hooks(hooks_)

    def evaluate(self) -> dict[str, dict[str, Any]]:
        """Evaluate the model as it is on every test set, under the trainer's precision policy."""
        policy = self.policy.for_evaluation(self.cfg.SOLVER.AMP.EVAL_DTYPE)
        comm.broadcast(self.model.buffers())  # each rank's last batch has moved them elsewhere
        check_finite(self.model)
        results, evaluated, pairs = self._evaluate(self.cfg, self.model, policy, self.test_loaders)
        self._evaluated = evaluated if self.cfg.TEST.REPORT else []
        self._pairs = (self.trainer.iter, pairs)
        return results

    def _run(self) -> Run | None:
        """Return what was evaluated last, for a report; None when there is nothing new."""
        sets, self._evaluated = self._evaluated, []
        if not sets:
            return None
        cfg = self.cfg
        weights = f"after epoch {self.trainer.epoch + 1} of {cfg.SOLVER.MAX_EPOCH}"
        return Run(
            cfg=cfg,
            weights=weights,
            protocol=_protocol(cfg, self.policy.for_evaluation(cfg.SOLVER.AMP.EVAL_DTYPE)),
            policy=self.policy,
            device=next(self.model.parameters()).device,
            sets=sets,
            train=items_of(self.data_loader),
            history=history_of(cfg.OUTPUT_DIR),
        )

    def _pair_scores(self) -> dict[str, Any]:
        """Return, for a checkpoint, each test set's ``PairScores``, if the model has not been trained on since."""
        iteration, pairs = self._pairs
        return {"pairs": pairs} if pairs and iteration == self.trainer.iter else {}

    @contextmanager
    def evaluated_weights(self) -> Iterator[None]:
        """Let the model have what is to be evaluated inside: averaged weights, newly estimated batch-norm statistics.

        Statistics that are estimated anew stay, with the weights that they belong to.
        """
        cfg, average = self.cfg, self.average
        last = self.trainer.epoch + 1 == cfg.SOLVER.MAX_EPOCH
        averaged = bool(average) and (
            cfg.SOLVER.EMA.EVALUATE if average.kind == "ema" else last and average.updates > 0
        )
        with average.applied() if averaged else nullcontext():
            if averaged:
                logger.info("evaluating the average of the weights (%s, %d updates)", average.kind, average.updates)
            if self.precise_bn_loader is not None:
                update_bn_statistics(
                    self.model, self.precise_bn_loader, cfg.TEST.PRECISE_BN.NUM_ITER, policy=self.policy
                )
            elif averaged and average.kind == "swa":
                # The statistics are of the weights that were averaged, not of their average.
                update_bn_statistics(
                    self.model,
                    self.build_train_loader(cfg),
                    self.trainer.batches_before(self.trainer.iters_per_epoch),
                    policy=self.policy,
                )
            yield

    def build_hooks(self) -> list[HookBase]:
        """Return the hooks in the order in which they are called."""
        cfg, iters_per_epoch = self.cfg, self.trainer.iters_per_epoch
        batches_per_iteration = self.trainer.batches_before(iters_per_epoch) / iters_per_epoch
        build: list[HookBase] = [hooks.LRScheduler(build_lr_schedule(cfg, iters_per_epoch))]
        for name in ("WARMUP", "FREEZE"):
            epochs, iterations = cfg.SOLVER[f"{name}_EPOCHS"], cfg.SOLVER[f"{name}_ITERS"]
            if epochs and iterations:
                logger.warning("SOLVER.%s_ITERS %d has no effect: %s_EPOCHS is %d", name, iterations, name, epochs)
        freezing = freeze_length(cfg, iters_per_epoch)
        if bool(cfg.MODEL.FREEZE_LAYERS) != bool(freezing):
            logger.warning("nothing is frozen: set MODEL.FREEZE_LAYERS and SOLVER.FREEZE_ITERS or FREEZE_EPOCHS")
        if cfg.MODEL.FREEZE_LAYERS:
            build.append(hooks.FreezeLayers(self.model, cfg.MODEL.FREEZE_LAYERS, freezing))
        if cfg.SOLVER.FREEZE_FC_ITERS:
            build.append(hooks.FreezeClassifier(self.model, cfg.SOLVER.FREEZE_FC_ITERS))
        if cfg.SOLVER.EMA.ENABLED:
            build.append(hooks.EMA(self.average, cfg.SOLVER.EMA.DECAY))
        if cfg.SOLVER.SWA.ENABLED:
            build.append(hooks.SWA(self.average, start=swa_start(cfg), period=cfg.SOLVER.SWA.PERIOD))
        if cfg.LOG_ACTIVATIONS:
            build.append(hooks.ActivationMonitor(self.model, cfg.LOG_PERIOD))
        return [
            *build,
            hooks.PeriodicWriter(
                cfg.LOG_PERIOD,
                self.writers,
                images_per_iteration=cfg.SOLVER.IMS_PER_BATCH * batches_per_iteration,
                device=next(self.model.parameters()).device,
            ),
            self.eval_hook,
            hooks.PeriodicCheckpointer(
                self.checkpointer,
                cfg.SOLVER.CHECKPOINT_PERIOD,
                iterations=cfg.SOLVER.CHECKPOINT_ITERS,
                minutes=cfg.SOLVER.CHECKPOINT_MINUTES,
                keep=cfg.SOLVER.CHECKPOINT_KEEP,
            ),
            *([ReportHook(self._run)] if cfg.TEST.REPORT else []),
            self.stop,
        ]

    def build_writers(self, start_iter: int) -> list[Any]:
        """Return the writers of metrics.json and of the TensorBoard events."""
        output_dir = Path(self.cfg.OUTPUT_DIR)
        return [
            JSONWriter(output_dir / "metrics.json", start_iter=start_iter),
            TensorboardXWriter(output_dir, start_iter=start_iter),
        ]

    @classmethod
    def auto_scale_hyperparams(cls, cfg: CfgNode, num_classes: int) -> CfgNode:
        """Return a frozen copy of ``cfg`` whose ``MODEL.HEADS.NUM_CLASSES`` is the number of training identities.

        Raises:
            ConfigError: it was set to another number.
        """
        asked = cfg.MODEL.HEADS.NUM_CLASSES
        if asked not in (0, num_classes):
            raise ConfigError(
                f"MODEL.HEADS.NUM_CLASSES is {asked}, but the training data ({', '.join(cfg.DATASETS.NAMES)}) has "
                f"{num_classes} identities.\n  fix: leave it at 0, so that it is taken from the data"
            )
        return cfg.with_values({"MODEL.HEADS.NUM_CLASSES": num_classes})

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """Return the model of the config."""
        model = build_model(cfg)
        logger.info("model: %s, %d parameters", cfg.MODEL.META_ARCHITECTURE, sum(p.numel() for p in model.parameters()))
        return model

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of the config."""
        return build_optimizer(cfg, model)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        """Return the training loader."""
        return build_reid_train_loader(cfg)

    @classmethod
    def build_weight_average(cls, cfg: CfgNode, model: nn.Module) -> WeightAverage | None:
        """Return the average of ``SOLVER.EMA`` or ``SOLVER.SWA``, None when neither is enabled."""
        if cfg.SOLVER.EMA.ENABLED:
            return WeightAverage(model, "ema")
        return WeightAverage(model, "swa") if cfg.SOLVER.SWA.ENABLED else None

    @classmethod
    def build_precise_bn_loader(cls, cfg: CfgNode) -> Any:
        """Return the loader of ``TEST.PRECISE_BN.DATASET``'s training images; None when precise batch norm is off."""
        if not cfg.TEST.PRECISE_BN.ENABLED:
            return None
        cfg = cfg.with_values({"DATASETS.NAMES": (cfg.TEST.PRECISE_BN.DATASET,)})
        try:
            return cls.build_train_loader(cfg)
        except UserError as error:
            raise type(error)(f"TEST.PRECISE_BN.DATASET {cfg.TEST.PRECISE_BN.DATASET!r}: {error}") from error

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> tuple[Any, int]:
        """Return a test loader and the number of its query images."""
        return build_reid_test_loader(cfg, dataset_name)

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, num_query: int, output_dir: str | None = None) -> DatasetEvaluator:
        """Return the evaluator of one test set."""
        return ReidEvaluator(cfg, num_query, output_dir)

    @classmethod
    def test(cls, cfg: CfgNode, model: nn.Module) -> dict[str, Any]:
        """Evaluate ``model`` on ``DATASETS.TESTS`` under the policy of the config, log the table, write the report.

        Returns:
            The metrics of the one test set, or data set name -> metrics when there are several.

        Raises:
            ConfigError: the report that ``TEST.REPORT`` asks for cannot be written; the table has been logged.
        """
        policy = PrecisionPolicy.from_config(cfg, next(model.parameters()).device)
        policy = policy.for_evaluation(cfg.SOLVER.AMP.EVAL_DTYPE)
        loaders = {name: cls.build_test_loader(cfg, name) for name in cfg.DATASETS.TESTS}
        results, evaluated, _ = cls._evaluate(cfg, model, policy, loaders)
        if cfg.TEST.REPORT and comm.is_main_process():
            run = Run(
                cfg=cfg,
                weights=cfg.MODEL.WEIGHTS or "the model as it is",
                protocol=_protocol(cfg, policy),
                policy=policy,
                device=next(model.parameters()).device,
                sets=evaluated,
                history=history_of(Path(cfg.MODEL.WEIGHTS).parent if cfg.MODEL.WEIGHTS else cfg.OUTPUT_DIR),
            )
            logger.info("wrote %s", report_of_weights(run))
        return _flat(results)

    @classmethod
    def test_weights(cls, cfg: CfgNode) -> dict[str, Any]:
        """Evaluate the weights file ``MODEL.WEIGHTS``, as ``--eval-only`` does, and write ``metrics_eval.json``.

        Returns:
            What ``test`` returns.

        Raises:
            UserError: no weights were named, they or the test data are wrong, or the metrics cannot be written; the
                table has been logged then.
        """
        if not cfg.MODEL.WEIGHTS:
            raise ConfigError("--eval-only needs weights: add MODEL.WEIGHTS path/to/model.pth")
        model, extra = cls.load_model(cfg)
        policy = PrecisionPolicy.from_config(cfg, next(model.parameters()).device)
        evaluation = policy.for_evaluation(cfg.SOLVER.AMP.EVAL_DTYPE)
        evaluation.compare(extra.get("policy"), "these weights were trained")
        loader = cls.build_precise_bn_loader(cfg)
        if loader is not None:
            update_bn_statistics(model, loader, cfg.TEST.PRECISE_BN.NUM_ITER, policy=policy)
        results = cls.test(cfg, model)
        names = dict.fromkeys(cfg.DATASETS.TESTS)
        by_name = results if len(names) > 1 else dict.fromkeys(names, results)
        if comm.is_main_process():
            logger.info("wrote %s", write_metrics(cfg, by_name, protocol=_protocol(cfg, evaluation)))
        return results

    @classmethod
    def load_model(cls, cfg: CfgNode) -> tuple[nn.Module, dict[str, Any]]:
        """Return the model with the weights of ``MODEL.WEIGHTS``, as they are to be evaluated.

        Returns:
            The model, and the further entries of the file.

        Raises:
            UserError: the weights are missing, damaged, or of another model.
        """
        cfg = cfg.with_values({"MODEL.BACKBONE.PRETRAIN": False})  # would be overwritten at once
        model = cls.build_model(cfg)
        average = cls.build_weight_average(cfg, model)
        kind = None if average is None or (average.kind == "ema" and not cfg.SOLVER.EMA.EVALUATE) else average.kind
        weights, min_match = cfg.MODEL.WEIGHTS, cfg.MODEL.WEIGHTS_MIN_MATCH
        return model, load_evaluated_weights(model, weights, average=kind, min_match=min_match)

    @classmethod
    def _evaluate(
        cls, cfg: CfgNode, model: nn.Module, policy: PrecisionPolicy, loaders: dict[str, tuple[Any, int]]
    ) -> tuple[dict[str, dict[str, Any]], list[EvaluatedSet], dict[str, Any]]:
        """Return data set name -> metrics, what a report shows of each set, and data set name -> its ``PairScores``.

        Nothing on ranks other than 0.
        """
        results, evaluated, pairs = {}, [], {}
        for name, (loader, num_query) in loaders.items():
            logger.info("evaluating on %s", name)
            folder = Path(cfg.OUTPUT_DIR) / "evaluation" / folder_name(name)
            evaluator = cls.build_evaluator(cfg, num_query, str(folder))
            metrics = inference_on_dataset(
                model, loader, evaluator, cfg.TEST.FLIP.ENABLED, policy=policy, locate=describe_evaluation
            )
            if metrics:
                results[name] = metrics
                evaluated.append(evaluated_set(name, metrics, evaluator, loader, num_query))
            if getattr(evaluator, "pairs", None) is not None:
                pairs[name] = evaluator.pairs.state_dict()
        if results:
            print_results(results, protocol=_protocol(cfg, policy))
        return results, evaluated, pairs


def _protocol(cfg: CfgNode, policy: PrecisionPolicy) -> str:
    """Return in one line how an evaluation under ``policy`` measures."""
    flip = "flip test" if cfg.TEST.FLIP.ENABLED else "no flip test"
    return f"{Protocol.from_config(cfg).describe()}; {flip}; features {policy.describe()}"


class _PolicyOf:
    """The present policy of a trainer, as a part of its checkpoints; that of a checkpoint is compared with it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return self.trainer.policy.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.policy.compare(state, "this run was trained so far")


class ConfigText:
    """The config as text, a part of every checkpoint; on a resume this run's own counts, and what differs is logged."""

    def __init__(self, cfg: CfgNode) -> None:
        self.cfg, self.text = cfg, cfg.dump()

    def state_dict(self) -> str:
        return self.text

    def load_state_dict(self, state: str) -> None:
        for line in describe_changes(self.cfg, state, "the checkpoint's config"):
            logger.info("the config differs from the checkpoint's: %s", line)


def _flat(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics alone when there is one data set, as FastReID does."""
    return next(iter(results.values())) if len(results) == 1 else results
