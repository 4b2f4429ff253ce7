"""Remove the training state from checkpoints for deployment."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastamp.checkpoint.adapters import adapters_in
from fastamp.checkpoint.checkpointer import STRIPPED
from fastamp.checkpoint.entries import no_config_error
from fastamp.checkpoint.safetensors_file import INFERENCE_ENTRIES
from fastamp.checkpoint.weights_file import check_output, read_checkpoint, state_dict_in, write_checkpoint
from fastamp.config import CfgNode, get_cfg
from fastamp.utils.files import expand


@dataclass(frozen=True)
class StripReport:
    """Summary of what ``strip`` wrote and removed.

    Attributes:
        path: output file.
        weights: kind of weights in the output: ``model``, or the evaluated average ``ema`` or ``swa``.
        removed: names of the removed entries.
        bytes_before, bytes_after: sizes of the input file and the output file, in bytes.
    """

    path: Path
    weights: str
    removed: list[str]
    bytes_before: int
    bytes_after: int


def strip(
    checkpoint: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, adapters: bool = False
) -> StripReport:
    """Write a copy of a checkpoint without training state.

    The copy contains the weights, the config and the entries that inference reads. If the config selects a weight
    average for evaluation (``SOLVER.EMA``, ``SOLVER.SWA``), the average replaces the weights. The copy gives the same
    features and metrics as the checkpoint. A new run can start from the copy (``MODEL.WEIGHTS``), but a run cannot be
    resumed from it.

    Args:
        checkpoint: checkpoint of a run.
        out: output file, ``.pth``; None for ``<checkpoint>_stripped.pth`` or ``<checkpoint>_adapters.pth`` in the same
            folder.
        adapters: write only the LoRA adapters and the heads, without the frozen weights of the backbone. Default False.

    Raises:
        WeightsError: if the checkpoint cannot be read, or contains no config, or no adapters.
        ConfigError: if ``out`` is the checkpoint itself, has another suffix, or cannot be written.
    """
    source = expand(checkpoint)
    target = (
        source.with_name(f"{source.stem}_{'adapters' if adapters else 'stripped'}.pth") if out is None else expand(out)
    )
    check_output(target, source)
    content = read_checkpoint(source)
    kept = without_training_state(content, source)
    if adapters:
        kept |= adapters_in(kept["model"], source) | {"config": _with_base(kept["config"])}
    write_checkpoint(target, kept)
    removed = sorted(content.keys() - kept.keys())
    return StripReport(target, kept[STRIPPED], removed, source.stat().st_size, target.stat().st_size)


def without_training_state(content: Any, source: Path) -> dict[str, Any]:
    """Return the evaluated weights, the config and the ``INFERENCE_ENTRIES`` of a checkpoint.

    Args:
        content: content of the checkpoint. It is not modified.
        source: path of the checkpoint, for messages.

    Returns:
        Content of a checkpoint, whose entry ``STRIPPED`` names the kind of the weights.

    Raises:
        WeightsError: if the content has no weights or no config.
    """
    if not isinstance(content, dict) or not isinstance(content.get("config"), str):
        raise no_config_error(source)
    kept = {"model": state_dict_in(content, source), "config": content["config"]}
    kept |= {name: content[name] for name in INFERENCE_ENTRIES if name in content}
    average = content.get("average")
    if isinstance(average, dict) and average.get("updates") and _is_evaluated(average.get("kind"), content["config"]):
        kept["model"] |= state_dict_in(average, f"the {average['kind']} in {source}")
        kept[STRIPPED] = average["kind"]
    kept.setdefault(STRIPPED, "model")
    return kept


def _with_base(config: str) -> str:
    """Set ``MODEL.LORA.BASE`` in a config, given as YAML text, to the file from which the weights were initialized."""
    tree: Any = CfgNode.load_cfg(config)
    model, backbone = tree["MODEL"], tree["MODEL"]["BACKBONE"]
    model["LORA"]["BASE"] = (
        model["LORA"]["BASE"] or model["WEIGHTS"] or (backbone["PRETRAIN_PATH"] if backbone["PRETRAIN"] else "")
    )
    return tree.dump()


def _is_evaluated(kind: Any, config: str) -> bool:
    """Return True if a config, given as YAML text, selects the weight average ``kind`` for evaluation."""
    if kind != "ema":
        return kind == "swa"
    value: Any = CfgNode.load_cfg(config)  # not merged: it may have keys of custom components
    for name in ("SOLVER", "EMA", "EVALUATE"):
        value = value.get(name) if isinstance(value, dict) else None
    return get_cfg().SOLVER.EMA.EVALUATE if value is None else bool(value)
