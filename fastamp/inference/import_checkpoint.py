"""Conversion of weights files of FastReID, torchreid or TransReID to fastamp checkpoints."""

import contextlib
import shlex
from typing import Any

from torch import nn

from fastamp.checkpoint.checkpointer import Checkpointer
from fastamp.checkpoint.load_state import classifiers, convert_state_dict, examples, load_model_state
from fastamp.checkpoint.weights_file import average_in, check_output, read_checkpoint, state_dict_in, tensors_by_path
from fastamp.config import CfgNode, read_config
from fastamp.config.projects import project_pairs
from fastamp.contracts import State
from fastamp.modeling import build_model
from fastamp.modeling.infer_config import backbone_prefixes, infer_config, interpolation_keys
from fastamp.utils.errors import WeightsError, did_you_mean, writing
from fastamp.utils.files import expand
from fastamp.utils.plural import plural


def import_checkpoint(
    source: str, target: str, *, config_file: str, opts: list[str], plugin: str, prefix: str = ""
) -> None:
    """Convert ``source``, log a report, and write ``target``.

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
        inferred = [] if config_file else inferred_pairs(state, source, defaults)
        # Download nothing: the weights come from IN.
        fixed = ["MODEL.BACKBONE.PRETRAIN", "False", "MODEL.BACKBONE.PRETRAIN_PATH", ""]
        cfg = read_config(config_file, ["MODEL.DEVICE", "cpu", *inferred, *opts, *fixed], plugin=plugin)
        model, cfg = load_imported(cfg, state, source, content)
    except WeightsError as error:
        raise WeightsError(f"{error}{'' if prefix else prefix_hint(content, defaults)}") from error
    with writing(out):
        Checkpointer(model, out.parent).save(out.stem, tag=False, config=cfg.dump())
    print(f"wrote {out}")


def weights_below(content: Any, prefix: str, source: str, defaults: CfgNode) -> State:
    """Return the state dict of a file, or the tensors below ``prefix`` with the prefix removed.

    Without a prefix, an average of the weights in the file is preferred, as for ``MODEL.WEIGHTS``.

    Raises:
        WeightsError: if the file contains no state dict, or no tensor below ``prefix``.
    """
    if not prefix:
        state_dict_in(content, source)  # a student and a teacher are an error, whose fix lists their prefixes
        return state_dict_in(average_in(content), source)
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
    prefixes = backbone_prefixes(tensors_by_path(content), defaults)
    prefixes.pop("", None)
    if not prefixes:
        return ""
    lines = [f"    --prefix {prefix}   ({name})" for prefix, name in prefixes.items()]
    text = "\n  fix: select a backbone in this file by its prefix; add one of:\n" + "\n".join(lines[:8])
    if any("CLIP" in name for name in prefixes.values()):
        text += "\n  note: the layers of CLIP's vision transformers differ from build_vit_backbone; use a timm backbone"
    return text


def inferred_pairs(state: State, source: str, defaults: CfgNode) -> list[str]:
    """Infer the config of ``state``, print it, and return it as KEY VALUE pairs."""
    pairs = [word for pair in infer_config(state, source, defaults).items() for word in pair]
    print("inferred config:", shlex.join(pairs))
    unknown = [key for key in ("STEM_POOL", "LAST_STRIDE") if f"MODEL.BACKBONE.{key}" not in pairs]
    print(
        "keys that cannot be inferred; they keep their defaults unless set by KEY VALUE: MODEL.BACKBONE."
        f"{''.join(f'{key}, ' for key in unknown)}SIE_VIEWS (SIE_CAMERAS is set to the total number of embeddings); "
        "MODEL.HEADS.CLS_LAYER, SCALE, MARGIN, JPM.SHIFT, POOL_LAYER if it has no weights; MODEL.PIXEL_MEAN, PIXEL_STD"
    )
    return pairs


def load_imported(cfg: CfgNode, state: State, source: str, content: Any) -> tuple[nn.Module, CfgNode]:
    """Build the model of a config, and load ``state`` into it, which logs a report.

    Args:
        cfg: config of the model.
        state: state dict.
        source: the file, for messages.
        content: content of the file.

    Returns:
        The model, and its config with the number of classes.

    Raises:
        WeightsError: if the weights do not match the model, or are not finite.
    """
    if cfg.MODEL.META_ARCHITECTURE == "Distiller":  # the student is a Baseline; the teachers' files may be missing
        cfg = cfg.with_values({"MODEL.META_ARCHITECTURE": "Baseline"})
    model = build_model(cfg)
    if cfg.MODEL.HEADS.NUM_CLASSES == 0:
        converted, _ = convert_state_dict(model, state)
        counts = [len(converted[name]) for name in classifiers(model) if name in converted]
        if counts:
            cfg = cfg.with_values({"MODEL.HEADS.NUM_CLASSES": counts[0]})
            model = build_model(cfg)
    load_model_state(
        model,
        state,
        source=source,
        min_match=cfg.MODEL.WEIGHTS_MIN_MATCH,
        content=content,
        allow_missing=cfg.MODEL.WEIGHTS_ALLOW_MISSING,
    )
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
    return model, cfg
