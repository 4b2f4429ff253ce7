"""Conversion of state dicts from other programs to the parameter names used in fastamp."""

from collections.abc import Mapping

import torch
from torch import nn

_STEM_NOTE = (
    "{who} use a padded stem pooling: set MODEL.BACKBONE.STEM_POOL to padded for the same features (the default, ceil, "
    "is FastReID's since 2020-08-14)"
)


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


def whole_model_names(state: dict[str, torch.Tensor], backbone: nn.Module, notes: list[str]) -> dict[str, torch.Tensor]:
    """Add FastReID's prefixes ``backbone.`` and ``heads.`` to the tensor names of a complete model.

    TransReID uses ``base.`` for the backbone and no prefix for the head. torchreid uses no prefixes: all tensors except
    the classifier belong to the backbone. The head converts the names of its own tensors.

    Args:
        state (dict[str, torch.Tensor]): state dict of a complete model.
        backbone (nn.Module): backbone of the model to load into.
        notes (list[str]): remarks for the import report are appended here.
    """
    names = list(state)
    if is_agw(state):
        return agw_names(state)
    pools_without_padding = getattr(backbone, "stem_pool", "") == "ceil"
    if any(name.startswith("base.") for name in names):
        return {
            f"backbone.{name.removeprefix('base.')}" if name.startswith("base.") else f"heads.{name}": value
            for name, value in state.items()
        }
    if any(name.startswith(("backbone.", "heads.")) for name in names):
        if any(name.startswith("heads.bnneck.") for name in names) and pools_without_padding:
            notes.append(_STEM_NOTE.format(who="models of FastReID up to v0.1.1, such as this file,"))
        return state
    if not backbone.state_dict().keys() & state.keys():
        return state
    if pools_without_padding:
        notes.append(
            _STEM_NOTE.format(who="ResNets of torchreid")
            + "; LAST_STRIDE is 2 in torchreid's resnet50, 1 in resnet50_fc512"
        )
    of_head = ("classifier.", "fc.")
    return {f"{'heads' if name.startswith(of_head) else 'backbone'}.{name}": value for name, value in state.items()}
