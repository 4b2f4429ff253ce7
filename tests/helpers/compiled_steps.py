"""Compile the models that ``OptimizationStep`` trains."""

from collections.abc import Callable
from typing import Any

from torch import nn

from fastamp.amp import OptimizationStep
from fastamp.utils.compiled import _Region, compile_parts

VARIABLE = "FASTAMP_TEST_COMPILED"
"""Environment variable with which ``preloaded.py`` calls ``install`` before a script."""


def install(set_attribute: Callable[[Any, str, Any], None] = setattr) -> None:
    """Replace ``OptimizationStep.__init__`` by one that compiles the model first, and let failed compilations raise."""
    create, run_eagerly = OptimizationStep.__init__, _Region._run_after

    def compile_model(self: OptimizationStep, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        compile_parts(model, ("",), "aot_eager")
        create(self, model, *args, **kwargs)

    def fail(self: _Region, failure: str, *args: Any, **kwargs: Any) -> None:
        run_eagerly(self, failure, *args, **kwargs)  # raises errors of the model
        raise AssertionError(f"compilation failed: {failure}")

    set_attribute(_Region, "_run_after", fail)
    set_attribute(OptimizationStep, "__init__", compile_model)
