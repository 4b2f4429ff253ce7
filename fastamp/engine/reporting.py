"""The report of a run, written when it has been evaluated."""

import logging
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

from fastamp.data.datasets.base import ImageItem
from fastamp.engine.train_loop import HookBase
from fastamp.evaluation.evaluator import DatasetEvaluator
from fastamp.report import EvaluatedSet, History, Run, read_history, write_report
from fastamp.utils import comm
from fastamp.utils.errors import DataError, UserError

logger = logging.getLogger(__name__)


class ReportHook(HookBase):
    """Write the report after each evaluation, behind the checkpoint; register it behind what saves that.

    Args:
        run: returns what was evaluated last, None when that has been written already.
    """

    saves = True

    def __init__(self, run: Callable[[], Run | None]) -> None:
        self.run = run

    def after_epoch(self) -> None:
        run = self.run()
        if run is not None:
            report(run)


def report(run: Run) -> None:
    """Write the report of a training, on rank 0; a training does not end because that fails."""
    if not comm.is_main_process():
        return
    try:
        logger.info("wrote %s", write_report(run, Path(run.cfg.OUTPUT_DIR)))
    except UserError as error:
        logger.warning("no report: %s", error)


def evaluated_set(
    name: str, metrics: dict[str, Any], evaluator: DatasetEvaluator, loader: Any, num_query: int
) -> EvaluatedSet:
    """Return what a report shows of a test set, as far as evaluator and loader, which may be the user's own, know."""
    items = items_of(loader)
    judgement = getattr(evaluator, "judgement", None)
    return EvaluatedSet(name, metrics, judgement, items[:num_query], items[num_query:])


def items_of(loader: Any) -> list[ImageItem]:
    """Return the images of a loader's data set; none where it does not list them."""
    return getattr(getattr(loader, "dataset", None), "items", [])


def report_of_weights(run: Run) -> Path:
    """Write the report of an evaluation of weights, on rank 0, beside that of a training in the same folder; return it.

    Raises:
        ConfigError: it cannot be written.
    """
    folder = Path(run.cfg.OUTPUT_DIR)
    name = "report.html" if history_of(folder) is None else "report_eval.html"
    return write_report(run, folder, name=name)


def history_of(folder: str | PathLike[str]) -> History | None:
    """Return the history of the training whose folder this is; None where there was none."""
    try:
        return read_history(Path(folder).expanduser() / "metrics.json")
    except DataError:
        return None
