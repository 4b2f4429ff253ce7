"""Periodic evaluation and selection of the best model."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.engine.hooks.base import HookBase
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BestMetric:
    """Metric that selects the best model; higher is better.

    Attributes:
        metric: name of a reported metric, e.g. ``"mAP"``.
        datasets: test sets to average the metric over.
        meaning: explanation of the name, for messages. Default: the mean of mAP and Rank-1, for ``"metric"``.
    """

    metric: str
    datasets: tuple[str, ...]
    meaning: str = "the mean of mAP and Rank-1"

    @classmethod
    def by_name(cls, name: str, reported: Mapping[str, Sequence[str] | None]) -> "BestMetric":
        """Parse ``SOLVER.BEST_METRIC``.

        Args:
            name: ``<metric>`` or ``<dataset>/<metric>``.
            reported: dataset name -> names of the metrics that its evaluator reports; None if the evaluator does not
                declare the names.

        Returns:
            The metric.

        Raises:
            ConfigError: if any of the selected datasets does not report the metric. A ``name`` without a dataset
                selects all datasets.
        """
        for dataset, metrics in reported.items():
            short_name = name.removeprefix(f"{dataset}/")
            if short_name != name and (metrics is None or short_name in metrics):
                return cls(short_name, (dataset,))
        if all(metrics is None or name in metrics for metrics in reported.values()):
            is_reid = all(metrics is not None and "mAP" in metrics for metrics in reported.values())
            return cls(name, tuple(reported)) if is_reid else cls(name, tuple(reported), meaning="")
        known = [metrics for metrics in reported.values() if metrics is not None]
        common = [metric for metric in known[0] if all(metric in metrics for metrics in known)]
        by_dataset = [f"{dataset}/{metric}" for dataset, metrics in reported.items() for metric in metrics or ()]
        unreported = " It requires TEST.ROC on and its rate in TEST.ROC.FAR." if "TAR@FAR=" in name else ""
        raise ConfigError(
            f"SOLVER.BEST_METRIC: unknown metric {name!r}."
            f"{unreported or did_you_mean(name, [*common, *by_dataset])}\n"
            f"  choices: {', '.join(common)}; or a metric of one test set, e.g. {by_dataset[0]}"
        )

    def __str__(self) -> str:
        words = f"{self.metric} ({self.meaning})" if self.metric == "metric" and self.meaning else self.metric
        sets = ", ".join(self.datasets)
        return f"{words} on {sets}" if len(self.datasets) == 1 else f"{words}, its mean over {sets}"

    def of(self, results: Mapping[str, Mapping[str, Any]]) -> float:
        """Compute the mean of the metric over ``datasets``.

        Args:
            results: dataset name -> metrics.

        Returns:
            Value of the metric.

        Raises:
            ConfigError: if the metric is missing from ``results``.
        """
        for dataset in self.datasets:
            if self.metric not in results[dataset]:
                raise ConfigError(
                    f"SOLVER.BEST_METRIC: {self.metric!r} is missing from the results of {dataset}.\n"
                    f"  found: {', '.join(results[dataset])}\n  fix:   set SOLVER.BEST_METRIC to one of these metrics"
                )
        return float(sum(results[dataset][self.metric] for dataset in self.datasets) / len(self.datasets))


class EvalHook(HookBase):
    """Evaluate every ``period`` epochs and after the last one, and save the best model.

    With ``at_start``, the model is also evaluated before the first step, as iteration and epoch -1 of the writers. If
    the score after the last epoch is lower, a warning is logged.

    Args:
        period: period in epochs.
        evaluate: returns dataset name -> metrics on rank 0 and an empty dict on other ranks.
        checkpointer: saves ``model_best`` when ``metric`` improves.
        writers: receive the metrics as ``<dataset>/<metric>``.
        metric: selects the best model.
        weights: returns a context manager in which the model holds the weights to evaluate and to save as
            ``model_best``. Default: the current weights.
        at_start: also evaluate before the first step. Default False.
    """

    def __init__(
        self,
        period: int,
        evaluate: Callable[[], dict[str, dict[str, Any]]],
        checkpointer: Checkpointer,
        writers: Sequence[Any],
        metric: BestMetric,
        weights: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        at_start: bool = False,
    ) -> None:
        self.period = period
        self.evaluate = evaluate
        self.checkpointer = checkpointer
        self.writers = writers
        self.metric = metric
        self.weights = weights
        self.at_start = at_start
        self.first: float | None = None
        self.best: float | None = None
        self.results: dict[str, dict[str, Any]] = {}

    def reset_best(self) -> None:
        """Reset the best score, so that the next evaluation saves ``model_best``."""
        self.best = None

    def before_train(self) -> None:
        if self.at_start and self.trainer.start_iter == 0:
            with self.weights():
                self.results = self.evaluate()
                self._save_if_best(-1, -1)
            self.first = self.best

    def after_epoch(self) -> None:
        epochs_done = self.trainer.epoch + 1
        if epochs_done % self.period and epochs_done != self.trainer.max_epoch:
            return
        try:
            with self.weights():
                self.results = self.evaluate()
                self._save_if_best(self.trainer.iter, self.trainer.epoch)
        except Exception:
            # Keep the trained weights. Other ranks hold the same weights and may not reach this point.
            with comm.as_single_process():
                logger.warning(
                    "evaluation failed: saved the weights to %s", self.checkpointer.save("model_unevaluated")
                )
            raise

    def _save_if_best(self, iteration: int, epoch: int) -> None:
        """Pass the results to the writers. If ``metric`` has improved, save ``model_best``.

        Args:
            iteration: last completed iteration, from 0.
            epoch: its epoch, from 0.
        """
        if not comm.any_across_ranks(bool(self.results)):
            return
        row = {key: value for name, metrics in self.results.items() for key, value in _flatten_metrics(name, metrics)}
        for writer in self.writers:
            writer.write(self.trainer.iters_before + iteration, {"epoch": self.trainer.epochs_before + epoch, **row})
        score = comm.broadcast_scalar(self.metric.of(self.results) if self.results else 0.0)
        if self.best is None or math.isnan(self.best) or score > self.best:
            self.best = score
            best = {"metric": str(self.metric), "value": score, "iteration": iteration + 1}
            path = self.checkpointer.save("model_best", tag=False, best=best)
            logger.info("new best score: %.2f (%s), saved to %s", score, self.metric, path)
        if self.first is not None and epoch + 1 == self.trainer.max_epoch and score < self.first:
            logger.warning(
                "the training made the model worse: %.2f after the last epoch, %.2f before the first step (%s).\n"
                "  fix: use model_best.pth, reduce SOLVER.BASE_LR or SOLVER.MAX_EPOCH, or add images",
                score,
                self.first,
                self.metric,
            )

    def state_dict(self) -> dict[str, Any]:
        start = {} if self.first is None else {"first": self.first}
        return {"best": self.best, "metric": str(self.metric)} | start

    def load_state_dict(self, state: dict[str, Any]) -> None:
        best, before = state["best"], state["metric"]
        if not (best is None or isinstance(best, float)):
            raise ValueError(f"EvalHook: best score: expected a float or None, got {type(best).__name__}")
        self.best, self.first = best, state.get("first")
        if self.best is not None and before != str(self.metric):
            logger.warning(
                "the metric that selects the best model changed from %s (%.2f) to %s: the best score is reset, and the "
                "next evaluation replaces model_best.pth.\n"
                "  fix: to keep it, set SOLVER.BEST_METRIC and the test sets as before",
                before,
                self.best,
                self.metric,
            )
            self.best = self.first = None


def _flatten_metrics(prefix: str, metrics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield each metric as ``(name, value)``, e.g. ``("Market1501/mAP", 85.9)``.

    Names of baselines have the form ``Market1501/baseline <name>/mAP``, those of groups of queries ``Market1501/group
    <value>/mAP`` and ``Market1501/mean over groups/mAP``, and names of interval bounds ``Market1501/mAP low``.
    With ``TEST.ALL_SPLITS``, those of a split are ``VIPeR, query cam_b/mAP``, and ``VIPeR/mAP std`` is the standard
    deviation.
    """
    for name, value in metrics.items():
        if name == "baselines":
            for baseline, values in value.items():
                yield from _flatten_metrics(f"{prefix}/baseline {baseline}", values)
        elif name == "groups":
            for group, values in value.items():
                yield from _flatten_metrics(f"{prefix}/group {group}", values)
        elif name == "mean_over_groups":
            yield from _flatten_metrics(f"{prefix}/mean over groups", value)
        elif name == "splits":
            for split, values in value.items():
                yield from _flatten_metrics(split, values)
        elif name == "std" and "splits" in metrics:
            yield from ((f"{prefix}/{metric} std", deviation) for metric, deviation in value.items())
        elif name == "intervals":
            for metric, (low, high) in value.items():
                yield from ((f"{prefix}/{metric} low", low), (f"{prefix}/{metric} high", high))
        else:
            yield f"{prefix}/{name}", value
