"""Exponential moving average of the weights of a model, updated in each forward pass."""

import copy
from collections.abc import Iterator

import torch
from torch import nn

from fastamp.utils.moved import renamed_attribute


class MomentumCopy(nn.Module):
    """Copies of submodules of a model, with exponential moving averages of the weights in float32.

    The averages are buffers, not parameters: they have no gradients and are not optimized, but are saved in
    checkpoints. If a step is skipped, they are restored, like the running statistics of batch norm. Call ``update`` at
    the start of a forward pass in training mode, when the model has the weights of the last applied step.

    Args:
        model (nn.Module): model that contains the submodules.
        parts (tuple[str, ...]): names of the submodules; the copies have the same names.
        momentum (float): momentum of the average per update, in 0..1.
    """

    written_in_forward = True

    def __init__(self, model: nn.Module, *, parts: tuple[str, ...], momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        for name in parts:
            self.add_module(name, copy.deepcopy(model.get_submodule(name)))
        self.weights = tuple(name for name, _ in self.named_parameters())
        _parameters_to_buffers(self)

    @torch.no_grad()
    def update(self, model: nn.Module, *, statistics: bool) -> None:
        """Update the average: weights = momentum * weights + (1 - momentum) * weights of the model.

        Args:
            model (nn.Module): the model that the submodules were copied from.
            statistics (bool): average the buffers too, e.g. the statistics of batch norm; integer buffers are copied.
        """
        averaged = dict(self.named_buffers())
        current = {name: tensor for name, tensor in self._tensors_of(model, statistics=statistics) if name in averaged}
        floating = [name for name, tensor in current.items() if tensor.is_floating_point()]
        torch._foreach_lerp_(
            [averaged[name] for name in floating], [current[name] for name in floating], 1 - self.momentum
        )
        for name in current.keys() - set(floating):
            averaged[name].copy_(current[name])

    def copy_training_modes(self, model: nn.Module) -> None:
        """Copy the training mode of each module from ``model``, which may have frozen modules in evaluation mode."""
        for part in self._modules:
            pairs = zip(self.get_submodule(part).modules(), model.get_submodule(part).modules(), strict=True)
            for module, original in pairs:
                module.training = original.training

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return the names of the buffers that are equal on all ranks: weights, but not batch norm statistics."""
        return self.weights

    def fill_from_model(self, state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
        """Add the tensors of this module to a state dict that lacks them, as copies of the model's tensors.

        Args:
            state (dict[str, torch.Tensor]): state dict of the whole model.
            prefix (str): prefix of this module in ``state``, including the trailing dot.
        """
        if any(name.startswith(prefix) for name in state):
            return state
        prefixes = tuple(f"{part}." for part in self._modules)
        return state | {prefix + name: value for name, value in state.items() if name.startswith(prefixes)}

    follow_modes = renamed_attribute("follow_modes", "copy_training_modes")
    starts_from = renamed_attribute("starts_from", "fill_from_model")

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
