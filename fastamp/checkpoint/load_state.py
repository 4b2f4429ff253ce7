"""Load state dicts from any source into a model: convert names, compare tensors, report mismatches."""

import contextlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from fastamp.checkpoint.layouts import block_counts, nearest_layout, refuse_unsupported, transformer_size
from fastamp.checkpoint.shards import full_state_form, load_full_state
from fastamp.config import CfgNode
from fastamp.contracts import ClassDependent, State, StateConverter
from fastamp.layers.lora import is_adapter
from fastamp.utils.errors import UserError, WeightsError
from fastamp.utils.plural import plural

logger = logging.getLogger(__name__)


MIN_MATCH = 0.9
"""Default of ``MODEL.WEIGHTS_MIN_MATCH``."""
# Tensors that only ReID models have: BNNecks, classifiers, embeddings of cameras and parts.
_OF_REID = re.compile(r"^(heads|bottleneck\w*|classifier\w*)\.|(^|\.)(sie_embed|cv_embed|part_token1?|cls_pos)$")


@runtime_checkable
class _TrainedModel(Protocol):
    """Model that names its submodules which evaluation does not use."""

    training_only: tuple[str, ...]


@dataclass(frozen=True)
class WeightsOrigin:
    """Facts about a weights file that a part of its state dict does not show.

    Attributes:
        text: text of the config of the training; None (default) if the file has none.
        is_reid: the file contains heads or embeddings of a ReID model, not only a pretrained network.
    """

    text: Any = None
    is_reid: bool = False

    @property
    def config(self) -> CfgNode | None:
        """Config of the training, with the keys that the text contains; None without a readable one."""
        with contextlib.suppress(UserError):
            return CfgNode.load_cfg(self.text) if isinstance(self.text, str) else None
        return None


@runtime_checkable
class OriginUser(Protocol):
    """Module that converts its tensors differently according to their origin."""

    def set_weights_origin(self, origin: WeightsOrigin) -> None:
        """Receive the origin before ``convert_state_dict`` is called."""


@dataclass
class ImportReport:
    """Result of loading a state dict.

    Attributes:
        source: origin of the state dict, for messages.
        matched: names of the model's tensors that were loaded.
        renamed: names of the loaded tensors that have a different name in the file.
        dropped: names of tensors that are in the file but not in the model.
        missing: names of tensors that are in the model but not in the file.
        other_shape: names of classifiers that were not loaded because the number of identities differs.
        not_needed: those of ``other_shape`` that the model, which is built for evaluation, does not need.
        backbone_fraction: fraction of the backbone's tensors that matched, in 0..1.
        notes: remarks about the origin of the file.
    """

    source: str
    matched: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    other_shape: list[str] = field(default_factory=list)
    not_needed: list[str] = field(default_factory=list)
    backbone_fraction: float = 0.0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        num_in_model = len(self.matched) + len(self.missing) + len(self.other_shape) - len(self.not_needed)
        replaced = [name for name in self.other_shape if name not in self.not_needed]
        in_file = len(self.matched) + len(self.dropped) + len(self.other_shape)
        backbone = f"{self.backbone_fraction:.0%} of the backbone's"
        lines = [
            f"matched  {_count(self.matched, num_in_model)} of the model's tensors, {backbone}",
            f"renamed  {_count(self.renamed, num_in_model)}{examples(self.renamed)}",
            f"dropped  {_count(self.dropped, in_file)} of the file's tensors{examples(self.dropped)}",
            f"missing  {_count(self.missing, num_in_model)} of the model's tensors{examples(self.missing)}",
        ]
        if replaced:
            lines.append(f"not loaded (different number of identities)  {', '.join(replaced)}")
        if self.not_needed:
            lines.append(f"not needed for evaluation  {', '.join(self.not_needed)}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(f"  {line}" for line in lines)


def _count(names: list[str], whole: int) -> str:
    return f"{len(names)} ({len(names) / max(whole, 1):.0%})"


def convert_state_dict(model: nn.Module, state: State) -> tuple[State, list[str]]:
    """Convert a state dict to the parameter names of ``model``.

    Modules are visited from the outermost to the innermost. A module that supports the parameter names of other
    libraries defines ``convert_state_dict(state, notes) -> state``. This method receives the tensors of the module,
    without the module's prefix, and returns them under the names in the module's state dict; unknown names are left
    unchanged. It may append remarks to ``notes``. The state dict that is passed to this function is not modified.

    Returns:
        ``(converted, notes)``: the converted state dict, and remarks for the import report.

    Raises:
        WeightsError: if a module cannot convert its tensors.
    """
    notes: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, StateConverter):
            prefix = f"{name}." if name else ""
            below = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            others = {key: value for key, value in state.items() if not key.startswith(prefix)}
            state = others | {prefix + key: value for key, value in module.convert_state_dict(below, notes).items()}
    return state, list(dict.fromkeys(notes))  # without duplicates from modules of the same class


def load_model_state(
    model: nn.Module,
    state: State,
    *,
    source: str,
    backbone_prefix: str = "backbone.",
    min_match: float = MIN_MATCH,
    without: tuple[str, ...] = (),
    fit: Callable[[State], State] | None = None,
    content: Any = None,
    allow_missing: bool = True,
) -> ImportReport:
    """Convert ``state`` and copy the tensors whose names and shapes match into ``model``.

    Args:
        model: model to load into.
        state: state dict.
        source: origin of ``state``, for messages.
        backbone_prefix: prefix of the tensors that ``min_match`` applies to. Default ``"backbone."``.
        min_match: minimum fraction of the backbone's tensors that ``state`` must contain. Default 0.9.
        without: globs of tensor names that ``min_match`` ignores.
        fit: function that transforms the converted state dict before it is compared with the model.
        content: content of the file that contains ``state``. Default None: unknown. An ``OriginUser`` receives it
            before the conversion.
        allow_missing: let the other tensors of the model keep their initial values; False is an error if they are
            learned and needed in evaluation, i.e. not classifiers, losses or counters. Default True. If ``min_match``
            is below its default, tensors of the backbone may be missing.

    Returns:
        Matched, renamed, dropped and missing tensors; also logged.

    Raises:
        WeightsError: if a tensor other than a classifier has the wrong shape; if a tensor for a floating-point
            parameter or buffer is not floating-point, or is quantized, sparse or on the meta device; or if the matched
            fraction of the backbone is below ``min_match``; or, without ``allow_missing``, if learned tensors are
            missing. The model is left unchanged.
    """
    text = content.get("config") if isinstance(content, dict) else None
    origin = WeightsOrigin(text, is_reid=any(_OF_REID.search(key) for key in state))
    for module in model.modules():
        if isinstance(module, OriginUser):
            module.set_weights_origin(origin)
    converted, notes = convert_state_dict(model, state)
    if fit is not None:
        converted = fit(converted)
    model_state = full_state_form(model)
    report = _compare(model, model_state, converted, source, backbone_prefix=backbone_prefix, without=without)
    report.renamed = [key for key in report.matched if key not in state]
    report.notes = notes
    _check_weight_tensors(model_state, converted, report)
    _check_model_match(model_state, converted, report, min_match)
    if report.missing and not allow_missing:
        _check_complete(model, report, () if min_match >= MIN_MATCH else (backbone_prefix or "",))
    load_full_state(model, {key: converted[key] for key in report.matched}, strict=False)
    logger.info("loaded weights from %s\n%s", source, report)
    _log_mismatches(model_state, converted, report, backbone_prefix)
    return report


def _compare(
    model: nn.Module,
    model_state: State,
    converted: State,
    source: str,
    *,
    backbone_prefix: str,
    without: tuple[str, ...],
) -> ImportReport:
    """Compare ``converted``, the converted state dict, with ``model_state``, the state dict of the model."""
    matched = [key for key in converted if key in model_state and model_state[key].shape == converted[key].shape]
    # Ignored: num_batches_tracked, which old files lack, and the empty classifier of a head without classes.
    missing = [key for key in model_state if key not in converted and not key.endswith("num_batches_tracked")]
    if missing and not any(is_adapter(key) for key in converted):  # weights to which adapters are added
        missing, without = [key for key in missing if not is_adapter(key)], (*without, "*.lora_A", "*.lora_B")
    weights = [key for key in model_state if not key.endswith("num_batches_tracked")]
    backbone = [key for key in weights if key.startswith(backbone_prefix)] or weights  # a model without a backbone
    backbone = [key for key in backbone if not any(fnmatchcase(key, pattern) for pattern in without)]
    loaded, classifier_keys = set(matched), classifiers(model)
    other_shape = [key for key in converted if key in model_state and key not in loaded]
    # A model without classes has empty classifiers, also those that no head lists.
    other_shape = [key for key in other_shape if key in classifier_keys or model_state[key].numel() == 0]
    return ImportReport(
        source,
        matched=matched,
        dropped=[key for key in converted if key not in model_state],
        missing=[key for key in missing if model_state[key].numel() > 0],
        other_shape=other_shape,
        not_needed=[key for key in other_shape if model_state[key].shape[0] == 0],
        backbone_fraction=sum(key in loaded for key in backbone) / max(len(backbone), 1),
    )


def _check_weight_tensors(model_state: State, converted: State, report: ImportReport) -> None:
    """Raise WeightsError if a tensor cannot be copied into a floating-point parameter."""
    expected = [key for key in report.matched if model_state[key].is_floating_point()]
    wrong = [key for key in expected if not (converted[key].is_floating_point() and is_weight(converted[key]))]
    if wrong:
        first = converted[wrong[0]]
        raise WeightsError(
            f"weights from {report.source} must be dense floating-point tensors, but {len(wrong)} are not"
            f"{examples(wrong)}; the first has dtype {first.dtype} and layout {first.layout} on device {first.device}\n"
            "  fix: save the weights before the model is quantized or otherwise converted"
        )


def is_weight(value: object) -> bool:
    """Return True if ``value`` is a dense tensor that is not on the meta device."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta


def _check_model_match(model_state: State, converted: State, report: ImportReport, min_match: float) -> None:
    """Raise WeightsError if a tensor other than a classifier has the wrong shape, or too few backbone tensors match."""
    placed = {*report.matched, *report.dropped, *report.other_shape}
    wrong = [key for key in converted if key not in placed]
    if wrong:
        shapes = "\n".join(
            f"    {key}: file {tuple(converted[key].shape)}, model {tuple(model_state[key].shape)}" for key in wrong[:5]
        )
        is_other_network = len(wrong) + len(report.matched) < min_match * len(model_state)
        if is_other_network:
            refuse_unsupported(converted, report.source)
        layout = _layout(converted) if is_other_network else ""
        raise WeightsError(
            f"weights from {report.source} do not match the model: shape mismatch in "
            f"{plural(len(wrong), 'tensor')}\n{shapes}\n{_sizes(model_state, converted)}{layout}"
            "  fix: use the config that the weights were trained with (MODEL.BACKBONE.NAME, "
            "MODEL.BACKBONE.DEPTH, MODEL.HEADS.*, INPUT.CHANNELS)"
        )
    if report.dropped:
        _check_blocks(model_state, converted, report, min_match)
    if report.backbone_fraction < min_match:
        refuse_unsupported(converted, report.source)
        fix = "use the config that the weights were trained with"
        if report.backbone_fraction > 0:
            fix += ", or lower MODEL.WEIGHTS_MIN_MATCH to load them partially"
        else:
            fix += f"; if the names in the file have a prefix, remove it (the first is {next(iter(converted), '')!r})"
        raise WeightsError(
            f"weights from {report.source} do not match the model's backbone: {report.backbone_fraction:.0%} of its "
            f"tensors match, less than MODEL.WEIGHTS_MIN_MATCH {min_match:g}\n{report}\n{_layout(converted)}"
            f"  fix: {fix}"
        )


def _check_blocks(model_state: State, converted: State, report: ImportReport, min_match: float) -> None:
    """Raise WeightsError if a file has more transformer blocks than the model."""
    blocks, expected = sum(block_counts(converted)), sum(block_counts(model_state))
    expected += any(key.startswith("heads.b1.") for key in model_state)  # the last block is in JPMHead
    if 0 < expected < min_match * blocks:
        raise WeightsError(
            f"weights from {report.source} do not match the model: the file has {blocks} transformer blocks, the model "
            f"{expected}\n{_sizes(model_state, converted)}"
            "  fix: use the config that the weights were trained with (MODEL.BACKBONE.NAME, "
            "MODEL.BACKBONE.DEPTH), or lower MODEL.WEIGHTS_MIN_MATCH to load them partially"
        )


def _check_complete(model: nn.Module, report: ImportReport, partial: tuple[str, ...]) -> None:
    """Raise WeightsError if learned tensors that evaluation needs are missing, other than those below ``partial``."""
    learned = {name for name, _ in model.named_parameters()} - classifiers(model)
    missing = [key for key in report.missing if key in learned or key.endswith((".running_mean", ".running_var"))]
    unused = [f"{name}." for name in model.training_only] if isinstance(model, _TrainedModel) else []
    missing = [key for key in missing if not key.startswith((*unused, *partial))]
    if missing:
        raise WeightsError(
            f"weights from {report.source} are incomplete: {plural(len(missing), 'learned tensor')} of the model "
            f"would keep initial values{examples(missing)}\n{report}\n"
            "  fix: use the config that the weights were trained with (MODEL.META_ARCHITECTURE, MODEL.BACKBONE.*, "
            "MODEL.HEADS.*), or set MODEL.WEIGHTS_ALLOW_MISSING to True to use the initial values"
        )


def _sizes(model_state: State, converted: State) -> str:
    """Describe the transformers of a file and of the model, one line each; empty for other networks."""
    sizes = {"file": transformer_size(converted), "model": transformer_size(model_state)}
    return "".join(f"  {name}: {size}\n" for name, size in sizes.items()) if all(sizes.values()) else ""


def _layout(converted: State) -> str:
    """Describe the known layout nearest to a file, as a line of a message; empty if none is near."""
    nearest = nearest_layout(converted)
    return f"  nearest known layout of the file: {nearest}\n" if nearest else ""


def _log_mismatches(model_state: State, converted: State, report: ImportReport, backbone_prefix: str) -> None:
    """Log unexpected, missing and mismatched tensors."""
    # Ignored: an ImageNet classifier inside the backbone, as in files of TransReID.
    imagenet = tuple(f"{backbone_prefix}{name}." for name in ("fc", "head", "classifier"))
    unexpected = [key for key in report.dropped if key.startswith(backbone_prefix) and not key.startswith(imagenet)]
    adapters = [key for key in unexpected if is_adapter(key)]
    if adapters:
        logger.warning(
            "%s in %s are not used, because the model has no LoRA adapters%s: the features will differ.\n"
            "  fix: set MODEL.LORA.RANK, ALPHA and TARGETS as in the original model",
            plural(len(adapters), "tensor"),
            report.source,
            examples(adapters),
        )
        unexpected = [key for key in unexpected if key not in adapters]
    if unexpected and backbone_prefix:
        logger.warning(
            "the backbone in %s has %s that the model lacks%s: if the original model uses them, the features "
            "will differ.\n  fix: set MODEL.BACKBONE.WITH_NL, WITH_SE and DEPTH as in the original model",
            report.source,
            plural(len(unexpected), "tensor"),
            examples(unexpected),
        )
    if report.missing:
        logger.warning(
            "%s initial values; not found in %s%s",
            plural(len(report.missing), "tensor of the model keeps its", "tensors of the model keep their"),
            report.source,
            examples(report.missing),
        )
    for key in report.other_shape:
        if key in report.not_needed:
            continue
        logger.warning(
            "%s was not loaded and keeps its initial values, because the number of identities differs: the shape is %s "
            "in %s, but %s in the model",
            key,
            tuple(converted[key].shape),
            report.source,
            tuple(model_state[key].shape),
        )


def classifiers(model: nn.Module) -> set[str]:
    """Collect the names of tensors that depend on the training identities, as listed in ``module.classifiers``."""
    return {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if isinstance(module, ClassDependent)
        for key in module.classifiers
    }


def examples(keys: list[str]) -> str:
    """Format the first three keys as ``" (a, b, c, ...)"``; empty if there are no keys."""
    return f" ({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''})" if keys else ""
