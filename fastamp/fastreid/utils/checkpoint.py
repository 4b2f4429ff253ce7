"""FastReID's checkpointers for custom training loops, and messages about state dicts."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from fastamp.checkpoint import checkpointer
from fastamp.fastreid.utils.file_io import PathManager

__all__ = [
    "Checkpointer",
    "PathManager",
    "PeriodicCheckpointer",
    "get_missing_parameters_message",
    "get_unexpected_parameters_message",
]


class Checkpointer(checkpointer.Checkpointer):
    """Checkpointer with FastReID's arguments and methods.

    Args:
        model: model, which may be wrapped in ``DataParallel`` or ``DistributedDataParallel``; the file has the names
            without the wrapper.
        save_dir: output folder.
        save_to_disk: ignored: only the main process writes. Default True.
        checkpointables: objects with ``state_dict()`` and ``load_state_dict(state)``.
    """

    def __init__(
        self, model: nn.Module, save_dir: str = "", *, save_to_disk: bool = True, **checkpointables: Any
    ) -> None:
        wrapped = isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel)
        super().__init__(model.module if wrapped else model, save_dir, **checkpointables)

    def load(self, path: str | os.PathLike[str], checkpointables: Sequence[str] | None = ()) -> dict[str, Any]:
        """Load the model weights of a file, and the states of the objects named in ``checkpointables``. Default ().

        Returns:
            The remaining entries of the file.
        """
        content = super().load(path)
        for key in checkpointables or ():
            self.checkpointables[key].load_state_dict(content.pop(key))
        return content

    def has_checkpoint(self) -> bool:
        """Return True if ``save_dir`` contains a checkpoint to resume from. Must be called on every rank."""
        return self.last_checkpoint() is not None

    def get_checkpoint_file(self) -> str:
        """Return the path of the checkpoint to resume from; "" if there is none. Must be called on every rank."""
        return str(self.last_checkpoint() or "")

    def resume_or_load(self, path: str | os.PathLike[str] = "", *, resume: bool = True) -> dict[str, Any]:
        """Resume from the newest readable checkpoint in ``save_dir``; if there is none, load weights.

        Args:
            path: weights file; ``""`` (default) loads nothing.
            resume: search for a checkpoint. Default True.

        Returns:
            See ``resume`` and ``load``; empty if nothing was loaded.
        """
        last = self.last_checkpoint() if resume else None
        if last is not None:
            return self.resume(last)
        return self.load(path) if path else {}


class PeriodicCheckpointer:
    """Save ``model_<epoch>`` every ``period`` epochs, ``model_best`` and ``model_final`` in a custom training loop.

    The hook of the same name in ``fastamp.engine.hooks`` is for ``DefaultTrainer``.

    Args:
        checkpointer: writes the files.
        period: period in epochs.
        max_epoch: number of epochs; None (default) saves no ``model_final``.
    """

    def __init__(self, checkpointer: checkpointer.Checkpointer, period: int, max_epoch: int | None = None) -> None:
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
