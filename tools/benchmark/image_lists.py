#!/usr/bin/env python
"""Measure CPU time, peak memory and worker memory growth for a CSV file with a million images.

`plain` uses a list of tuples and a list of labels, as most projects do; `fastamp` is `build_reid_train_loader`. Each
variant runs in a separate process, in turns. CPU time and peak memory are those of reading the list and building the
loader. Then one worker fetches random batches; its private memory (USS, from /proc/PID/smaps_rollup) is read after the
first 20 batches and after the last. A worker shares its parent's memory until one of them writes to it, and accessing a
Python object in a list is such a write, because it changes the reference count.

The images are links to one small file. Each image is listed many times, and each line creates separate strings. With
`--columns`, the file also has the further columns clothes, species, time (integers, all different), weight (floats) and
note (mostly missing); the plain variant keeps them in its tuples as text.
"""

import argparse
import csv
import gc
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from tabulate import tabulate
from torch.utils.data import DataLoader, Dataset

from fastamp.config import get_cfg
from fastamp.data import build_reid_train_loader
from fastamp.data.decode import read_image

BATCH, WARM_UP, FILES, CAMERAS, SIZE = 64, 20, 10_000, 20, (32, 16)


COLUMNS = ("clothes", "species", "time", "weight", "note")


def write_list(folder: Path, rows: int, columns: bool) -> Path:
    """Write the images and a CSV file of ``rows`` lines, 20 per identity; return the path of the CSV file.

    Args:
        folder: folder for the images and the file.
        rows: number of lines.
        columns: write further columns.
    """
    pixels = np.random.default_rng(0).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
    first = folder / "first.jpg"
    Image.fromarray(pixels).save(first)
    names = [f"images/{number // 100:03d}/camera-{number % CAMERAS}-frame-{number:06d}.jpg" for number in range(FILES)]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(first, folder / name)
    file = folder / "list.csv"
    with file.open("w") as stream:
        stream.write(",".join(("path", "pid", "camid", "split", *(COLUMNS if columns else ()))) + "\n")
        for row in range(rows):
            line = f"{names[row % FILES]},person{row // 20:06d},{row % CAMERAS},train"
            if columns:
                line += f",{row // 20}_{row % 4},{('lion', 'zebra', 'okapi')[row % 3]},{1_600_000_000 + 7 * row}"
                line += f",{(row * 7919 % 100_003) / 100_003:.5f},{'' if row % 7 else 'lies'}"
            stream.write(line + "\n")
    return file


class PlainDataset(Dataset):
    """Dataset with a list of tuples (path, identity, camera, further columns)."""

    def __init__(self, file: Path) -> None:
        with file.open() as stream:
            rows = list(csv.DictReader(stream))
        extra = [name for name in COLUMNS if name in rows[0]]
        self.items = [
            (str(file.parent / row["path"]), row["pid"], int(row["camid"]), *(row[name] for name in extra))
            for row in rows
        ]
        rank = {pid: number for number, pid in enumerate(sorted({item[1] for item in self.items}))}
        self.labels = [rank[item[1]] for item in self.items]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, _, camid, *_ = self.items[index]
        return {"images": read_image(path), "targets": self.labels[index], "camids": camid, "img_paths": path}


class _Endless(torch.utils.data.Sampler):
    """Batch sampler that yields batches of random indices infinitely."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        draw = random.Random(0)
        while True:
            yield [draw.randrange(self.size) for _ in range(BATCH)]


def plain(file: Path) -> Any:
    """Build the plain loader."""
    dataset = PlainDataset(file)
    return DataLoader(dataset, batch_sampler=_Endless(len(dataset)), num_workers=1, multiprocessing_context="fork")


def fastamp(file: Path) -> Any:
    """Build the fastamp loader."""
    cfg = get_cfg()
    options = {
        "DATASETS.NAMES": f"('csv:{file}',)",
        "DATALOADER.NUM_WORKERS": 1,
        "DATALOADER.SAMPLER_TRAIN": "TrainingSampler",
        "SOLVER.IMS_PER_BATCH": BATCH,
        "INPUT.SIZE_TRAIN": SIZE,
        "INPUT.REA.ENABLED": False,
        "MODEL.DEVICE": "cpu",
    }
    cfg.merge_from_list([str(word) for pair in options.items() for word in pair])
    return build_reid_train_loader(cfg)


VARIANTS = {"plain": plain, "fastamp": fastamp}


def private_memory_mb(pid: int) -> float:
    """Return the private memory (USS) of a process in MB (10^6 bytes)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / 1e6


def children() -> set[int]:
    """Return the PIDs of the child processes."""
    files = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(pid) for file in files for pid in file.read_text().split()}


def peak_mb() -> float:
    """Return the peak resident set size of this process in MB (10^6 bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(variant: str, file: Path, batches: int) -> dict[str, float]:
    """Run one variant in this process; return CPU seconds, peak memory and memory growth of the worker in MB."""
    torch.set_num_threads(1)
    before, began = peak_mb(), time.process_time()
    loader = VARIANTS[variant](file)
    figures = {"cpu": time.process_time() - began, "peak": peak_mb() - before}
    gc.collect()
    iterator = iter(loader)
    for number, _ in enumerate(itertools.islice(iterator, batches)):
        if number == WARM_UP:
            (worker,) = children()
            first = private_memory_mb(worker)
    figures["growth"] = private_memory_mb(worker) - first
    return figures


def main() -> None:
    """Run all variants in turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="(default: %(default)s)")
    parser.add_argument(
        "--batches", type=int, default=400, help=f"number of batches of {BATCH} images (default: %(default)s)"
    )
    parser.add_argument("--columns", action="store_true", help="add five further columns to the file")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--variant", choices=VARIANTS, help="run only this variant in this process and print JSON")
    parser.add_argument("--file", type=Path, help="CSV file of --variant")
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args.variant, args.file, args.batches)))
        return
    results: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    with TemporaryDirectory() as folder:
        file = write_list(Path(folder), args.rows, args.columns)
        for number in range(args.rounds):
            for variant in VARIANTS:
                print(f"round {number + 1} of {args.rounds}: {variant}", file=sys.stderr)
                command = [sys.executable, __file__, "--variant", variant, "--file", str(file)]
                command += ["--batches", str(args.batches)]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                results[variant].append(json.loads(output.splitlines()[-1]))
    rows = [
        [variant, *(f"{statistics.median(figures[key] for figures in runs):.1f}" for key in ("cpu", "peak", "growth"))]
        for variant, runs in results.items()
    ]
    headers = ["variant", "build: CPU [s]", "build: peak memory above the imports [MB]"]
    print(f"{args.rows} lines, medians of {args.rounds} rounds")
    print(tabulate(rows, [*headers, f"worker: growth in {args.batches} batches [MB]"], tablefmt="github"))


if __name__ == "__main__":
    main()
