"""What a checkpoint says of its run besides the weights, and what is whole when a file cannot be written."""

import logging
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.config import CfgNode, describe_changes
from fastamp.engine.command_line import resume_command
from fastamp.utils import comm
from fastamp.utils.errors import WeightsError

if TYPE_CHECKING:
    from fastamp.engine.train_loop import SimpleTrainer

logger = logging.getLogger(__name__)


class TrainerPolicy:
    """The present precision policy of a trainer, as a part of its checkpoints; on a resume another one is logged."""

    def __init__(self, trainer: "SimpleTrainer") -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return self.trainer.policy.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.policy.compare(state, "this run was trained so far")


class ConfigText:
    """The config as text, a part of every checkpoint; on a resume this run's own counts, and what differs is logged."""

    def __init__(self, cfg: CfgNode) -> None:
        self.cfg, self.text = cfg, cfg.dump()

    def state_dict(self) -> str:
        return self.text

    def load_state_dict(self, state: str) -> None:
        for line in describe_changes(self.cfg, state, "the checkpoint's config"):
            logger.info("the config differs from the checkpoint's: %s", line)


def labels_checksum(data_loader: Any) -> int | None:
    """Return the CRC32 of the labels of a loader's images; None where its data set does not list them."""
    labels = getattr(data_loader.dataset, "labels", None)
    return None if labels is None else zlib.crc32(np.array(labels, dtype=np.int64).tobytes())


def recovery_hint(checkpointer: Checkpointer, *, has_best: bool) -> str:
    """Return what is whole, and what to do, when a file of a run could not be written.

    Args:
        checkpointer: of the run.
        has_best: whether this run has saved a best model.
    """
    try:
        with comm.as_single_process():  # the other ranks, which could write, are somewhere else
            last = checkpointer.last_checkpoint()
    except WeightsError as error:
        return f"  {error}"
    best = _describe_best(checkpointer.save_dir / "model_best.pth") if has_best else ""
    if last is None:
        return (
            f"  {best or 'nothing was saved before'}\n"
            f"  fix: make room, or choose another OUTPUT_DIR than {checkpointer.save_dir}"
        )
    best = f"  {best}\n" if best else ""
    return f"  the checkpoint before is whole: {last}\n{best}  fix: make room, then resume with:\n  {resume_command()}"


def _describe_best(path: Path) -> str:
    """Return a sentence about a best model; empty if it is not whole."""
    try:
        best = read_checkpoint(path, lazily=True)["best"]
        return f"the best model is whole: {path} ({best['metric']} {best['value']:.2f})" if best else ""
    except (WeightsError, KeyError, TypeError, ValueError):
        return ""
