"""Teachers for distillation: whole models from config and weights files, at rest."""

from typing import Any

from torch import nn

from fastamp.checkpoint.load_state import load_model_state
from fastamp.checkpoint.weights_file import read_checkpoint, state_dict_in
from fastamp.config import get_cfg
from fastamp.config.defaults import KEYS
from fastamp.modeling.meta_arch.build import build_model
from fastamp.utils.errors import ConfigError, UserError, WeightsError

# What these add to Baseline is for their own training.
_TEACH_AS_BASELINE = ("Distiller", "MoCo")


def build_teachers(cfg: Any) -> list[nn.Module]:
    """Return the models of ``KD.MODEL_CONFIG`` with the weights of ``KD.MODEL_WEIGHTS``, on ``MODEL.DEVICE``.

    They are in evaluation mode and without gradients. A teacher's config says all about it but the device, the memory
    format, the compiler and the precision that is on, which are the student's; where it has
    ``MODEL.HEADS.NUM_CLASSES`` 0, the number of classes is too. It normalizes images by its own ``MODEL.PIXEL_MEAN``
    and ``PIXEL_STD``.

    Raises:
        ConfigError: there are not as many configs as weights, or a config is missing, wrong, or of a model that cannot
            teach this one.
        WeightsError: weights are missing, damaged, or not those of the config.
    """
    configs, weights = cfg.KD.MODEL_CONFIG, cfg.KD.MODEL_WEIGHTS
    if len(configs) != len(weights):
        raise ConfigError(
            f"KD.MODEL_CONFIG names {len(configs)} files and KD.MODEL_WEIGHTS {len(weights)}: each teacher needs both"
        )
    return [_build_teacher(cfg, *files) for files in zip(configs, weights, strict=True)]


def _build_teacher(cfg: Any, config_file: str, weights_file: str) -> nn.Module:
    try:
        teacher = build_model(_teacher_config(cfg, config_file))
    except UserError as error:
        raise ConfigError(f"KD.MODEL_CONFIG {config_file!r}: {error}") from error
    if not hasattr(teacher, "class_logits"):
        raise ConfigError(
            f"KD.MODEL_CONFIG {config_file!r}: a {type(teacher).__name__} has no class logits to teach with"
        )
    try:
        state = state_dict_in(read_checkpoint(weights_file), weights_file)
        report = load_model_state(teacher, state, source=weights_file)
    except WeightsError as error:
        raise WeightsError(f"KD.MODEL_WEIGHTS {weights_file!r}: {error}") from error
    missing = report.missing + report.other_shape
    if missing:
        raise WeightsError(
            f"KD.MODEL_WEIGHTS {weights_file!r} does not fill the model of {config_file}: {len(missing)} tensors are "
            f"missing or of another number of classes, e.g. {', '.join(missing[:3])}.\n"
            "  fix: take the teacher's own config, trained on the student's identities, with its classifier in the file"
        )
    return teacher.requires_grad_(False).eval()


def _teacher_config(cfg: Any, path: str) -> Any:
    """Return the config of a teacher, as it is built beside the student of ``cfg``."""
    teacher = get_cfg()
    for key, _ in cfg.keys_below():
        if key.path not in KEYS:  # a project's own
            teacher.define(key.path, key.default, key.meaning, key.choices, key.aliases, key.of)
    teacher.merge_from_file(path)
    if teacher.INPUT.CHANNELS != cfg.INPUT.CHANNELS:
        raise ConfigError(
            f"INPUT.CHANNELS is {teacher.INPUT.CHANNELS}, and the student's images have {cfg.INPUT.CHANNELS}"
        )
    classes = cfg.MODEL.HEADS.NUM_CLASSES
    if teacher.MODEL.HEADS.NUM_CLASSES not in (0, classes):
        raise ConfigError(
            f"MODEL.HEADS.NUM_CLASSES is {teacher.MODEL.HEADS.NUM_CLASSES}, and the student tells {classes} identities "
            "apart: a teacher must have been trained on the same ones"
        )
    teacher.MODEL.HEADS.NUM_CLASSES = classes
    teacher.MODEL.DEVICE = cfg.MODEL.DEVICE
    teacher.MODEL.CHANNELS_LAST, teacher.MODEL.COMPILE = cfg.MODEL.CHANNELS_LAST, cfg.MODEL.COMPILE
    teacher.SOLVER.AMP.ENABLED, teacher.SOLVER.AMP.DTYPE = cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.AMP.DTYPE
    teacher.MODEL.BACKBONE.PRETRAIN = False  # would be overwritten at once
    if teacher.MODEL.META_ARCHITECTURE in _TEACH_AS_BASELINE:
        teacher.MODEL.META_ARCHITECTURE = "Baseline"
    teacher.KD = get_cfg().KD  # its own teachers have done their work
    teacher.MODEL.LOSSES.NAME = ()  # as have its losses, whose weights a file need not have
    for norm in (teacher.MODEL.BACKBONE, teacher.MODEL.HEADS):
        if norm.NORM.lower() == "syncbn":  # the same in evaluation, and for every device
            norm.NORM = "BN"
    teacher.freeze()
    return teacher
