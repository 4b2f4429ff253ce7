"""A second set of weights that follows a model's as an exponential moving average."""

import copy
from collections.abc import Iterator

import torch
from torch import nn

from fastamp.utils.moved import renamed_attribute


class MomentumCopy(nn.Module):
    """Copies of some parts of a model whose weights are a moving average of those parts' weights, in float32.

    All of it is buffers, the weights too: no gradient and no optimizer reaches them, a checkpoint holds them, and a
    step that is skipped gives them back as it does the running statistics of batch norm. ``update`` comes first in a
    training forward pass, where the model's weights are those of the last step that was taken.

    Args:
        model: has the parts.
        parts: their names in it, which are those of the copies here.
        momentum: share of the average that an update keeps, 0..1.
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
        """Move the weights by 1 - momentum of their difference to the model's.

        Args:
            model: the one that the copies were made of.
            statistics: its other buffers too, e.g. batch norm's; those that are no floating-point numbers are copied.
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
        """Be in training and evaluation mode where the model is, part by part: parts of it may be frozen."""
        for part in self._modules:
            pairs = zip(self.get_submodule(part).modules(), model.get_submodule(part).modules(), strict=True)
            for module, original in pairs:
                module.training = original.training

    def equal_on_all_ranks(self) -> tuple[str, ...]:
        """Return the buffers that every rank computes alike: the weights, from weights that are the same everywhere."""
        return self.weights

    def fill_from_model(self, state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
        """Return ``state`` of a whole model with this module's tensors, taken from the model's where it has none.

        Args:
            state: name -> tensor.
            prefix: of this module's names in it, with the dot.
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
    """Make buffers of all parameters, in place; those that share a tensor go on sharing it."""
    buffers: dict[nn.Parameter, torch.Tensor] = {}
    for module in root.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                del module._parameters[name]
                module.register_buffer(name, buffers.setdefault(parameter, parameter.detach()))
