#!/usr/bin/env python
"""Measure the overhead of a fastamp training step over a bare PyTorch AMP loop with the same model.

Both loops train the same ResNet-50 recipe on the same random images in alternating steps, so that drift of the
machine's speed does not bias the comparison. The result is the median ratio of the times over the pairs of steps.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch
from train_step import batches, config

from fastamp.amp import PrecisionPolicy, resolve_device
from fastamp.diagnostics.environment import inspect_environment
from fastamp.engine import TRAINER_REGISTRY
from fastamp.modeling import build_model
from fastamp.solver import build_optimizer
from fastamp.utils.env import keep_freed_memory
from fastamp.utils.progress import track


def fastamp_step(args: argparse.Namespace) -> Callable[[], None]:
    """Return a function that runs one iteration of AMPTrainer with the default config."""
    cfg = config(args, amp=True)
    torch.manual_seed(0)
    model = build_model(cfg)
    parts = {"model": model, "data_loader": batches(args), "optimizers": [build_optimizer(cfg, model)]}
    trainer = TRAINER_REGISTRY.build("AMPTrainer", cfg, **parts)
    model.train()

    def step() -> None:
        trainer.run_step()
        trainer.iter += 1

    return step


def bare_step(args: argparse.Namespace) -> Callable[[], None]:
    """Return a function that runs one step of the AMP loop from the PyTorch documentation, with the same model."""
    cfg = config(args, amp=True)
    torch.manual_seed(0)
    model = build_model(cfg)
    optimizer, source = build_optimizer(cfg, model), batches(args)
    policy = PrecisionPolicy.from_config(cfg, next(model.parameters()).device)
    model.train()

    def step() -> None:
        with policy.autocast():
            loss = sum(model(next(source)).values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of one step."""
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Run the benchmark and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, nargs=2, default=(256, 128), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--warmup", type=int, default=4, help="number of warm-up pairs (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=40)
    args = parser.parse_args()
    device = resolve_device(args.device)
    print(inspect_environment(device).table(), file=sys.stderr)
    if device.type == "cpu":
        keep_freed_memory()  # as default_setup does
    fastamp, bare = fastamp_step(args), bare_step(args)
    times: list[tuple[float, float]] = []
    for pair in track(range(args.warmup + args.pairs), args.warmup + args.pairs, "pairs of steps"):
        # Alternate the order, since the second step may benefit from warm caches.
        order = (fastamp, bare) if pair % 2 else (bare, fastamp)
        seconds = {step: timed(step, device) for step in order}
        if pair >= args.warmup:
            times.append((seconds[fastamp], seconds[bare]))
    ratios = sorted(one / other for one, other in times)
    quarter = len(ratios) // 4
    # The mean of the medians of both orders cancels the effect of the order.
    by_order = [statistics.median(a / b for a, b in itertools.islice(times, first, None, 2)) for first in (0, 1)]
    ratio = statistics.mean(by_order)
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    print(f"ResNet-50, {args.size[0]}x{args.size[1]}, batch {args.batch}, {len(times)} pairs of steps")
    print(f"fastamp {medians[0]:.4f} s, bare PyTorch AMP {medians[1]:.4f} s per step (medians)")
    middle = f"{ratios[quarter]:.4f} to {ratios[-quarter - 1]:.4f}"
    print(f"fastamp / bare: {ratio:.4f} ({100 * (ratio - 1):+.2f} %), interquartile range {middle}")


if __name__ == "__main__":
    main()
