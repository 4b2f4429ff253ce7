"""Explanations of out-of-memory errors and of operations without a deterministic implementation."""

import re
from types import TracebackType
from typing import Any

import torch

from fastamp.amp.policy import dtype_name
from fastamp.utils import comm
from fastamp.utils.errors import TrainingError, summarize_error

IN_TRAINING = (
    "reduce SOLVER.IMS_PER_BATCH (SOLVER.ACCUM_STEPS keeps the number of images per step constant) or INPUT.SIZE_TRAIN"
    "; set SOLVER.AMP to True if it is False; set MODEL.BACKBONE.CHECKPOINTING to True for a ViT"
)
IN_EVALUATION = "reduce TEST.IMS_PER_BATCH or INPUT.SIZE_TEST"

_NO_ENGINE = "unable to find an engine"
# The status codes are those of cuBLAS and cuDNN; cuDNN 9 has CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED.
_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "_ALLOC_FAILED",
    "_ALLOCATION_FAILED",
    _NO_ENGINE,
)


class DeviceErrorHandler:
    """Context manager that converts device errors into a TrainingError with a fix; other errors pass through.

    Args:
        place: where the error occurs, for the message, e.g. ``"iteration 7"``.
        smaller: text after ``fix:`` in the message of an out-of-memory error: config values that reduce memory use.

    Attributes:
        batch: the current batch, set by the caller; the message lists the shapes of its tensors.
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
    """Convert an out-of-memory or nondeterminism error into a TrainingError.

    Args:
        error: the error that PyTorch raised.
        place, smaller: see ``DeviceErrorHandler``.
        batch: the current batch; the message lists the shapes of its tensors.

    Returns:
        Error that states a fix, or None if ``error`` is of neither kind.
    """
    error_summary = summarize_error(error)
    if is_out_of_memory(error):
        rank = f" on rank {comm.get_rank()}" if comm.is_distributed() else ""
        cause = ""
        if _NO_ENGINE in str(error):
            cause = (
                "  cause: cuDNN found no algorithm for a convolution, usually because none fits into the free memory.\n"
            )
        return TrainingError(
            f"out of memory in {place}{rank}.\n  batch: {shapes_of(batch)}\n{_memory_taken()}"
            f"  found: {error_summary}\n{cause}  fix:   {smaller}"
        )
    if isinstance(error, RuntimeError) and "CUBLAS_WORKSPACE_CONFIG" in str(error):
        return TrainingError(
            f"DETERMINISTIC is True, but PyTorch does not use cuBLAS in deterministic mode ({place}).\n"
            f"  found: {error_summary}\n"
            "  cause: a matrix product ran on the GPU before CUBLAS_WORKSPACE_CONFIG was set; PyTorch checks this "
            "environment variable only once.\n"
            "  fix:   set CUBLAS_WORKSPACE_CONFIG=:4096:8 before Python starts, or call default_setup earlier"
        )
    operation = re.match(r"(\S+) does not have a deterministic implementation", str(error))
    if isinstance(error, RuntimeError) and operation:
        return TrainingError(
            f"DETERMINISTIC is True, but {operation[1]} has no deterministic implementation on this device "
            f"({place}).\n  found: {error_summary}\n"
            "  fix:   set DETERMINISTIC False, or use a model, loss or transform without this operation"
        )
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if ``error`` is an out-of-memory error of the device or the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in _OUT_OF_MEMORY)


def shapes_of(batch: dict[str, Any]) -> str:
    """Format the names, shapes and dtypes of the tensors in a batch."""
    tensors = ((key, value) for key, value in batch.items() if isinstance(value, torch.Tensor))
    return ", ".join(f"{key} {tuple(value.shape)} {dtype_name(value.dtype)}" for key, value in tensors)


def _memory_taken() -> str:
    if not torch.cuda.is_initialized():
        return ""
    free, total = torch.cuda.mem_get_info()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return (
        f"  memory of {torch.cuda.get_device_name()}: {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free; reserved "
        f"by this process: {reserved / 2**30:.1f} GiB, allocated for tensors: {allocated / 2**30:.1f} GiB\n"
    )
