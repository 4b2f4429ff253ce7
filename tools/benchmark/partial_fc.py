#!/usr/bin/env python
"""Measure time and memory of a training step of the head with many identities, with and without Partial FC.

Each row is measured in a process of its own: the head (ArcSoftmax, cross entropy, SGD with momentum) on random
features, with the optimizer step of fastamp. The time is the median of the steps. The memory is the increase of the
peak over the memory before the head is built: on a CPU the resident set, on CUDA the allocated tensors. The class
centers and their momentum, which are the same for all rows of the same number of identities, are in a column of their
own; on a CPU, the rest includes the libraries that the first step loads.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

from fastamp.amp import OptimizationStep, resolve_device
from fastamp.diagnostics.environment import inspect_environment
from fastamp.modeling.heads import EmbeddingHead
from fastamp.modeling.losses import LOSS_REGISTRY
from fastamp.utils.env import peak_memory_mb


def sampling_rates(identities: int, centers: int) -> dict[str, float | None]:
    """Return the rows of the table for a number of identities: name -> sampling rate, None for the ordinary head."""
    rates = {"ordinary head": None, "Partial FC, rate 1": 1.0, "Partial FC, rate 0.1": 0.1}
    return rates | {f"Partial FC, {centers:,} centers": min(1.0, centers / identities)}


def measure(args: argparse.Namespace, identities: int, rate: float | None) -> dict[str, float]:
    """Return the milliseconds of a step, and the memory in MiB: of the centers with momentum, and the rest."""
    torch.manual_seed(0)
    device = resolve_device(args.device)
    before = peak_memory_mb(device)
    backbone = nn.Linear(args.width, args.width)  # so that the features have a gradient
    head = EmbeddingHead(
        feat_dim=args.width,
        num_classes=identities,
        cls_layer="ArcSoftmax",
        scale=64,
        margin=0.5,
        with_bnneck=False,
        pool_layer="Identity",
        sample_rate=rate,
    )
    model = nn.ModuleList([backbone, head]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    step, loss = OptimizationStep(model, [optimizer]), LOSS_REGISTRY.get("CrossEntropyLoss")()
    times, clock = [], time.process_time if args.cpu_time else time.perf_counter
    for number in range(args.warmup + args.steps):
        inputs = torch.randn(args.batch, args.width, device=device)
        targets = torch.randint(identities, (args.batch,), device=device)
        start = clock()
        step.zero_grad()
        outputs = head(backbone(inputs)[:, :, None, None], targets)
        step.scale({"loss_cls": loss(outputs, targets)}).backward()
        step.finish()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= args.warmup:
            times.append(clock() - start)
    centers = 2 * head.weight.nbytes / 2**20
    rest = peak_memory_mb(device) - before - centers
    return {"ms": 1000 * statistics.median(times), "MiB of centers and momentum": centers, "other MiB": rest}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the benchmark, print a table and return its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--identities", type=int, nargs="+", default=[20_000, 100_000, 250_000, 500_000, 1_000_000])
    parser.add_argument("--width", type=int, default=64, help="feature width (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="batch size (default: %(default)s)")
    parser.add_argument("--centers", type=int, default=10_000, help="centers of the last row (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=4, help="number of warm-up steps (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="number of measured steps (default: %(default)s)")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time, on a machine with other load")
    parser.add_argument("--output", type=Path, help="also write the rows to this JSON file")
    args = parser.parse_args(argv)
    if min(args.identities) < 1 or args.steps < 1:
        parser.error("--identities and --steps must be at least 1")
    print(inspect_environment(resolve_device(args.device)).table(), file=sys.stderr)
    rows = []
    for identities in args.identities:
        for name, rate in sampling_rates(identities, args.centers).items():
            # A new process for each row: the peak of the resident set cannot be reset.
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                rows.append({"identities": identities, "head": name, **pool.apply(measure, (args, identities, rate))})
    print(tabulate(rows, headers="keys", floatfmt=",.1f", intfmt=",", tablefmt="github"))
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
