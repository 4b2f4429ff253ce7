"""TensorFloat-32: reduced precision of float32 matrix products and convolutions, in both APIs of PyTorch."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def set_tf32(allowed: bool) -> None:
    """Allow or disable TF32 for matrix products and convolutions on CUDA. On a CPU, float32 has full precision.

    The result does not depend on earlier settings in either API. PyTorch 2.9 introduced ``fp32_precision``. There,
    ``allow_tf32 = False`` is not sufficient: it only removes the setting of the operator, which then inherits TF32
    from ``torch.backends.fp32_precision`` or ``torch.backends.cudnn.fp32_precision``. The flags of the earlier API are
    set as well, because reading them is an error while the two APIs differ; ``torch.backends.cudnn.flags`` and, up to
    PyTorch 2.14, ``torch.compile`` read them.

    Args:
        allowed (bool): whether TF32 may be used.
    """
    matmul, cudnn, mkldnn = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
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
