#!/usr/bin/env python
"""Compare the training input pipeline with PIL and torchvision transforms on one core.

fastamp's pipeline runs with each installed decoder (INPUT.DECODER), and with cached images. All variants decode JPEG
files of generated pedestrians and build batches of 64 images at 256x128: bicubic resize, flip, padding, crop and random
erasing. The reference uses PIL, torchvision.transforms (v1) and torch.stack. The variants run in turns, so that drift
of the machine's speed does not bias the comparison. Then boxes in large frames are read in several ways. With a CUDA
device, the benchmark also measures the fraction of a training step (ResNet-50, bf16, batch size 128) spent waiting for
data.

With --reduced, JPEG files of 4 and 8 times the size of the resized image are read without and with
INPUT.DECODE_REDUCED in turns: ratio of the CPU time, and cosines of the features of each image (minimum, mean). The
mean cosine of different images is what they are to be compared with.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tabulate import tabulate
from torch import Tensor
from torchvision import transforms as v1

from fastamp.config import CfgNode, get_cfg
from fastamp.data import image_decoder
from fastamp.data.build import build_reid_train_loader
from fastamp.data.cache import ImageCache
from fastamp.data.dataset import ReidDataset
from fastamp.data.datasets.base import ImageItem
from fastamp.data.transforms import build_transforms
from fastamp.demo import generate_demo
from fastamp.diagnostics.environment import inspect_environment
from fastamp.engine import DefaultTrainer
from fastamp.inference import Predictor
from fastamp.modeling import build_model
from fastamp.utils.env import keep_freed_memory
from fastamp.utils.errors import ConfigError

SIZE, BATCH = (256, 128), 64
FRAMES, BOXES = 40, 10
REFERENCE = "PIL, torchvision.transforms"
RECIPE = "Market1501/bagtricks_R50"


def installed_decoders() -> list[str]:
    """Return the names of the decoders that can be loaded."""
    names = []
    for name in image_decoder.KEYS[0].choices[1:]:
        with contextlib.suppress(ConfigError):
            names.append(image_decoder.image_decoder(name).name)
    return names


def reference(paths: list[str], cfg: CfgNode) -> Callable[[list[int]], Tensor]:
    """Build the reference pipeline: indices -> (B, 3, H, W) float32."""
    recipe = v1.Compose(
        [
            v1.Resize(SIZE, interpolation=v1.InterpolationMode.BICUBIC),
            v1.RandomHorizontalFlip(),
            v1.Pad(cfg.INPUT.PADDING.SIZE),
            v1.RandomCrop(SIZE),
            v1.ToTensor(),
            v1.RandomErasing(p=cfg.INPUT.REA.PROB, value=(0.485, 0.456, 0.406)),
        ]
    )

    def batch(indices: list[int]) -> Tensor:
        return torch.stack([recipe(Image.open(paths[index]).convert("RGB")) for index in indices])

    return batch


def fastamp_pipeline(dataset: ReidDataset) -> Callable[[list[int]], Tensor]:
    """Build the fastamp pipeline: indices -> (B, 3, H, W) uint8."""
    return lambda indices: dataset.__getitems__([(0, index, index) for index in indices])["images"]


def write_demo(folder: Path, size: tuple[int, int], *, train_identities: int, images_per_identity: int) -> None:
    """Write generated pedestrians of this size."""
    generate_demo(
        folder,
        train_identities=train_identities,
        test_identities=4,
        images_per_identity=images_per_identity,
        distractors=0,
        cameras=4,
        image_size=size,
        workers=len(os.sched_getaffinity(0)),
    )


def compare(source: tuple[int, int], rounds: int, folder: Path) -> list[list[Any]]:
    """Return ``(name, images/s, ratio to the reference)`` for each variant."""
    write_demo(folder, source, train_identities=40, images_per_identity=16)
    paths = sorted(str(path) for path in (folder / "bounding_box_train").glob("*.jpg"))
    cfg = get_cfg()
    cfg.merge_from_file(RECIPE)
    items = [ImageItem(path, number, 0) for number, path in enumerate(paths)]
    transforms = build_transforms(cfg)
    cached = ReidDataset(items, transforms, relabel=True)
    cached.use_cache(ImageCache(items, (3, *SIZE), cached.read, where="ram"))
    variants = {
        REFERENCE: reference(paths, cfg),
        **{
            name: fastamp_pipeline(ReidDataset(items, transforms._replace(decoder=name), relabel=True))
            for name in installed_decoders()
        },
        "cached": fastamp_pipeline(cached),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    for number in range(rounds + 1):
        for name, batch in variants.items():
            began = time.perf_counter()
            for start in range(0, len(paths) - BATCH + 1, BATCH):
                batch(list(range(start, start + BATCH)))
            if number:  # the first round warms the caches
                seconds[name].append(time.perf_counter() - began)
    cached.cache.close()
    images = len(paths) // BATCH * BATCH
    slowest = statistics.median(seconds[REFERENCE])
    return [
        [name, f"{images / statistics.median(times):.0f}", f"{slowest / statistics.median(times):.2f}"]
        for name, times in seconds.items()
    ]


def compare_boxes(rounds: int, folder: Path) -> list[list[Any]]:
    """Return ``(how boxes are read, boxes/s, ratio to decoding the frame for each box)`` for frames of 1920x1080."""
    random = np.random.default_rng(0)
    items = []
    for number in range(FRAMES):
        coarse = Image.fromarray(random.integers(0, 256, (68, 120, 3), dtype=np.uint8)).resize((1920, 1080))
        noisy = np.asarray(coarse) + random.normal(0, 6, (1080, 1920, 3))
        path = folder / f"{number}.jpg"
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)
        corners = random.integers(0, (1920 - 160, 1080 - 360), (BOXES, 2)).tolist()
        items += [ImageItem(str(path), 0, 0, box=(left, top, left + 160, top + 360)) for left, top in corners]
    cfg = get_cfg()
    cfg.merge_from_file(RECIPE)
    transforms = build_transforms(cfg, is_train=False)
    dataset, cached = (ReidDataset(items, transforms, relabel=True) for _ in range(2))
    cached.use_cache(ImageCache(items, (3, *SIZE), cached.read, where="ram"))

    def decode_each(rows: list[int]) -> None:
        for row in rows:
            left, top, right, bottom = items[row].box
            transforms.resize(transforms.read_original(items[row].path)[:, top:bottom, left:right])

    order = list(range(len(items)))
    shuffled = random.permutation(len(items)).tolist()
    variants = {
        "decode the frame for each box": (decode_each, order),
        "boxes frame by frame": (fastamp_pipeline(dataset), order),
        "boxes in random order": (fastamp_pipeline(dataset), shuffled),
        "boxes in random order, cached": (fastamp_pipeline(cached), shuffled),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, (batch, rows) in variants.items():
            began = time.perf_counter()
            for start in range(0, len(rows), BATCH):
                batch(rows[start : start + BATCH])
            seconds[name].append(time.perf_counter() - began)
    cached.cache.close()
    slowest = statistics.median(seconds["decode the frame for each box"])
    return [
        [name, f"{len(items) / statistics.median(times):.0f}", f"{slowest / statistics.median(times):.2f}"]
        for name, times in seconds.items()
    ]


def waiting(steps: int, cache: str, augment_on: str, root: str) -> tuple[float, float]:
    """Return ``(seconds per training step on CUDA, fraction of this time spent waiting for data)``."""
    os.environ["FASTAMP_DATASETS"] = root
    cfg = get_cfg()
    cfg.merge_from_file(RECIPE)
    options = {
        "DATASETS.NAMES": "Demo",
        "DATASETS.TESTS": "Demo",
        "MODEL.BACKBONE.PRETRAIN": False,
        "SOLVER.AMP": "bf16",
        "SOLVER.AMP.PREFLIGHT": "off",
        "SOLVER.IMS_PER_BATCH": 128,
        "DATALOADER.CACHE": cache,
        "INPUT.AUGMENT_ON": augment_on,
        "OUTPUT_DIR": root,
    }
    cfg.merge_from_list([word for pair in options.items() for word in pair])
    trainer = DefaultTrainer(cfg)
    loader = iter(build_reid_train_loader(cfg))
    waited = began = 0.0
    for step in range(steps + 10):
        if step == 10:
            torch.cuda.synchronize()
            waited, began = 0.0, time.perf_counter()
        asked = time.perf_counter()
        batch = next(loader)
        waited += time.perf_counter() - asked
        trainer.trainer.step(batch)
    torch.cuda.synchronize()
    total = time.perf_counter() - began
    return total / steps, waited / total


def features_of(checkpoint: str) -> tuple[Callable[[list[Tensor]], Tensor], tuple[int, int]]:
    """Return a function that computes features (N, D) of resized images, and their size.

    Without a checkpoint, the model is a ResNet-50 with random weights.
    """
    if checkpoint:
        predictor = Predictor(checkpoint, device="cpu")
        return predictor.features_of_preprocessed, predictor.cfg.INPUT.SIZE_TEST
    cfg = get_cfg()
    cfg.merge_from_file(RECIPE)
    cfg.merge_from_list(["MODEL.BACKBONE.PRETRAIN", "False", "MODEL.DEVICE", "cpu", "MODEL.HEADS.NUM_CLASSES", "100"])
    torch.manual_seed(0)
    model = build_model(cfg).eval()

    def features(images: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return model({"images": torch.stack(images)})

    return features, SIZE


def write_windows(pictures: Path, size: tuple[int, int], folder: Path) -> None:
    """Write 64 random windows of the pictures in a folder, of this size, as JPEG files.

    Windows of pictures that are too small are the largest of the same shape, and are enlarged.
    """
    random, (height, width) = np.random.default_rng(0), size
    files = sorted(path for path in pictures.rglob("*") if path.suffix.lower() in (".jpg", ".png"))
    for number in range(BATCH):
        picture = Image.open(files[number * max(len(files) // BATCH, 1) % len(files)]).convert("RGB")
        scale = min(1, picture.height / height, picture.width / width)
        down, across = int(scale * height), int(scale * width)
        top, left = random.integers((picture.height - down + 1, picture.width - across + 1)).tolist()
        window = picture.crop((left, top, left + across, top + down)).resize((width, height), Image.Resampling.BICUBIC)
        window.save(folder / f"{number:02}.jpg", quality=90)


def compare_reduced(paths: list[str], size: tuple[int, int], features: Callable[..., Tensor], rounds: int) -> list[Any]:
    """Return ratio of the CPU time; minimum and mean cosine without and with reduction; that of different images."""
    cfg = get_cfg()
    cfg.merge_from_list(["INPUT.SIZE_TEST", str(size)])
    off = build_transforms(cfg, is_train=False)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    images: dict[bool, list[Tensor]] = {}
    for _ in range(rounds + 1):  # the first round warms the caches
        for reduced, times in seconds.items():
            began = time.process_time()
            images[reduced] = [off._replace(reduced=reduced).read(path) for path in paths]
            times.append(time.process_time() - began)
    exact, found = (torch.nn.functional.normalize(features(images[reduced]).double()) for reduced in seconds)
    cosines, others = (exact * found).sum(1), (exact @ exact.T)[~torch.eye(len(paths), dtype=torch.bool)]
    ratio = statistics.median(a / b for a, b in zip(*(times[1:] for times in seconds.values()), strict=True))
    return [f"{ratio:.2f}", f"{cosines.min():.5f}", f"{cosines.mean():.5f}", f"{others.mean():.3f}"]


def report_reduced(checkpoint: str, pictures: str, rounds: int) -> None:
    """Print the table of INPUT.DECODE_REDUCED."""
    features, size = features_of(checkpoint)
    torch.set_num_threads(1)
    rows = []
    for factor in (4, 8):
        source = factor * size[0], factor * size[1]
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root)
            if pictures:
                write_windows(Path(pictures), source, folder)
            else:
                write_demo(folder, source, train_identities=16, images_per_identity=4)
                folder /= "bounding_box_train"
            paths = sorted(str(path) for path in folder.glob("*.jpg"))
            rows.append([f"{source[0]}x{source[1]}", *compare_reduced(paths, size, features, rounds)])
    print(f"\nINPUT.DECODE_REDUCED, images resized to {size[0]}x{size[1]}")
    print(tabulate(rows, ["files", "ratio", "minimum cosine", "mean", "different images"], tablefmt="github"))


def main() -> None:
    """Run the benchmarks and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="training steps on CUDA (default: %(default)s)")
    parser.add_argument("--reduced", action="store_true", help="compare INPUT.DECODE_REDUCED only")
    parser.add_argument("--model", default="", help="with --reduced: checkpoint (default: ResNet-50, random weights)")
    parser.add_argument("--images", default="", help="with --reduced: folder of pictures (default: drawn pedestrians)")
    args = parser.parse_args()
    if args.reduced:
        report_reduced(args.model, args.images, args.rounds)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    keep_freed_memory()  # as a training run does on a CPU
    print(inspect_environment(device).table())
    if device.type == "cuda":
        rows = []
        with tempfile.TemporaryDirectory() as root:
            for cache, augment_on in (("none", "worker"), ("none", "device"), ("ram", "worker"), ("ram", "device")):
                seconds, fraction = waiting(args.steps, cache, augment_on, root)
                rows.append([cache, augment_on, f"{1000 * seconds:.1f}", f"{100 * fraction:.1f}"])
        print(tabulate(rows, ["CACHE", "AUGMENT_ON", "step [ms]", "waiting for data [%]"], tablefmt="github"))
    for source in ((128, 64), (256, 128)):
        with tempfile.TemporaryDirectory() as folder:
            rows = compare(source, args.rounds, Path(folder))
        print(f"\nsource images of {source[0]}x{source[1]}, one core")
        print(tabulate(rows, ["pipeline", "images/s", "ratio"], tablefmt="github"))
    with tempfile.TemporaryDirectory() as folder:
        rows = compare_boxes(args.rounds, Path(folder))
    print(f"\n{BOXES} boxes in each of {FRAMES} frames of 1920x1080, one core")
    print(tabulate(rows, ["boxes", "boxes/s", "ratio"], tablefmt="github"))


if __name__ == "__main__":
    main()
