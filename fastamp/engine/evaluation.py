"""Evaluate a model on the test sets of a config."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from fastamp.amp import PrecisionPolicy
from fastamp.config import CfgNode
from fastamp.engine.reporting import evaluated_set, history_of, write_evaluation_report
from fastamp.evaluation import DatasetEvaluator, Protocol, inference_on_dataset, print_results
from fastamp.report import EvaluatedSet, Run
from fastamp.utils import comm
from fastamp.utils.files import folder_name

logger = logging.getLogger(__name__)

BuildEvaluator = Callable[[CfgNode, int, str], DatasetEvaluator]


@dataclass
class EvaluationOutput:
    """What an evaluation has found; nothing on ranks other than 0.

    Attributes:
        results: data set name -> metrics.
        sets: what a report shows of each set.
        pairs: data set name -> the state of its ``PairScores``.
    """

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    sets: list[EvaluatedSet] = field(default_factory=list)
    pairs: dict[str, Any] = field(default_factory=dict)


def evaluate_sets(
    cfg: CfgNode,
    model: nn.Module,
    policy: PrecisionPolicy,
    loaders: dict[str, tuple[Any, int]],
    build_evaluator: BuildEvaluator,
) -> EvaluationOutput:
    """Evaluate a model as it is, and print the table of results.

    Args:
        cfg: its OUTPUT_DIR gets what evaluators write.
        model: images -> (B, D) features.
        policy: of the evaluation.
        loaders: data set name -> test loader and the number of its query images.
        build_evaluator: ``(cfg, number of query images, folder)`` -> the evaluator of a test set.
    """
    found = EvaluationOutput()
    for name, (loader, num_query) in loaders.items():
        logger.info("evaluating on %s", name)
        folder = Path(cfg.OUTPUT_DIR) / "evaluation" / folder_name(name)
        evaluator = build_evaluator(cfg, num_query, str(folder))
        metrics = inference_on_dataset(model, loader, evaluator, cfg.TEST.FLIP.ENABLED, policy=policy)
        if metrics:
            found.results[name] = metrics
            found.sets.append(evaluated_set(name, metrics, evaluator, loader, num_query))
        if getattr(evaluator, "pairs", None) is not None:
            found.pairs[name] = evaluator.pairs.state_dict()
    if found.results:
        print_results(found.results, protocol=describe_protocol(cfg, policy))
    return found


def evaluation_policy(cfg: CfgNode, model: nn.Module) -> PrecisionPolicy:
    """Return the policy of an evaluation by the config, without a training."""
    policy = PrecisionPolicy.from_config(cfg, next(model.parameters()).device)
    return policy.for_evaluation(cfg.SOLVER.AMP.EVAL_DTYPE)


def report_evaluation(cfg: CfgNode, model: nn.Module, policy: PrecisionPolicy, sets: list[EvaluatedSet]) -> None:
    """Write the report that ``TEST.REPORT`` asks for, of an evaluation without a training.

    Raises:
        ConfigError: it cannot be written.
    """
    if not cfg.TEST.REPORT or not comm.is_main_process():
        return
    run = Run(
        cfg=cfg,
        weights=cfg.MODEL.WEIGHTS or "the model as it is",
        protocol=describe_protocol(cfg, policy),
        policy=policy,
        device=next(model.parameters()).device,
        sets=sets,
        history=history_of(Path(cfg.MODEL.WEIGHTS).parent if cfg.MODEL.WEIGHTS else cfg.OUTPUT_DIR),
    )
    logger.info("wrote %s", write_evaluation_report(run))


def describe_protocol(cfg: CfgNode, policy: PrecisionPolicy) -> str:
    """Return in one line how an evaluation under ``policy`` measures."""
    flip = "flip test" if cfg.TEST.FLIP.ENABLED else "no flip test"
    return f"{Protocol.from_config(cfg).describe()}; {flip}; features {policy.describe()}"


def unwrap_single(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the metrics alone when there is one data set, as FastReID does."""
    return next(iter(results.values())) if len(results) == 1 else results
