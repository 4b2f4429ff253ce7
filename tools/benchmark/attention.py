#!/usr/bin/env python
"""Compare attention in float32, in PyTorch's bfloat16 kernel and in fastamp with bfloat16 inputs, on a CPU.

The variants run in turns. Errors of output and gradients are relative to float64 (root mean square).
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tabulate import tabulate

from fastamp.layers import dot_product_attention

# Name, function, dtype of queries, keys and values.
VARIANTS = (
    ("float32", F.scaled_dot_product_attention, torch.float32),
    ("PyTorch's kernel in bfloat16", F.scaled_dot_product_attention, torch.bfloat16),
    ("fastamp in bfloat16", dot_product_attention, torch.bfloat16),
)


def attend(
    function: Callable[..., torch.Tensor], packed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """Return the output, the gradients, and the CPU milliseconds of both passes for (3, B, heads, N, D) inputs."""
    packed = packed.clone().requires_grad_()
    times = [time.process_time()]
    output = function(*packed.unbind(0))
    times.append(time.process_time())
    output.backward(torch.ones_like(output))
    times.append(time.process_time())
    milliseconds = [1000 * (end - start) for start, end in itertools.pairwise(times)]
    return output.detach().double(), packed.grad.double(), milliseconds


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=129, help="129: ViT-B/16 with images of 256x128")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    exact = torch.randn(3, args.batch, args.heads, args.tokens, 64).bfloat16()
    *reference, _ = attend(F.scaled_dot_product_attention, exact.double())
    times: dict[str, list[list[float]]] = {name: [] for name, _, _ in VARIANTS}
    errors = {}
    for number in range(args.rounds + 1):
        for name, function, dtype in VARIANTS:
            *outputs, taken = attend(function, exact.to(dtype))
            errors[name] = [float((a - b).norm() / b.norm()) for a, b in zip(outputs, reference, strict=True)]
            if number:  # the first round warms up
                times[name].append(taken)
    rows = []
    for name, rounds in times.items():
        forward, backward = (statistics.median(column) for column in zip(*rounds, strict=True))
        output, gradients = errors[name]
        rows.append((name, f"{forward:.1f}", f"{backward:.1f}", f"{output:.1e}", f"{gradients:.1e}"))
    headers = ("variant", "forward, CPU ms", "backward, CPU ms", "error of output", "error of gradients")
    print(f"batch {args.batch}, {args.heads} heads of width 64, {args.tokens} tokens")
    print(tabulate(rows, headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
