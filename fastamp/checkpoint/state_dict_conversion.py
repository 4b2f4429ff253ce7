"""Conversion of state dicts from other programs to the parameter names used in fastamp."""

from collections.abc import Mapping

import torch
from torch import nn

from fastamp.checkpoint.load_state import convert_state_dict
from fastamp.contracts import State

_STEM_NOTE = (
    "{who} use a padded stem pooling: set MODEL.BACKBONE.STEM_POOL to padded for the same features (the default, ceil, "
    "is FastReID's since 2020-08-14)"
)

_RELU_NOTE = (
    "the ResNets of the strong baseline and AGW have no ReLU in the stem: set MODEL.BACKBONE.STEM_RELU to False for "
    "the same features (the default, True, is that of torchvision and FastReID)"
)
# Modules of SpCL and cluster-contrast, whose networks are sequences -> modules of a ResNet and its head.
_SEQUENCE = {f"base.{number}.": f"base.{name}." for number, name in enumerate(("conv1", "bn1"))}
_SEQUENCE |= {f"base.{number + 3}.": f"base.layer{number}." for number in range(1, 5)} | {"feat_bn.": "bottleneck."}
# Modules of MiewID -> modules of this package.
_MIEWID = {"pooling": "heads.pool_layer", "bn": "heads.bottleneck"}
# Prefixes of the head in files without a prefix for the backbone: of torchreid, and of the vision transformers that
# TransReID-SSL and PASS trained without labels.
_OF_HEAD = ("classifier.", "fc.", "bottleneck.")

# Modules of the two-stem network of Ye et al. (Cross-Modal-Re-ID-baseline) -> modules of ``TwoStemResNet``.
_AGW_MODULES = {
    f"{kind}_module.{kind}.{module}": f"backbone.{prefix}{module}"
    for kind, prefix in (("visible", ""), ("thermal", "infrared_"))
    for module in ("conv1", "bn1")
}
_AGW_STEMS = ("visible_module.", "thermal_module.")


def is_agw(state: Mapping[str, torch.Tensor]) -> bool:
    """Return True for a state dict of the visible-infrared program of Ye et al. 2021."""
    return any(name.startswith(_AGW_STEMS) for name in state)


def agw_names(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert the names of the visible-infrared network of Ye et al. 2021 to ``backbone.*`` and ``heads.*``.

    The network consists of three whole ResNets: of the stems, only the first convolution and normalization are used;
    of the shared network, only the stages.
    """
    converted = {}
    for name, value in rename_modules(state, _AGW_MODULES).items():
        if name.startswith((*_AGW_STEMS, *(f"base_resnet.base.{module}." for module in ("conv1", "bn1", "fc")))):
            continue
        if name.startswith("base_resnet.base."):
            name = f"backbone.{name.removeprefix('base_resnet.base.')}"
        elif name.startswith("NL_"):
            name = f"backbone.{name.replace('.g.0.', '.g.')}"
        elif not name.startswith("backbone."):
            name = f"heads.{name}"
        converted[name] = value
    return converted


def is_strong_baseline(state: Mapping[str, torch.Tensor]) -> bool:
    """Return True for a ResNet of the strong baseline (Luo et al. 2019) or of AGW for visible images (Ye et al. 2021).

    Their ResNets have no ReLU in the stem, except for those with instance norm.
    """
    return "base.conv1.weight" in state and "base.layer1.0.bn1.IN.weight" not in state


def is_miewid(state: Mapping[str, torch.Tensor]) -> bool:
    """Return True for a file of MiewID: a network of timm, a learned exponent of the pooling, and a batch norm."""
    return {"pooling.p", "bn.running_mean"} <= state.keys()


def sequence_names(state: State) -> State:
    """Convert the numbered modules of the ResNets of SpCL (Ge et al. 2020) and cluster-contrast (Dai et al. 2022)."""
    if "base.0.weight" not in state:
        return state
    renamed = {}
    for name, value in state.items():
        old = next((prefix for prefix in _SEQUENCE if name.startswith(prefix)), "")
        renamed[_SEQUENCE[old] + name.removeprefix(old) if old else name] = value
    return renamed


_MOCO = "encoder_q."
_MOCO_HEADS = tuple(f"{_MOCO}{name}." for name in ("fc", "fc1", "fc2", "classifier", "embed_fc"))


def backbone_names(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert the prefix of the backbone's tensors to ``backbone.``; the names of other tensors do not change.

    The prefix is ``base.`` in TransReID's files and ``encoder_q.`` in MoCo's, whose projection heads below the same
    prefix do not belong to the backbone. Without one of these prefixes, no name changes.
    """
    renamed = {}
    for name, value in state.items():
        prefix = next((candidate for candidate in ("base.", _MOCO) if name.startswith(candidate)), "")
        if prefix and not name.startswith(_MOCO_HEADS):
            name = f"backbone.{name.removeprefix(prefix)}"
        renamed[name] = value
    return renamed


def _add_backbone_prefix(state: dict[str, torch.Tensor], backbone: nn.Module) -> dict[str, torch.Tensor]:
    """Add the prefix ``backbone.`` to all names if they match more than half of the backbone's tensors.

    Names are compared after the backbone's conversion, e.g. of timm's names.
    """
    try:
        converted = convert_state_dict(backbone, state)[0]
    except (RuntimeError, LookupError):  # names of a different architecture
        return state
    backbone_keys = backbone.state_dict().keys()
    if 2 * len(backbone_keys & converted.keys()) <= len(backbone_keys):
        return state
    return {f"backbone.{name}": value for name, value in state.items()}


def rename_modules(state: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Rename modules in a state dict.

    Args:
        state: parameter name -> tensor.
        names: old module name -> new module name. Tensors of other modules keep their names.
    """
    renamed = {}
    for key, value in state.items():
        module, _, tensor = key.rpartition(".")
        renamed[f"{names[module]}.{tensor}" if module in names else key] = value
    return renamed


def whole_model_names(
    state: State, backbone: nn.Module, notes: list[str], *, pools_without_padding: bool, has_relu: bool
) -> State:
    """Add FastReID's prefixes ``backbone.`` and ``heads.`` to the tensor names of a complete model.

    TransReID uses ``base.`` for the backbone and no prefix for the head. torchreid uses no prefixes: all tensors except
    the classifier belong to the backbone. Files of a pretrained backbone without a head get the prefix ``backbone.``.
    The names of the head's tensors are converted later, by the head.

    Args:
        state: state dict of a complete model.
        backbone: backbone of the model to load into.
        notes: remarks for the import report are appended here.
        pools_without_padding: whether the stem of the model to load into is that of current FastReID releases.
        has_relu: whether the model to load into is a ResNet with a ReLU in its stem.
    """
    if is_miewid(state):
        return rename_modules(state, _MIEWID)
    program = "SpCL and cluster-contrast" if "base.0.weight" in state else "the strong baseline and AGW"
    lacks_relu, state = is_strong_baseline(state), sequence_names(state)
    if any(name.startswith(("backbone.", "heads.")) for name in state):
        if any(name.startswith("heads.bnneck.") for name in state) and pools_without_padding:
            notes.append(_STEM_NOTE.format(who="models of FastReID up to v0.1.1, such as this file,"))
        return state
    if is_agw(state):
        return agw_names(state)
    if any(name.startswith(_MOCO) for name in state):
        return backbone_names(state)
    if any(name.startswith("base.") for name in state):
        if pools_without_padding and "base.conv1.weight" in state:
            notes.append(_STEM_NOTE.format(who=program))
        if has_relu and lacks_relu:
            notes.append(_RELU_NOTE)
        return {
            f"backbone.{name.removeprefix('base.')}" if name.startswith("base.") else f"heads.{name}": value
            for name, value in state.items()
        }
    if not backbone.state_dict().keys() & state.keys():
        return _add_backbone_prefix(state, backbone)
    if pools_without_padding:
        notes.append(
            _STEM_NOTE.format(who="ResNets of torchreid")
            + "; LAST_STRIDE is 2 in torchreid's resnet50, 1 in resnet50_fc512"
        )
    of_head = {name for name in state if name.startswith(_OF_HEAD)} - backbone.state_dict().keys()
    return {f"{'heads' if name in of_head else 'backbone'}.{name}": value for name, value in state.items()}
