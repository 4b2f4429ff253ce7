"""Loggers of a training run: metrics.json, and those in ``LOGGERS``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fastamp.config import CfgNode
from fastamp.utils.command_line import TrainingInterrupted
from fastamp.utils.errors import check_choice
from fastamp.utils.events import JSONWriter, TensorboardXWriter
from fastamp.utils.trackers import LOGGER_REGISTRY, Tracker
from fastamp.utils.trackers.tracker_process import start_tracker

ARTIFACTS = ("report.html", "model_best.pth", "model_final.pth", "config.yaml", "metrics.json", "log.txt")
# Shown by TensorBoard for each run, also if a run uses their defaults.
_HPARAMS = ("SEED", "SOLVER.OPT", "SOLVER.BASE_LR", "SOLVER.IMS_PER_BATCH", "SOLVER.MAX_EPOCH", "SOLVER.AMP.ENABLED")
_NO_HPARAMS = ("OUTPUT_DIR", "LOG", "TRACKING.")


def check_loggers(cfg: CfgNode) -> None:
    """Check the names in ``LOGGERS`` and ``TRACKING.ARTIFACTS``.

    Raises:
        ConfigError: if a name is unknown.
    """
    for name in cfg.LOGGERS:
        LOGGER_REGISTRY.get(name)
    for name in cfg.TRACKING.ARTIFACTS:
        check_choice("TRACKING.ARTIFACTS", name, ARTIFACTS)


def build_writers(cfg: CfgNode, start_iter: int) -> list[Any]:
    """Build the writer of ``metrics.json`` and the loggers in ``LOGGERS``. Call this on the main process only.

    Args:
        cfg: config of the run.
        start_iter: first iteration of this training; above 0 after a resume.

    Returns:
        Objects with ``write(iteration, metrics)`` and ``close()``.
    """
    writers: list[Any] = [JSONWriter(Path(cfg.OUTPUT_DIR) / "metrics.json", start_iter=start_iter)]
    for name in dict.fromkeys(cfg.LOGGERS):
        logger = LOGGER_REGISTRY.get(name)
        if isinstance(logger, type) and issubclass(logger, Tracker):
            writer = start_tracker(logger, cfg)
        else:
            writer = LOGGER_REGISTRY.build(name, cfg, start_iter=start_iter)
        if writer is not None:  # the package of the tracker is not installed
            writers.append(writer)
    return writers


def has_tracker(cfg: CfgNode) -> bool:
    """Return True if ``LOGGERS`` contains an experiment tracker."""
    return not set(cfg.LOGGERS) <= {"tensorboard"}


def without_trackers(cfg: CfgNode) -> CfgNode:
    """Return a copy of the config in which ``LOGGERS`` contains no experiment tracker."""
    return cfg.with_values({"LOGGERS": tuple(name for name in cfg.LOGGERS if name == "tensorboard")})


def in_group(cfg: CfgNode, folder: str | Path, name: str) -> CfgNode:
    """Return a copy of the config of one of several runs, whose name and group in experiment trackers are set.

    Args:
        cfg: config of the run; it is returned unchanged if ``LOGGERS`` contains no experiment tracker.
        folder: folder of all runs; its name is the default of ``TRACKING.GROUP``.
        name: name of the run in the group, e.g. ``"seed0"``.
    """
    if not has_tracker(cfg):
        return cfg
    folder = Path(folder).absolute().name
    values = {"TRACKING.GROUP": cfg.TRACKING.GROUP or folder, "TRACKING.NAME": f"{cfg.TRACKING.NAME or folder}-{name}"}
    return cfg.with_values(values)


@LOGGER_REGISTRY.register("tensorboard")
def build_tensorboard_writer(cfg: CfgNode, *, start_iter: int = 0) -> TensorboardXWriter:
    """Build the writer of TensorBoard events, and write the config."""
    writer = TensorboardXWriter(cfg.OUTPUT_DIR, start_iter=start_iter, datasets=cfg.DATASETS.TESTS)
    hparams = {
        key.path: value
        for key, value in cfg.keys_below()
        if key.path in _HPARAMS or (value != key.default and not key.path.startswith(_NO_HPARAMS))
    }
    writer.write_config(cfg.dump(), hparams)
    return writer


@runtime_checkable
class StatusWriter(Protocol):
    """Writer that is told how the run ended."""

    def set_status(self, status: str) -> None:
        """Receive ``"interrupted"`` if a signal has stopped the run, ``"failed"`` after any other exception."""


@contextmanager
def closing_writers(writers: list[Any]) -> Iterator[None]:
    """Close the writers at the end of the context and remove them from the list.

    If the run did not end normally, each ``StatusWriter`` is told so.
    """
    try:
        yield
    except BaseException as error:
        status = "interrupted" if isinstance(error, TrainingInterrupted | KeyboardInterrupt) else "failed"
        for writer in writers:
            if isinstance(writer, StatusWriter):
                writer.set_status(status)
        raise
    finally:
        for writer in writers:
            writer.close()
        writers.clear()
