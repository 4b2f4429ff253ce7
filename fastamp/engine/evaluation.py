"""Evaluation on the test sets of a config."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fastamp.amp import PrecisionPolicy
from fastamp.config import CfgNode
from fastamp.contracts import Loader
from fastamp.data.build import family_of
from fastamp.data.dataset import ReidDataset
from fastamp.data.datasets import DATASET_REGISTRY
from fastamp.data.random_splits import test_set_of
from fastamp.data.rank_agreement import check_equal_on_all_ranks
from fastamp.data.training_images import check_not_leaked
from fastamp.diagnostics.nan_locator import describe_evaluation
from fastamp.engine.reporting import evaluated_set, history_of, write_evaluation_report
from fastamp.evaluation import (
    EVALUATOR_REGISTRY,
    DatasetEvaluator,
    Identities,
    Protocol,
    ReidEvaluator,
    check_evaluable,
    inference_on_dataset,
    print_results,
)
from fastamp.evaluation.calibration import Calibration
from fastamp.evaluation.remembered_features import RememberedFeatures
from fastamp.evaluation.split_average import average_splits
from fastamp.feature_pass import Extract, extract_features
from fastamp.modeling import META_ARCH_REGISTRY
from fastamp.report import EvaluatedSet, Run
from fastamp.report.queries import write_queries
from fastamp.utils import comm
from fastamp.utils.errors import DataError
from fastamp.utils.files import folder_name

logger = logging.getLogger(__name__)

BuildTest = Callable[[CfgNode, str, tuple[Any, int], str | None], tuple[Any, DatasetEvaluator]]


@dataclass
class EvaluationOutput:
    """Output of an evaluation on several test sets; empty on ranks other than 0.

    Attributes:
        results: dataset name -> metrics.
        sets: data for the report, one entry per test set.
        pairs: dataset name -> state dict of the evaluator's ``PairScores``.
        weights: weights that were evaluated: ``"model"`` (default), or their average ``"ema"`` or ``"swa"``.
    """

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    sets: list[EvaluatedSet] = field(default_factory=list)
    pairs: dict[str, Any] = field(default_factory=dict)
    weights: str = "model"


def evaluate_sets(
    cfg: CfgNode,
    model: nn.Module,
    policy: PrecisionPolicy,
    loaders: dict[str, tuple[Any, int]],
    build_test: BuildTest,
    *,
    calibration: Calibration | None = None,
) -> EvaluationOutput:
    """Evaluate a model on several test sets and print a table of the results.

    Args:
        cfg: config. Evaluators write their files to ``OUTPUT_DIR/evaluation/<dataset>``.
        model: maps a batch of images to (B, D) features.
        policy: precision of the evaluation.
        loaders: dataset name, or title of a split, see ``evaluated_splits`` -> (test loader, number of query images).
        build_test: function (config, dataset name, its entry in ``loaders``, folder for the files of the evaluator)
            that returns ``(loader, evaluator)``; see ``DefaultTrainer.build_test``.
        calibration: calibration of the model, whose error rates are measured.

    Returns:
        Metrics and report data for each test set, see ``average_splits`` for those with several splits.
    """
    output, remembered = EvaluationOutput(), dict[str, RememberedFeatures]()
    for name, test in loaders.items():
        logger.info("evaluating on %s", name)
        of_set = test_set_of(name, cfg.DATASETS.TESTS)
        folder = Path(cfg.OUTPUT_DIR) / "evaluation" / folder_name(name)
        loader, evaluator = build_test(cfg, name, test, str(folder))
        if calibration is not None and isinstance(evaluator, ReidEvaluator):
            evaluator.set_calibration(calibration, of_set)
        is_split = of_set != name and isinstance(loader, Loader) and isinstance(loader.dataset, ReidDataset)
        extract: Extract = extract_features
        if is_split and loader.dataset.items.boxes is None:
            extract = remembered.setdefault(of_set, RememberedFeatures())
        metrics = inference_on_dataset(
            model,
            loader,
            evaluator,
            cfg.TEST.FLIP.ENABLED,
            policy=policy,
            locate=describe_evaluation,
            extract=extract,
        )
        scalars = np.generic | np.ndarray | torch.Tensor
        metrics = {key: value.item() if isinstance(value, scalars) else value for key, value in metrics.items()}
        if metrics:
            output.results[name] = metrics
            test_set = evaluated_set(name, metrics, evaluator, loader, test[1])
            output.sets.append(test_set)
            if isinstance(evaluator, ReidEvaluator) and evaluator.per_query and evaluator.ranking and test_set.images:
                path = folder / "queries.csv"
                queries = test_set.images if evaluator.protocol.rule.all_images else test_set.query
                write_queries(path, evaluator.ranking, queries, test_set.source)
                logger.info("wrote %s", path)
        if isinstance(evaluator, ReidEvaluator) and evaluator.pairs is not None:
            output.pairs[name] = evaluator.pairs.state_dict()
    _average_splits(output, cfg.DATASETS.TESTS)
    if output.results:
        print_results(output.results, protocol=describe_protocol(cfg, policy), trained_on=cfg.DATASETS.NAMES)
    for test_set in output.sets:
        if test_set.calibration_check is not None:
            logger.info("open-set decisions on %s: %s", test_set.name, test_set.calibration_check.describe())
    return output


def _average_splits(output: EvaluationOutput, names: Sequence[str]) -> None:
    """Replace the results of the splits of a test set by their mean."""
    splits: dict[str, list[EvaluatedSet]] = {}
    for test_set in output.sets:
        splits.setdefault(test_set_of(test_set.name, names), []).append(test_set)
    output.sets = [
        parts[0]
        if len(parts) == 1
        else EvaluatedSet(name, average_splits({part.name: part.metrics for part in parts}), None, (), ())
        for name, parts in splits.items()
    ]
    output.results = {test_set.name: test_set.metrics for test_set in output.sets}


def build_evaluator(cfg: CfgNode, num_query: int, output_dir: str | None = None) -> DatasetEvaluator:
    """Build the evaluator ``TEST.EVALUATOR`` for a test set.

    Args:
        cfg: config. For ``auto``, the evaluator of all test sets is built if they have the same: that named by the
            attribute ``evaluator`` of their class, or the evaluator whose attribute ``test_sets`` has their name.
            Otherwise that named by the attribute ``evaluator`` of the class of ``MODEL.META_ARCHITECTURE``; without it,
            ``ReidEvaluator``.
        num_query: number of query images.
        output_dir: folder for the files of the evaluator.

    Raises:
        ConfigError: if the name is not registered.
    """
    return EVALUATOR_REGISTRY.build(_evaluator_name(cfg), cfg, num_query=num_query, output_dir=output_dir)


def _evaluator_name(cfg: CfgNode) -> str:
    """Return the name of the evaluator; see ``build_evaluator``."""
    name: str = cfg.TEST.EVALUATOR
    if name != "auto":
        return name
    of_tests = {_evaluator_of(name) for name in cfg.DATASETS.TESTS if ":" not in name}
    if len(of_tests) == 1 and "" not in of_tests:
        return of_tests.pop()
    of_model: str = META_ARCH_REGISTRY.get(cfg.MODEL.META_ARCHITECTURE).evaluator
    return of_model


def _evaluator_of(test_set: str) -> str:
    """Return the name of the evaluator for a registered test set; "" if neither names the other."""
    named: str = DATASET_REGISTRY.get(test_set).evaluator
    of_evaluators = (name for name in EVALUATOR_REGISTRY if test_set in EVALUATOR_REGISTRY.get(name).test_sets)
    return named or next(of_evaluators, "")


def check_test_set(cfg: CfgNode, name: str, loader: Any, evaluator: DatasetEvaluator) -> None:
    """Check that an evaluator can evaluate a test set, and set the names of the columns in a ``ReidEvaluator``.

    Args:
        cfg: config.
        name: name of the test set.
        loader: its loader; without an attribute ``dataset``, nothing is checked.
        evaluator: its evaluator.

    Raises:
        DataError: if the test set differs between the ranks; or, if the evaluator is a ``ReidEvaluator``, the test set
            cannot be evaluated, see ``check_evaluable``, or has identities on which the model is trained.
    """
    if not isinstance(loader, Loader):
        return
    check_equal_on_all_ranks(loader.dataset, f"the test set {name}")
    dataset = loader.dataset
    if isinstance(evaluator, ReidEvaluator) and isinstance(dataset, ReidDataset):
        names = dataset.column_names()
        evaluator.set_column_names(names)
        labels = dataset.labels, dataset.camids, dataset.rankable_columns()
        try:
            check_evaluable(Identities.split(evaluator.num_query, *labels, names), evaluator.protocol)
        except DataError as error:
            raise type(error)(f"{name}: {error}") from error
        if not (cfg.DATASETS.COMBINEALL or evaluator.protocol.rule.closed_set):
            _check_not_leaked(cfg, name, dataset)


def _check_not_leaked(cfg: CfgNode, name: str, dataset: ReidDataset) -> None:
    """Check that the model is not trained on identities of the test set.

    The training images of a dataset are not read unless it is one of DATASETS.NAMES.

    Raises:
        DataError: if it is.
    """
    families = {family_of(name) for name in cfg.DATASETS.NAMES}
    for source in dataset.sources:
        if {family_of(name), source.family} & families:
            try:
                _ = source.train
            except DataError:  # an evaluation does not need the training images
                continue
            check_not_leaked(source)


def evaluation_policy(cfg: CfgNode, model: nn.Module) -> PrecisionPolicy:
    """Build the precision policy for an evaluation outside of a training run."""
    policy = PrecisionPolicy.from_config(cfg, next(model.parameters()).device)
    return policy.for_evaluation(cfg.SOLVER.AMP.EVAL_DTYPE)


def report_evaluation(cfg: CfgNode, model: nn.Module, policy: PrecisionPolicy, sets: list[EvaluatedSet]) -> None:
    """Write the report of an evaluation outside of a training run if ``TEST.REPORT`` is True.

    Only rank 0 writes the report.

    Raises:
        ConfigError: if the report cannot be written.
    """
    if not cfg.TEST.REPORT or not comm.is_main_process():
        return
    run = Run(
        cfg=cfg,
        weights=cfg.MODEL.WEIGHTS or "current weights of the model",
        protocol=describe_protocol(cfg, policy),
        policy=policy,
        device=next(model.parameters()).device,
        sets=sets,
        history=history_of(Path(cfg.MODEL.WEIGHTS).parent if cfg.MODEL.WEIGHTS else cfg.OUTPUT_DIR),
    )
    logger.info("wrote %s", write_evaluation_report(run))


def describe_protocol(cfg: CfgNode, policy: PrecisionPolicy) -> str:
    """Describe the evaluation protocol and the precision of the features in one line.

    A registered evaluator may describe its own protocol, see ``DatasetEvaluator.describe_protocol``.
    """
    flip = "flip test" if cfg.TEST.FLIP.ENABLED else "no flip test"
    own = EVALUATOR_REGISTRY.get(_evaluator_name(cfg)).describe_protocol(cfg)
    protocol = own or Protocol.from_config(cfg).describe()
    return f"{protocol}; {flip}; features {policy.describe()}"


def unwrap_single(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics of the dataset if ``results`` has one entry, else ``results`` itself."""
    return next(iter(results.values())) if len(results) == 1 else results
