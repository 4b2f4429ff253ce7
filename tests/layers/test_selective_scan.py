"""Selective scan: values of the authors' program and of the definition in float64, gradients, memory, precision."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fastamp.layers import selective_scan

REFERENCE = Path(__file__).parents[1] / "reference" / "vmamba"
NAMES = ("u", "delta", "A", "B", "C", "D", "delta_bias")


def reference(name):
    with np.load(REFERENCE / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file}


def relative_error(value, expected):
    return float((value.double() - expected).detach().abs().max() / expected.detach().abs().max())


def definition(u, delta, A, B, C, D=None, delta_bias=None, *, delta_softplus=True):
    """The definition, position by position."""
    delta = delta if delta_bias is None else delta + delta_bias[:, None]
    delta = F.softplus(delta) if delta_softplus else delta
    B, C = (x.repeat_interleave(u.shape[1] // x.shape[1], 1).unbind(3) for x in (B, C))
    state, outputs = torch.zeros_like(A), []
    for B_l, C_l, u_l, delta_l in zip(B, C, u.unbind(2), delta.unbind(2), strict=True):
        step = delta_l[..., None]
        state = (step * A).exp() * state + step * B_l * u_l[..., None]
        outputs.append((C_l * state).sum(2))
    return torch.stack(outputs, 2) + (0 if D is None else D[:, None] * u)


def random_inputs(batch, groups, channels, states, length, dtype=torch.float32):
    """Inputs of the size of a trained model's: steps of 0.001 to 0.1 and larger, A = -1 .. -N."""
    torch.manual_seed(0)
    wide = groups * channels
    A = -torch.arange(1, states + 1, dtype=dtype).repeat(wide, 1)
    u, delta = torch.randn(2, batch, wide, length, dtype=dtype)
    B, C = torch.randn(2, batch, groups, states, length, dtype=dtype)
    return [u, delta, A, B, C, torch.randn(wide, dtype=dtype), torch.empty(wide, dtype=dtype).uniform_(-6.9, 0)]


def with_gradients(function, inputs, grad):
    inputs = [x.clone().requires_grad_() for x in inputs]
    output = function(*inputs)
    return output.detach(), torch.autograd.grad(output, inputs, grad.to(output.dtype))


@pytest.mark.parametrize("name", ["scan1", "scan2"])
def test_values_and_gradients_of_the_authors_program(name):
    known = reference(name)
    for dtype, tolerance, gradient_tolerance in ((torch.float64, 1e-10, 1e-10), (torch.float32, 1e-5, 1e-4)):
        inputs = [known[key].to(dtype) for key in NAMES]
        output, grads = with_gradients(selective_scan, inputs, known["out_grad"])
        assert output.dtype == dtype
        assert relative_error(output, known["out_float64"]) < tolerance
        for key, grad in zip(NAMES, grads, strict=True):
            assert relative_error(grad, known[f"grad_{key}"]) < gradient_tolerance, key
        assert relative_error(selective_scan(*inputs[:5]), known["out_no_D_no_bias"]) < tolerance
        positive = selective_scan(inputs[0], known["delta_positive"].to(dtype), *inputs[2:6], delta_softplus=False)
        assert relative_error(positive, known["out_no_softplus_no_bias"]) < tolerance
