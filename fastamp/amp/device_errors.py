"""What a user reads when a device refuses to compute: memory is used up, or an operation has no deterministic form."""

import re
from types import TracebackType
from typing import Any

import torch

from fastamp.amp.policy import dtype_name
from fastamp.utils import comm
from fastamp.utils.errors import TrainingError
from fastamp.utils.moved import moved_names

__getattr__ = moved_names(
    __name__,
    {
        "Refusals": "fastamp.amp.device_errors.DeviceErrorHandler",
        "refusal": "fastamp.amp.device_errors.explain_device_error",
    },
)

IN_TRAINING = (
    "a smaller SOLVER.IMS_PER_BATCH (and SOLVER.ACCUM_STEPS for as many images a step), or INPUT.SIZE_TRAIN; "
    "SOLVER.AMP where it is off; MODEL.BACKBONE.CHECKPOINTING True for a ViT"
)
IN_EVALUATION = "a smaller TEST.IMS_PER_BATCH, or INPUT.SIZE_TEST"


class DeviceErrorHandler:
    """Raises inside of it what a user should read instead of a device's refusal; other errors pass.

    Args:
        place: what is computed, e.g. ``"iteration 7"``.
        smaller: the keys that make it need less memory.

    Attributes:
        batch: set it to the batch that is computed on.
    """

    def __init__(self, place: str, smaller: str) -> None:
        self.place = place
        self.smaller = smaller
        self.batch: dict[str, Any] = {}

    def __enter__(self) -> "DeviceErrorHandler":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if isinstance(error, Exception):
            explained = explain_device_error(error, self.place, self.batch, self.smaller)
            if explained is not None:
                raise explained from error


def explain_device_error(error: Exception, place: str, batch: dict[str, Any], smaller: str) -> TrainingError | None:
    """Return what a user should read instead of ``error``; None where it is something else.

    Args:
        place, smaller: see ``DeviceErrorHandler``.
        batch: its tensors' shapes are said.
    """
    found = first_line(error)
    if is_out_of_memory(error):
        rank = f" on rank {comm.get_rank()}" if comm.is_distributed() else ""
        return TrainingError(
            f"out of memory in {place}{rank}.\n  batch: {shapes_of(batch)}\n{_memory_taken()}"
            f"  found: {found}\n  fix:   {smaller}"
        )
    operation = re.match(r"(\S+) does not have a deterministic implementation", str(error))
    if isinstance(error, RuntimeError) and operation:
        return TrainingError(
            f"DETERMINISTIC is True, and {operation[1]} cannot be computed deterministically on this device "
            f"({place}).\n  found: {found}\n"
            "  fix:   DETERMINISTIC False, or a part of the model, a loss or an augmentation without it"
        )
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that the memory of a device or of the machine is used up."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc")
    )


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def shapes_of(batch: dict[str, Any]) -> str:
    """Return names, shapes and dtypes of a batch's tensors."""
    tensors = ((key, value) for key, value in batch.items() if isinstance(value, torch.Tensor))
    return ", ".join(f"{key} {tuple(value.shape)} {dtype_name(value.dtype)}" for key, value in tensors)


def _memory_taken() -> str:
    if not torch.cuda.is_initialized():
        return ""
    free, total = torch.cuda.mem_get_info()
    taken, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return (
        f"  memory of {torch.cuda.get_device_name()}: {total / 2**30:.1f} GiB, of which {free / 2**30:.1f} GiB are "
        f"free; this process has {held / 2**30:.1f} GiB, {taken / 2**30:.1f} GiB of that in tensors\n"
    )
