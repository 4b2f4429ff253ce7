"""A model whose weights are float16 and that needs no autocast, for a file that other programs run."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


def to_float16(module: nn.Module) -> None:
    """Let a module, in evaluation mode, compute in float16 by itself, in place; it cannot be trained any more.

    Weights are float16, and every module that has some casts its inputs to it, as autocast would in front of each
    operation. In float32 stay, with their weights, as under autocast on a GPU:

    - float32 regions (``force_fp32``, ``SOLVER.AMP.FORCE_FP32``) with all that is below them;
    - normalization layers, whose statistics leave float16's range; what they return is float16.

    Args:
        module: e.g. a backbone, float32.
    """
    if getattr(module.forward, "is_fp32_region", False):
        return  # casts its inputs itself, and what it returns stays float32
    if _has_region(module) or _is_norm(module):
        module.register_forward_pre_hook(_inputs_in(torch.float32), with_kwargs=True)
        module.register_forward_hook(_output_in_float16)
        return
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    for tensor in own:
        if tensor.is_floating_point():
            tensor.data = tensor.data.half()
    if any(tensor.dtype == torch.float16 for tensor in own):
        module.register_forward_pre_hook(_inputs_in(torch.float16), with_kwargs=True)
    for child in module.children():
        to_float16(child)


def _has_region(module: nn.Module) -> bool:
    """Whether a method of the module is a float32 region, in which it may use any of its parts."""
    return any(
        getattr(member, "is_fp32_region", False) for base in type(module).__mro__ for member in vars(base).values()
    )


def _is_norm(module: nn.Module) -> bool:
    """Whether it is a normalization layer, of PyTorch's, torchvision's or timm's: none has a base class for all."""
    below = sum(1 for _ in module.parameters()) - sum(1 for _ in module.parameters(recurse=False))
    return below == 0 and any("Norm" in base.__name__ for base in type(module).__mro__)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with every float tensor in it as ``dtype``."""
    return tree_map(
        lambda each: each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each, value
    )


def _inputs_in(dtype: torch.dtype) -> Any:
    """Return a forward pre-hook that casts the inputs."""

    def cast(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _cast(args, dtype), _cast(kwargs, dtype)

    return cast


def _output_in_float16(module: nn.Module, args: Any, output: Any) -> Any:
    return _cast(output, torch.float16)
