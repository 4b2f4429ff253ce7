"""Reports of training runs and evaluations, and ``metrics_eval.json``."""

import hashlib
import json
import logging
import math
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from fastamp.config import CfgNode
from fastamp.report import History, Run, evaluated_set, items_of, read_history, source_of, write_report
from fastamp.utils import comm
from fastamp.utils.errors import DataError, UserError
from fastamp.utils.files import expand, file_sha256, write_atomically
from fastamp.utils.version import __version__

__all__ = [
    "evaluated_set",
    "history_of",
    "items_of",
    "source_of",
    "to_json",
    "write_evaluation_report",
    "write_metrics",
    "write_training_report",
]

logger = logging.getLogger(__name__)


def write_training_report(run: Run) -> None:
    """Write the report of a training run on rank 0. If this fails, a warning is logged and the run continues."""
    if not comm.is_main_process():
        return
    try:
        logger.info("wrote %s", write_report(run, Path(run.cfg.OUTPUT_DIR)))
    except UserError as error:
        logger.warning("cannot write the report: %s", error)


def write_evaluation_report(run: Run) -> Path:
    """Write the report of an evaluation to OUTPUT_DIR.

    The file is ``report_eval.html`` if OUTPUT_DIR contains a training history, else ``report.html``. The report of a
    training run is thus not overwritten.

    Returns:
        Path of the report.

    Raises:
        ConfigError: if the report cannot be written.
    """
    folder = Path(run.cfg.OUTPUT_DIR)
    name = "report.html" if history_of(folder) is None else "report_eval.html"
    return write_report(run, folder, name=name)


def write_metrics(cfg: CfgNode, results: dict[str, dict[str, Any]], *, protocol: str) -> Path:
    """Write the metrics of an evaluation to ``OUTPUT_DIR/metrics_eval.json``.

    Args:
        cfg: config of the evaluation.
        results: dataset name -> metrics, in percent. Non-finite values are written as null.
        protocol: one-line description of the evaluation protocol.

    Returns:
        Path of the file.

    Raises:
        WriteError: if the file cannot be written.
    """
    path = Path(cfg.OUTPUT_DIR) / "metrics_eval.json"
    content = {
        "weights": cfg.MODEL.WEIGHTS,
        "weights_sha256": file_sha256(expand(cfg.MODEL.WEIGHTS)),
        "config_sha256": hashlib.sha256(cfg.dump().encode()).hexdigest(),
        "config": cfg.dump(),
        "protocol": protocol,
        "fastamp": __version__,
        "datasets": list(results),
        "metrics": to_json(results),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write(json.dumps(content, indent=1, allow_nan=False).encode() + b"\n"))
    return path


def to_json(value: Any) -> Any:
    """Convert metrics of any evaluator to plain values. Non-finite numbers become None."""
    if isinstance(value, dict):
        return {str(name): to_json(member) for name, member in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(member) for member in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def history_of(folder: str | PathLike[str]) -> History | None:
    """Read the training history from ``metrics.json`` in ``folder``; None if the file is missing or invalid."""
    try:
        return read_history(Path(folder).expanduser() / "metrics.json")
    except DataError:
        return None
