"""Infer the config of a model from the parameter names and shapes in a weights file."""

import itertools
import logging
import re
from collections.abc import Iterator, Mapping

import torch

from fastamp.checkpoint.layouts import nearest_layout, refuse_unsupported
from fastamp.checkpoint.load_state import convert_state_dict
from fastamp.checkpoint.state_dict_conversion import (
    agw_names,
    is_agw,
    is_miewid,
    is_strong_baseline,
    sequence_names,
)
from fastamp.config import CfgNode, get_cfg
from fastamp.contracts import State
from fastamp.modeling.backbones import BACKBONE_REGISTRY, Variants
from fastamp.modeling.heads import jpm_head, part_token_head
from fastamp.modeling.heads.embedding_head import PUBLISHED_EXPONENTS
from fastamp.modeling.meta_arch import lightmbn, mgn
from fastamp.utils.errors import WeightsError

logger = logging.getLogger(__name__)

# Prefixes of tensors that do not belong to the backbone, in files without a prefix for the backbone.
_HEAD_PREFIXES = ("fc.", "classifier.", "heads.", "head.", "pixel_", "bottleneck", "b1.", "b2.", "b1_", "b2_", "b3")
# Prefixes of the first head of meta-architectures with several heads.
_FIRST_HEADS = {"MGN": "b1_head.", "LightMBN": "average_head."}
_DERIVED_SUFFIXES = ("num_batches_tracked", "relative_position_index", "attn_mask")
# More than twice as many as in ResNeSt 269x, the largest. The time per candidate grows with the number of tensors.
_MAX_TENSORS = 5000
# Widths of timm's EfficientNetV2 (RW), the networks of MiewID.
_MIEWID = {1024: "timm/efficientnetv2_rw_t", 1792: "timm/efficientnetv2_rw_s", 2152: "timm/efficientnetv2_rw_m"}
# Maximum number of components of a prefix, and minimum fraction of the smallest variant's weights below it.
_MAX_PREFIX_PARTS, _MIN_PREFIX_FRACTION = 6, 0.6


def infer_config(state: State, source: str, defaults: CfgNode | None = None) -> dict[str, str]:
    """Infer the config keys of a model from its state dict.

    The state dict does not determine the max pooling of the stem, the last stride, pooling layers without weights, the
    type and scale of the classifier, or the normalization of images. The result contains these keys only if the tensor
    names belong to one program whose published models all have the same values.

    Args:
        state: parameter name -> tensor, from fastamp, FastReID, torchreid or TransReID.
        source: origin of ``state``, for error messages.
        defaults: config that supplies all other keys, including keys defined by projects. Default: ``get_cfg()``.

    Returns:
        Config key -> value, as text.

    Raises:
        WeightsError: if no registered backbone matches; see also ``_miewid_keys``.
    """
    if is_miewid(state):
        return _miewid_keys(state, source)
    if is_agw(state):
        state = agw_names(state)
    of_program = interpolation_keys(state)
    stem = _stem_keys(state)
    state = sequence_names(lightmbn.published_names(state))
    names = (name for name, head in _FIRST_HEADS.items() if any(key.startswith(head) for key in state))
    architecture = next(names, "Baseline")
    is_transreid = is_transreid_file(state)
    prefixes = ("base.", "backbone.")
    trunk = {name.partition(".")[2]: value for name, value in state.items() if name.startswith(prefixes)} or dict(state)
    if architecture != "Baseline":
        trunk = {"MGN": mgn, "LightMBN": lightmbn}[architecture].backbone_state(state)
    elif "b1.0.norm1.weight" in state:  # JPM's copies of the last block
        number = sum(name.startswith("blocks.") and name.endswith(".norm1.weight") for name in trunk)
        if is_transreid:
            number -= 1  # TransReID's files keep the unused last block
        trunk |= jpm_head.last_block_state(state, number=number)
    defaults = get_cfg() if defaults is None else defaults
    keys, width = _find_backbone(trunk, source, defaults)
    keys |= {"MODEL.BACKBONE.FEAT_DIM": str(width), "MODEL.META_ARCHITECTURE": architecture}
    if any(name.startswith("heads_extra_bn_") for name in state):
        keys["MODEL.BACKBONE.EXTRA_BN"] = "True"
    return (
        keys
        | _keys_from_tensors(keys, trunk)
        | _head_keys(state, prefix=_FIRST_HEADS.get(architecture, "heads."), is_transreid=is_transreid, width=width)
        | of_program
        | (stem if keys["MODEL.BACKBONE.NAME"] == "build_resnet_backbone" else {})
    )


def is_transreid_file(state: State) -> bool:
    """Return True for a file of TransReID or its descendants: a transformer below ``base.``.

    The strong baseline (Luo et al. 2019) and AGW (Ye et al. 2021) have a ResNet below this prefix.
    """
    return any(name.startswith("base.patch_embed.") for name in state)


def _miewid_keys(state: State, source: str) -> dict[str, str]:
    """Return the config keys of a file of MiewID.

    Raises:
        WeightsError: if its network is not one of timm's EfficientNetV2 (RW).
    """
    width = len(state["bn.running_mean"])
    if width not in _MIEWID or "backbone.conv_head.weight" not in state:
        raise WeightsError(
            f"{source} has the names of MiewID, but a network of {width} channels that is not recognized.\n"
            "  fix: set MODEL.BACKBONE.NAME to timm/NAME, with the model_name of its config, in a config based on "
            "Wildlife/miewid, and pass it with --config-file"
        )
    size = dict.fromkeys(("INPUT.SIZE_TRAIN", "INPUT.SIZE_TEST"), "(440, 440)")
    return size | {
        "MODEL.BACKBONE.NAME": _MIEWID[width],
        "MODEL.BACKBONE.LAST_STRIDE": "2",
        "MODEL.HEADS.POOL_LAYER": "GeneralizedMeanPoolingP",
        "MODEL.HEADS.WITH_BNNECK": "True",
        "INPUT.INTERPOLATION": "bilinear",
    }


def _stem_keys(state: State) -> dict[str, str]:
    """Return the keys of a ResNet's stem and last stride that the program of a file determines; {} if it is unknown.

    The programs are torchreid, the strong baseline, AGW, SpCL and cluster-contrast.
    """
    if any(name.startswith("base.") for name in state):
        stride = "1"
    elif {"conv1.weight", "classifier.weight"} <= state.keys():  # torchreid: resnet50_fc512 and resnet50
        stride = "1" if "fc.0.weight" in state else "2"
    else:
        return {}
    relu = {"MODEL.BACKBONE.STEM_RELU": "False"} if is_strong_baseline(state) else {}
    return {"MODEL.BACKBONE.STEM_POOL": "padded", "MODEL.BACKBONE.LAST_STRIDE": stride} | relu


def interpolation_keys(state: State) -> dict[str, str]:
    """Infer the config keys of the image interpolation from the library that wrote the state dict.

    torchreid, the strong baseline (Luo et al. 2019) and AGW resize images with bilinear interpolation. TransReID uses
    bicubic interpolation in training and bilinear interpolation in evaluation. The parameter names identify these
    programs; for other files, also of SpCL and cluster-contrast, which use bicubic interpolation, the result is empty.
    """
    if is_transreid_file(state):
        return {"INPUT.INTERPOLATION_TEST": "bilinear"}
    if any(name.startswith("base.") for name in state):
        return {} if "base.0.weight" in state else {"INPUT.INTERPOLATION": "bilinear"}
    prefixed = any(name.startswith(("backbone.", "heads.")) for name in state)
    return {} if prefixed or "classifier.weight" not in state else {"INPUT.INTERPOLATION": "bilinear"}


def backbone_prefixes(tensors: State, defaults: CfgNode | None = None) -> dict[str, str]:
    """Find the prefixes under which a weights file contains a backbone, sorted by the number of matching tensors.

    Args:
        tensors: path -> tensor, for all tensors of the file; see ``tensors_by_path``.
        defaults: see ``infer_config``.

    Returns:
        Prefix (empty, or with a trailing dot) -> name of the backbone, e.g. ``resnet``. The prefix of CLIP's vision
        transformer, which is not a supported backbone, maps to ``CLIP's image encoder``.
    """
    defaults = get_cfg() if defaults is None else defaults
    votes: dict[str, tuple[int, str]] = {}
    for name, variants in _all_variants().items():
        try:
            backbone_state = _build_and_convert(_backbone_keys(name, variants.depths[0]), {}, defaults)[0]
        except _CannotBuildError:
            continue
        # The first block of each stage is the same for every depth. Single-component names such as norm are too common.
        expected = {name for name in backbone_state if name.endswith(".weight") and "." in name.removesuffix(".weight")}
        counts: dict[str, int] = {}
        for path in tensors:
            parts = path.split(".")
            for start in range(min(len(parts) - 1, _MAX_PREFIX_PARTS)):
                if ".".join(parts[start:]) in expected:
                    prefix = ".".join(parts[:start]) + "." * bool(start)
                    counts[prefix] = counts.get(prefix, 0) + 1
                    break
        for prefix, count in counts.items():
            if count >= _MIN_PREFIX_FRACTION * len(expected) and count > votes.get(prefix, (0, ""))[0]:
                votes[prefix] = count, name.removeprefix("build_").removesuffix("_backbone")
    for prefix in {path.partition("visual.")[0] + "visual." for path in tensors if "visual.transformer." in path}:
        votes.setdefault(prefix, (0, "CLIP's image encoder"))
    return {prefix: name for prefix, (_, name) in sorted(votes.items(), key=lambda item: -item[1][0])}


def _all_variants() -> dict[str, Variants]:
    """Return the variants of all backbones that declare them: registry name -> ``Variants``."""
    backbones = {name: BACKBONE_REGISTRY.get(name) for name in BACKBONE_REGISTRY}
    return {name: backbone.variants for name, backbone in backbones.items() if backbone.variants is not None}


def _find_backbone(trunk: State, source: str, defaults: CfgNode) -> tuple[dict[str, str], int]:
    """Find the registered backbone that best matches ``trunk``, and return ``(config keys, width)``.

    Backbones that differ only in layers without weights can all match completely; the first one is used.
    """
    count = sum(not name.startswith(_HEAD_PREFIXES) and not name.endswith(_DERIVED_SUFFIXES) for name in trunk)
    if count > _MAX_TENSORS:
        raise WeightsError(
            f"{source} matches no supported model: found {count} backbone tensors, but the largest supported "
            "backbone has about 2000.\n  fix: pass the training config with --config-file or as KEY VALUE pairs"
        )
    best: tuple[float, dict[str, str], int] = (0.0, {}, 0)
    for keys in _candidates(trunk, defaults):
        try:
            fraction, width = _match_fraction(keys, trunk, defaults)
        except _CannotBuildError:  # e.g. an unsupported combination of options
            continue
        if fraction > best[0]:
            best = (fraction, keys, width)
        if fraction == 1.0:
            break
    fraction, keys, width = best
    if fraction < 0.9:
        refuse_unsupported(trunk, source)
        nearest = f"; the closest is {' '.join(keys.values())}: {fraction:.0%} of the tensors match" if keys else ""
        layout = nearest_layout(trunk)
        known = f"  nearest known layout: {layout}\n" if layout else ""
        raise WeightsError(
            f"{source} matches no supported model{nearest}.\n{known}"
            "  fix: pass the training config with --config-file or as KEY VALUE pairs"
        )
    return keys, width


def _candidates(trunk: State, defaults: CfgNode) -> Iterator[dict[str, str]]:
    """Yield the config keys of candidate backbones: most similar parameter names first, then fewest enabled options."""
    similarity: dict[str, float] = {}
    all_variants = _all_variants()
    for name, variants in all_variants.items():
        try:
            backbone_state, converted, _ = _build_and_convert(_backbone_keys(name, variants.depths[0]), trunk, defaults)
        except _CannotBuildError as error:
            logger.warning("skipping backbone %s, which cannot be built: %s", name, error)
            continue
        similarity[name] = len(backbone_state.keys() & converted.keys()) / len(backbone_state)
    for name in sorted(similarity, key=similarity.__getitem__, reverse=True)[:4]:
        variants = all_variants[name]
        for count in range(len(variants.options) + 1):
            for enabled, depth in itertools.product(itertools.combinations(variants.options, count), variants.depths):
                yield _backbone_keys(name, depth, enabled)


def _backbone_keys(name: str, depth: str, options: tuple[str, ...] = ()) -> dict[str, str]:
    keys = {"MODEL.BACKBONE.NAME": name, "MODEL.BACKBONE.DEPTH": depth}
    return keys | {f"MODEL.BACKBONE.{option}": "True" for option in options}


def _keys_from_tensors(keys: Mapping[str, str], trunk: State) -> dict[str, str]:
    """Infer config keys other than name, depth and options, e.g. the number of cameras of a ViT."""
    return BACKBONE_REGISTRY.get(keys["MODEL.BACKBONE.NAME"]).variants.keys_of(trunk)


class _CannotBuildError(Exception):
    """Raised if a registered backbone cannot be built, e.g. because an optional package is not installed."""


def _build_and_convert(keys: Mapping[str, str], trunk: State, defaults: CfgNode) -> tuple[State, State, int]:
    """Build a backbone on the meta device, and return ``(state dict, converted trunk, width)``.

    The converted trunk has the parameter names of the backbone. It is empty if the backbone cannot convert ``trunk``.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)  # warnings about candidates are irrelevant to the user
    try:
        cfg = defaults.with_values(keys | _keys_from_tensors(keys, trunk))
        with torch.device("meta"):
            backbone = BACKBONE_REGISTRY.build(cfg.MODEL.BACKBONE.NAME, cfg)
    except Exception as error:  # anything that a plugin's constructor raises
        raise _CannotBuildError(f"{type(error).__name__}: {error}") from error
    finally:
        logging.disable(level)
    backbone_state = {
        name: value for name, value in backbone.state_dict().items() if not name.endswith("num_batches_tracked")
    }
    try:
        return backbone_state, convert_state_dict(backbone, trunk)[0], backbone.feature_dim
    except (WeightsError, RuntimeError, KeyError, IndexError):  # the names belong to a different architecture
        return backbone_state, {}, backbone.feature_dim


def _match_fraction(keys: dict[str, str], trunk: State, defaults: CfgNode) -> tuple[float, int]:
    """Compute the fraction of tensors that match between a backbone and ``trunk``, and the width of the backbone."""
    backbone_state, converted, width = _build_and_convert(keys, trunk, defaults)
    matching = sum(
        name in backbone_state and backbone_state[name].shape == value.shape for name, value in converted.items()
    )
    unexpected = [name for name in converted if name not in backbone_state and not name.startswith(_HEAD_PREFIXES)]
    unexpected = [name for name in unexpected if not name.endswith(_DERIVED_SUFFIXES)]
    return matching / (len(backbone_state) + len(unexpected)), width


def _head_keys(state: State, *, prefix: str, is_transreid: bool, width: int) -> dict[str, str]:
    """Infer the config keys of the head and, for TransReID, of the image normalization."""
    head_state = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    head = head_state or {name: value for name, value in state.items() if not name.startswith(("backbone.", "base."))}
    keys: dict[str, str] = {}
    classifiers = [head[name] for name in ("weight", "classifier.weight", "branches.0.weight") if name in head]
    if classifiers and classifiers[0].dim() == 2:
        keys["MODEL.HEADS.NUM_CLASSES"] = str(len(classifiers[0]))
    if "fc.0.weight" in head and "fc.1.running_mean" in head:  # not a projection of MoCo
        return keys | {
            "MODEL.HEADS.NAME": "FCHead",
            "MODEL.HEADS.EMBEDDING_DIM": str(len(head["fc.0.weight"])),
            "MODEL.HEADS.NECK_FEAT": "after",
        }
    reduction = state.get("reductions.average.weight", head.get("bottleneck.0.weight"))
    if reduction is not None and reduction.dim() == 4:
        keys["MODEL.HEADS.EMBEDDING_DIM"] = str(len(reduction))
        positions, rest = divmod(reduction.shape[1], width)
        if positions > 2 and not rest:  # every position of the map, as in face recognition
            keys |= {"MODEL.HEADS.POOL_LAYER": "Flatten", "MODEL.BACKBONE.FEAT_DIM": str(reduction.shape[1])}
            if positions == 7 * 7:
                keys |= dict.fromkeys(("INPUT.SIZE_TRAIN", "INPUT.SIZE_TEST"), "(112, 112)")
    jpm = any(name.startswith(("b1.0.", "branches.")) for name in head)
    norm = any(name.startswith(("bottleneck", "bnneck")) and value.dim() == 1 for name, value in head.items())
    keys["MODEL.HEADS.WITH_BNNECK"] = str(norm or jpm)
    if not head.keys().isdisjoint({"pool_layer.p", *PUBLISHED_EXPONENTS}):
        keys["MODEL.HEADS.POOL_LAYER"] = "GeneralizedMeanPoolingP"
    if any(name.endswith("cls_token") for name in state):
        keys |= {"MODEL.HEADS.POOL_LAYER": "Identity", "MODEL.HEADS.NAME": "JPMHead" if jpm else "EmbeddingHead"}
    if any(name.endswith(("part_token", "part_token1")) for name in state):
        width = next(value.shape[-1] for name, value in state.items() if name.endswith("cls_token"))
        keys |= part_token_head.infer_keys(head, width)
    if jpm:
        branches = {match[1] for name in head if (match := re.match(r"(?:bottleneck_|branches\.)(\d+)\.", name))}
        keys["MODEL.HEADS.JPM.PARTS"] = str(len(branches - {"0"}))
    if is_transreid:
        half = "(127.5, 127.5, 127.5)"
        keys |= {"MODEL.HEADS.EVAL_FEAT": "before", "MODEL.PIXEL_MEAN": half, "MODEL.PIXEL_STD": half}
    return keys
