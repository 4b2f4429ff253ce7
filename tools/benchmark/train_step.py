#!/usr/bin/env python
"""Compare training steps in mixed precision, in float32 and in a plain PyTorch loop.

Each variant runs in a separate process to measure its peak memory. The variants run in turns, so that drift of the
machine's speed does not bias the comparison. Images are random and in memory, without an input pipeline.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from tabulate import tabulate
from torch import nn

from fastamp.amp import PrecisionPolicy, resolve_device
from fastamp.config import CfgNode, get_cfg
from fastamp.diagnostics.environment import inspect_environment
from fastamp.engine import TRAINER_REGISTRY
from fastamp.modeling import build_backbone, build_model
from fastamp.solver import build_optimizer
from fastamp.utils.env import keep_freed_memory, peak_memory_mb

RECIPE = "Market1501/bagtricks_R50"
VARIANTS = ("float32", "amp", "plain float32", "plain amp", "plain amp channels_last")
NUM_CLASSES = 751
OSNET = (
    "MODEL.BACKBONE.NAME",
    "build_osnet_backbone",
    "MODEL.BACKBONE.DEPTH",
    "x0_25",
    "MODEL.BACKBONE.FEAT_DIM",
    "128",
)
VIT = ("MODEL.BACKBONE.NAME", "build_vit_backbone", "MODEL.BACKBONE.DEPTH", "base", "MODEL.BACKBONE.FEAT_DIM", "768")
SWIN = ("MODEL.BACKBONE.NAME", "build_swin_backbone", "MODEL.BACKBONE.DEPTH", "base", "MODEL.BACKBONE.FEAT_DIM", "1024")
NETWORKS = {"resnet50": (), "osnet_x0_25": OSNET, "vit_base": VIT, "swin_base": SWIN}


def config(args: argparse.Namespace, *options: str, amp: bool) -> Any:
    """Build the config of the BoT R50 recipe without pretrained weights."""
    cfg = get_cfg()
    cfg.merge_from_file(RECIPE)
    cfg.merge_from_list(["MODEL.BACKBONE.PRETRAIN", "False", "MODEL.DEVICE", args.device, "SOLVER.AMP", str(amp)])
    cfg.merge_from_list(["SOLVER.AMP.PREFLIGHT", "off"])  # not part of a step
    cfg.merge_from_list(["MODEL.HEADS.NUM_CLASSES", str(NUM_CLASSES), *options])
    return cfg


def batches(args: argparse.Namespace) -> Any:
    """Yield the same random batch infinitely."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (args.batch, 3, *args.size), dtype=torch.uint8, generator=generator)
    targets = torch.arange(args.batch) // 4
    while True:
        yield {"images": images, "targets": targets}


def build_trainer(cfg: CfgNode, loader: Any) -> Any:
    """Build fastamp's trainer with a model from seed 0 in training mode; ``loader`` yields the batches."""
    torch.manual_seed(0)
    model = build_model(cfg)
    trainer = TRAINER_REGISTRY.build(
        "AMPTrainer" if cfg.SOLVER.AMP.ENABLED else "SimpleTrainer",
        cfg,
        model=model,
        data_loader=loader,
        optimizers=[build_optimizer(cfg, model)],
    )
    model.train()
    return trainer


def fastamp_step(trainer: Any) -> Callable[[], None]:
    """Return a function that runs one iteration of fastamp's trainer."""

    def step() -> None:
        trainer.run_step()
        trainer.iter += 1  # only iteration 0 checks that low precision is used

    return step


class PlainGate(nn.Module):
    """OSNet's channel gate as in torchreid: one evaluation per stream."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.fc1, self.fc2 = gate.fc1, gate.fc2

    def forward(self, *streams: torch.Tensor) -> torch.Tensor:
        first, *rest = (x * self.fc2(self.fc1(x.mean((2, 3), keepdim=True)).relu()).sigmoid() for x in streams)
        return sum(rest, start=first)


def plain_backbone(args: argparse.Namespace) -> tuple[nn.Module, int]:
    """Build the network of a plain script, and return it with the number of its features."""
    if args.network == "resnet50":
        resnet = torchvision.models.resnet50()
        resnet.layer4[0].conv2.stride = resnet.layer4[0].downsample[0].stride = (1, 1)
        return nn.Sequential(*list(resnet.children())[:-2]), 2048
    network = build_backbone(config(args, *NETWORKS[args.network], amp=False))
    for block in network.modules():
        if hasattr(block, "gate"):
            block.gate = PlainGate(block.gate)
    return network, network.feature_dim


class PlainModel(nn.Module):
    """Backbone, global average pooling, BNNeck and classifier, as in a plain script."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.backbone, features = plain_backbone(args)
        self.neck = nn.BatchNorm1d(features)
        self.classifier = nn.Linear(features, NUM_CLASSES, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.backbone(x).mean((2, 3))
        return features, self.classifier(self.neck(features))


def plain_step(args: argparse.Namespace, *, amp: bool, channels_last: bool) -> Any:
    """Return a function that runs one iteration of a plain loop: cross entropy, batch-hard triplet loss and Adam."""
    device = resolve_device(args.device)
    policy = PrecisionPolicy.from_config(config(args, *NETWORKS[args.network], amp=amp), device)
    model = PlainModel(args).to(device).train()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=3.5e-4, weight_decay=5e-4)
    source = batches(args)
    mean = torch.tensor([123.675, 116.28, 103.53], device=device).view(1, 3, 1, 1)
    std = torch.tensor([58.395, 57.12, 57.375], device=device).view(1, 3, 1, 1)

    def step() -> None:
        batch = next(source)
        images = (batch["images"].to(device).float() - mean) / std
        if channels_last:
            images = images.to(memory_format=torch.channels_last)
        targets = batch["targets"].to(device)
        with policy.autocast():
            features, logits = model(images)
            features, logits = features.float(), logits.float()
        same = targets[:, None] == targets
        distances = torch.cdist(features, features)
        hardest = distances.masked_fill(~same, 0).amax(1) - distances.masked_fill(same, 1e9).amin(1)
        loss = nn.functional.cross_entropy(logits, targets, label_smoothing=0.1) + (hardest + 0.3).relu().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Run one variant in this process; return images/s, CPU milliseconds per step and peak memory in MiB."""
    amp, device = "amp" in args.variant, resolve_device(args.device)
    if args.variant.startswith("plain"):
        step = plain_step(args, amp=amp, channels_last="channels_last" in args.variant)
    else:
        if device.type == "cpu":
            keep_freed_memory()  # as default_setup does
        step = fastamp_step(build_trainer(config(args, *NETWORKS[args.network], amp=amp), batches(args)))
    for _ in range(args.warmup):
        step()
    times = []
    cpu_start = time.process_time()
    for _ in range(args.steps):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    cpu_ms = 1000 * (time.process_time() - cpu_start) / args.steps
    return {
        "images_per_second": args.batch / statistics.median(times),
        "cpu_ms": cpu_ms,
        "memory": peak_memory_mb(device),
    }


def main() -> None:
    """Run all variants in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--network", choices=NETWORKS, default="resnet50")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, nargs=2, default=(256, 128), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--variants", choices=VARIANTS, nargs="+", default=VARIANTS, help="float32 is the baseline and must be included"
    )
    parser.add_argument("--variant", choices=VARIANTS, help="run only this variant in this process and print JSON")
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args)))
        return
    if "float32" not in args.variants:
        parser.error("--variants must include float32")
    print(inspect_environment(resolve_device(args.device), asked=args.device).table(), file=sys.stderr)
    results: dict[str, list[dict[str, float]]] = {variant: [] for variant in args.variants}
    for round_number in range(args.rounds):
        for variant in args.variants:
            print(f"round {round_number + 1} of {args.rounds}: {variant}", file=sys.stderr)
            output = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--variant", variant],
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            ).stdout
            results[variant].append(json.loads(output.splitlines()[-1]))
    speed, cpu, memory = (
        {v: statistics.median(r[key] for r in results[v]) for v in args.variants}
        for key in ("images_per_second", "cpu_ms", "memory")
    )
    rows = [
        (v, f"{speed[v]:.1f}", f"{speed[v] / speed['float32']:.2f}", f"{cpu[v]:.0f}",
         f"{memory[v]:.0f}", f"{memory[v] / memory['float32']:.2f}")
        for v in args.variants
    ]  # fmt: skip
    headers = ["variant", "images/s", "x float32", "CPU ms/step", "peak MiB", "x float32"]
    print(f"{args.network}, {args.size[0]}x{args.size[1]}, batch {args.batch}")
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
