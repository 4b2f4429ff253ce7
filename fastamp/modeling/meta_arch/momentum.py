"""Exponential moving average of the weights of a model, updated in each forward pass."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fastamp.amp.model_tensors import ModelTensors


class MomentumCopy(nn.Module):
    """Copies of submodules of a model, with exponential moving averages of the weights in float32.

    The averages are buffers, not parameters: they have no gradients and are not optimized, but are saved in
    checkpoints. If a step is skipped, they are restored, like the running statistics of batch norm. Call ``update`` at
    the start of a forward pass in training mode, when the model has the weights of the last applied step.

    Args:
        model: model that contains the submodules.
        parts: names of the submodules; the copies have the same names.
        momentum: momentum of the average per update, in 0..1.
    """

    written_in_forward = True

    def __init__(self, model: nn.Module, *, parts: tuple[str, ...], momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        for name in parts:
            self.add_module(name, copy.deepcopy(model.get_submodule(name)))
        self.weights = tuple(name for name, _ in self.named_parameters())
        _parameters_to_buffers(self)
        self._lists: list[ModelTensors] = []
        self._pairs_key: tuple[Any, ...] | None = None
        self._cached_pairs: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    @torch.no_grad()
    def update(self, model: nn.Module, *, statistics: bool) -> None:
        """Update the average: weights = momentum * weights + (1 - momentum) * weights of the model.

        Args:
            model: the model that the submodules were copied from.
            statistics: average the buffers too, e.g. the statistics of batch norm; integer buffers are copied.
        """
        floating, others = self._pairs(model, statistics=statistics)
        torch._foreach_lerp_(*floating, 1 - self.momentum)
        if others[0]:
            torch._foreach_copy_(*others)

    def copy_training_modes(self, model: nn.Module) -> None:
        """Copy the training mode of each module from ``model``, which may have frozen modules in evaluation mode."""
        lists, count = self._lists_of(model), len(self._modules)
        for of_copy, originals in zip(lists[:count], lists[count:], strict=True):
            for module, original in zip(of_copy.modules, originals.modules, strict=True):
                module.training = original.training

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return the names of the buffers that are equal on all ranks: weights, but not batch norm statistics."""
        return self.weights

    def fill_from_model(self, state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
        """Add the tensors of this module to a state dict that lacks them, as copies of the model's tensors.

        Args:
            state: state dict of the whole model.
            prefix: prefix of this module in ``state``, including the trailing dot.
        """
        if any(name.startswith(prefix) for name in state):
            return state
        prefixes = tuple(f"{part}." for part in self._modules)
        return state | {prefix + name: value for name, value in state.items() if name.startswith(prefixes)}

    def _lists_of(self, model: nn.Module) -> list[ModelTensors]:
        """Return up-to-date lists of the modules of each copy, then of each submodule of the model."""
        sources = [*self._modules.values(), *(model.get_submodule(part) for part in self._modules)]
        if [tensors.model for tensors in self._lists] != sources:
            self._lists = [ModelTensors(source) for source in sources]
            self._pairs_key = None
        for tensors in self._lists:
            tensors.refresh()
        return self._lists

    def _pairs(self, model: nn.Module, *, statistics: bool) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Return (averages, tensors of the model) of the floating-point tensors, and of the other tensors."""
        key = (statistics, *(tensors.version for tensors in self._lists_of(model)))
        if key != self._pairs_key:
            averaged = dict(self.named_buffers())
            current = {name: t for name, t in self._tensors_of(model, statistics=statistics) if name in averaged}
            self._cached_pairs = [
                ([averaged[name] for name in names], [current[name] for name in names])
                for names in (
                    [name for name, tensor in current.items() if tensor.is_floating_point() is floating]
                    for floating in (True, False)
                )
            ]
            self._pairs_key = key
        return self._cached_pairs

    def __getstate__(self) -> dict[str, Any]:
        # A copy of this module must not contain the model.
        return self.__dict__ | {"_lists": [], "_pairs_key": None, "_cached_pairs": []}

    def _tensors_of(self, model: nn.Module, *, statistics: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for part in self._modules:
            original = model.get_submodule(part)
            yield from original.named_parameters(part)
            if statistics:
                yield from original.named_buffers(part)


def _parameters_to_buffers(root: nn.Module) -> None:
    """Convert all parameters to buffers, in place; shared parameters stay shared."""
    buffers: dict[nn.Parameter, torch.Tensor] = {}
    for module in root.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                del module._parameters[name]
                module.register_buffer(name, buffers.setdefault(parameter, parameter.detach()))
