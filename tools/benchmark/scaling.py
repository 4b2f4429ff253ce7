#!/usr/bin/env python
"""Compare a training step in one and in two processes, and predict the scaling to many GPUs.

The global batch and the total number of threads are the same: one process with 2 threads, or two with 1 thread each.
Both settings run in turns, so that drift of the machine's speed does not bias the comparison. An all-reduce of a tensor
as large as the gradients is measured separately. Images are random and in memory, without an input pipeline. The output
of --predict is computed, not measured.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import nn

from fastamp.amp import requested_device, resolve_device
from fastamp.config import CfgNode, fixed_input_size, read_config
from fastamp.diagnostics.environment import inspect_environment
from fastamp.engine import TRAINER_REGISTRY, launch
from fastamp.modeling import build_model
from fastamp.solver import build_optimizer
from fastamp.utils import comm
from fastamp.utils.env import available_cores, keep_freed_memory

QUICKSTART = "Demo/bagtricks_R18"
NUM_CLASSES = 751
BUCKET = 25 * 2**20
"""Bucket size of DistributedDataParallel in bytes."""
BACKWARD = 2 / 3
"""Fraction of a step spent in the backward pass, which can overlap with communication; twice the forward pass."""
REACHED = 0.8
"""Achieved fraction of a link's nominal bandwidth."""


@dataclasses.dataclass(frozen=True)
class Links:
    """Interconnect between GPUs, with eight GPUs per machine.

    Attributes:
        name: name in the table.
        inside: bandwidth between GPUs of the same machine in bytes/s, one direction.
        between: bandwidth between machines in bytes/s, one direction; shared by the rings of all network cards.
        latency: latency of one hop in seconds.
    """

    name: str
    inside: float
    between: float
    latency: float


LINKS = (
    Links("NVLink 4 (450 GB/s), 8 x 400 Gb/s InfiniBand", 450e9, 8 * 50e9, 5e-6),
    Links("PCIe 4.0 x16 (32 GB/s), 100 Gb/s Ethernet", 32e9, 12.5e9, 30e-6),
    Links("PCIe 4.0 x16 (32 GB/s), 25 Gb/s Ethernet", 32e9, 3.125e9, 30e-6),
)


def all_reduce_seconds(size: int, gpus: int, links: Links) -> float:
    """Return the time of a ring all-reduce: 2 (N - 1) / N x bytes / bandwidth, plus the latency of the hops.

    Args:
        size: size of the gradients in bytes.
        gpus: number N of GPUs; above 8 the ring spans machines, and the slowest link counts.
        links: interconnect.
    """
    bandwidth = REACHED * (links.inside if gpus <= 8 else min(links.inside, links.between))
    hops = 2 * (gpus - 1) * math.ceil(size / BUCKET)
    return 2 * (gpus - 1) / gpus * size / bandwidth + hops * links.latency


def efficiencies(step: float, communication: float) -> tuple[float, float]:
    """Return the scaling efficiencies, in 0..1, without and with full overlap of communication and backward pass."""
    exposed = max(0.0, communication - BACKWARD * step)
    return step / (step + communication), step / (step + exposed)


def predict(cfg: CfgNode, step: float, size: int, origin: str) -> None:
    """Print the predicted scaling and its assumptions.

    Args:
        cfg: config with SOLVER.IMS_PER_BATCH.
        step: seconds per step on one GPU with SOLVER.IMS_PER_BATCH images.
        size: size of the gradients in bytes.
        origin: source of ``step``, for the output.
    """
    batch = cfg.SOLVER.IMS_PER_BATCH
    print(
        f"computed, not measured: {batch} images and {step:g} s per step on each GPU ({origin}), gradients "
        f"{size / 2**20:.1f} MiB;\nrings with {100 * REACHED:.0f} % of the nominal bandwidth, 8 GPUs per machine, "
        "buckets of 25 MiB; ranges are from no overlap\nwith the backward pass (two thirds of a step) to full "
        "overlap; the input pipeline is assumed not to be a bottleneck"
    )
    print(prediction(step, size, batch))


def prediction(step: float, size: int, batch: int) -> str:
    """Return the table of predicted speeds.

    Args:
        step: seconds per step on one GPU.
        size: size of the gradients in bytes.
        batch: images per GPU and step; the global batch grows with the number of GPUs.
    """
    rows = []
    for links in LINKS:
        for gpus in (8, 64):
            seconds = all_reduce_seconds(size, gpus, links)
            fractions = efficiencies(step, seconds)
            speeds = " to ".join(f"{gpus * batch / step * fraction:.0f}" for fraction in fractions)
            per_cent = " to ".join(f"{100 * fraction:.1f}" for fraction in fractions)
            rows.append((links.name, gpus, f"{1e3 * seconds:.1f}", speeds, f"{per_cent} %"))
    headers = ["links", "GPUs", "all-reduce, ms", "images/s", "of linear scaling"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _image_size(cfg: CfgNode) -> tuple[int, int]:
    return fixed_input_size(cfg, is_train=True, needed_by="this benchmark")


def batches(cfg: CfgNode) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this process's shard of one random batch, infinitely."""
    size, generator = cfg.SOLVER.IMS_PER_BATCH, torch.Generator().manual_seed(0)
    shard = slice(*comm.shard_range(size))
    images = torch.randint(256, (size, cfg.INPUT.CHANNELS, *_image_size(cfg)), dtype=torch.uint8, generator=generator)
    batch = {"images": images[shard], "targets": (torch.arange(size) // 4)[shard]}
    batch |= {name: torch.zeros_like(batch["targets"]) for name in ("camids", "viewids")}
    while True:
        yield batch


def config(args: argparse.Namespace) -> CfgNode:
    """Build the config, without pretrained weights."""
    given = ["MODEL.DEVICE", "auto", "MODEL.BACKBONE.PRETRAIN", "False", "MODEL.HEADS.NUM_CLASSES", str(NUM_CLASSES)]
    given += ["SOLVER.AMP.PREFLIGHT", "off"]  # not part of a step
    return read_config(args.config_file, [*given, *args.opts])


def gradient_bytes(model: nn.Module) -> int:
    """Return the size of the gradients in bytes."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def measure(args: argparse.Namespace) -> None:
    """Time steps and all-reduces in this process group and write the medians as JSON."""
    cfg = config(args)
    device = resolve_device(requested_device(cfg))
    if device.type == "cpu":
        keep_freed_memory()  # as default_setup does
    torch.manual_seed(0)
    model = build_model(cfg).train()
    trainer = TRAINER_REGISTRY.build(
        "AMPTrainer" if cfg.SOLVER.AMP.ENABLED else "SimpleTrainer",
        cfg,
        model=model,
        data_loader=batches(cfg),
        optimizers=[build_optimizer(cfg, model)],
    )

    def step() -> None:
        trainer.run_step()
        trainer.iter += 1  # only iteration 0 checks that low precision is used

    size = gradient_bytes(model)
    figures = {"step": timed(step, args.warmup, args.steps, device), "bytes": size, "all_reduce": 0.0}
    if comm.is_distributed():
        gradients = torch.zeros(size, dtype=torch.uint8, device=device).view(torch.float32).split(BUCKET // 4)

        def all_reduce() -> None:
            for bucket in gradients:
                dist.all_reduce(bucket)

        figures["all_reduce"] = timed(all_reduce, 1, args.steps, device)
    if comm.is_main_process():
        Path(args.output).write_text(json.dumps(figures))


def timed(function: Any, warmup: int, count: int, device: torch.device) -> float:
    """Return the median seconds of ``count`` calls."""
    times = []
    for number in range(warmup + count):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number >= warmup:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def compare(args: argparse.Namespace, counts: tuple[int, ...]) -> dict[int, dict[str, float]]:
    """Measure each number of processes in turns; return the medians over the rounds."""
    results: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        for round_number in range(args.rounds):
            for count in counts:
                threads = max(1, args.threads // count)
                print(f"round {round_number + 1} of {args.rounds}: {count} processes", file=sys.stderr)
                subprocess.run(
                    [sys.executable, __file__, "--measure", str(count), "--output", str(output), *sys.argv[1:]],
                    check=True,
                    stdout=sys.stderr,
                    env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                )
                results[count].append(json.loads(output.read_text()))
    return {
        count: {key: statistics.median(figures[key] for figures in rounds) for key in rounds[0]}
        for count, rounds in results.items()
    }


def main() -> None:
    """Run the benchmark and print the table and, with --predict, the predicted scaling."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config-file", default=QUICKSTART)
    parser.add_argument("--processes", type=int, default=2, help="number of processes to compare with one process")
    parser.add_argument(
        "--threads", type=int, default=available_cores(), help="total number of threads of all processes"
    )
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--predict", action="store_true", help="also predict the scaling to 8 and 64 GPUs")
    parser.add_argument(
        "--step-seconds", type=float, help="predict from this time per step of one GPU, without a measurement"
    )
    parser.add_argument("--measure", type=int, help="only measure this number of processes and write to --output")
    parser.add_argument("--output")
    parser.add_argument("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE")
    args = parser.parse_args()
    if args.measure:
        launch(measure, args.measure, args=(args,))
        return
    cfg = config(args)
    if args.step_seconds:
        predict(cfg, args.step_seconds, gradient_bytes(build_model(cfg)), "given")
        return
    device = resolve_device(requested_device(cfg))
    print(inspect_environment(device, asked=requested_device(cfg)).table(), file=sys.stderr)
    figures_of = compare(args, (1, args.processes))
    batch, single = cfg.SOLVER.IMS_PER_BATCH, figures_of[1]["step"]
    precision = "AMP" if cfg.SOLVER.AMP.ENABLED else "float32"
    size, mib = "x".join(map(str, _image_size(cfg))), figures_of[1]["bytes"] / 2**20
    print(
        f"measured: {Path(args.config_file).stem}, {size}, {precision}, global batch {batch}, gradients {mib:.1f} MiB"
    )
    rows = [
        (
            f"{count} x {max(1, args.threads // count)}",
            f"{figures['step']:.3f}",
            f"{batch / figures['step']:.1f}",
            f"{single / figures['step']:.2f}",
            f"{1e3 * figures['all_reduce']:.1f}",
            f"{100 * figures['all_reduce'] / figures['step']:.1f} %",
        )
        for count, figures in figures_of.items()
    ]
    headers = ["processes x threads", "s/step", "images/s", "x one process", "all-reduce, ms", "of the step"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    if args.predict:
        print()
        predict(cfg, single, int(figures_of[1]["bytes"]), "measured in one process")


if __name__ == "__main__":
    main()
