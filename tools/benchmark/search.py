#!/usr/bin/env python
"""Measure gallery indices: build time, memory, recall relative to exact search, and time per query.

Features form clusters: each identity has a center and the same number of images, which differ by a camera shift and by
noise. Centers and noise have fewer dimensions than the features, with decreasing variance like principal components; a
part of the noise is isotropic. Queries are additional images of the same identities. Each kind of index is built and
searched in a separate process to measure its memory. On a shared machine, the CPU time of all threads is more reliable
than the wall time.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile

import numpy as np
import torch
from tabulate import tabulate

from fastamp.diagnostics.environment import inspect_environment
from fastamp.retrieval.features_file import read_features
from fastamp.retrieval.npz import write_arrays
from fastamp.retrieval.open_gallery import with_index
from fastamp.retrieval.search import search as search_gallery
from fastamp.utils.env import peak_memory_mb

KINDS = "flat", "ivf", "hnsw"
INNER_WIDTH = 128
CAMERAS = 8
# Lengths of the components that are added to the center, which has length 1; the last is isotropic.
CAMERA_SHIFT, NOISE, REST = 0.2, 0.7, 0.3
BLOCK = 20_000
# Number of queries that are searched one by one.
SINGLE = 30


class Images:
    """Random synthetic features, one per image."""

    def __init__(self, identities: int, width: int) -> None:
        self.random = np.random.default_rng(0)
        self.components = self.random.standard_normal((INNER_WIDTH, width), dtype=np.float32)
        self.components /= np.sqrt(np.arange(1, INNER_WIDTH + 1, dtype=np.float32))[:, None]
        self.centers = self.varied(identities, 1.0)
        self.shifts = self.varied(CAMERAS, CAMERA_SHIFT)

    def varied(self, count: int, length: float) -> np.ndarray:
        """Return ``count`` random linear combinations of the components, scaled to L2 norm ``length``."""
        vectors = self.random.standard_normal((count, INNER_WIDTH), dtype=np.float32) @ self.components
        return vectors * (length / np.linalg.norm(vectors, axis=1, keepdims=True))

    def of(self, pids: np.ndarray) -> np.ndarray:
        """Return features (N, D), one for each of N identities."""
        count, width = len(pids), self.centers.shape[1]
        features = self.random.standard_normal((count, width), dtype=np.float32) * (REST / width**0.5)
        features += self.centers[pids] + self.varied(count, NOISE)
        return features + self.shifts[self.random.integers(0, CAMERAS, count)]


def generate(folder: Path, identities: int, images: int, width: int, queries: int) -> None:
    """Write the gallery as an extraction, gallery.npz, and the query features, queries.npy, to ``folder``."""
    count, source = identities * images, Images(identities, width)
    pids = source.random.permutation(np.repeat(np.arange(identities), images))

    columns = {"paths": np.array([f"images/{number:08d}.jpg" for number in range(count)]), "pids": pids}
    columns |= {"camids": np.zeros(count, np.int64)}
    columns |= {"config_hash": np.array("0"), "checkpoint": np.array("generated"), "metric": np.array("cosine")}
    with TemporaryFile(dir=folder) as rows, (folder / "gallery.npz").open("wb") as file:
        rows.writelines(source.of(pids[start : start + BLOCK]) for start in range(0, count, BLOCK))
        write_arrays(file, {"features": np.memmap(rows, np.float32, "r", shape=(count, width))} | columns)
    np.save(folder / "queries.npy", source.of(source.random.integers(0, identities, queries)))


def anonymous_mb() -> float:
    """Return the anonymous memory of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("cannot measure memory: /proc/self/status has no RssAnon.\n  fix: run on Linux")


def build(folder: Path, kind: str) -> dict[str, float]:
    """Build an index of one kind in this process; return times and sizes."""
    features = read_features(folder / "gallery.npz")
    start, busy = time.perf_counter(), time.process_time()
    with_index(features, folder / f"{kind}.index", kind)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    size = 0.0 if kind == "flat" else (folder / f"{kind}.index").stat().st_size / 2**20
    peak = peak_memory_mb(torch.device("cpu"))
    return {"build_s": seconds, "build_cpu_s": busy, "peak_mb": peak, "file_mb": size}


def search(folder: Path, kind: str, efforts: list[int]) -> list[dict[str, float]]:
    """Search an index of one kind in this process with each effort; return recall and times."""
    queries = np.load(folder / "queries.npy")
    start = time.perf_counter()
    gallery = with_index(read_features(folder / "gallery.npz"), folder / f"{kind}.index", kind)
    loaded = time.perf_counter() - start
    truth = folder / "exact.npy"
    if not truth.exists():
        np.save(truth, search_gallery(queries, gallery, 10, exact=True).rows)
    exact, results = np.load(truth), []
    for effort in efforts or [None]:
        search_gallery(queries[:50], gallery, 10, effort=effort)
        start, busy = time.perf_counter(), time.process_time()
        rows = search_gallery(queries, gallery, 10, effort=effort).rows
        batch, batch_cpu = (time.perf_counter() - start) / len(queries), (time.process_time() - busy) / len(queries)
        single, single_cpu = [], []
        for query in queries[:SINGLE]:
            start, busy = time.perf_counter(), time.process_time()
            search_gallery(query[None], gallery, 10, effort=effort)
            single.append(time.perf_counter() - start)
            single_cpu.append(time.process_time() - busy)
        recall = np.mean([len(set(a) & set(b)) for a, b in zip(rows, exact, strict=True)]) / 10
        results.append(
            {
                "effort": effort,
                "load_s": loaded,
                "anonymous_mb": anonymous_mb(),
                "recall_1": float((rows[:, 0] == exact[:, 0]).mean()),
                "recall_10": float(recall),
                "single_ms": 1000 * float(np.median(single)),
                "single_cpu_ms": 1000 * float(np.median(single_cpu)),
                "batch_ms": 1000 * batch,
                "batch_cpu_ms": 1000 * batch_cpu,
            }
        )
    return results


def in_own_process(*arguments: str) -> dict[str, float] | list[dict[str, float]]:
    """Run this script in a separate process and return its JSON output."""
    output = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(output.stdout.splitlines()[-1])


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--identities", type=int, default=50_000)
    parser.add_argument("--images", type=int, default=20, help="images per identity (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--nprobe", type=int, nargs="+", default=[], help="efforts of IVF (default: that of the index)")
    parser.add_argument(
        "--ef-search", type=int, nargs="+", default=[], help="efforts of HNSW (default: that of the index)"
    )
    parser.add_argument("--folder", help="folder for temporary files (default: that of the system)")
    parser.add_argument("--step", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        step, kind, *efforts = args.step
        folder = Path(args.folder)
        print(json.dumps(build(folder, kind) if step == "build" else search(folder, kind, list(map(int, efforts)))))
        return
    print(inspect_environment(torch.device("cpu"), asked="cpu").table(), file=sys.stderr)
    efforts = {"flat": [], "ivf": args.nprobe, "hnsw": args.ef_search}
    with TemporaryDirectory(dir=args.folder) as temporary:
        generate(Path(temporary), args.identities, args.images, args.width, args.queries)
        rows = []
        for kind in sorted(args.kinds, key=KINDS.index):
            print(f"{kind}: building", file=sys.stderr)
            built = in_own_process("--folder", temporary, "--step", "build", kind)
            print(f"{kind}: {built}", file=sys.stderr)
            for line in in_own_process("--folder", temporary, "--step", "search", kind, *map(str, efforts[kind])):
                print(f"{kind}: {line}", file=sys.stderr, flush=True)
                rows.append({"kind": kind, **built, **line})
            Path(temporary, f"{kind}.index").unlink(missing_ok=True)
    print(f"{args.identities} identities x {args.images} images x {args.width}, {args.queries} queries")
    print(tabulate(rows, headers="keys", tablefmt="github", floatfmt=".3g"))


if __name__ == "__main__":
    main()
