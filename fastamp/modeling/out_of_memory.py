"""Detect that a model does not fit into memory before the operating system kills the process."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastamp.amp.device_errors import is_out_of_memory
from fastamp.config import CfgNode
from fastamp.utils.env import available_memory
from fastamp.utils.errors import ConfigError

_FACTORIES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.randint, torch.arange}
_MIN_CHECKED_BYTES = 2**26  # 64 MiB; smaller tensors are not checked, to save time
# PyTorch's errors if the number of bytes overflows.
_OVERFLOW_MESSAGES = (
    "size calculation overflowed",
    "multiplication overflow",
)
_MIN_SUSPECT_SIZE = 1024  # smaller config values cannot be the cause


@contextmanager
def explain_out_of_memory(cfg: CfgNode) -> Iterator[None]:
    """Raise ConfigError if a model built in this context does not fit into memory.

    Linux overcommits memory and kills the process only when the process writes to the memory. Therefore, the size of
    each large tensor is compared with the available memory before the tensor is created. Tensors created earlier are
    initialized by then and already reduce the available memory. Building on the meta device would give the total size,
    but all components, including custom ones, would have to support it, and pretrained weights could not be loaded.
    Tensors that are not created by PyTorch's factory functions are detected only if their allocation fails.

    Args:
        cfg: the config; the message names keys below ``MODEL``.

    Raises:
        ConfigError: if the model does not fit into memory. The message states the required and available memory, and
            the config keys that are the likely cause.
    """
    try:
        with _CheckTensorSizes(partial(_out_of_memory_error, cfg)):
            yield
    except (RuntimeError, MemoryError) as error:
        if not (is_out_of_memory(error) or any(text in str(error) for text in _OVERFLOW_MESSAGES)):
            raise
        requested = re.search(r"allocate (\d+) bytes", str(error))
        raise _out_of_memory_error(cfg, nbytes=int(requested[1]) if requested else None) from error


class _CheckTensorSizes(TorchFunctionMode):
    """Compare the size of each large CPU tensor with the available memory before the tensor is created.

    Args:
        error: creates the error from the shape and the bytes of a tensor, and the available bytes.
    """

    def __init__(self, error: Callable[..., ConfigError]) -> None:
        super().__init__()
        self._error = error

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = torch.device(kwargs.get("device") or torch.get_default_device())
        if func in _FACTORIES and device.type == "cpu" and kwargs.get("out") is None:
            arguments = {name: value for name, value in kwargs.items() if name not in ("generator", "pin_memory")}
            self._check(func(*args, **arguments | {"device": "meta"}))
        elif func is torch.Tensor.clone and args[0].device.type == "cpu":  # copies of modules clone their tensors
            self._check(args[0])
        return func(*args, **kwargs)

    def _check(self, tensor: torch.Tensor) -> None:
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < _MIN_CHECKED_BYTES:
            return
        free = available_memory()
        if free is not None and nbytes > free:
            raise self._error(shape=tuple(tensor.shape), nbytes=nbytes, free=free)


def _out_of_memory_error(
    cfg: CfgNode, *, shape: tuple[int, ...] = (), nbytes: int | None = None, free: int | None = None
) -> ConfigError:
    """Create the error; the message lists large integers below ``MODEL`` that divide a dimension of the tensor."""
    large = {
        key.path: value
        for key, value in cfg.MODEL.keys_below()
        if isinstance(value, int) and value >= _MIN_SUSPECT_SIZE
    }
    divisors = {name: value for name, value in large.items() if any(size and size % value == 0 for size in shape)}
    suspects = sorted((divisors or large).items(), key=lambda item: -item[1])
    tensor = f"a tensor of shape {shape}" if shape else "a tensor"
    needs = f"{tensor} needs {_gigabytes(nbytes)}" if nbytes else f"{tensor} is too large"
    available = f", but only {_gigabytes(free)} are available" if free is not None else ""
    values = f"\n  found: {', '.join(f'{name} {value}' for name, value in suspects[:3])}" if suspects else ""
    key_to_lower = suspects[0][0] if suspects else "the sizes below MODEL"
    return ConfigError(f"the model does not fit into memory: {needs}{available}.{values}\n  fix: lower {key_to_lower}")


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.{0 if nbytes >= 1e11 else 1}f} GB"
