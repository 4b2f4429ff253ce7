"""Error messages for failed model passes that report the module, the source line and the batch."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn

from fastamp.amp.device_errors import IN_TRAINING, explain_device_error, is_out_of_memory, shapes_of
from fastamp.diagnostics.isolated_passes import IsolatedPasses, batch_size, slice_batch
from fastamp.diagnostics.layer_hooks import hooked
from fastamp.utils.errors import TrainingError, UserError, summarize_error

T = TypeVar("T")


def run_passes(
    model: nn.Module,
    batch: dict[str, Any],
    run: Callable[[IsolatedPasses], T],
    *,
    precision: str,
    frozen: tuple[str, ...] = (),
    halve_from: int | None = None,
) -> tuple[T, int]:
    """Call ``run(passes)`` with isolated passes over a batch, and explain exceptions (see ``ErrorContext.explain``).

    Args:
        model, batch, frozen: see ``IsolatedPasses``.
        run: function that runs the model.
        precision: name of the dtype, for messages.
        halve_from: smallest number of images at which the batch is halved and tried again after an out-of-memory
            error. Default None: the batch is never halved.

    Returns:
        ``(result, count)``: the return value of ``run``, and the number of images in the batch that was used.

    Raises:
        TrainingError: if memory runs out, or the model raises an exception.
        UserError: if the model raises a UserError, which is passed on unchanged.
    """
    count = batch_size(batch)
    while True:
        context = ErrorContext(model, precision)
        with IsolatedPasses(model, slice_batch(batch, count), frozen=frozen) as passes, context.watching():
            try:
                return run(passes), count
            except Exception as error:
                if halve_from is None or count < halve_from or not is_out_of_memory(error):
                    context.explain(error, passes.batch)
        count //= 2
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


class ErrorContext:
    """Hooks that track the module being called, to report where an exception was raised.

    Args:
        model: the model.
        precision: name of the dtype, for messages.
    """

    def __init__(self, model: nn.Module, precision: str) -> None:
        self.model = model
        self.precision = precision
        self._names = {module: name for name, module in model.named_modules()}
        self._stack: list[tuple[nn.Module, Any]] = []

    def watching(self) -> AbstractContextManager[None]:
        """Register the hooks for the duration of the context."""
        return hooked(self.model, self._names, enter=self._enter, leave=self._leave)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._stack.append((module, args))

    def _leave(self, *_: Any) -> None:
        self._stack.pop()

    def explain(self, error: Exception, batch: dict[str, Any]) -> None:
        """Raise a TrainingError that describes ``error`` with the module, the source line and the shapes of the batch.

        Raises:
            TrainingError: if ``error`` is not a UserError; a UserError is raised unchanged.
        """
        if isinstance(error, UserError):
            raise error
        module, args = self._stack[-1] if self._stack else (self.model, ())
        name = self._names[module] or "the model itself"
        where = f"{name} ({type(module).__name__})" if self._stack else "the backward pass"
        explained = explain_device_error(error, f"the pre-flight, in {self.precision}, in {where}", batch, IN_TRAINING)
        if explained is not None:
            raise explained from error
        reason = "an error in the model or the data, not in mixed precision"
        if self.precision != "float32":
            reason = "the batch passes in float32, so a module does not support this precision"
        raise TrainingError(
            f"the model fails on the first training batch in {self.precision}: {reason}.\n"
            f"  found: {summarize_error(error)}\n"
            f"  where: {where}, {_line_of(error)}\n"
            f"  batch: {shapes_of(batch)}\n"
            f"{_channels_hint(module, args)}"
            "  (set SOLVER.AMP.PREFLIGHT to off to see the full traceback)"
        ) from error


def _channels_hint(module: nn.Module, args: Any) -> str:
    """Explain a wrong number of input channels of a convolution; empty for other errors."""
    image = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if image is None or not isinstance(module, nn.Conv2d) or image.dim() != 4 or image.shape[1] == module.in_channels:
        return ""
    return (
        f"  cause: channel mismatch: expected {module.in_channels} channels, got {image.shape[1]}.\n"
        "  fix:   set INPUT.CHANNELS to the number of channels of the model's first convolution, or change the model\n"
    )


def _line_of(error: Exception) -> str:
    """Return ``"file:line"`` of the innermost frame outside of PyTorch."""
    frame, line = error.__traceback__, None
    while frame is not None:
        path = frame.tb_frame.f_code.co_filename
        if "/torch/" not in path.replace("\\", "/"):
            line = f"{path}:{frame.tb_lineno}"
        frame = frame.tb_next
    return line or "unknown line"
