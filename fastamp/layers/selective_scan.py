"""Selective scan of state-space models (Gu & Dao 2023, arXiv:2312.00752, algorithm 2), in pure PyTorch.

Internally states have the shape (batch, L, N, K, d), and what the N states of a channel share has N = 1. The channels
are contiguous in memory, so that one position of all images and channels is one operation.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastamp.amp import force_fp32

_CHUNK = 16  # positions
_SEGMENT_ELEMENTS = 2**21  # states in memory at once; a segment is the positions that they belong to


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

    The d channels of each of the K groups share B and C. Computes in float32 under every precision policy. The states
    are not kept: memory is linear in L, since the backward pass computes them again; a second derivative is an error.
    Exported models, and compiled ones without gradients, combine positions in log2(L) steps.

    Args:
        u, delta: (batch, K * d, L) float. Fastest as transposed views of contiguous (batch, L, K * d) tensors.
        A: (K * d, N), negative.
        B, C: (batch, K, N, L).
        D: (K * d,), factor of u in the output. Default None: no such term.
        delta_bias: (K * d,), added to delta before softplus. Default None.
        delta_softplus: apply softplus to delta. False: delta must not be negative. Default True.

    Returns:
        (batch, K * d, L) float32, or float64 for float64 inputs; a transposed view of a (batch, L, K * d) tensor.
    """
    dtype = torch.promote_types(u.dtype, delta.dtype)
    by_group = (B.shape[1], -1)
    inputs: list[Any] = [
        *(_positions_first(x.to(dtype)).unflatten(2, by_group).unsqueeze(2) for x in (u, delta)),
        A.to(dtype).t().unflatten(1, by_group).contiguous(),
        *(x.to(dtype).permute(0, 3, 2, 1).unsqueeze(-1).contiguous() for x in (B, C)),
        *(None if x is None else x.to(dtype).unflatten(0, by_group) for x in (D, delta_bias)),
    ]
    needs_gradients = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    trains = needs_gradients and torch.compiler.is_dynamo_compiling()  # False in exports, unless they are strict
    traced = torch.jit.is_tracing() or (torch.compiler.is_compiling() and not trains)
    scan: Any = _scan_by_doubling if traced else _SelectiveScan.apply
    return scan(*inputs, delta_softplus).flatten(2).transpose(1, 2)


def _positions_first(x: Tensor) -> Tensor:
    """Return a contiguous (batch, L, channels) tensor with the values of a (batch, channels, L) tensor."""
    result = x.transpose(1, 2)
    if torch.jit.is_tracing() or torch.compiler.is_compiling() or result.is_contiguous():
        return result.contiguous()
    return torch.stack([image.t().contiguous() for image in x])  # copies matrices, which is 4 times as fast


def _step_size(delta: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    delta = delta if bias is None else delta + bias
    return F.softplus(delta) if softplus else delta


def _add_products(x: Tensor, y: Tensor, total: Tensor | None = None) -> Tensor:
    """Sum x * y over the states, and add ``total``: (batch, L, 1, K, d)."""
    for x_n, y_n in zip(x.split(1, -3), y.split(1, -3), strict=True):
        total = x_n * y_n if total is None else torch.addcmul(total, x_n, y_n)
    assert total is not None  # there is at least one state
    return total


def _output(h: Tensor, C: Tensor, u: Tensor, D: Tensor | None) -> Tensor:
    return _add_products(h, C, None if D is None else u * D)


def _scan_by_doubling(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, bias: Tensor | None, softplus: bool
) -> Tensor:
    """Combine each position with those before it, at distances 1, 2, 4, ... (Hillis & Steele 1986)."""
    step = _step_size(delta, bias, softplus)
    factor, h, distance = (step * A).exp(), step * u * B, 1
    while distance < int(h.shape[1]):  # torch.jit traces sizes as tensors
        near, far = factor[:, distance:], h[:, :-distance]
        h = torch.cat((h[:, :distance], h[:, distance:] + near * far), 1)
        factor = torch.cat((factor[:, :distance], near * factor[:, :-distance]), 1)
        distance *= 2
    return _output(h, C, u, D)


def _recur(factor: Tensor, h: Tensor, before: Tensor | None, products: Tensor, reverse: bool = False) -> None:
    """Compute ``h_l += factor_l h_(l-1)`` in place, position after position; with ``reverse``, ``factor_l h_(l+1)``.

    The chunks are computed at the same time, each as if the state before it were 0, and so are the products of their
    factors. The last states of the chunks are again a recurrence; multiplied with the products they are added to the
    next chunk. Nothing is divided by a product, which would overflow.

    Args:
        factor, h: (batch, L, N, K, d).
        before: state before the first position, (batch, N, K, d). None: 0.
        products: ``factor`` or a copy of it, which is overwritten.
        reverse: begin at the last position.
    """
    first, last, order = (-1, 0, -1) if reverse else (0, -1, 1)
    if before is not None:
        h[:, first].addcmul_(factor[:, first], before)
    if h.shape[1] <= _CHUNK:
        factors, states = (x.unbind(1)[::order] for x in (factor, h))
        for number in range(1, len(states)):
            states[number].addcmul_(factors[number], states[number - 1])
    elif rest := h.shape[1] % _CHUNK:
        before, size = None, [h.shape[1] - rest, rest]
        for part in list(zip(*(x.split(size, 1) for x in (factor, h, products)), strict=True))[::order]:
            _recur(part[0], part[1], before, part[2], reverse)
            before = part[1][:, last]
    else:
        chunked = [x.unflatten(1, (-1, _CHUNK)) for x in (factor, h, products)]
        factors, states, passed = (x.unbind(2)[::order] for x in chunked)
        for number in range(1, _CHUNK):
            states[number].addcmul_(factors[number], states[number - 1])
            passed[number].mul_(passed[number - 1])
        _recur(passed[-1], states[-1], None, passed[-1], reverse)
        ahead, behind = slice(1, None), slice(-1)
        inner, later, earlier = (ahead, behind, ahead) if reverse else (behind, ahead, behind)
        chunked[1][:, later, inner].addcmul_(chunked[2][:, later, inner], chunked[1][:, earlier, last, None])


class _SelectiveScan(torch.autograd.Function):
    """Scan by segments of positions, of which only the last states are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """Compute the output (batch, L, 1, K, d) from the inputs of ``_scan_by_doubling``."""
        u, delta, A, B, C, D, bias, ctx.softplus = inputs
        step, output, lasts = _step_size(delta, bias, ctx.softplus), torch.empty_like(u), [None]
        for part in _segments(u, A):
            factor = (step[:, part] * A).exp_()
            h = step[:, part] * u[:, part] * B[:, part]
            _recur(factor, h, lasts[-1], factor)
            output[:, part] = _output(h, C[:, part], u[:, part], D)
            lasts.append(h[:, -1].clone())
        ctx.save_for_backward(u, step, A, B, C, D, bias, *lasts[1:-1])
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the states of each segment again, from the last segment to the first."""
        # once_differentiable returns constants if the gradient of the output is one.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("selective_scan has no second derivative.\n  fix: do not set create_graph=True")
        u, step, A, B, C, D, bias, *lasts = ctx.saved_tensors
        grad_u, grad_step, grad_B, grad_C = (torch.empty_like(x) for x in (u, step, B, C))
        grad_A, after = torch.zeros_like(A), None
        for part, before in list(zip(_segments(u, A), [None, *lasts], strict=False))[::-1]:
            u_, step_, B_, C_, grad = (x[:, part] for x in (u, step, B, C, grads[0]))
            factor, entering = (step_ * A).exp_(), step_ * u_
            h = entering * B_
            _recur(factor, h, before, factor.clone())
            grad_C[:, part] = (h * grad).sum(-1, keepdim=True)
            grad_h = grad * C_
            if after is not None:
                grad_h[:, -1] += after
            passed = factor * grad_h  # factor_l times the gradient of h_l: the gradient of h_(l-1) from later positions
            _recur(factor, passed, None, factor, reverse=True)
            grad_h[:, :-1] += passed[:, 1:]
            after = passed[:, 0].clone()
            passed[:, 1:] *= h[:, :-1]  # from here on the gradient of step * A
            passed[:, 0] *= 0 if before is None else before
            grad_A += (passed * step_).sum((0, 1))
            grad_B[:, part] = (grad_h * entering).sum(-1, keepdim=True)
            grad_entering = _add_products(grad_h, B_)
            grad_step[:, part] = _add_products(passed, A, grad_entering * u_)
            grad_u[:, part] = grad_entering * step_ if D is None else torch.addcmul(grad_entering * step_, grad, D)
        if ctx.softplus:
            grad_step.mul_(torch.neg(step).expm1_()).neg_()  # sigmoid(x) = 1 - exp(-softplus(x))
        grad_D = None if D is None else (grads[0] * u).sum((0, 1, 2))
        grad_bias = None if bias is None else grad_step.sum((0, 1, 2))
        return grad_u, grad_step, grad_A, grad_B, grad_C, grad_D, grad_bias, None


def _segments(u: Tensor, A: Tensor) -> list[slice]:
    """Split the positions: each segment has a multiple of the chunk's positions."""
    size = max(_SEGMENT_ELEMENTS // max(len(u) * A.numel(), 1) // _CHUNK, 1) * _CHUNK
    return [slice(start, start + size) for start in range(0, u.shape[1], size)]
