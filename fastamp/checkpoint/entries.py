"""Config entry of a checkpoint, and errors for missing or damaged entries."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastamp.checkpoint.safetensors_file import WEIGHTS_NAME
from fastamp.config import CfgNode
from fastamp.utils.errors import UserError, WeightsError


def merge_from_checkpoint(cfg: CfgNode, content: Any, checkpoint: str | os.PathLike[str]) -> None:
    """Merge the config stored in a checkpoint into ``cfg``.

    Raises:
        WeightsError: if the checkpoint contains no config, or one that is invalid in this version.
    """
    if not merge_if_config(cfg, content, checkpoint):
        raise no_config_error(checkpoint)


def merge_if_config(cfg: CfgNode, content: Any, checkpoint: str | os.PathLike[str]) -> bool:
    """Merge the config stored in a checkpoint into ``cfg``, if there is one.

    Args:
        cfg: config, which is not frozen.
        content: content of the checkpoint.
        checkpoint: path of the checkpoint, for messages.

    Returns:
        True if the checkpoint contains a config.

    Raises:
        WeightsError: if the config is invalid in this version.
    """
    text = content.get("config") if isinstance(content, dict) else None
    if not isinstance(text, str):
        return False
    try:
        cfg.merge_saved(text)
    except UserError as error:
        raise WeightsError(
            f"cannot use the config in {checkpoint}: it was written by another version of fastamp, or needs a plugin.\n"
            f"  found: {str(error).removeprefix('saved config: ')}\n"
            "  fix: load the plugin of the run with --plugin, or use the fastamp version that wrote the checkpoint"
        ) from error
    return True


def no_config_error(checkpoint: str | os.PathLike[str]) -> WeightsError:
    """Create the error for a checkpoint without a config."""
    return WeightsError(
        f"{checkpoint} contains no config, so the model cannot be built.\n"
        "  fix: convert the file with `fastamp import`, which adds a config"
    )


def checkpoint_of(source: str | os.PathLike[str]) -> Path:
    """Find the checkpoint to evaluate in a run folder or packaged model.

    This is model_best.pth, else model_final.pth, else model.safetensors.

    Returns:
        Path of the checkpoint; ``source`` itself if it is not a folder.

    Raises:
        WeightsError: if ``source`` is a folder that contains neither of these files.
    """
    source = Path(source)
    if not source.is_dir():
        return source
    for name in ("model_best.pth", "model_final.pth", WEIGHTS_NAME):
        if (source / name).is_file():
            return source / name
    files = sorted(path.name for path in source.glob("*.pth"))
    raise WeightsError(
        f"{source}: neither model_best.pth, model_final.pth nor {WEIGHTS_NAME} found.\n"
        f"  found: {', '.join(files) or 'no .pth file'}\n"
        "  fix: give the path of a checkpoint"
    )


def is_training_recorded(entries: Mapping[str, Any]) -> bool:
    """Return True if the entries of a checkpoint are of a training by fastamp; those of imported weights are not.

    The config of imported weights has the defaults for all keys that only a training uses.
    """
    return any(isinstance(entries.get(name), Mapping) for name in ("policy", "versions"))


def damaged_entry_error(checkpoint: str | os.PathLike[str], wrong: str) -> WeightsError:
    """Create the error for a damaged entry; ``wrong`` describes the mismatch."""
    return WeightsError(
        f"{checkpoint} has unexpected content or is damaged.\n  {wrong}\n"
        "  fix: use another checkpoint of the run, or import the weights with `fastamp import`"
    )
