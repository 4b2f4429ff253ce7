"""Selective scan of state-space models (Gu & Dao 2023, arXiv:2312.00752, algorithm 2), in pure PyTorch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastamp.amp import force_fp32

_CHUNK = 16
"""Positions of a chunk: the loop over them computes all chunks of a segment at once."""

_SEGMENT_ELEMENTS = 2**21
"""Number of states that are in memory at once; a segment is the positions that they belong to."""


@force_fp32
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    *,
    delta_softplus: bool = True,
) -> Tensor:
    """Scan a sequence by a linear recurrence whose factors depend on the input.

    In each channel, with the state h = 0 before the first position l::

        h_ln = exp(delta_l A_n) h_(l-1)n + delta_l B_ln u_l        y_l = sum_n C_ln h_ln + D u_l

    The d channels of each of the K groups share B and C. Computes in
    float32 under every precision policy. The states are not kept: memory is linear in L and does not grow with N, since
    the backward pass computes them again. The backward pass cannot be differentiated.

    Args:
        u, delta: (batch, K * d, L) float. Fastest as transposed views of contiguous (batch, L, K * d) tensors.
        A: (K * d, N), negative.
        B, C: (batch, K, N, L).
        D: (K * d,), factor of u in the output. Default None: 0.
        delta_bias: (K * d,), added to delta before softplus. Default None: 0.
        delta_softplus: apply softplus to delta. False: delta must not be negative. Default True.

    Returns:
        (batch, K * d, L) float32, or float64 for float64 inputs; a transposed view of a (batch, L, K * d) tensor.
    """
    dtype = torch.promote_types(u.dtype, delta.dtype)
    zeros = u.new_zeros(u.shape[1])
    inputs = (
        _positions_first(u.to(dtype)),
        _positions_first(delta.to(dtype)),
        A.t().to(dtype).contiguous(),
        B.permute(0, 3, 2, 1).to(dtype).contiguous(),
        C.permute(0, 3, 2, 1).to(dtype).contiguous(),
        (zeros if D is None else D).to(dtype),
        (zeros if delta_bias is None else delta_bias).to(dtype),
    )
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # also in torch.export
        return _scan(*inputs, delta_softplus, None)[0].transpose(1, 2)
    return _SelectiveScan.apply(*inputs, delta_softplus).transpose(1, 2)


def _positions_first(x: Tensor) -> Tensor:
    """Return a contiguous (batch, L, channels) tensor with the values of a (batch, channels, L) tensor."""
    result = x.transpose(1, 2)
    if result.is_contiguous() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return result.contiguous()
    return torch.stack([image.t().contiguous() for image in x])  # a transposed matrix is copied 4 times as fast


def _expand(x: Tensor, channels: int) -> Tensor:
    """Repeat (batch, L, N, K) for the channels of each group: (batch, L, N, channels)."""
    return x[..., None].expand(*x.shape, channels // x.shape[3]).flatten(3)


def _discretize(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, bias: Tensor, softplus: bool) -> tuple[Tensor, ...]:
    """Return the step size (batch, L, channels), and the factor and the input of the states (batch, L, N, channels)."""
    step = F.softplus(delta + bias) if softplus else delta + bias
    factor = (step[:, :, None] * A).exp()
    return step, factor, _by_group(B, step * u)


def _by_group(x: Tensor, y: Tensor) -> Tensor:
    """Multiply (batch, L, N, K) with (batch, L, channels): (batch, L, N, channels)."""
    return (x[..., None] * y.unflatten(2, (x.shape[3], -1))[:, :, None]).flatten(3)


def _scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor, softplus: bool, state: Any
) -> tuple[Tensor, Tensor]:
    """Return the output (batch, L, channels) and the last state (batch, N, channels)."""
    _, factor, entering = _discretize(u, delta, A, B, bias, softplus)
    states = _recurrence(factor, entering, state)
    groups = B.shape[3]
    output = (C[..., None] * states.unflatten(3, (groups, -1))).sum(2).flatten(2)
    return torch.addcmul(output, u, D), states[:, -1]


def _recurrence(factor: Tensor, entering: Tensor, before: Tensor | None = None, *, reverse: bool = False) -> Tensor:
    """Compute ``h_l = factor_l h_(l-1) + entering_l`` along dimension 1; with ``reverse`` from the end, h_(l+1).

    Chunks of positions are computed in parallel, starting from 0, as are the products of their factors; the ends of the
    chunks are a recurrence of the same form. No product is divided by another, so that nothing overflows.

    Args:
        factor, entering: (batch, L, N, channels).
        before: (batch, N, channels), state before the first position. Default None: 0.
    """
    length = int(factor.shape[1])  # torch.jit traces sizes as tensors
    if length <= _CHUNK:
        return torch.stack(_steps(factor.unbind(1), entering.unbind(1), before, reverse), 1)
    chunks, rest = divmod(length, _CHUNK)
    if rest:  # the chunk that is not full comes last
        split = (rest, length - rest) if reverse else (length - rest, rest)
        parts = list(zip(factor.split(split, 1), entering.split(split, 1), strict=True))
        first, last = reversed(parts) if reverse else parts
        done = _recurrence(*first, before, reverse=reverse)
        end = _recurrence(*last, done[:, 0 if reverse else -1], reverse=reverse)
        return torch.cat((end, done) if reverse else (done, end), 1)
    factors = factor.unflatten(1, (chunks, _CHUNK)).unbind(2)
    local = _steps(factors, entering.unflatten(1, (chunks, _CHUNK)).unbind(2), None, reverse)
    products = _steps(factors, None, None, reverse)
    edge = 0 if reverse else -1
    ends = _recurrence(products[edge], local[edge], before, reverse=reverse)
    first = (torch.zeros_like(ends[:, 0]) if before is None else before)[:, None]
    carried = torch.cat((ends[:, 1:], first) if reverse else (first, ends[:, :-1]), 1)
    states = [torch.addcmul(x, product, carried) for x, product in zip(local, products, strict=True)]
    return torch.stack(states, 2).flatten(1, 2)


def _steps(factors: Any, entering: Any, state: Tensor | None, reverse: bool) -> list[Tensor]:
    """Compute the recurrence step by step; without ``entering``, the products of the factors."""
    states: list[Tensor] = []
    order = range(len(factors))
    for position in reversed(order) if reverse else order:
        if state is None:
            state = (factors if entering is None else entering)[position]
        elif entering is None:
            state = state * factors[position]
        else:
            state = torch.addcmul(entering[position], factors[position], state)
        states.append(state)
    return states[::-1] if reverse else states


class _SelectiveScan(torch.autograd.Function):
    """Scan by segments of positions, of which only the first states are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Scan segment by segment; inputs are those of ``_scan`` without the state."""
        *tensors, softplus = inputs
        u, delta, A, B, C, D, bias = tensors
        length = _segment(u, A)
        state, states, outputs = None, [], []
        for start in range(0, u.shape[1], length):
            part = slice(start, start + length)
            output, state = _scan(u[:, part], delta[:, part], A, B[:, part], C[:, part], D, bias, softplus, state)
            outputs.append(output)
            states.append(state)
        ctx.save_for_backward(*tensors, *states[:-1])
        ctx.softplus = softplus
        return torch.cat(outputs, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the states of each segment again, from the last segment to the first."""
        u, delta, A, B, C, D, bias, *states = ctx.saved_tensors
        (grad_output,) = grads
        channels, groups, length = u.shape[2], B.shape[3], _segment(u, A)
        grads_of = [torch.empty_like(x) for x in (u, delta, B, C)]
        grad_A, grad_bias = torch.zeros_like(A), torch.zeros_like(bias)
        later = None  # gradient of the last state of the segment, from later segments
        for number in reversed(range(len(states) + 1)):
            part = slice(number * length, (number + 1) * length)
            before = states[number - 1] if number else torch.zeros_like(u[:, 0, None] * A)
            u_, C_, grad = u[:, part], C[:, part], grad_output[:, part]
            step, factor, entering = _discretize(u_, delta[:, part], A, B[:, part], bias, ctx.softplus)
            h = _recurrence(factor, entering, before)
            grad_h = _by_group(C_, grad)
            if later is not None:
                grad_h[:, -1] += later
            grad_C = (h.unflatten(3, (groups, -1)) * grad.unflatten(2, (groups, -1))[:, :, None]).sum(-1)
            # factor_l times the gradient of h_l, which is its contribution to the gradient of h_(l-1)
            passed = _recurrence(factor, factor * grad_h, reverse=True)
            grad_h[:, :-1] += passed[:, 1:]
            later = passed[:, 0].clone()
            exponent = passed.mul_(torch.cat((before[:, None], h[:, :-1]), 1))  # gradient of step * A
            grad_A += (exponent * step[:, :, None]).sum((0, 1))
            from_B = (grad_h * _expand(B[:, part], channels)).sum(2)
            grad_step = (exponent * A).sum(2) + from_B * u_
            grad_B = (grad_h.unflatten(3, (groups, -1)) * (step * u_).unflatten(2, (groups, -1))[:, :, None]).sum(-1)
            if ctx.softplus:
                grad_step *= torch.sigmoid(delta[:, part] + bias)
            grad_bias += grad_step.sum((0, 1))
            for whole, value in zip(grads_of, (from_B * step + grad * D, grad_step, grad_B, grad_C), strict=True):
                whole[:, part] = value
        grad_u, grad_delta, grad_B, grad_C = grads_of
        return grad_u, grad_delta, grad_A, grad_B, grad_C, (grad_output * u).sum((0, 1)), grad_bias, None


def _segment(u: Tensor, A: Tensor) -> int:
    """Return the number of positions of a segment: a multiple of the chunk."""
    states = max(u.shape[0] * A.numel(), 1)
    return max(_SEGMENT_ELEMENTS // states // _CHUNK, 1) * _CHUNK
