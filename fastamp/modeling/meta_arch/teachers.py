"""Teacher models for distillation, built from config and weights files."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from fastamp.amp import requested_device
from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.weights_file import average_in, read_checkpoint, state_dict_in
from fastamp.config import CfgNode, get_cfg
from fastamp.config.defaults import KEYS
from fastamp.contracts import Batch
from fastamp.modeling.meta_arch.build import META_ARCH_REGISTRY, build_model
from fastamp.utils.errors import ConfigError, UserError, WeightsError
from fastamp.utils.files import expand


@runtime_checkable
class Teacher(Protocol):
    """Model from which another one can be distilled."""

    def class_logits(self, batch: Batch) -> torch.Tensor:
        """Compute the logits (B, K) float32 of the classes, without margin."""


def build_teachers(cfg: CfgNode) -> list[nn.Module]:
    """Build the teachers in ``KD.MODEL_CONFIG`` on ``MODEL.DEVICE``, and load their ``KD.MODEL_WEIGHTS``.

    The teachers are in evaluation mode without gradients. They use the device, memory format, compilation and precision
    of the student. A teacher whose ``MODEL.HEADS.NUM_CLASSES`` is 0 also uses the student's number of classes. All
    other settings, including ``MODEL.PIXEL_MEAN`` and ``PIXEL_STD``, come from the teacher's config.

    Raises:
        ConfigError: if the numbers of config and weights files differ, or if a config is missing, invalid or does not
            match the student.
        WeightsError: if a weights file is missing, damaged or does not match its config.
    """
    configs, weights = cfg.KD.MODEL_CONFIG, cfg.KD.MODEL_WEIGHTS
    if len(configs) != len(weights):
        raise ConfigError(
            f"KD.MODEL_CONFIG and KD.MODEL_WEIGHTS differ in length: {len(configs)} and {len(weights)}.\n"
            "  fix: list one config file and one weights file for each teacher"
        )
    return [_build_teacher(cfg, *files) for files in zip(configs, weights, strict=True)]


def _build_teacher(cfg: CfgNode, config_file: str, weights_file: str) -> nn.Module:
    try:
        teacher = build_model(_teacher_config(cfg, config_file))
    except UserError as error:
        if not expand(config_file).exists():
            raise ConfigError(
                f"KD.MODEL_CONFIG: the teacher's config {config_file!r} does not exist.\n"
                "  fix: train the teacher first, or set KD.MODEL_CONFIG to the config.yaml in the folder of its run"
            ) from error
        raise ConfigError(f"KD.MODEL_CONFIG {config_file!r}: {error}") from error
    if not isinstance(teacher, Teacher):
        raise ConfigError(
            f"KD.MODEL_CONFIG {config_file!r}: {type(teacher).__name__} cannot be a teacher, because it has no method "
            "class_logits.\n  fix: choose a teacher whose MODEL.META_ARCHITECTURE defines class_logits, e.g. Baseline"
        )
    try:
        content = read_checkpoint(weights_file)
        state = state_dict_in(average_in(content), weights_file)
        report = load_model_state(teacher, state, source=weights_file, content=content)
    except WeightsError as error:
        raise WeightsError(f"KD.MODEL_WEIGHTS {weights_file!r}: {error}") from error
    missing = report.missing + report.other_shape
    if missing:
        raise WeightsError(
            f"KD.MODEL_WEIGHTS {weights_file!r} does not match {config_file}: tensors are missing or have a different "
            f"number of classes ({len(missing)} in total, e.g. {', '.join(missing[:3])}).\n"
            "  fix: use the config of the teacher's run, and a teacher trained on the student's identities"
        )
    return teacher.requires_grad_(False).eval()


def _teacher_config(cfg: CfgNode, path: str) -> Any:
    """Read the config of a teacher and adapt it to ``cfg``, the config of the student."""
    teacher = get_cfg()
    for key, _ in cfg.keys_below():
        if key.path not in KEYS:  # keys defined by a project
            teacher.define(key.path, key.default, key.meaning, key.choices, key.aliases, key.of)
    teacher.merge_from_file(path)
    if teacher.INPUT.CHANNELS != cfg.INPUT.CHANNELS:
        raise ConfigError(
            f"INPUT.CHANNELS: expected {cfg.INPUT.CHANNELS}, as in the student's config, got "
            f"{teacher.INPUT.CHANNELS}.\n"
            "  fix: choose a teacher trained on images with the student's number of channels"
        )
    classes = cfg.MODEL.HEADS.NUM_CLASSES
    if teacher.MODEL.HEADS.NUM_CLASSES not in (0, classes):
        raise ConfigError(
            f"MODEL.HEADS.NUM_CLASSES: expected {classes}, as in the student's config, got "
            f"{teacher.MODEL.HEADS.NUM_CLASSES}.\n  fix: choose a teacher trained on the student's identities"
        )
    teacher.MODEL.HEADS.NUM_CLASSES = classes
    teacher.MODEL.DEVICE = requested_device(cfg)
    for name in ("CHANNELS_LAST", "COMPILE", "COMPILE_REGION", "COMPILE_MODE"):
        teacher.MODEL[name] = cfg.MODEL[name]
    teacher.SOLVER.AMP.ENABLED, teacher.SOLVER.AMP.DTYPE = cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE
    teacher.MODEL.BACKBONE.PRETRAIN = False  # overwritten by the weights file
    name = teacher.MODEL.META_ARCHITECTURE
    teacher.MODEL.META_ARCHITECTURE = META_ARCH_REGISTRY.get(name).teaches_as or name
    teacher.KD = get_cfg().KD  # the teacher needs no teachers
    teacher.MODEL.LOSSES.NAME = ()  # nor losses, whose parameters may be missing in the file
    for norm in (teacher.MODEL.BACKBONE, teacher.MODEL.HEADS):
        if norm.NORM.lower() == "syncbn":  # equivalent in evaluation, and supported by every device
            norm.NORM = "BN"
    teacher.freeze()
    return teacher
