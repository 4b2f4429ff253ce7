"""Conversion of a model to float16 weights that run without autocast, for export."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from fastamp.amp.fp32 import is_fp32_region


def to_float16(module: nn.Module) -> None:
    """Convert a module for inference in float16, in place. The converted module cannot be trained.

    Weights become float16, and each module with weights casts its inputs to float16, as autocast does before each
    operation. As under autocast on a GPU, the following modules and their weights stay in float32:

    - float32 regions (``force_fp32``, ``SOLVER.AMP.FORCE_FP32``) and their submodules;
    - normalization layers, because their statistics may exceed the range of float16. Their output is cast to float16.

    Args:
        module: a float32 module in evaluation mode, e.g. a backbone.
    """
    if is_fp32_region(module.forward):
        return  # a region casts its own inputs, and its output stays float32
    if _has_region(module) or _is_norm(module):
        module.register_forward_pre_hook(_inputs_in(torch.float32), with_kwargs=True)
        module.register_forward_hook(_output_in_float16)
        return
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data = tensor.data.half()
    if any(tensor.dtype == torch.float16 for tensor in tensors):
        module.register_forward_pre_hook(_inputs_in(torch.float16), with_kwargs=True)
    for child in module.children():
        to_float16(child)


def _has_region(module: nn.Module) -> bool:
    """Return True if at least one method of the module's class is decorated with ``force_fp32``."""
    return any(is_fp32_region(member) for base in type(module).__mro__ for member in vars(base).values())


def _is_norm(module: nn.Module) -> bool:
    """Return True for normalization layers of PyTorch, torchvision and timm, which share no base class."""
    below = sum(1 for _ in module.parameters()) - sum(1 for _ in module.parameters(recurse=False))
    return below == 0 and any("Norm" in base.__name__ for base in type(module).__mro__)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast all floating-point tensors in a nested structure to ``dtype``."""
    return tree_map(
        lambda item: item.to(dtype) if isinstance(item, torch.Tensor) and item.is_floating_point() else item,
        value,
    )


def _inputs_in(dtype: torch.dtype) -> Any:
    """Build a forward pre-hook that casts the inputs to ``dtype``."""

    def cast(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _cast(args, dtype), _cast(kwargs, dtype)

    return cast


def _output_in_float16(module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(output, torch.float16)
