"""Entries of a checkpoint besides the weights: the config, and errors for what is missing or damaged."""

import os

from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.config import CfgNode
from fastamp.utils.errors import UserError, WeightsError


def merge_from_checkpoint(cfg: CfgNode, checkpoint: str | os.PathLike[str]) -> None:
    """Merge the config in a checkpoint into ``cfg``.

    Raises:
        WeightsError: the file cannot be read, or holds no config of this version.
    """
    if not merge_if_config(cfg, checkpoint):
        raise no_config_error(checkpoint)


def merge_if_config(cfg: CfgNode, checkpoint: str | os.PathLike[str]) -> bool:
    """Merge the config in a checkpoint into ``cfg``, if it holds one, and return whether it does.

    Raises:
        WeightsError: the file cannot be read, or its config is not of this version.
    """
    content = read_checkpoint(checkpoint)
    text = content.get("config") if isinstance(content, dict) else None
    if not isinstance(text, str):
        return False
    try:
        cfg.merge_from_other_cfg(CfgNode.load_cfg(text))
    except UserError as error:
        raise WeightsError(
            f"the config in {checkpoint} is not of this version, or of parts of your own: {error}"
        ) from error
    return True


def no_config_error(checkpoint: str | os.PathLike[str]) -> WeightsError:
    """Return the error for a checkpoint without a config."""
    return WeightsError(
        f"{checkpoint} holds no config, so that the model is not known.\n"
        "  fix: python tools/import_checkpoint.py makes a checkpoint with a config of it"
    )


def damaged_entry_error(checkpoint: str | os.PathLike[str], wrong: str) -> WeightsError:
    """Return the error for an entry that has another form than what a run writes; ``wrong`` says which."""
    return WeightsError(
        f"{checkpoint} holds what no run writes, or is damaged.\n  {wrong}\n"
        "  fix: use another checkpoint of the run, or import its weights with tools/import_checkpoint.py"
    )
