"""torch.compile in place: a model keeps its class and the names of its tensors."""

import os
import shutil
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from fastamp.utils.errors import ConfigError


def compile_parts(model: nn.Module, backend: str) -> None:
    """Compile the submodules of ``model`` that its ``trunks`` names; it happens when they first run.

    Args:
        model: stays what it is, and so do the names of its tensors.
        backend: one of torch.compile's.

    Raises:
        ConfigError: the model names none, or the backend has no compiler to call.
    """
    names = getattr(model, "trunks", ())
    if not names:
        raise ConfigError(
            f"MODEL.COMPILE is {backend}, but {type(model).__name__} does not say which of its parts to compile.\n"
            '  fix: MODEL.COMPILE off, or a class attribute trunks = ("backbone",) in it'
        )
    if backend == "inductor" and not any(map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++"))):
        raise ConfigError(
            "MODEL.COMPILE inductor needs a C++ compiler, and there is no g++, c++ or clang++ here.\n"
            "  fix: install one, or set MODEL.COMPILE off"
        )
    for name in names:
        model.get_submodule(name).compile(backend=backend)


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which the compiled parts of ``model`` run as written, so that hooks in them are called."""
    # Asked for only where it matters: it imports the compiler, which takes seconds.
    if any(module._compiled_call_impl is not None for module in model.modules()):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()
