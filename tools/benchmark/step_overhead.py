#!/usr/bin/env python
"""Measure the overhead of a fastamp training step over a bare PyTorch AMP loop with the same arithmetic.

Both loops train the same model on the same random images in alternating steps, so that drift of the machine's speed
does not bias the comparison. Each pair of steps has one ratio of the times; the result is the median ratio with a 95 %
bootstrap confidence interval. On a CPU, the CPU time of the process is reported as well. It excludes the time in which
other processes occupy the cores.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from train_step import batches, build_trainer, config, fastamp_step

from fastamp.amp import PrecisionPolicy, resolve_device
from fastamp.diagnostics.environment import inspect_environment
from fastamp.modeling import build_model
from fastamp.solver import build_gradient_clipping, build_optimizer
from fastamp.utils.env import keep_freed_memory
from fastamp.utils.progress import track

NETWORKS = {
    "resnet50": (),
    "resnet18": ("MODEL.BACKBONE.DEPTH", "18x", "MODEL.BACKBONE.FEAT_DIM", "512"),
}
"""Name -> changes of the BoT R50 recipe."""


def build_config(args: argparse.Namespace) -> Any:
    """Build the config of both loops."""
    cfg = config(args, amp=True)
    cfg.merge_from_list(["SOLVER.AMP.DTYPE", args.dtype, *NETWORKS[args.network], *args.opts])
    return cfg


def bare_step(args: argparse.Namespace) -> Callable[[], None]:
    """Return a function that runs one step of the AMP loop from the PyTorch documentation, with the same model.

    Gradients are scaled in float16 and clipped if ``SOLVER.CLIP_GRADIENTS`` is enabled.
    """
    cfg = build_config(args)
    torch.manual_seed(0)
    model = build_model(cfg)
    device = next(model.parameters()).device
    optimizer, source = build_optimizer(cfg, model), batches(args)
    policy, clip = PrecisionPolicy.from_config(cfg, device), build_gradient_clipping(cfg)
    scale = cfg.SOLVER.AMP.INIT_SCALE
    scaler = torch.amp.GradScaler(device.type, init_scale=scale, enabled=policy.needs_loss_scaling)
    model.train()

    def step() -> None:
        with policy.autocast():
            loss = sum(model(next(source)).values())
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            clip(gradients, torch.nn.utils.get_total_norm(gradients))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(step: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of one step."""
    start, cpu_start = time.perf_counter(), time.process_time()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - cpu_start


def summarize(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Compute the median ratio of pairs (fastamp, bare) of times, with its 95 % bootstrap confidence interval.

    The pairs alternate between two orders of the two steps. The mean of the medians of both orders reduces the effect
    of the order.
    """
    ratios = np.array([one / other for one, other in pairs])
    random = np.random.default_rng(0)
    medians = []
    for order in (ratios[0::2], ratios[1::2]):
        resampled = random.choice(order, (2000, len(order)))
        medians.append((np.median(order), np.median(resampled, axis=1)))
    (first, first_resampled), (second, second_resampled) = medians
    low, high = np.quantile((first_resampled + second_resampled) / 2, (0.025, 0.975))
    fastamp, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "fastamp": fastamp, "bare": bare, "ratio": float(first + second) / 2, "low": float(low), "high": float(high),
    }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark, print the result and return it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--network", choices=NETWORKS, default="resnet50")
    parser.add_argument("--dtype", default="auto", help="SOLVER.AMP.DTYPE (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="batch size (default: %(default)s)")
    parser.add_argument("--size", type=int, nargs=2, default=(256, 128), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--warmup", type=int, default=4, help="number of warm-up pairs (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=40, help="number of measured pairs (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="also write the result to this JSON file")
    parser.add_argument("opts", nargs="*", metavar="KEY VALUE", help="changes of the config")
    args = parser.parse_args(argv)
    if args.pairs < 2:
        parser.error("--pairs must be at least 2")
    device = resolve_device(args.device)
    print(inspect_environment(device).table(), file=sys.stderr)
    if device.type == "cpu":
        keep_freed_memory()  # as default_setup does
    fastamp, bare = fastamp_step(build_trainer(build_config(args), batches(args))), bare_step(args)
    times: list[dict[Callable[[], None], tuple[float, float]]] = []
    for pair in track(range(args.warmup + args.pairs), args.warmup + args.pairs, "pairs of steps"):
        # Alternate the order, since the second step may benefit from warm caches.
        order = (fastamp, bare) if pair % 2 else (bare, fastamp)
        seconds = {step: timed(step, device) for step in order}
        if pair >= args.warmup:
            times.append(seconds)
    clocks = ["wall", "cpu"] if device.type == "cpu" else ["wall"]
    summaries = {
        clock: summarize([(of_pair[fastamp][i], of_pair[bare][i]) for of_pair in times])
        for i, clock in enumerate(clocks)
    }
    print(f"{args.network}, {args.size[0]}x{args.size[1]}, batch {args.batch}, {len(times)} pairs of steps")
    for clock, summary in summaries.items():
        print(
            f"{clock:4} time: fastamp {summary['fastamp']:.4f} s, bare PyTorch AMP {summary['bare']:.4f} s per step; "
            f"overhead {100 * (summary['ratio'] - 1):+.2f} % "
            f"(95 % interval {100 * (summary['low'] - 1):+.2f} to {100 * (summary['high'] - 1):+.2f} %)"
        )
    result = {
        "network": args.network, "size": list(args.size), "batch": args.batch, "pairs": len(times), **summaries,
    }  # fmt: skip
    if args.output:
        args.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
