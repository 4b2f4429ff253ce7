#!/usr/bin/env python
"""Measure the HTTP service: throughput and latency of concurrent clients, against the Predictor, and an overload.

The Predictor computes the features of the same JPEG files (bytes) in batches as large as TEST.IMS_PER_BATCH. The
service runs in a separate process, and the clients (httpx, asyncio) in another one on the same machine. They share
its cores, so the CPU time per image is printed too (Linux); rounds of both alternate. The model has random weights.

The overload sends ten times as many requests at once as the queue has places: each must be answered, with status 200 or
429, and each image that was added (201) must be in the gallery.
"""

import argparse
import asyncio
import io
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import numpy as np
import PIL.Image
import torch

from fastamp import Predictor
from fastamp.checkpoint.weights_file import write_checkpoint
from fastamp.config import get_cfg
from fastamp.diagnostics.environment import inspect_environment
from fastamp.modeling import build_model
from fastamp.retrieval.mutable_gallery import MutableGallery

BACKBONES = {
    "osnet": {"MODEL.BACKBONE.NAME": "build_osnet_backbone", "MODEL.BACKBONE.DEPTH": "x0_25"},
    "resnet50": {"MODEL.BACKBONE.NAME": "build_resnet_backbone", "MODEL.BACKBONE.DEPTH": "50x"},
}
WIDTHS = {"osnet": 128, "resnet50": 2048}
OVERLOAD, QUEUE = 10, 64


def write_model(path: Path, name: str) -> None:
    """Write a checkpoint with random weights."""
    values = {
        **BACKBONES[name],
        "MODEL.BACKBONE.FEAT_DIM": WIDTHS[name],
        "MODEL.BACKBONE.PRETRAIN": False,
        "MODEL.DEVICE": "cpu",
        "MODEL.HEADS.NUM_CLASSES": 2,
        "INPUT.SIZE_TEST": (256, 128),
    }
    cfg = get_cfg().with_values(values)
    torch.manual_seed(0)
    write_checkpoint(path, {"model": build_model(cfg).state_dict(), "config": cfg.dump()})


def jpeg_files(count: int) -> list[bytes]:
    """Return JPEG files of 256 x 128 pixels, with smooth random content."""
    random, contents = np.random.default_rng(0), []
    for _ in range(count):
        small = PIL.Image.fromarray(random.integers(0, 256, (16, 8, 3), dtype=np.uint8))
        file = io.BytesIO()
        small.resize((128, 256), PIL.Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        contents.append(file.getvalue())
    return contents


async def load(address: str, files: list[bytes], clients: int, per_request: int, seconds: float) -> dict[str, float]:
    """Send requests from concurrent clients; return images per second, and percentiles of the latency in ms."""
    latencies: list[float] = []
    # Without certificates, whose reading takes longer than many requests.
    connected = [httpx.AsyncClient(base_url=address, timeout=120, verify=False) for _ in range(clients)]
    start = time.perf_counter()
    end = start + seconds

    async def run(number: int) -> None:
        async with connected[number] as client:
            position = number * per_request
            while time.perf_counter() < end:
                chosen = [files[(position + offset) % len(files)] for offset in range(per_request)]
                position += per_request
                begin = time.perf_counter()
                answer = await client.post("/v1/features", files=[("images", ("a.jpg", image)) for image in chosen])
                answer.raise_for_status()
                latencies.append(time.perf_counter() - begin)

    await asyncio.gather(*map(run, range(clients)))
    images, passed = len(latencies) * per_request, time.perf_counter() - start
    points = statistics.quantiles(latencies, n=100)
    return {"images": images, "images/s": images / passed, "p50": 1000 * points[49], "p99": 1000 * points[98]}


async def overload(address: str, files: list[bytes], count: int) -> tuple[Counter[int], list[str]]:
    """Add ``count`` images in as many requests at once; return the numbers of statuses, and the acknowledged ids."""
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=address, timeout=300, limits=limits) as client:
        requests = [
            client.post("/v1/gallery/items", files=[("images", ("a.jpg", files[number % len(files)]))])
            for number in range(count)
        ]
        answers = await asyncio.gather(*requests)
    ids = [item_id for answer in answers if answer.status_code == 201 for item_id in answer.json()["ids"]]
    return Counter(answer.status_code for answer in answers), ids


def start_service(*options: object) -> tuple["subprocess.Popen[str]", str]:
    """Start the service; return its process and its address."""
    words = [sys.executable, "-m", "fastamp", "serve", *options, "--device", "cpu", "--port", 0]
    process = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True)
    for line in process.stdout or ():
        if match := re.search(r"serving .* at (http://\S+)", line):
            return process, match[1]
    raise SystemExit("the service did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", choices=list(BACKBONES), default="osnet", help="default: %(default)s (x0.25)")
    parser.add_argument("--clients", type=int, default=32, help="concurrent clients (default: %(default)s)")
    parser.add_argument("--per-request", type=int, nargs="+", default=[1, 8], help="images per request (default: 1 8)")
    parser.add_argument("--seconds", type=float, default=8, help="time of each round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each variant (default: %(default)s)")
    args = parser.parse_args()
    print(inspect_environment(torch.device("cpu"), asked="cpu").table(), file=sys.stderr)
    files = jpeg_files(256)
    with TemporaryDirectory() as name:
        checkpoint, gallery = Path(name, "model.pth"), Path(name, "a.gallery")
        write_model(checkpoint, args.backbone)
        predictor = Predictor(checkpoint, device="cpu")
        process, address = start_service(checkpoint, "--gallery", gallery, "--queue", 1024)
        try:
            compare(process, predictor, address, files, args)
        finally:
            process.send_signal(signal.SIGTERM)
            print(process.communicate()[0].strip().splitlines()[-1])
        process, address = start_service(
            checkpoint, "--gallery", gallery, "--queue", QUEUE, "--connections", 2 * OVERLOAD * QUEUE
        )
        statuses, ids = asyncio.run(overload(address, files, OVERLOAD * QUEUE))
        process.send_signal(signal.SIGTERM)
        print(f"{OVERLOAD * QUEUE} requests at once, queue {QUEUE}: statuses {dict(statuses)}")
        print(process.communicate()[0].strip().splitlines()[-1])
        with MutableGallery(gallery) as opened:
            missing = [item_id for item_id in ids if item_id not in opened]
            print(f"{len(ids)} images acknowledged, {len(opened)} in the gallery, {len(missing)} lost")


def cpu_seconds(process: "subprocess.Popen[str]") -> float:
    """Return the CPU time of a process in seconds (Linux)."""
    values = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


def compare(
    process: "subprocess.Popen[str]", predictor: Predictor, address: str, files: list[bytes], args: argparse.Namespace
) -> None:
    """Print the throughput of the Predictor and of the service, in turns."""
    predictor.features(files)
    plain: list[float] = []
    plain_cpu: list[float] = []
    served: dict[int, list[dict[str, float]]] = {count: [] for count in args.per_request}
    for _ in range(args.rounds):
        start, computed, before = time.perf_counter(), 0, time.process_time()
        while time.perf_counter() - start < args.seconds:
            predictor.features(files)
            computed += len(files)
        plain.append(computed / (time.perf_counter() - start))
        plain_cpu.append(1000 * (time.process_time() - before) / computed)
        for count, runs in served.items():
            before, started = cpu_seconds(process), time.process_time()
            runs.append(asyncio.run(load(address, files, args.clients, count, args.seconds)))
            runs[-1]["cpu"] = 1000 * (cpu_seconds(process) - before) / runs[-1]["images"]
            runs[-1]["client cpu"] = 1000 * (time.process_time() - started) / runs[-1]["images"]
    base, base_cpu = statistics.median(plain), statistics.median(plain_cpu)
    print(f"{args.backbone}, {torch.get_num_threads()} threads; medians of {args.rounds} rounds")
    print(f"Predictor: {base:.0f} images/s ({min(plain):.0f} to {max(plain):.0f}), CPU {base_cpu:.1f} ms per image")
    for count, runs in served.items():
        rates = [run["images/s"] for run in runs]
        rate, p50, p99, cpu, client = (
            statistics.median(run[name] for run in runs) for name in ("images/s", "p50", "p99", "cpu", "client cpu")
        )
        print(
            f"service, {args.clients} clients x {count} images: {rate:.0f} images/s ({min(rates):.0f} to "
            f"{max(rates):.0f}), {100 * rate / base:.0f} % of the Predictor; p50 {p50:.0f} ms, p99 {p99:.0f} ms; "
            f"CPU per image: service {cpu:.1f} ms ({cpu / base_cpu:.2f} x Predictor), clients {client:.1f} ms"
        )


if __name__ == "__main__":
    main()
