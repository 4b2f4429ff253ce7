"""In-place torch.compile, which keeps the class of a model and the names of its tensors."""

import os
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from fastamp.utils.errors import ConfigError


def compile_parts(model: nn.Module, names: Sequence[str], backend: str) -> None:
    """Compile submodules of a model. Compilation runs in their first forward pass.

    Args:
        model: the model; its class and the names of its tensors do not change.
        names: names of the submodules, ``model.trunks``.
        backend: backend of torch.compile.

    Raises:
        ConfigError: if there are no names, or the backend needs a C++ compiler and none was found.
    """
    if not names:
        raise ConfigError(
            f"MODEL.COMPILE is {backend}, but {type(model).__name__} has no attribute trunks that lists the submodules "
            'to compile.\n  fix: set MODEL.COMPILE to off, or add a class attribute such as trunks = ("backbone",)'
        )
    if backend == "inductor" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++"))):
        raise ConfigError(
            "MODEL.COMPILE is inductor, which needs a C++ compiler, but g++, c++ and clang++ were not found.\n"
            "  fix: install a C++ compiler, or set MODEL.COMPILE to off"
        )
    for name in names:
        model.get_submodule(name).compile(backend=backend)


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Create a context that runs compiled submodules eagerly, so that their hooks are called."""
    # set_stance imports the compiler, which takes seconds, so it is used only for compiled models.
    if any(module._compiled_call_impl is not None for module in model.modules()):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()
