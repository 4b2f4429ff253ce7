"""Low-rank adaptation (LoRA) of linear layers."""

import math
from collections.abc import Iterator

import torch
from torch import nn

from fastamp.amp import force_fp32

ADAPTERS = ("lora_A", "lora_B")
"""Names of the parameters of an adapter, below the adapted module."""

_ADAPTED_CLASSES: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}


class Adapted(nn.Module):
    """Base class of modules with a low-rank update of a parameter; see ``add_adapter``.

    Attributes:
        lora_A, lora_B: factors of the update; missing after ``merge_adapters``.
        lora_scale: factor of the update.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float

    def adapted(self) -> torch.Tensor:
        """Return the parameter with its update."""
        raise NotImplementedError


def add_adapter(module: nn.Module, name: str, *, rank: int, alpha: float) -> None:
    """Add a low-rank update to the parameter ``name`` of a module, and freeze the parameter.

    The module uses W + (alpha / rank) B A in place of the parameter W (Hu et al. 2022, arXiv:2106.09685, eq. 3). A is
    drawn as in the original program (Kaiming-uniform), B is 0, so that the update starts at 0. The names of the
    module's own parameters do not change; ``lora_A`` and ``lora_B`` are added. The update is added to the weight, not
    to the output, because the attention of Swin and others uses the weight itself; the function is the same.

    Args:
        module: module to change, e.g. ``nn.Linear``.
        name: name of a parameter (out, in) of the module.
        rank: number of rows of A (rank, in) and columns of B (out, rank).
        alpha: scale of the update, which is divided by ``rank``.
    """
    weight = module.get_parameter(name)
    module.__class__ = _adapted_class(type(module), name)
    assert isinstance(module, Adapted)
    module.lora_A = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
    module.lora_B = nn.Parameter(weight.new_zeros(weight.shape[0], rank))
    nn.init.kaiming_uniform_(module.lora_A, a=math.sqrt(5))
    module.lora_scale = alpha / rank


def _adapted_class(module_class: type[nn.Module], name: str) -> type[nn.Module]:
    """Create a subclass of ``module_class`` whose attribute ``name`` is the parameter plus the low-rank update."""

    if (module_class, name) in _ADAPTED_CLASSES:
        return _ADAPTED_CLASSES[module_class, name]

    def adapted(self: Adapted) -> torch.Tensor:
        weight = self._parameters.get(name, self._buffers.get(name))  # a buffer in a momentum encoder
        if weight is None:
            raise AttributeError(name)
        if "lora_A" not in self._parameters:  # merged
            return weight
        return weight + _update(self.lora_A, self.lora_B, self.lora_scale)

    members = {name: property(adapted), "adapted": adapted, "__module__": module_class.__module__}
    generated = type(module_class.__name__, (module_class, Adapted), members)
    return _ADAPTED_CLASSES.setdefault((module_class, name), generated)


@force_fp32
def _update(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute the low-rank update ``scale`` B A, (out, in), in float32."""
    return scale * (b @ a)


def adapted_modules(model: nn.Module) -> Iterator[tuple[str, Adapted]]:
    """Iterate over the names and the modules of a model with adapters."""
    for name, module in model.named_modules():
        if isinstance(module, Adapted) and "lora_A" in module._parameters:
            yield name, module


def is_adapter(name: str) -> bool:
    """Return True for the name of a parameter of an adapter."""
    return name.rpartition(".")[2] in ADAPTERS


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add the low-rank updates to the parameters and remove the adapters, in place; the function is the same."""
    for _, module in list(adapted_modules(model)):
        merged = module.adapted()
        del module.lora_A, module.lora_B
        module.adapted().copy_(merged)
        if "adapted" in vars(type(module)):  # not below another generated class
            module.__class__ = type(module).__bases__[0]
