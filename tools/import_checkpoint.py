#!/usr/bin/env python
"""Turn weights of FastReID, torchreid or TransReID into a fastamp checkpoint: import_checkpoint.py IN OUT.

The model is that of --config-file and of KEY VALUE pairs; without a file it is recognized from the names and shapes in
IN, and the KEY VALUE pairs say what leaves no trace there. Prints what was matched, renamed, dropped and missing. With
MODEL.BACKBONE.DEPLOY True a RepVGG is written in its form for inference. Exit code 2 when the weights are of another
model.

Files of DINO, MoCo, Lightning and others hold several models, or a backbone below a prefix: --prefix teacher.backbone.
takes what is below it, sub-dictionaries included. Without it the tool lists the prefixes where it finds a backbone.
"""

import argparse
import contextlib
import logging
import sys
from pathlib import Path
from typing import Any

import torch

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.checkpoint.load_state import classifiers, convert_state_dict, examples, load_model_state
from fastamp.checkpoint.weights_file import read_checkpoint, state_dict_in, tensors_by_path
from fastamp.cli.options import add_plugin_argument
from fastamp.config import CfgNode, read_config
from fastamp.engine import run_command_line
from fastamp.modeling import build_model
from fastamp.modeling.infer_config import backbone_prefixes, infer_config, interpolation_keys
from fastamp.utils.errors import ConfigError, WeightsError, did_you_mean, writing
from fastamp.utils.files import expand, ignore_closed_stdout, real_path
from fastamp.utils.logger import setup_logger
from fastamp.utils.terminal_text import sanitize_terminal_text


def import_checkpoint(
    source: str, target: str, *, config_file: str, opts: list[str], plugin: str, prefix: str = ""
) -> None:
    """Read ``source``, print the report, and write ``target``.

    Args:
        source: weights file.
        target: checkpoint, .pth.
        config_file: config of the model; empty to recognize it.
        opts: KEY VALUE pairs.
        plugin: Python file with custom components; empty for none.
        prefix: take what is below it only, see ``tensors_by_path``; empty for the whole file.

    Raises:
        ConfigError: ``target`` is ``source`` or cannot be written, or the config is wrong.
        WeightsError: ``source`` cannot be read, is of another model, or has weights that are not finite.
    """
    out = expand(target)
    if out.suffix != ".pth":
        raise ConfigError(f"{target}: a checkpoint's name ends with .pth")
    if real_path(out) == real_path(expand(source)):
        raise ConfigError(f"{target} is the file that is read; name another one")
    read_config(config_file, opts, plugin=plugin)  # what is wrong in them is said first
    defaults = read_config("", (), plugin=plugin)
    content = read_checkpoint(source)
    try:
        state = weights_below(content, prefix, source, defaults)
        write_model(state, source, out, config_file=config_file, opts=opts, plugin=plugin)
    except WeightsError as error:
        hint = "" if prefix else prefix_hint(content, defaults)
        if not hint:
            raise
        raise WeightsError(f"{error}\n{hint}") from error


def weights_below(content: Any, prefix: str, source: str, defaults: CfgNode) -> dict[str, torch.Tensor]:
    """Return the state dict of a file, or the tensors below ``prefix`` without it.

    Raises:
        WeightsError: there is no state dict, or nothing below ``prefix``.
    """
    if not prefix:
        return state_dict_in(content, source)
    tensors = tensors_by_path(content)
    prefix = prefix.rstrip(".") + "."
    state = {path.removeprefix(prefix): value for path, value in tensors.items() if path.startswith(prefix)}
    if not state:
        hint = did_you_mean(prefix, backbone_prefixes(tensors, defaults))
        raise WeightsError(
            f"{source} has nothing below --prefix {prefix}.{hint}\n"
            f"  found: {', '.join(sorted({path.partition('.')[0] for path in tensors})[:8]) or 'no tensors'}"
        )
    return state


def prefix_hint(content: Any, defaults: CfgNode) -> str:
    """Return where in a file backbones are, and how to import them; empty if that is not below a prefix."""
    with contextlib.suppress(WeightsError):
        if not backbone_prefixes(state_dict_in(content, ""), defaults).keys().isdisjoint(("", "backbone.", "base.")):
            return ""  # where it is looked for
    found = {prefix: name for prefix, name in backbone_prefixes(tensors_by_path(content), defaults).items() if prefix}
    if not found:
        return ""
    lines = [f"    --prefix {prefix}   ({name})" for prefix, name in found.items()]
    text = "  this file has a backbone below a prefix; to import it, add one of:\n" + "\n".join(lines[:8])
    if any("CLIP" in name for name in found.values()):
        text += "\n  CLIP's vision transformers have other layers: MODEL.BACKBONE.NAME build_timm_backbone has them"
    return text


def write_model(
    state: dict[str, torch.Tensor], source: str, out: Path, *, config_file: str, opts: list[str], plugin: str
) -> None:
    """Load ``state`` into the model of the config, or of the recognized one, print the report, and write ``out``."""
    if not config_file:
        keys = infer_config(state, source, read_config("", (), plugin=plugin))
        print("recognized:", *(f"{key} {value!r}" if " " in value else f"{key} {value}" for key, value in keys.items()))
        print(
            "not told by a file, and as by default unless given as KEY VALUE: MODEL.BACKBONE.STEM_POOL, LAST_STRIDE, "
            "SIE_VIEWS (SIE_CAMERAS is the number of all embeddings); MODEL.HEADS.CLS_LAYER, SCALE, MARGIN, JPM.SHIFT, "
            "POOL_LAYER without weights; MODEL.PIXEL_MEAN, PIXEL_STD"
        )
        opts = [*(each for pair in keys.items() for each in pair), *opts]
    # No downloads: the weights are here.
    opts = ["MODEL.DEVICE", "cpu", *opts, "MODEL.BACKBONE.PRETRAIN", "False", "MODEL.BACKBONE.PRETRAIN_PATH", ""]
    cfg = read_config(config_file, opts, plugin=plugin)
    if cfg.MODEL.META_ARCHITECTURE == "Distiller":  # what it leaves is a Baseline, and its teachers may not be here
        opts += ["MODEL.META_ARCHITECTURE", "Baseline"]
        cfg = read_config(config_file, opts, plugin=plugin)
    model = build_model(cfg)
    if cfg.MODEL.HEADS.NUM_CLASSES == 0:
        converted, _ = convert_state_dict(model, state)
        found = [len(converted[name]) for name in classifiers(model) if name in converted]
        if found:
            cfg = read_config(config_file, [*opts, "MODEL.HEADS.NUM_CLASSES", str(found[0])], plugin=plugin)
            model = build_model(cfg)
    report = load_model_state(model, state, source=source, min_match=cfg.MODEL.WEIGHTS_MIN_MATCH)
    print(sanitize_terminal_text(str(report)))
    found = cfg.INPUT.INTERPOLATION if cfg.INPUT.INTERPOLATION_TEST == "same" else cfg.INPUT.INTERPOLATION_TEST
    for key, value in interpolation_keys(state).items():
        if found != value:
            print(f"note: test images are resized by {found}, but the weights were tested with {key} {value}")
    bad = [name for name, value in model.state_dict().items() if not value.isfinite().all()]
    if bad:
        raise WeightsError(
            f"{source}: {len(bad)} tensors are not finite{examples(bad)}; nothing was written\n"
            "  fix: take an earlier checkpoint, from before the training diverged"
        )
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        Checkpointer(model, out.parent).save(out.stem, tag=False, config=cfg.dump())
    print(f"written: {out}")


def cli(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="IN", help="weights file of another program, or of an older version")
    parser.add_argument("target", metavar="OUT", help="checkpoint to write, .pth")
    parser.add_argument("--config-file", default="", metavar="FILE", help="YAML config of the model")
    parser.add_argument("--prefix", default="", help="take the tensors below it, e.g. teacher.backbone.")
    add_plugin_argument(parser)
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="config keys and their values")
    args = parser.parse_intermixed_args(argv)
    setup_logger()
    logging.getLogger("fastamp.checkpoint.load_state").setLevel(logging.WARNING)  # the report is printed here
    return run_command_line(
        lambda: import_checkpoint(
            args.source,
            args.target,
            config_file=args.config_file,
            opts=args.opts,
            plugin=args.plugin,
            prefix=args.prefix,
        )
    )


if __name__ == "__main__":
    with ignore_closed_stdout():
        sys.exit(cli())
