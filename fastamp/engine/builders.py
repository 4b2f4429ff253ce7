"""Parts of a run that are built from its config, and the evaluation of weights."""

import logging
from typing import Any

import torch
from torch import nn

from fastamp.amp import PrecisionPolicy
from fastamp.checkpoint.entries import is_training_recorded
from fastamp.checkpoint.evaluated_weights import load_evaluated_weights
from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.config import CfgNode
from fastamp.data import build_reid_test_loader, build_reid_train_loader
from fastamp.data.build import with_num_categories, with_num_classes
from fastamp.data.random_splits import check_has_splits, evaluated_splits
from fastamp.engine.evaluation import (
    build_evaluator,
    check_test_set,
    describe_protocol,
    evaluate_sets,
    evaluation_policy,
    report_evaluation,
    unwrap_single,
)
from fastamp.engine.reporting import write_metrics
from fastamp.engine.summary import warn_below_baselines
from fastamp.evaluation import DatasetEvaluator, update_bn_statistics
from fastamp.evaluation.calibration import Calibration, read_calibration
from fastamp.modeling import adapt_to_training_set, build_model
from fastamp.solver import WeightAverage, build_optimizer
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError, UserError
from fastamp.utils.logger import log_to_console
from fastamp.zoo import warn_of_differences, with_local_files

logger = logging.getLogger(__name__)


class Builders:
    """Methods that need no training run; a subclass overrides one to replace a part."""

    @classmethod
    def build_run_config(cls, cfg: CfgNode, dataset: Any) -> CfgNode:
        """Return a frozen copy of ``cfg`` with the keys that depend on the training set.

        Raises:
            ConfigError: if ``MODEL.HEADS.NUM_CLASSES`` is set to a different number than that of the training set.
        """
        return with_num_categories(with_num_classes(*adapt_to_training_set(cfg, dataset)), dataset)

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """Build the model from the config."""
        model = build_model(cfg)
        logger.info("model: %s, %d parameters", cfg.MODEL.META_ARCHITECTURE, sum(p.numel() for p in model.parameters()))
        return model

    @classmethod
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer from the config."""
        return build_optimizer(cfg, model)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Any:
        """Build the training loader.

        A custom loader is a ``torch.utils.data.DataLoader``; or it provides ``dataset.num_classes``,
        ``iters_per_epoch`` (the number of batches in an epoch), and ``start_at(n)``, after which the next iterator
        starts at batch ``n``.
        """
        return build_reid_train_loader(cfg)

    @classmethod
    def build_weight_average(cls, cfg: CfgNode, model: nn.Module) -> WeightAverage | None:
        """Build the weight average for ``SOLVER.EMA`` or ``SOLVER.SWA``; return None if neither is enabled."""
        if cfg.SOLVER.EMA.ENABLED:
            return WeightAverage(model, "ema")
        return WeightAverage(model, "swa") if cfg.SOLVER.SWA.ENABLED else None

    @classmethod
    def build_precise_bn_loader(cls, cfg: CfgNode) -> Any:
        """Build a training loader for ``TEST.PRECISE_BN.DATASET``; return None if ``TEST.PRECISE_BN`` is disabled."""
        if not cfg.TEST.PRECISE_BN.ENABLED:
            return None
        cfg = cfg.with_values({"DATASETS.NAMES": (cfg.TEST.PRECISE_BN.DATASET,)})
        try:
            return cls.build_train_loader(cfg)
        except UserError as error:
            raise type(error)(f"TEST.PRECISE_BN.DATASET {cfg.TEST.PRECISE_BN.DATASET!r}: {error}") from error

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> tuple[Any, int]:
        """Build a test loader and return ``(loader, number of query images)``."""
        return build_reid_test_loader(cfg, dataset_name, requires_gallery=False)  # checked for the evaluator

    @classmethod
    def _build_test_loaders(cls, cfg: CfgNode) -> dict[str, tuple[Any, int]]:
        """Return the test loaders: name of a test set, or title of a split of it -> ``build_test_loader``."""
        check_has_splits(cfg)
        return {
            title: cls.build_test_loader(cfg.with_values(values) if values else cfg, name)
            for name in cfg.DATASETS.TESTS
            for title, values in evaluated_splits(cfg, name).items()
        }

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, num_query: int, output_dir: str | None = None) -> Any:
        """Build the evaluator ``TEST.EVALUATOR`` for a test set.

        Args:
            cfg: config.
            num_query: number of query images.
            output_dir: folder for the files of the evaluator.
        """
        return build_evaluator(cfg, num_query, output_dir)

    @classmethod
    def build_test(
        cls, cfg: CfgNode, name: str, test: tuple[Any, int], output_dir: str | None = None
    ) -> tuple[Any, DatasetEvaluator]:
        """Return the loader and the evaluator of a test set, checked by ``check_test_set``.

        Args:
            cfg: config.
            name: name of the test set.
            test: ``(test loader, number of query images)``.
            output_dir: folder for the files of the evaluator.
        """
        loader, num_query = test
        evaluator = cls.build_evaluator(cfg, num_query, output_dir)
        check_test_set(cfg, name, loader, evaluator)
        return loader, evaluator

    @classmethod
    def test(
        cls,
        cfg: CfgNode,
        model: nn.Module,
        *,
        loaders: dict[str, tuple[Any, int]] | None = None,
        calibration: Calibration | None = None,
    ) -> dict[str, Any]:
        """Evaluate ``model`` on ``DATASETS.TESTS`` in the configured precision, log the results and write the report.

        Args:
            cfg: config.
            model: model with the weights to evaluate.
            loaders: dataset name -> (test loader, number of query images). Default: built by ``build_test_loader``.
            calibration: calibration of the model, whose error rates are measured. Default None.

        Returns:
            Metrics of the test set, or a dict of dataset name -> metrics for several test sets; empty on ranks other
            than 0.

        Raises:
            ConfigError: if the report (``TEST.REPORT``) cannot be written; the results have already been logged.
        """
        log_to_console()
        policy = evaluation_policy(cfg, model)
        loaders = loaders or cls._build_test_loaders(cfg)
        output = evaluate_sets(cfg, model, policy, loaders, cls.build_test, calibration=calibration)
        report_evaluation(cfg, model, policy, output.sets)
        warn_below_baselines(output.results)
        return unwrap_single(output.results)

    @classmethod
    def test_weights(cls, cfg: CfgNode) -> dict[str, Any]:
        """Evaluate the weights file ``MODEL.WEIGHTS`` and write ``metrics_eval.json``, as ``--eval-only`` does.

        Returns:
            See ``test``.

        Raises:
            UserError: if ``MODEL.WEIGHTS`` is empty, if the weights or the test data are invalid, or if a file cannot
                be written. If only writing fails, the results have already been logged.
        """
        if not cfg.MODEL.WEIGHTS:
            raise ConfigError("--eval-only requires MODEL.WEIGHTS.\n  fix: add MODEL.WEIGHTS path/to/model.pth")
        warn_of_differences(cfg, evaluated=True)
        cfg = with_local_files(cfg)
        # Built before the model, so that missing images and test sets fail early.
        loaders, precise_bn_loader = cls._build_test_loaders(cfg), cls.build_precise_bn_loader(cfg)
        for name, test in loaders.items():
            cls.build_test(cfg, name, test)
        model, extra = cls.load_model(cfg)
        policy = PrecisionPolicy.from_config(cfg, next(model.parameters()).device)
        evaluation = policy.for_evaluation(cfg.SOLVER.AMP.EVAL_DTYPE)
        evaluation.compare(extra.get("policy"), "these weights were trained")
        if precise_bn_loader is not None:
            update_bn_statistics(model, precise_bn_loader, cfg.TEST.PRECISE_BN.NUM_ITER, policy=policy)
        if not is_training_recorded(extra):
            cfg = cfg.with_values({"DATASETS.NAMES": ()})  # the training sets are unknown
        results = cls.test(cfg, model, loaders=loaders, calibration=read_calibration(extra, cfg.MODEL.WEIGHTS))
        names = dict.fromkeys(cfg.DATASETS.TESTS)
        by_name = results if len(names) > 1 else dict.fromkeys(names, results)
        if comm.is_main_process():
            logger.info("wrote %s", write_metrics(cfg, by_name, protocol=describe_protocol(cfg, evaluation)))
        return results

    @classmethod
    def load_model(cls, cfg: CfgNode) -> tuple[nn.Module, dict[str, Any]]:
        """Build the model and load the weights to evaluate from ``MODEL.WEIGHTS``.

        Averaged weights are loaded if the config selects an average for evaluation; see ``evaluated_average``.

        Returns:
            The model with the loaded weights, and all other entries of the file.

        Raises:
            UserError: if the weights are missing or damaged, or do not match the model.
        """
        cfg = with_local_files(cfg.with_values({"MODEL.BACKBONE.PRETRAIN": False}))  # overwritten below
        model = cls.build_model(cfg)
        return model, load_evaluated_weights(model, read_checkpoint(cfg.MODEL.WEIGHTS), cfg)
