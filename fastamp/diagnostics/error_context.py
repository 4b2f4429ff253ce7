"""Errors of a model's passes, explained: which module, which line, which batch."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn

from fastamp.amp.device_errors import IN_TRAINING, explain_device_error, is_out_of_memory, shapes_of
from fastamp.diagnostics.isolated_passes import IsolatedPasses, batch_size, slice_batch
from fastamp.utils.compiled import uncompiled
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
    """Return what ``run`` returns, and the number of images it was run on; explain its errors.

    Args:
        model, batch, frozen: see ``IsolatedPasses``.
        run: runs the model.
        precision: name of the dtype it computes in.
        halve_from: when memory is short, run on half of the images, and so on, as long as there are so many; None
            never does.

    Raises:
        TrainingError: memory ran out, or the model raised an error.
        UserError: the model's own.
    """
    count = batch_size(batch)
    while True:
        with (
            IsolatedPasses(model, slice_batch(batch, count), frozen=frozen) as passes,
            ErrorContext(model, precision) as context,
        ):
            try:
                return run(passes), count
            except Exception as error:
                if halve_from is None or count < halve_from or not is_out_of_memory(error):
                    context.explain(error, passes.batch)
        count //= 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class ErrorContext:
    """Knows in which module an error was raised.

    Args:
        model: the model.
        precision: name of the dtype that it computes in.
    """

    def __init__(self, model: nn.Module, precision: str) -> None:
        self.model = model
        self.precision = precision
        self._inside: list[tuple[str, nn.Module, Any]] = []
        self._handles = ExitStack()

    def __enter__(self) -> "ErrorContext":
        self._handles.enter_context(uncompiled(self.model))
        for name, module in self.model.named_modules():
            for handle in (
                module.register_forward_pre_hook(self._enter(name)),
                module.register_forward_hook(self._leave),
            ):
                self._handles.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.close()

    def _enter(self, name: str) -> Callable[[nn.Module, Any], None]:
        return lambda module, args: self._inside.append((name, module, args))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()

    def explain(self, error: Exception, batch: dict[str, Any]) -> None:
        """Raise what a user should read instead of ``error``, or ``error`` itself where it is for users already.

        Raises:
            TrainingError: always, but for a ``UserError``.
        """
        if isinstance(error, UserError):
            raise error
        name, module, args = self._inside[-1] if self._inside else ("", self.model, ())
        where = f"{name or 'the model itself'} ({type(module).__name__})" if self._inside else "the backward pass"
        refused = explain_device_error(error, f"the pre-flight, in {self.precision}, in {where}", batch, IN_TRAINING)
        if refused is not None:
            raise refused from error
        blame = "an error of the model or of the data, not of mixed precision"
        if self.precision != "float32":
            blame = "and not in float32: a part of the model does not take this precision"
        raise TrainingError(
            f"the model fails on the first training batch in {self.precision}: {blame}.\n"
            f"  found: {summarize_error(error)}\n"
            f"  where: {where}, {_line_of(error)}\n"
            f"  batch: {shapes_of(batch)}\n"
            f"{_channels_hint(module, args)}"
            "  (SOLVER.AMP.PREFLIGHT off shows the whole traceback)"
        ) from error


def _channels_hint(module: nn.Module, args: Any) -> str:
    """Return a line when a convolution was given another number of channels than it takes."""
    image = args[0] if args and isinstance(args[0], torch.Tensor) else None
    takes = getattr(module, "in_channels", None)
    if image is None or takes is None or image.dim() != 4 or image.shape[1] == takes:
        return ""
    return (
        f"  cause: it takes {takes} channels and was given {image.shape[1]}.\n"
        "  fix:   INPUT.CHANNELS is what images are read as: it and the model's first convolution must agree\n"
    )


def _line_of(error: Exception) -> str:
    """Return the innermost line that is not PyTorch's own."""
    frame, found = error.__traceback__, None
    while frame is not None:
        path = frame.tb_frame.f_code.co_filename
        if "/torch/" not in path.replace("\\", "/"):
            found = f"{path}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found or "an unknown line"
