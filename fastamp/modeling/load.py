"""Load a trained model for inference from a checkpoint or a config."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastamp.amp import PrecisionPolicy, requested_device, resolve_device
from fastamp.amp.policy import DTYPES
from fastamp.checkpoint.entries import checkpoint_of, damaged_entry_error, merge_from_checkpoint
from fastamp.checkpoint.evaluated_weights import load_evaluated_weights
from fastamp.checkpoint.weights_file import read_checkpoint
from fastamp.config import CfgNode, get_cfg
from fastamp.layers.lora import merge_adapters
from fastamp.modeling.meta_arch import build_model
from fastamp.utils.errors import ConfigError
from fastamp.utils.files import expand
from fastamp.zoo import warn_of_differences, with_local_files

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """Trained model with its precision policy and config.

    Attributes:
        model: model in evaluation mode, with averaged weights if the config selects them for evaluation.
        policy: precision policy for evaluation; run the model inside ``policy.autocast()``.
        cfg: config of the model, frozen.
        extra: entries of the checkpoint other than the weights.
    """

    model: nn.Module
    policy: PrecisionPolicy
    cfg: CfgNode
    extra: dict[str, Any]


def load_model(
    source: CfgNode | str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    opts: Sequence[str] = (),
    plugin: str = "",
) -> LoadedModel:
    """Load a trained model in evaluation mode, with the precision policy for evaluation. LoRA adapters are merged.

    Args:
        source: checkpoint of a run, e.g. ``logs/x/model_best.pth``, which contains the config; run folder or packaged
            model, see ``checkpoint_of``; or a config with ``MODEL.WEIGHTS``.
        device: ``auto`` (CUDA, else MPS, else CPU), ``cpu``, ``cuda``, ``cuda:N``, ``mps``. Default None: ``auto`` for
            a checkpoint, ``MODEL.DEVICE`` for a config.
        opts: alternating keys and values that override the config, e.g. ``["SOLVER.AMP.EVAL_DTYPE", "float32"]``.
        plugin: Python file that registers the custom components of a checkpoint, see ``read_config``; it is executed.
            Ignored for a config. Default "".

    Returns:
        The model. For a checkpoint, the precision is the training precision, or is set by ``opts`` if they contain
        ``SOLVER.AMP`` keys. For a config, the config sets the precision.

    Raises:
        TypeError: if ``source`` is neither a path nor a config.
        WeightsError: if the weights are missing or damaged, if they do not match the model, or if the checkpoint
            contains no config.
        ConfigError: if an option is invalid, if ``MODEL.WEIGHTS`` is empty, if the device is not available, or if the
            device does not support the precision.
    """
    from_config = isinstance(source, CfgNode)
    if not isinstance(source, CfgNode | str | os.PathLike):
        raise TypeError(
            f"expected the path of a checkpoint or run folder, or a config with MODEL.WEIGHTS; got "
            f'{type(source).__name__}.\n  fix: pass a path, e.g. Predictor("logs/x/model_best.pth")'
        )
    device = str(device) if isinstance(device, torch.device) else device
    if from_config:
        cfg = _with_options(source, device, opts)
        if not cfg.MODEL.WEIGHTS:
            raise ConfigError("MODEL.WEIGHTS is empty.\n  fix: set MODEL.WEIGHTS to the weights file")
        warn_of_differences(cfg, evaluated=True)
        cfg = with_local_files(cfg)
        content = read_checkpoint(cfg.MODEL.WEIGHTS)
    else:
        checkpoint = checkpoint_of(expand(source))
        content = read_checkpoint(checkpoint)
        cfg = _config_from_checkpoint(content, checkpoint, device or "auto", opts, plugin)
        warn_of_differences(cfg, evaluated=True)
    resolved = resolve_device(requested_device(cfg))
    # MODEL.WEIGHTS overwrites the pretrained weights, and no losses are computed.
    model = build_model(cfg.with_values({"MODEL.BACKBONE.PRETRAIN": False, "MODEL.LOSSES.NAME": ()}))
    extra = load_evaluated_weights(model, content, cfg)
    if cfg.MODEL.LORA.RANK:
        merge_adapters(model)
    stored = _stored_policy(extra, cfg.MODEL.WEIGHTS)
    if stored and not from_config and not _sets_precision(opts):
        policy_cfg = cfg.with_values({"SOLVER.AMP": "off" if stored["dtype"] == "float32" else stored["dtype"]})
    else:
        policy_cfg = cfg
    policy = PrecisionPolicy.from_config(policy_cfg, resolved)
    if policy_cfg is not cfg and not policy.enabled and cfg.SOLVER.AMP.ENABLED:
        # SOLVER.AMP is on in the config of the run.
        policy = replace(policy, reason="the last precision of the training")
    policy = policy.for_evaluation(cfg.SOLVER.AMP.EVAL_DTYPE)
    policy.check_model(model)
    logger.info(
        "%s: %s, %d parameters, precision: %s",
        cfg.MODEL.WEIGHTS,
        cfg.MODEL.META_ARCHITECTURE,
        sum(p.numel() for p in model.parameters()),
        policy.describe(),
    )
    return LoadedModel(model.eval(), policy, cfg, extra)


def _config_from_checkpoint(content: Any, checkpoint: Path, device: str, opts: Sequence[str], plugin: str) -> CfgNode:
    """Read the config from a checkpoint, and adapt the config for inference with the checkpoint's weights."""
    cfg = get_cfg(plugin)
    merge_from_checkpoint(cfg, content, checkpoint)
    machine = ["MODEL.DEVICE", device, "MODEL.COMPILE", "off", "MODEL.BACKBONE.SCAN", "torch"]
    cfg.merge_from_list([*machine, "INPUT.DECODER", "auto", "MODEL.HEADS.NUM_CLASSES", 0])
    cfg.merge_from_list(opts)
    cfg.merge_from_list(["MODEL.WEIGHTS", str(checkpoint)])
    cfg.freeze()
    return cfg


def _with_options(cfg: CfgNode, device: str | None, opts: Sequence[str]) -> CfgNode:
    """Copy a config, set the device and the KEY VALUE pairs in the copy, and freeze the copy."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.merge_from_list(["MODEL.DEVICE", device] if device else [])
    cfg.merge_from_list(opts)
    cfg.freeze()
    return cfg


def _stored_policy(extra: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Return the training precision policy stored in a checkpoint; None if the checkpoint does not contain one.

    Raises:
        WeightsError: if the policy in the checkpoint does not name a dtype.
    """
    policy: Any = extra.get("policy")
    if policy is not None and not (isinstance(policy, dict) and policy.get("dtype") in [*DTYPES]):
        raise damaged_entry_error(path, f"policy: expected a dict with a dtype ({', '.join(DTYPES)})")
    return policy


def _sets_precision(opts: Sequence[str]) -> bool:
    return any(key.startswith("SOLVER.AMP") and key != "SOLVER.AMP.EVAL_DTYPE" for key in opts[::2])
