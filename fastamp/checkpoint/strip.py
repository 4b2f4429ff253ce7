"""Checkpoints without the training state, for deployment."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastamp.checkpoint.checkpointer import STRIPPED
from fastamp.checkpoint.entries import no_config_error
from fastamp.checkpoint.weights_file import read_checkpoint, state_dict_in, write_checkpoint
from fastamp.config import CfgNode, get_cfg
from fastamp.utils.errors import ConfigError
from fastamp.utils.files import expand, real_path

# The entries that evaluation, Predictor, extraction and export read, besides the weights.
_KEPT = ("config", "policy", "pairs", "best", STRIPPED)


@dataclass(frozen=True)
class StripReport:
    """The result of ``strip``.

    Attributes:
        path: the file that was written.
        weights: which weights it holds: ``model``, or the average that is evaluated, ``ema`` or ``swa``.
        removed: entries of the checkpoint that it does not hold.
        bytes_before, bytes_after: size of the two files.
    """

    path: Path
    weights: str
    removed: list[str]
    bytes_before: int
    bytes_after: int


def strip(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> StripReport:
    """Write a checkpoint that holds the weights, the config and what inference reads, but no training state.

    Where the config evaluates an average of the weights (``SOLVER.EMA``, ``SOLVER.SWA``), the average replaces the
    weights. The file gives the same features and metrics, and a training can start from it (``MODEL.WEIGHTS``), but
    none can resume from it.

    Args:
        checkpoint: a file that a run wrote.
        out: the file to write, ``.pth``; None is ``<checkpoint>_stripped.pth`` in the same folder.

    Raises:
        WeightsError: the checkpoint cannot be read, or holds no config.
        ConfigError: ``out`` is ``checkpoint``, has another suffix, or cannot be written.
    """
    source = expand(checkpoint)
    target = source.with_name(f"{source.stem}_stripped.pth") if out is None else expand(out)
    if target.suffix != ".pth":
        raise ConfigError(f"{target}: expected a name that ends in .pth")
    if real_path(target) == real_path(source):
        raise ConfigError(f"{target} is the checkpoint itself, whose training state would be lost; name another file")
    content = read_checkpoint(source)
    if not isinstance(content, dict) or not isinstance(content.get("config"), str):
        raise no_config_error(source)
    kept = {"model": state_dict_in(content, source)} | {name: content[name] for name in _KEPT if name in content}
    average = content.get("average")
    if isinstance(average, dict) and average.get("updates") and _is_evaluated(average.get("kind"), content["config"]):
        kept["model"] |= state_dict_in(average, f"the {average['kind']} in {source}")
        kept[STRIPPED] = average["kind"]
    kept.setdefault(STRIPPED, "model")
    write_checkpoint(target, kept)
    removed = sorted(content.keys() - kept.keys())
    return StripReport(target, kept[STRIPPED], removed, source.stat().st_size, target.stat().st_size)


def _is_evaluated(kind: Any, config: str) -> bool:
    """Return whether a config, as text, evaluates an average of this kind."""
    if kind != "ema":
        return kind == "swa"
    value: Any = CfgNode.load_cfg(config)  # not merged: it may have keys of custom components
    for name in ("SOLVER", "EMA", "EVALUATE"):
        value = value.get(name) if isinstance(value, dict) else None
    return get_cfg().SOLVER.EMA.EVALUATE if value is None else bool(value)
