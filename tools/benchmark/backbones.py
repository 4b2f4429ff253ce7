#!/usr/bin/env python
"""Compare backbones with the same networks in torchvision and timm by parameters, multiply-adds and images/s.

Each row measures forward passes in evaluation mode on a batch of 256x128 images, without the head; last stride and
stem pooling are those of the reference. The two networks run in turns, so that drift of the machine's speed does not
bias the comparison, and the fastest round of each is used. Multiply-adds are those of the convolutions and matrix
products in a forward pass of one image.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import timm
import torch
import torchvision
from tabulate import tabulate
from torch import nn

from fastamp.amp import PrecisionPolicy
from fastamp.config import get_cfg
from fastamp.diagnostics.environment import inspect_environment
from fastamp.engine.dry_run import multiply_adds
from fastamp.modeling import build_backbone

SIZE = (256, 128)


def _vision(name: str) -> nn.Module:
    """Build the torchvision model without its head."""
    model = torchvision.models.get_model(name)
    if hasattr(model, "features"):
        return model.features
    last = {"resnet50": 2, "resnext50_32x4d": 2, "shufflenet_v2_x1_0": 1}[name]
    return nn.Sequential(*list(model.children())[:-last])


def _timm(name: str) -> nn.Module:
    """Build the timm model without its head."""
    options = {"img_size": SIZE} if name.startswith(("vit", "deit")) else {}
    return timm.create_model(name, num_classes=0, global_pool="", **options)


@dataclass(frozen=True)
class Row:
    """Config of a backbone, and the name of the same network in torchvision or timm."""

    name: str
    depth: str
    width: int
    reference: str = ""
    make: Callable[[str], nn.Module] = _vision
    option: str = ""

    @property
    def label(self) -> str:
        """Label of the table row."""
        return " ".join([self.name, self.depth, self.option.removeprefix("WITH_")]).strip()

    def build(self) -> nn.Module:
        """Build the fastamp backbone."""
        cfg = get_cfg()
        cfg.merge_from_list(["MODEL.BACKBONE.NAME", f"build_{self.name}_backbone", "MODEL.BACKBONE.DEPTH", self.depth])
        cfg.merge_from_list(["MODEL.BACKBONE.FEAT_DIM", str(self.width), "INPUT.SIZE_TRAIN", SIZE])
        cfg.merge_from_list(["MODEL.BACKBONE.LAST_STRIDE", "2", "MODEL.BACKBONE.STEM_POOL", "padded"])
        if self.option:
            cfg.merge_from_list([f"MODEL.BACKBONE.{self.option}", "True"])
        return build_backbone(cfg)


ROWS = [
    Row("resnet", "50x", 2048, "resnet50"),
    Row("resnet", "50x", 2048, option="WITH_IBN"),
    Row("resnext", "50x", 2048, "resnext50_32x4d"),
    Row("resnest", "50x", 2048, "resnest50d", _timm),
    Row("osnet", "x1_0", 512),
    Row("osnet", "x1_0", 512, option="WITH_IBN"),
    Row("osnet_ain", "x1_0", 512),
    Row("repvgg", "A0", 1280, "repvgg_a0", _timm),
    Row("repvgg", "A0", 1280, option="DEPLOY"),
    Row("mobilenetv2", "1.0x", 1280, "mobilenet_v2"),
    Row("mobilenetv3", "Large", 1280, "mobilenet_v3_large"),
    Row("shufflenetv2", "1.0x", 1024, "shufflenet_v2_x1_0"),
    Row("effnet", "b0", 1280, "efficientnet_b0"),
    Row("regnet", "400x", 384, "regnetx_004", _timm),
    Row("regnet", "400y", 440, "regnety_004", _timm),
    Row("vit", "base", 768, "vit_base_patch16_224", _timm),
    Row("vit", "deit_small", 384, "deit_small_patch16_224", _timm),
    Row("swin", "tiny", 768, "swin_t"),
]


def compare(models: list[nn.Module], images: torch.Tensor, rounds: int, bf16: bool) -> list[float]:
    """Return images/s of each model in its fastest round, after one warm-up round."""
    seconds: list[list[float]] = [[] for _ in models]
    synchronize = torch.cuda.synchronize if images.is_cuda else lambda: None
    cfg = get_cfg()
    cfg.merge_from_list(["SOLVER.AMP", "bf16" if bf16 else "off"])
    with torch.inference_mode(), PrecisionPolicy.from_config(cfg, images.device).autocast():
        for number in range(rounds + 1):
            for model, times in zip(models, seconds, strict=True):
                synchronize()
                began = time.perf_counter()
                model(images)
                synchronize()
                if number:
                    times.append(time.perf_counter() - began)
    return [len(images) / min(times) for times in seconds]


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bf16", action="store_true", help="use bfloat16 instead of float32")
    parser.add_argument("--only", default="", help="run only rows with this text in the name")
    args = parser.parse_args()
    print(inspect_environment(torch.device(args.device), asked=args.device).table(), file=sys.stderr)
    images = torch.randn(args.batch, 3, *SIZE, device=args.device).to(memory_format=torch.channels_last)
    table = []
    for row in (candidate for candidate in ROWS if args.only in candidate.name):
        made = [row.build(), *([row.make(row.reference)] if row.reference else [])]
        made = [model.eval().to(args.device, memory_format=torch.channels_last) for model in made]
        work = multiply_adds(made[0], images[:1]) / 1e9
        speeds = compare(made, images, args.rounds, args.bf16)
        source = "timm" if row.make is _timm else "torchvision"
        table.append(
            [
                row.label,
                f"{sum(p.numel() for p in made[0].parameters()) / 1e6:.1f} M",
                f"{work:.2f} G",
                f"{speeds[0]:.0f}",
                f"{source}'s {row.reference}" if row.reference else "",
                f"{speeds[1]:.0f}" if row.reference else "",
                f"{speeds[0] / speeds[1]:.2f}" if row.reference else "",
            ]
        )
        print(f"{row.label} done", file=sys.stderr)
    headers = ["backbone", "parameters", "multiply-adds", "images/s", "reference", "reference images/s", "ratio"]
    print(tabulate(table, headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
