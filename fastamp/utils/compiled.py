"""torch.compile in place: a model keeps its class and the names of its tensors."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


def compile_parts(model: nn.Module, names: Iterable[str], backend: str) -> None:
    """Compile the submodules ``names`` of ``model`` with a backend of torch.compile; it happens when they first run."""
    for name in names:
        model.get_submodule(name).compile(backend=backend)


def uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which the compiled parts of ``model`` run as written, so that hooks in them are called."""
    # Asked for only where it matters: it imports the compiler, which takes seconds.
    if any(module._compiled_call_impl is not None for module in model.modules()):
        return torch.compiler.set_stance("force_eager")
    return nullcontext()
