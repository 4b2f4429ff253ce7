"""FastReID's periodic checkpointer for custom training loops, and messages about state dicts."""

import os
from collections.abc import Iterable
from typing import Any

from fastamp.checkpoint.checkpointer import Checkpointer


class PeriodicCheckpointer:
    """Save ``model_<epoch>`` every ``period`` epochs, ``model_best`` and ``model_final`` in a custom training loop.

    The hook of the same name in ``fastamp.engine.hooks`` is for ``DefaultTrainer``.

    Args:
        checkpointer: writes the files.
        period: period in epochs.
        max_epoch: number of epochs; None (default) saves no ``model_final``.
    """

    def __init__(self, checkpointer: Checkpointer, period: int, max_epoch: int | None = None) -> None:
        self.checkpointer, self.period, self.max_epoch = checkpointer, int(period), max_epoch
        self.best_metric = -1.0

    def step(self, epoch: int, **kwargs: Any) -> None:
        """Save the checkpoints that are due after ``epoch`` (from 0).

        Args:
            epoch: epoch that has ended.
            kwargs: additional entries of the checkpoint. The checkpoint whose ``metric``, also given as
                ``metric_dict={"metric": ...}``, is the highest so far is saved as ``model_best``.
        """
        metrics = kwargs.pop("metric_dict", None) or kwargs
        extra = {"epoch": epoch, **kwargs}
        if metrics.get("metric", -1.0) > self.best_metric:
            self.best_metric = float(metrics["metric"])
            self.checkpointer.save("model_best", tag=False, **extra)
        if (epoch + 1) % self.period == 0 and epoch + 1 != self.max_epoch:
            self.checkpointer.save(f"model_{epoch:04d}", **extra)
        if self.max_epoch is not None and epoch + 1 >= self.max_epoch:
            self.checkpointer.save("model_final", **extra)

    def save(self, name: str, **kwargs: Any) -> os.PathLike[str]:
        """Save a checkpoint under ``name``."""
        return self.checkpointer.save(name, **kwargs)


def get_missing_parameters_message(keys: Iterable[str]) -> str:
    """Describe the model's parameters that are missing from a checkpoint."""
    return "parameters of the model that are missing from the checkpoint: " + ", ".join(keys)


def get_unexpected_parameters_message(keys: Iterable[str]) -> str:
    """Describe the checkpoint's parameters that the model does not have."""
    return "parameters of the checkpoint that the model does not have: " + ", ".join(keys)
