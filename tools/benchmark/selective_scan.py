#!/usr/bin/env python
"""Compare formulations of the selective scan on a CPU, at the shapes of VMamba-T for images of 256x128.

The variants run in turns. The last rows add up the 2, 2, 8 and 2 blocks of the stages.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from fastamp.layers import selective_scan

STAGES = ((2, 96, 2048), (2, 192, 512), (8, 384, 128), (2, 768, 32))
"""Blocks, channels of a direction, positions."""

DIRECTIONS = 4


def prepare(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors and the inputs of the states, (batch, channels, N, L)."""
    step = F.softplus(delta + bias[:, None])
    B = B.repeat_interleave(u.shape[1] // B.shape[1], 1)
    return (step[:, :, None] * A[:, :, None]).exp(), (step * u)[:, :, None] * B


def finish(h: Tensor, u: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """Return the output, (batch, channels, L)."""
    return (h * C.repeat_interleave(u.shape[1] // C.shape[1], 1)).sum(2) + D[:, None] * u


def loop(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor) -> Tensor:
    """Compute each position by the definition."""
    delta, repeats = F.softplus(delta + bias[:, None]), u.shape[1] // B.shape[1]
    B, C = (x.repeat_interleave(repeats, 1) for x in (B, C))
    state, outputs = torch.zeros_like(A), []
    for u_l, step, B_l, C_l in zip(u.unbind(2), delta.unbind(2), B.unbind(3), C.unbind(3), strict=True):
        state = (step[..., None] * A).exp() * state + (step * u_l)[..., None] * B_l
        outputs.append((state * C_l).sum(2))
    return torch.stack(outputs, 2) + D[:, None] * u


def loop_of_prepared(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor) -> Tensor:
    """Compute only the recurrence by a loop, with two operations per position."""
    factor, entering = (x.permute(3, 0, 1, 2).contiguous() for x in prepare(u, delta, A, B, bias))
    state, states = torch.zeros_like(factor[0]), []
    for factor_l, entering_l in zip(factor.unbind(0), entering.unbind(0), strict=True):
        state = torch.addcmul(entering_l, factor_l, state)
        states.append(state)
    return finish(torch.stack(states, 3), u, C, D)


def doubling(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor) -> Tensor:
    """Combine each position with those before it, at distances 1, 2, 4, ... (Hillis & Steele 1986)."""
    factor, h = prepare(u, delta, A, B, bias)
    distance = 1
    while distance < u.shape[2]:
        near, far = factor[..., distance:], h[..., :-distance]
        h = torch.cat((h[..., :distance], torch.addcmul(h[..., distance:], near, far)), 3)
        factor = torch.cat((factor[..., :distance], near * factor[..., :-distance]), 3)
        distance *= 2
    return finish(h, u, C, D)


def matrices(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bias: Tensor) -> Tensor:
    """Multiply chunks of 16 positions with the matrix exp(S_l - S_j), j <= l, of cumulative sums; loop over chunks."""
    chunk = 16
    _, entering = prepare(u, delta, A, B, bias)
    exponent = F.softplus(delta + bias[:, None])[:, :, None] * A[:, :, None]
    sums = exponent.unflatten(3, (-1, chunk)).cumsum(4)
    later = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
    matrix = (sums[..., :, None] - sums[..., None, :]).masked_fill(later, -torch.inf).exp()
    local = (matrix @ entering.unflatten(3, (-1, chunk))[..., None])[..., 0]
    state, states = torch.zeros_like(local[..., 0, 0]), []
    for decay, part in zip(sums.exp().unbind(3), local.unbind(3), strict=True):
        states.append(torch.addcmul(part, decay, state[..., None]))
        state = states[-1][..., -1]
    return finish(torch.cat(states, 3), u, C, D)


VARIANTS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "loop over the positions": (loop, False),
    "loop over prepared factors": (loop_of_prepared, False),
    "matrices": (matrices, False),
    "doubling": (doubling, False),
    "fastamp, (batch, K d, L)": (selective_scan, False),
    "fastamp, (batch, L, K d)": (selective_scan, True),
}
"""Function, and whether u and delta are transposed views of contiguous (batch, L, K d) tensors."""


def random_inputs(batch: int, channels: int, states: int, length: int) -> list[Tensor]:
    """Return the seven inputs of the scan, of the size of a trained model's."""
    wide = DIRECTIONS * channels
    u, delta = torch.randn(2, batch, wide, length)
    B, C = torch.randn(2, batch, DIRECTIONS, states, length)
    A = -torch.arange(1.0, states + 1).repeat(wide, 1)
    return [u, delta, A, B, C, torch.ones(wide), torch.empty(wide).uniform_(-6.9, -2.25)]


def measure(function: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[float, float]:
    """Return the CPU milliseconds of a forward pass without gradients, and of a forward and a backward pass."""
    times = [time.process_time()]
    with torch.no_grad():
        function(*inputs)
    times.append(time.process_time())
    output = function(*inputs)
    torch.autograd.grad(output, inputs, torch.ones_like(output))
    times.append(time.process_time())
    return 1000 * (times[1] - times[0]), 1000 * (times[2] - times[1])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--states", type=int, default=1, help="N; 1 in the released models of VMamba")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    totals = {name: [0.0, 0.0] for name in VARIANTS}
    for blocks, channels, length in STAGES:
        inputs = random_inputs(args.batch, channels, args.states, length)
        reference = loop(*(x.double() for x in inputs))
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.shape == inputs[0].shape else x for x in inputs]
        given = {False: inputs, True: views}
        for x in (*inputs, *views):
            x.requires_grad_()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
        for number in range(args.rounds + 1):
            for name, (function, transposed) in VARIANTS.items():
                taken = measure(function, given[transposed])
                if number:  # the first round warms up
                    times[name].append(taken)
        for name, (function, transposed) in VARIANTS.items():
            forward, both = (statistics.median(column) for column in zip(*times[name], strict=True))
            totals[name][0] += blocks * forward
            totals[name][1] += blocks * both
            with torch.no_grad():
                error = float((function(*given[transposed]) - reference).abs().max() / reference.abs().max())
            base = times["loop over the positions"]
            ratios = [
                statistics.median(a / b for a, b in zip(first, own, strict=True))
                for first, own in zip(zip(*base, strict=True), zip(*times[name], strict=True), strict=True)
            ]
            rows.append(
                (length, name, f"{forward:.1f}", f"{ratios[0]:.1f}", f"{both:.1f}", f"{ratios[1]:.1f}", f"{error:.0e}")
            )
    first = totals["loop over the positions"]
    for name, (forward, both) in totals.items():
        rows.append(
            ("all", name, f"{forward:.0f}", f"{first[0] / forward:.1f}", f"{both:.0f}", f"{first[1] / both:.1f}", "")
        )
    headers = ("L", "variant", "forward, CPU ms", "speedup", "and backward, CPU ms", "speedup", "error")
    print(f"batch {args.batch}, K = {DIRECTIONS}, N = {args.states}, {torch.get_num_threads()} threads")
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
