"""Cached lists of the modules and tensors of a model."""

import itertools
import operator
from typing import Any

import torch
from torch import nn

_VALUES = operator.methodcaller("values")


class ModelTensors:
    """Cached lists of the modules, parameters and buffers of a model.

    ``nn.Module.parameters`` and ``buffers`` visit every module in Python, which takes milliseconds for a deep model.
    ``refresh`` compares the identities of all modules and tensors instead, and updates the lists only if one of them
    was added, removed or replaced. The lists are empty before the first ``refresh``.

    Args:
        model: the model.

    Attributes:
        model: see Args.
        modules: all modules.
        parameters: all parameters, without duplicates.
        version: number of updates of the lists.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: list[nn.Module] = []
        self.parameters: list[nn.Parameter] = []
        self.version = 0
        self._members: list[dict[str, Any]] = []
        self._held: list[nn.Module | torch.Tensor | None] = []
        self._known: list[int] | None = None

    def refresh(self) -> int:
        """Update the lists if the model has changed, and return ``version``."""
        if self._ids() != self._known:
            self.version += 1
            self.modules = list(self.model.modules())
            self.parameters = list(self.model.parameters())
            self._members = [members for m in self.modules for members in (m._modules, m._parameters, m._buffers)]
            # Keeps the members alive, so that a new object cannot have the id of one of them.
            self._held = [value for member in self._members for value in member.values()]
            self._known = self._ids()
        return self.version

    def _ids(self) -> list[int]:
        return list(map(id, itertools.chain.from_iterable(map(_VALUES, self._members))))
