"""The ordinary run: command-line arguments, set-up, and the trainer that builds everything from a config."""

import argparse
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastamp.amp import PrecisionPolicy, resolve_device
from fastamp.config import CfgNode, unsupported_settings
from fastamp.data import build_reid_test_loader, build_reid_train_loader
from fastamp.engine import hooks
from fastamp.engine.train_loop import TRAINER_REGISTRY, HookBase
from fastamp.evaluation import ReidEvaluator, inference_on_dataset, print_results
from fastamp.evaluation.evaluator import DatasetEvaluator
from fastamp.modeling import build_model
from fastamp.solver import OptimizerState, build_lr_schedule, build_optimizer
from fastamp.utils import comm
from fastamp.utils.checkpoint import Checkpointer, write_atomically
from fastamp.utils.env import RandomState, describe_environment, keep_freed_memory, seed_all
from fastamp.utils.errors import ConfigError
from fastamp.utils.events import JSONWriter, TensorboardXWriter
from fastamp.utils.logger import setup_logger

logger = logging.getLogger(__name__)


def default_argument_parser() -> argparse.ArgumentParser:
    """Return the parser of FastReID's command line."""
    parser = argparse.ArgumentParser(description="Train or evaluate a re-identification model.")
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML config file")
    parser.add_argument("--resume", action="store_true", help="continue from OUTPUT_DIR/last_checkpoint")
    parser.add_argument("--eval-only", action="store_true", help="evaluate MODEL.WEIGHTS on DATASETS.TESTS")
    parser.add_argument("--num-gpus", type=int, default=1, help="GPUs per machine")
    parser.add_argument("--num-machines", type=int, default=1)
    parser.add_argument("--machine-rank", type=int, default=0, help="this machine's number, from 0")
    parser.add_argument("--dist-url", default=None, help="where the processes meet, e.g. tcp://127.0.0.1:29500")
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="config keys and their values")
    return parser


def default_setup(cfg: CfgNode, args: argparse.Namespace | None = None) -> None:
    """Check the config, start the log, and seed the random generators.

    Raises:
        ConfigError: a value that cannot work, a part that this version does not have, or a device that is not there.
    """
    check_config(cfg)
    device = resolve_device(cfg.MODEL.DEVICE)
    rank = comm.get_rank()
    try:
        setup_logger(cfg.OUTPUT_DIR, rank=rank)
    except OSError as error:
        raise ConfigError(f"OUTPUT_DIR {cfg.OUTPUT_DIR!r} cannot be written to: {error.strerror}") from error
    logger.info("%s", describe_environment(device))
    if args is not None:
        logger.info("arguments: %s", args)
    logger.info("config:\n%s", cfg.dump())
    if device.type == "cpu":
        keep_freed_memory()
    seed_all(cfg.SEED + rank)
    torch.backends.cudnn.benchmark = cfg.CUDNN_BENCHMARK


def check_config(cfg: CfgNode) -> None:
    """Check what no single component can.

    Raises:
        ConfigError: with the key, the value and what to change.
    """
    unsupported = unsupported_settings(cfg)
    if unsupported:
        raise ConfigError("\n".join(unsupported))
    if not cfg.MODEL.LOSSES.NAME:
        raise ConfigError("MODEL.LOSSES.NAME is empty; name at least one loss")
    if cfg.SOLVER.AMP.MIN_SCALE > cfg.SOLVER.AMP.MAX_SCALE:
        raise ConfigError("SOLVER.AMP.MIN_SCALE is above SOLVER.AMP.MAX_SCALE")
    if not len(cfg.MODEL.PIXEL_MEAN) == len(cfg.MODEL.PIXEL_STD) == 3:
        raise ConfigError("MODEL.PIXEL_MEAN and MODEL.PIXEL_STD need three values each, for red, green and blue")
    if not cfg.DATASETS.TESTS:
        raise ConfigError("DATASETS.TESTS is empty; name at least one data set to evaluate on")


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
        self.optimizer = self.build_optimizer(cfg, self.model)
        name = cfg.SOLVER.TRAINER
        if name == "auto":
            name = "AMPTrainer" if cfg.SOLVER.AMP.ENABLED else "SimpleTrainer"
        self.trainer = TRAINER_REGISTRY.build(
            name, cfg, model=self.model, data_loader=self.data_loader, optimizers=[self.optimizer]
        )
        self.trainer.iters_per_epoch = self.data_loader.iters_per_epoch
        self.policy: PrecisionPolicy = self.trainer.policy
        logger.info("%s, precision: %s", name, self.policy.describe())
        # Fails here, before a long training, when a test set is missing.
        self.test_loaders = {name: self.build_test_loader(cfg, name) for name in cfg.DATASETS.TESTS}
        self.checkpointer = Checkpointer(
            self.model,
            cfg.OUTPUT_DIR,
            min_match=cfg.MODEL.WEIGHTS_MIN_MATCH,
            optimizer=OptimizerState(self.optimizer),
            trainer=self.trainer,
            random=RandomState(),
            policy=self.policy,
            config=_Constant(cfg.dump()),
        )
        self.stop = hooks.StopOnSignal(self.checkpointer)
        self.writers: list[Any] = []
        self.eval_hook = hooks.EvalHook(cfg.TEST.EVAL_PERIOD, self.evaluate, self.checkpointer, self.writers)
        self.trainer.register_hooks(self.build_hooks())

    def resume_or_load(self, resume: bool = True) -> None:
        """Continue from ``last_checkpoint`` when asked to and there is one, else load ``MODEL.WEIGHTS`` if set.

        Raises:
            WeightsError: the file is missing, damaged, or of another model.
        """
        last = self.checkpointer.last_checkpoint() if resume else None
        if last is not None:
            self.checkpointer.resume(last)
            logger.info("resuming from %s at iteration %d", last, self.trainer.start_iter)
        elif self.cfg.MODEL.WEIGHTS:
            extra = self.checkpointer.load(self.cfg.MODEL.WEIGHTS)
            self.policy.compare(extra.get("policy"), "these weights were trained")
        if resume and last is None:
            logger.warning("nothing to resume in %s: starting from the beginning", self.cfg.OUTPUT_DIR)

    def train(self) -> dict[str, Any]:
        """Train to the end and return the last evaluation's metrics."""
        cfg, start = self.cfg, self.trainer.start_iter
        output_dir = Path(cfg.OUTPUT_DIR)
        self.data_loader.start_iter = start
        if comm.is_main_process():
            if start == 0 and (output_dir / "last_checkpoint").exists():
                logger.warning("%s holds an earlier run, whose files are overwritten as this one goes on", output_dir)
            output_dir.mkdir(parents=True, exist_ok=True)
            write_atomically(output_dir / "config.yaml", lambda file: file.write(cfg.dump().encode()))
            self.writers += self.build_writers(start)
        logger.info(
            "training from iteration %d: %d epochs of %d iterations",
            start,
            cfg.SOLVER.MAX_EPOCH,
            self.data_loader.iters_per_epoch,
        )
        if start >= cfg.SOLVER.MAX_EPOCH * self.data_loader.iters_per_epoch:
            logger.info("nothing is left to train, a larger SOLVER.MAX_EPOCH would go on; evaluating")
            return _flat(self.evaluate())
        try:
            with self.stop.watching():
                self.trainer.train(start, cfg.SOLVER.MAX_EPOCH, self.data_loader.iters_per_epoch)
        finally:
            for writer in self.writers:
                writer.close()
            self.writers.clear()
        return _flat(self.eval_hook.results)

    def register_hooks(self, hooks_: Iterable[HookBase]) -> None:
        """Add hooks after those of ``build_hooks``."""
        self.trainer.register_hooks(hooks_)

    def evaluate(self) -> dict[str, dict[str, Any]]:
        """Evaluate the model as it is on every test set, under the trainer's precision policy."""
        policy = self.policy.for_evaluation(self.cfg.SOLVER.AMP.EVAL_DTYPE)
        return self._evaluate(self.cfg, self.model, policy, self.test_loaders)

    def build_hooks(self) -> list[HookBase]:
        """Return the hooks in the order in which they are called."""
        cfg = self.cfg
        return [
            hooks.LRScheduler(build_lr_schedule(cfg, self.data_loader.iters_per_epoch)),
            hooks.PeriodicWriter(
                cfg.LOG_PERIOD,
                self.writers,
                images_per_iteration=cfg.SOLVER.IMS_PER_BATCH,
                device=next(self.model.parameters()).device,
            ),
            self.eval_hook,
            hooks.PeriodicCheckpointer(self.checkpointer, cfg.SOLVER.CHECKPOINT_PERIOD),
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
        cfg = cfg.clone()
        cfg.defrost()
        cfg.MODEL.HEADS.NUM_CLASSES = num_classes
        cfg.freeze()
        return cfg

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
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> tuple[Any, int]:
        """Return a test loader and the number of its query images."""
        return build_reid_test_loader(cfg, dataset_name)

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, num_query: int, output_dir: str | None = None) -> DatasetEvaluator:
        """Return the evaluator of one test set."""
        return ReidEvaluator(cfg, num_query, output_dir)

    @classmethod
    def test(cls, cfg: CfgNode, model: nn.Module) -> dict[str, Any]:
        """Evaluate ``model`` on ``DATASETS.TESTS`` under the policy of the config, and log the table.

        Returns:
            The metrics of the one test set, or data set name -> metrics when there are several.
        """
        policy = PrecisionPolicy.from_config(cfg, next(model.parameters()).device)
        policy = policy.for_evaluation(cfg.SOLVER.AMP.EVAL_DTYPE)
        loaders = {name: cls.build_test_loader(cfg, name) for name in cfg.DATASETS.TESTS}
        return _flat(cls._evaluate(cfg, model, policy, loaders))

    @classmethod
    def test_weights(cls, cfg: CfgNode) -> dict[str, Any]:
        """Evaluate the weights file ``MODEL.WEIGHTS``, as ``--eval-only`` does; returns what ``test`` returns.

        Raises:
            UserError: no weights were named, or they or the test data are wrong.
        """
        if not cfg.MODEL.WEIGHTS:
            raise ConfigError("--eval-only needs weights: add MODEL.WEIGHTS path/to/model.pth")
        cfg = cfg.clone()
        cfg.defrost()
        cfg.MODEL.BACKBONE.PRETRAIN = False  # would be overwritten at once
        cfg.freeze()
        model = cls.build_model(cfg)
        extra = Checkpointer(model, min_match=cfg.MODEL.WEIGHTS_MIN_MATCH).load(cfg.MODEL.WEIGHTS)
        policy = PrecisionPolicy.from_config(cfg, next(model.parameters()).device)
        policy.for_evaluation(cfg.SOLVER.AMP.EVAL_DTYPE).compare(extra.get("policy"), "these weights were trained")
        return cls.test(cfg, model)

    @classmethod
    def _evaluate(
        cls, cfg: CfgNode, model: nn.Module, policy: PrecisionPolicy, loaders: dict[str, tuple[Any, int]]
    ) -> dict[str, dict[str, Any]]:
        results = {}
        for name, (loader, num_query) in loaders.items():
            logger.info("evaluating on %s", name)
            evaluator = cls.build_evaluator(cfg, num_query, cfg.OUTPUT_DIR)
            metrics = inference_on_dataset(model, loader, evaluator, cfg.TEST.FLIP.ENABLED, policy=policy)
            if metrics:
                results[name] = metrics
        if results:
            flip = ", flip test" if cfg.TEST.FLIP.ENABLED else ""
            print_results(results, protocol=f"Market-1501 rule, {cfg.TEST.METRIC} distance{flip}, {policy.describe()}")
        return results


class _Constant:
    """A value that goes into every checkpoint and is not taken back from it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        pass


def _flat(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics alone when there is one data set, as FastReID does."""
    return next(iter(results.values())) if len(results) == 1 else results
