#!/usr/bin/env python
"""Compare compiled with eager training steps and inference, for each region of MODEL.COMPILE_REGION.

The same model with the same weights runs in turns eagerly and compiled, in one process. Images are random and in
memory. ``warm-up`` is the time of the passes that compile; delete the folder TORCHINDUCTOR_CACHE_DIR to measure it
without compiled code of earlier runs.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from tabulate import tabulate
from torch import nn
from train_step import NETWORKS, batches, build_trainer, config, fastamp_step

from fastamp.amp import PrecisionPolicy, resolve_device
from fastamp.diagnostics.environment import inspect_environment
from fastamp.utils.compiled import compilation_of, uncompiled
from fastamp.utils.env import keep_freed_memory
from fastamp.utils.errors import UserError


def measure(args: argparse.Namespace, run: Callable[[], None], model: nn.Module) -> tuple[list[float], float]:
    """Run ``run`` in turns eagerly and compiled.

    Returns:
        Median CPU milliseconds (on a CUDA device: milliseconds) of an eager and of a compiled pass with the median of
        their ratios, and the seconds of warm-up.
    """
    clock = time.perf_counter if next(model.parameters()).is_cuda else time.process_time

    def timed(compiled: bool) -> float:
        with nullcontext() if compiled else uncompiled(model):
            start = clock()
            run()
            if next(model.parameters()).is_cuda:
                torch.cuda.synchronize()
            return 1000 * (clock() - start)

    before = compilation_of(model)
    seconds = before.seconds if before else 0.0
    for _ in range(args.warmup):
        timed(False)
        timed(True)
    state = compilation_of(model)
    if state is None:
        sys.exit("the compilation failed")
    pairs = [(timed(False), timed(True)) for _ in range(args.steps)]
    eager, compiled = zip(*pairs, strict=True)
    ratio = statistics.median(c / e for e, c in pairs)
    return [statistics.median(eager), statistics.median(compiled), ratio], state.seconds - seconds


def infer(model: nn.Module, policy: PrecisionPolicy, batch: dict[str, torch.Tensor]) -> None:
    """Compute the features of a batch."""
    with torch.inference_mode(), policy.autocast():
        model(batch)


def main() -> None:
    """Measure each region of each network and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["resnet50", "osnet_x0_25", "vit_base"])
    parser.add_argument("--regions", nargs="+", choices=("backbone", "model", "blocks"), default=["backbone", "model"])
    parser.add_argument("--mode", default="default", help="MODEL.COMPILE_MODE. Default: default")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, nargs=2, default=(128, 64), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--amp", action="store_true", help="mixed precision. Default: float32")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10, help="number of pairs of an eager and a compiled pass")
    args = parser.parse_args()
    device = resolve_device(args.device)
    print(inspect_environment(device, asked=args.device).table(), file=sys.stderr)
    if device.type == "cpu":
        keep_freed_memory()
    size = f"({args.size[0]}, {args.size[1]})"
    rows = []
    for network in args.networks:
        for region in args.regions:
            print(f"{network}, {region}", file=sys.stderr)
            options = ("MODEL.COMPILE", "inductor", "MODEL.COMPILE_MODE", args.mode, "MODEL.COMPILE_REGION", region)
            cfg = config(args, *NETWORKS[network], *options, "INPUT.SIZE_TRAIN", size, amp=args.amp)
            try:
                trainer = build_trainer(cfg, batches(args))
            except UserError as error:
                print(f"{network}, {region}: {error}", file=sys.stderr)
                continue
            model, policy = trainer.model, PrecisionPolicy.from_config(cfg, device)
            passes = {
                "training": fastamp_step(trainer),
                "inference": partial(infer, model, policy, next(batches(args))),
            }
            for name, run in passes.items():
                model.train(name == "training")
                (eager, compiled, ratio), seconds = measure(args, run, model)
                rows.append(
                    (network, region, name, f"{eager:.0f}", f"{compiled:.0f}", f"{1 / ratio:.2f}", f"{seconds:.0f}")
                )
                print(rows[-1], file=sys.stderr, flush=True)
            torch.compiler.reset()
    precision = "AMP" if args.amp else "float32"
    print(f"{args.size[0]}x{args.size[1]}, batch {args.batch}, {precision}, mode {args.mode}, CPU ms of a pass")
    headers = ["network", "region", "pass", "eager", "compiled", "speedup", "warm-up, s"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
