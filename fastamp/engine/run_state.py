"""Checkpoint entries that describe the run, and recovery hints after write errors."""

import logging
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.config import CfgNode, describe_changes
from fastamp.contracts import Loader
from fastamp.layers import PartialFC
from fastamp.utils import comm
from fastamp.utils.command_line import resume_command
from fastamp.utils.errors import WeightsError

if TYPE_CHECKING:
    from fastamp.engine.train_loop import SimpleTrainer

logger = logging.getLogger(__name__)


class TrainerPolicy:
    """Checkpoint entry that stores the precision policy of a trainer. On resume, a change of the dtype is logged."""

    def __init__(self, trainer: "SimpleTrainer") -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return self.trainer.policy.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.policy.compare(state, "this run was trained so far")


class SamplingState:
    """Checkpoint entry that stores the number of samples drawn by each Partial FC module, which determines the next.

    Args:
        model: model with the modules.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = {name: module for name, module in model.named_modules() if isinstance(module, PartialFC)}

    def state_dict(self) -> dict[str, int]:
        return {name: module.draws for name, module in self.modules.items()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        for name, module in self.modules.items():
            module.set_draws(state[name])


class ConfigText:
    """Checkpoint entry that stores the config as text.

    On resume, differences between the stored and the current config are logged, and the current config is used.
    """

    def __init__(self, cfg: CfgNode) -> None:
        self.cfg, self.text = cfg, cfg.saved_text()

    def state_dict(self) -> str:
        return self.text

    def load_state_dict(self, state: str) -> None:
        for line in describe_changes(self.cfg, state, "the checkpoint's config"):
            logger.info("the config differs from the config in the checkpoint: %s", line)


def labels_checksum(data_loader: Loader) -> int | None:
    """Return the CRC32 checksum of the labels of the training images, or None if they are unknown."""
    labels = data_loader.dataset.labels
    return None if labels is None else zlib.crc32(np.array(labels, dtype=np.int64).tobytes())


def recovery_hint(checkpointer: Checkpointer, *, has_best: bool) -> str:
    """Build the recovery hint for the error message after a file of the run could not be written.

    Args:
        checkpointer: checkpointer of the run.
        has_best: whether the run has saved a best model.

    Returns:
        Lines that state the newest valid checkpoint, the best model, and how to resume the run.
    """
    try:
        with comm.as_single_process():  # other ranks may not reach this point
            last = checkpointer.last_checkpoint()
    except WeightsError as error:
        return f"  {error}"
    best = _describe_best(checkpointer.save_dir / "model_best.pth") if has_best else ""
    if last is None:
        return (
            f"  {best or 'no checkpoint has been saved'}\n"
            f"  fix: free disk space, or choose another OUTPUT_DIR (now {checkpointer.save_dir})"
        )
    best = f"  {best}\n" if best else ""
    return f"  last valid checkpoint: {last}\n{best}  fix: free disk space, then resume with:\n  {resume_command()}"


def describe_last_checkpoint(checkpointer: Checkpointer) -> str:
    """Describe the newest checkpoint, for the error message if the weights become non-finite during training.

    The weights in a checkpoint are always finite, because they are checked before each save.
    """
    try:
        with comm.as_single_process():  # the other ranks may not get here
            last = checkpointer.last_checkpoint()
    except WeightsError as error:
        return str(error)
    return f"last checkpoint: {last}" if last else "no checkpoint was saved"


def _describe_best(path: Path) -> str:
    """Describe the best model; return an empty string if its file is damaged."""
    best = read_best(path)
    return f"best model: {path} ({best['metric']} {best['value']:.2f})" if best else ""


def read_best(path: Path) -> dict[str, Any] | None:
    """Read metric, value and iteration of the best model from ``model_best.pth``; None if that fails."""
    try:
        best = read_checkpoint(path, lazily=True)["best"]
        return {"metric": str(best["metric"]), "value": float(best["value"]), "iteration": int(best["iteration"])}
    except (WeightsError, KeyError, TypeError, ValueError):
        return None
