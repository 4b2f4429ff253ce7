"""Set whether CUDA may use TensorFloat-32 for float32, in the old and the new API of PyTorch."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def set_tf32(allowed: bool) -> None:
    """Allow or disable TF32 for float32 matrix products and convolutions on CUDA, regardless of earlier settings.

    On a CPU, float32 is always set to full precision. Both APIs of PyTorch are set:

    - ``fp32_precision``, since PyTorch 2.9. Setting only ``allow_tf32 = False`` is not sufficient: the operator then
      inherits TF32 from ``torch.backends.fp32_precision`` or ``torch.backends.cudnn.fp32_precision``.
    - ``allow_tf32``, because reading this flag raises an error if it contradicts ``fp32_precision``.
      ``torch.backends.cudnn.flags`` and, up to PyTorch 2.14, ``torch.compile`` read it.

    Args:
        allowed: True to allow TF32.
    """
    # Without types: the operators of cudnn and mkldnn depend on the version.
    backends: Any = torch.backends
    matmul, cudnn, mkldnn = backends.cuda.matmul, backends.cudnn, backends.mkldnn
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch may warn about the earlier API
        torch.set_float32_matmul_precision("highest")  # of all devices
        matmul.allow_tf32 = cudnn.allow_tf32 = allowed
    if not _has_fp32_precision():
        return
    cudnn.fp32_precision = "tf32" if allowed else "ieee"
    # Set after cudnn.fp32_precision, because some versions do not apply it to the operators.
    for operator in (matmul, cudnn.conv, cudnn.rnn):
        operator.fp32_precision = "tf32" if allowed else "ieee"
    # Not mkldnn.fp32_precision: PyTorch 2.9 to 2.15 set torch.backends.fp32_precision instead.
    for operator in (mkldnn.matmul, mkldnn.conv, mkldnn.rnn):
        operator.fp32_precision = "ieee"


@contextmanager
def without_tf32() -> Iterator[None]:
    """Context manager that disables TF32 in CUDA matrix products, regardless of ``SOLVER.TF32``."""
    matmul = torch.backends.cuda.matmul
    name, disabled = ("fp32_precision", "ieee") if _has_fp32_precision() else ("allow_tf32", False)
    before = getattr(matmul, name)
    setattr(matmul, name, disabled)
    try:
        yield
    finally:
        setattr(matmul, name, before)


def _has_fp32_precision() -> bool:
    return hasattr(torch.backends.cudnn, "conv")  # hasattr(matmul, "allow_tf32") may raise an error
