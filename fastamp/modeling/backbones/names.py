"""Translate the names that other programs give to the parts of a network."""

from collections.abc import Mapping

import torch


def rename_modules(state: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Return ``state`` with the modules that hold its tensors renamed: other name -> own name, others stay."""
    renamed = {}
    for key, value in state.items():
        module, _, tensor = key.rpartition(".")
        renamed[f"{names[module]}.{tensor}" if module in names else key] = value
    return renamed
