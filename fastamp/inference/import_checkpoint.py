"""Conversion of weights files of FastReID, torchreid or TransReID to fastamp checkpoints."""

import contextlib
from pathlib import Path
from typing import Any

import torch

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.checkpoint.load_state import classifiers, convert_state_dict, examples, load_model_state
from fastamp.checkpoint.weights_file import check_output, read_checkpoint, state_dict_in, tensors_by_path
from fastamp.config import CfgNode, read_config
from fastamp.config.projects import project_pairs
from fastamp.modeling import build_model
from fastamp.modeling.infer_config import backbone_prefixes, infer_config, interpolation_keys
from fastamp.utils.errors import WeightsError, did_you_mean, writing
from fastamp.utils.files import expand
from fastamp.utils.plural import plural
from fastamp.utils.terminal_text import sanitize_terminal_text


def import_checkpoint(
    source: str, target: str, *, config_file: str, opts: list[str], plugin: str, prefix: str = ""
) -> None:
    """Convert ``source``, print a report, and write ``target``.

    Args:
        source: weights file.
        target: checkpoint to write; the name must end in .pth.
        config_file: config of the model; empty to infer the config from the weights.
        opts: KEY VALUE pairs that override the config.
        plugin: Python file with custom components; empty for none.
        prefix: prefix of the tensors to use, see ``tensors_by_path``; empty for all tensors. Default empty.

    Raises:
        ConfigError: if ``target`` is ``source``, does not end in .pth or cannot be written, or the config is invalid.
        WeightsError: if ``source`` cannot be read, does not match the model, or contains non-finite weights.
    """
    out = expand(target)
    check_output(out, expand(source))
    read_config(config_file, opts, plugin=plugin)  # report config errors before reading the weights
    defaults = read_config("", project_pairs(opts), plugin=plugin)
    content = read_checkpoint(source)
    try:
        state = weights_below(content, prefix, source, defaults)
        write_model(
            state,
            source,
            out,
            config_file=config_file,
            opts=opts,
            plugin=plugin,
            content=content,
        )
    except WeightsError as error:
        hint = "" if prefix else prefix_hint(content, defaults)
        if not hint:
            raise
        raise WeightsError(f"{error}\n{hint}") from error


def weights_below(content: Any, prefix: str, source: str, defaults: CfgNode) -> dict[str, torch.Tensor]:
    """Return the state dict of a file, or the tensors below ``prefix`` with the prefix removed.

    Raises:
        WeightsError: if the file contains no state dict, or no tensor below ``prefix``.
    """
    if not prefix:
        return state_dict_in(content, source)
    tensors = tensors_by_path(content)
    prefix = prefix.rstrip(".") + "."
    state = {path.removeprefix(prefix): value for path, value in tensors.items() if path.startswith(prefix)}
    if not state:
        hint = did_you_mean(prefix, backbone_prefixes(tensors, defaults))
        raise WeightsError(
            f"--prefix {prefix!r}: {source} has no tensors with this prefix.{hint}\n"
            f"  found: {', '.join(sorted({path.partition('.')[0] for path in tensors})[:8]) or 'no tensors'}\n"
            "  fix: set --prefix to a prefix in the file"
        )
    return state


def prefix_hint(content: Any, defaults: CfgNode) -> str:
    """Return a fix that lists the prefixes of the backbones in a file; empty if no prefix is required or found."""
    with contextlib.suppress(WeightsError):
        if not backbone_prefixes(state_dict_in(content, ""), defaults).keys().isdisjoint(("", "backbone.", "base.")):
            return ""  # already searched without --prefix
    prefixes = {
        prefix: name for prefix, name in backbone_prefixes(tensors_by_path(content), defaults).items() if prefix
    }
    if not prefixes:
        return ""
    lines = [f"    --prefix {prefix}   ({name})" for prefix, name in prefixes.items()]
    text = "  fix: select a backbone in this file by its prefix; add one of:\n" + "\n".join(lines[:8])
    if any("CLIP" in name for name in prefixes.values()):
        text += "\n  note: the layers of CLIP's vision transformers differ from build_vit_backbone; use a timm backbone"
    return text


def write_model(
    state: dict[str, torch.Tensor],
    source: str,
    out: Path,
    *,
    config_file: str,
    opts: list[str],
    plugin: str,
    content: Any,
) -> None:
    """Load ``state`` into the configured or inferred model, print the report, and write ``out``.

    ``content`` is the content of the file ``source``.
    """
    if not config_file:
        keys = infer_config(state, source, read_config("", project_pairs(opts), plugin=plugin))
        print(
            "inferred config:",
            *(f"{key} {value!r}" if " " in value else f"{key} {value}" for key, value in keys.items()),
        )
        print(
            "keys that cannot be inferred; they keep their defaults unless set by KEY VALUE: MODEL.BACKBONE.STEM_POOL, "
            "LAST_STRIDE, SIE_VIEWS (SIE_CAMERAS is set to the total number of embeddings); MODEL.HEADS.CLS_LAYER, "
            "SCALE, MARGIN, JPM.SHIFT, POOL_LAYER if it has no weights; MODEL.PIXEL_MEAN, PIXEL_STD"
        )
        opts = [*(element for pair in keys.items() for element in pair), *opts]
    # Download nothing: the weights come from IN.
    opts = ["MODEL.DEVICE", "cpu", *opts, "MODEL.BACKBONE.PRETRAIN", "False", "MODEL.BACKBONE.PRETRAIN_PATH", ""]
    cfg = read_config(config_file, opts, plugin=plugin)
    if cfg.MODEL.META_ARCHITECTURE == "Distiller":  # the student is a Baseline; the teachers' files may be missing
        cfg = cfg.with_values({"MODEL.META_ARCHITECTURE": "Baseline"})
    model = build_model(cfg)
    if cfg.MODEL.HEADS.NUM_CLASSES == 0:
        converted, _ = convert_state_dict(model, state)
        counts = [len(converted[name]) for name in classifiers(model) if name in converted]
        if counts:
            cfg = cfg.with_values({"MODEL.HEADS.NUM_CLASSES": counts[0]})
            model = build_model(cfg)
    report = load_model_state(
        model,
        state,
        source=source,
        min_match=cfg.MODEL.WEIGHTS_MIN_MATCH,
        content=content,
        allow_missing=cfg.MODEL.WEIGHTS_ALLOW_MISSING,
    )
    print(sanitize_terminal_text(str(report)))
    used = cfg.INPUT.INTERPOLATION if cfg.INPUT.INTERPOLATION_TEST == "same" else cfg.INPUT.INTERPOLATION_TEST
    for key, value in interpolation_keys(state).items():
        if used != value:
            print(f"note: the config resizes test images with {used}, but the weights were tested with {key} {value}")
    bad = [name for name, value in model.state_dict().items() if not value.isfinite().all()]
    if bad:
        raise WeightsError(
            f"{source}: non-finite values{examples(bad)} in {plural(len(bad), 'tensor')}; nothing was written.\n"
            "  fix: use a checkpoint from before the training diverged"
        )
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        Checkpointer(model, out.parent).save(out.stem, tag=False, config=cfg.dump())
    print(f"wrote {out}")
