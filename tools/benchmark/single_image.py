#!/usr/bin/env python
"""Compare the Predictor with plain PyTorch on one image at a time: OSNet x0.25, images of 256x128.

Both compute the features of the same image, from a JPEG file and from an array, with the same weights, float32 and one
thread. Plain PyTorch is Pillow, torchvision.transforms (v1) and the forward pass of the same module, without the
checks of the Predictor. The variants run in turns; the CPU time of the process does not contain that of other programs.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tabulate import tabulate
from torch import Tensor
from torchvision import transforms as v1

from fastamp.checkpoint.weights_file import write_checkpoint
from fastamp.config import read_config
from fastamp.diagnostics.environment import inspect_environment
from fastamp.inference.predictor import Predictor
from fastamp.modeling import build_model

SIZE = (256, 128)
TARGET = 1.3


def make_predictor(folder: Path, dtype: str) -> Predictor:
    """Build a Predictor of OSNet x0.25 with random weights."""
    cfg = read_config("Market1501/bagtricks_R50").with_values(
        {
            "MODEL.DEVICE": "cpu",
            "MODEL.BACKBONE.NAME": "build_osnet_backbone",
            "MODEL.BACKBONE.DEPTH": "x0_25",
            "MODEL.BACKBONE.FEAT_DIM": 128,
            "MODEL.BACKBONE.PRETRAIN": False,
            "MODEL.HEADS.NUM_CLASSES": 10,
        }
    )
    write_checkpoint(folder / "osnet.pth", {"model": build_model(cfg).state_dict(), "config": cfg.dump()})
    return Predictor(folder / "osnet.pth", device="cpu", opts=["SOLVER.AMP.EVAL_DTYPE", dtype])


def plain_features(predictor: Predictor) -> Callable[[Path | np.ndarray], Tensor]:
    """Build the reference: path or array (H, W, 3) uint8 -> (1, D) float32."""
    model = predictor.model
    mean, std = (predictor.model.get_buffer(name).flatten() / 255 for name in ("pixel_mean", "pixel_std"))
    recipe = v1.Compose([v1.Resize(SIZE, v1.InterpolationMode.BICUBIC), v1.ToTensor(), v1.Normalize(mean, std)])
    backbone, heads = model.get_submodule("backbone"), model.get_submodule("heads")

    @torch.inference_mode()
    def features(image: Path | np.ndarray) -> Tensor:
        picture = Image.fromarray(image) if isinstance(image, np.ndarray) else Image.open(image).convert("RGB")
        result: Tensor = heads(backbone(recipe(picture)[None]))
        return result

    return features


def measure(variants: dict[str, Callable[[], Tensor]], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Run the variants in turns; return the CPU time of one call in milliseconds, for each round."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round in range(rounds + 1):
        for name, run in variants.items():
            start = time.process_time()
            for _ in range(repeats):
                run()
            if round:  # the first warms up
                times[name].append((time.process_time() - start) / repeats * 1e3)
    return times


def main() -> None:
    """Print the times, and the median and range of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=20, help="images in a round (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(inspect_environment(torch.device("cpu"), asked="cpu").table(), file=sys.stderr)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        pixels = np.random.default_rng(0).integers(0, 256, (20, 10, 3), dtype=np.uint8)
        array = np.asarray(Image.fromarray(pixels).resize((150, 320), Image.Resampling.BICUBIC))
        path = Path(folder) / "image.jpg"
        Image.fromarray(array).save(path, quality=90)
        predictor = make_predictor(Path(folder), "float32")
        plain = plain_features(predictor)
        for source, image in {"JPEG file": path, "array": array}.items():
            difference = (predictor(image) - plain(image)).abs().max() / plain(image).abs().max()
            variants = {
                "plain": lambda image=image: plain(image),
                "Predictor": lambda image=image: predictor(image),
            }
            times = measure(variants, args.rounds, args.repeats)
            ratios = sorted(a / b for a, b in zip(times["Predictor"], times["plain"], strict=True))
            medians = {name: statistics.median(values) for name, values in times.items()}
            rows.append((source, *medians.values(), statistics.median(ratios), ratios[0], ratios[-1], difference))
    headers = ("image", "plain (ms)", "Predictor (ms)", "ratio", "lowest", "highest", "difference")
    print(tabulate(rows, headers, floatfmt=("", ".2f", ".2f", ".2f", ".2f", ".2f", ".1e")))
    print(f"target: a ratio of at most {TARGET}")


if __name__ == "__main__":
    main()
