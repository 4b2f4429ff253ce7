"""CUDA kernel of the package mamba_ssm for the selective scan, compared with our scan before it is used."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastamp.layers.selective_scan import selective_scan
from fastamp.utils.errors import ConfigError

KEY = "MODEL.BACKBONE.SCAN"
# Largest difference, relative to the largest value: of the output, and of a gradient, which sums over all positions.
_TOLERANCES = (1e-4, 1e-3)


class ScanKernel:
    """``selective_scan_fn`` of mamba_ssm (Gu and Dao 2023, arXiv:2312.00752), with the arguments of ``selective_scan``.

    At the first call with each length L, for which the package has different kernels, output and gradients for the
    first image are compared with those of ``selective_scan``: in a training this is the pre-flight, before the first
    step. Traced, compiled and exported models use ``selective_scan``. The kernel returns the dtype of its inputs, so
    that they must be float32.

    Raises:
        ConfigError: if mamba_ssm cannot be imported; at a comparison, if the kernel fails or differs.
    """

    def __init__(self) -> None:
        try:
            from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
        except ImportError as error:
            raise ConfigError(
                f"{KEY} is mamba_ssm, but this package cannot be imported: {error}.\n"
                f"  fix: pip install mamba-ssm, which needs CUDA and a compiler, or set {KEY} to torch"
            ) from error
        self._kernel: Callable[..., Tensor] = selective_scan_fn
        self._compared: set[int] = set()

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Compute the scan of ``u, delta, A, B, C, D, delta_bias`` with softplus, (batch, K * d, L)."""
        if torch.jit.is_tracing() or torch.compiler.is_compiling():
            return selective_scan(*inputs)
        if (length := inputs[0].shape[2]) not in self._compared:
            self._compare([tensor[:1] if number in (0, 1, 3, 4) else tensor for number, tensor in enumerate(inputs)])
            self._compared.add(length)
        return self._compute(*inputs)

    def _compute(self, *inputs: Tensor) -> Tensor:
        *tensors, bias = inputs
        return self._kernel(*tensors, z=None, delta_bias=bias, delta_softplus=True)

    def _compare(self, inputs: Sequence[Tensor]) -> None:
        try:
            found, expected = (_with_gradients(scan, inputs) for scan in (self._compute, selective_scan))
        except RuntimeError as error:
            raise ConfigError(f"the kernel of mamba_ssm failed: {error}\n  fix: set {KEY} to torch") from error
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            scale = other.abs().max().clamp_min(torch.finfo(other.dtype).tiny)
            difference = ((one - other).abs().max() / scale).item() if one.dtype == other.dtype else float("inf")
            if not difference <= _TOLERANCES[number > 0]:
                what = (
                    "output" if number == 0 else f"gradient of {('u', 'delta', 'A', 'B', 'C', 'D', 'bias')[number - 1]}"
                )
                raise ConfigError(
                    f"the kernel of mamba_ssm differs from fastamp's scan at {inputs[0].shape[2]} positions: {what}, "
                    f"{difference:.2g} of the largest value.\n  expected: at most {_TOLERANCES[number > 0]}\n"
                    f"  fix: set {KEY} to torch"
                )


def _with_gradients(scan: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Any]:
    """Return the output, and the gradients of the sum of its squares with respect to all inputs."""
    # The hooks keep the tensors of the comparison out of a checkpoint, whose recomputation does not compare again.
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.inference_mode(False), torch.enable_grad(), hooks:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        output = scan(*leaves)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]
