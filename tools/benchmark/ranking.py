#!/usr/bin/env python
"""Compare time and memory of the evaluation, of its matrix product, and of a plain argsort evaluator.

Features are generated with the sizes of Market-1501 and MSMT17: clusters of identities with the same numbers of images,
cameras and distractors, and with noise that spreads the ranks of the matches. Each variant runs in a separate process
to measure its peak memory. The variants run in turns; ratios are between medians over the rounds. Memory is the peak
memory minus that of the features.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch
from tabulate import tabulate

from fastamp.diagnostics.environment import inspect_environment
from fastamp.evaluation import Identities, Protocol, compute_metrics
from fastamp.evaluation.neighbors import nearest_neighbors
from fastamp.evaluation.rerank import ReRanking
from fastamp.layers.distance import DistanceBlocks, matrix_product


class Size(NamedTuple):
    """Sizes of a test set: queries, gallery images, identities, cameras, and fraction of distractors in the gallery."""

    queries: int
    gallery: int
    identities: int
    cameras: int
    distractors: float


SIZES = {
    "market1501": Size(3368, 15913, 750, 6, 0.18),
    "msmt17": Size(11659, 82161, 3060, 15, 0.0),
    "small": Size(400, 2000, 100, 6, 0.1),
}
RANKING = ("product", "fastamp", "argsort")
RE_RANKING = ("search", "re-ranking")
WIDTH = 2048
# Standard deviation of the image component of a feature; that of the identity component is 1.
NOISE = 2.7


def generate(size: Size, path: Path) -> None:
    """Generate features and identities and write them to ``path``."""
    random = np.random.default_rng(0)
    centers = random.standard_normal((size.identities + 1, WIDTH), dtype=np.float32)
    arrays = {}
    for side, count in (("query", size.queries), ("gallery", size.gallery)):
        pids = random.integers(1, size.identities + 1, count)
        if side == "gallery":
            pids[random.random(count) < size.distractors] = 0
        # The noise differs between images.
        hardness = random.gamma(4.0, NOISE / 4, (count, 1)).astype(np.float32)
        features = random.standard_normal((count, WIDTH), dtype=np.float32)
        features *= hardness
        features += np.where(pids[:, None] > 0, centers[pids], 0)
        arrays |= {f"{side}_features": features, f"{side}_pids": pids}
        arrays[f"{side}_camids"] = random.integers(0, size.cameras, count)
    for name, array in arrays.items():
        np.save(path / name, array)


def load(path: Path) -> tuple[torch.Tensor, torch.Tensor, Identities]:
    """Load query and gallery features and their identities."""
    arrays = {
        name: torch.from_numpy(np.load(path / f"{name}.npy"))
        for name in (f"{side}_{column}" for side in ("query", "gallery") for column in ("features", "pids", "camids"))
    }
    ids = Identities(*(arrays[f"{side}_{column}"] for column in ("pids", "camids") for side in ("query", "gallery")))
    return arrays["query_features"], arrays["gallery_features"], ids


def product(queries: torch.Tensor, gallery: torch.Tensor, ids: Identities) -> dict[str, float]:
    """Compute only the matrix product, in the same blocks as the ranking."""
    shape = DistanceBlocks()
    shape.shape, shape.dtype, shape.memory_budget_mb = (len(queries), len(gallery)), torch.float32, 256
    rows = shape.block_rows
    block = torch.empty(min(rows, len(queries)), len(gallery))
    for part in queries.split(rows):
        matrix_product(part, gallery, block[: len(part)])
    return {}


def fastamp(queries: torch.Tensor, gallery: torch.Tensor, ids: Identities) -> dict[str, float]:
    """Run the evaluation with the defaults of ReidEvaluator."""
    return compute_metrics(queries, gallery, ids).metrics()


def argsort(queries: torch.Tensor, gallery: torch.Tensor, ids: Identities) -> dict[str, float]:
    """Run a common evaluator without fastamp: all distances, a full sort, and a loop over queries."""
    unit = [torch.nn.functional.normalize(side, dim=1) for side in (queries, gallery)]
    distances = (1 - unit[0] @ unit[1].t()).numpy()
    order = np.argsort(distances, axis=1)
    query_pids, gallery_pids, query_camids, gallery_camids = (
        tensor.numpy() for tensor in (ids.query_pids, ids.gallery_pids, ids.query_camids, ids.gallery_camids)
    )
    matches = gallery_pids[order] == query_pids[:, None]
    precisions, firsts = [], []
    for number in range(len(queries)):
        ranked = order[number]
        junk = (gallery_pids[ranked] == query_pids[number]) & (gallery_camids[ranked] == query_camids[number])
        counted = matches[number][~junk]
        if not counted.any():
            continue
        hits = counted.cumsum()
        precisions.append((hits / np.arange(1, len(counted) + 1) * counted).sum() / counted.sum())
        firsts.append(counted[0])
    return {"mAP": 100 * float(np.mean(precisions)), "Rank-1": 100 * float(np.mean(firsts))}


def search(queries: torch.Tensor, gallery: torch.Tensor, ids: Identities) -> dict[str, float]:
    """Run only the nearest-neighbor search of re-ranking."""
    features = torch.nn.functional.normalize(torch.cat((queries, gallery)), dim=1)
    nearest_neighbors(features, features, ReRanking().num_neighbors)
    return {}


def re_ranking(queries: torch.Tensor, gallery: torch.Tensor, ids: Identities) -> dict[str, float]:
    """Run the evaluation with re-ranking."""
    return compute_metrics(queries, gallery, ids, Protocol(re_ranking=ReRanking())).metrics()


FUNCTIONS: dict[str, Callable[..., dict[str, float]]] = {
    "product": product,
    "fastamp": fastamp,
    "argsort": argsort,
    "search": search,
    "re-ranking": re_ranking,
}


def memory_mb(field: str) -> float:
    """Return the memory of this process in MiB: ``"VmRSS"`` is the current value, ``"VmHWM"`` the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"cannot measure memory: /proc/self/status has no {field}.\n  fix: run on Linux")


def measure(variant: str, path: Path, runs: int) -> dict[str, float]:
    """Run one variant in this process.

    Returns:
        Metrics, seconds of the fastest run, and peak memory of the first run in MiB, without the features.
    """
    queries, gallery, ids = load(path)
    # Warm up: start threads and load libraries.
    first_identities = Identities(
        *(side[:1000] for side in (ids.query_pids, ids.gallery_pids, ids.query_camids, ids.gallery_camids))
    )
    FUNCTIONS[variant](queries[:1000], gallery[:1000], first_identities)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = memory_mb("VmRSS")
    seconds = []
    for number in range(runs):
        start = time.perf_counter()
        metrics = FUNCTIONS[variant](queries, gallery, ids)
        seconds.append(time.perf_counter() - start)
        if number == 0:
            peak = memory_mb("VmHWM") - before
    numbers = {name: metrics[name] for name in ("mAP", "Rank-1") if name in metrics}
    return {"seconds": min(seconds), "memory": peak} | numbers


def measured(variant: str, folder: str, runs: int) -> dict[str, float]:
    """Run ``measure`` in a separate process."""
    command = [sys.executable, __file__, "--variant", variant, "--features", folder, "--runs", str(runs)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def compare(name: str, size: Size, variants: tuple[str, ...], rounds: int, runs: int) -> str:
    """Run the variants in turns; return a table with the run time of each relative to the first variant."""
    results: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    with TemporaryDirectory() as folder:
        generate(size, Path(folder))
        for number in range(rounds):
            for variant in variants:
                print(f"{name}, round {number + 1} of {rounds}: {variant}", file=sys.stderr)
                results[variant].append(measured(variant, folder, runs))
    medians = {
        variant: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for variant, runs in results.items()
    }
    first = medians[variants[0]]["seconds"]
    rows = [
        (
            variant,
            f"{runs['seconds']:.2f}",
            f"{runs['seconds'] / first:.2f}",
            f"{runs['memory']:.0f}",
            *(f"{runs[metric]:.2f}" if metric in runs else "" for metric in ("mAP", "Rank-1")),
        )
        for variant, runs in medians.items()
    ]
    headers = ["variant", "s", f"x {variants[0]}", "MiB above the features", "mAP", "Rank-1"]
    title = f"{name}: {size.queries} x {size.gallery} x {WIDTH}, {rounds} rounds"
    return f"{title}\n{tabulate(rows, headers=headers, tablefmt='github', disable_numparse=True)}"


def growth(runs: int) -> str:
    """Return a table for three test sets, each with twice the queries and gallery images of the previous one."""
    rows = []
    with TemporaryDirectory() as folder:
        for factor in (1, 2, 4):
            size = Size(1000 * factor, 10_000 * factor, 500 * factor, 6, 0.1)
            print(f"growth: {size.queries} x {size.gallery}", file=sys.stderr)
            generate(size, Path(folder))
            seconds = measured("fastamp", folder, runs)["seconds"]
            products = size.queries * size.gallery * WIDTH
            rows.append((size.queries, size.gallery, f"{seconds:.2f}", f"{1e12 * seconds / products:.2f}"))
    headers = ["queries", "gallery", "s", "ps per query x gallery x width"]
    return f"growth\n{tabulate(rows, headers=headers, tablefmt='github', disable_numparse=True)}"


def main() -> None:
    """Run the benchmarks and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["market1501", "msmt17"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--runs", type=int, default=2, help="runs per process, of which the fastest counts (default: %(default)s)"
    )
    parser.add_argument("--no-argsort", action="store_true", help="skip the argsort evaluator (MSMT17: 13 GB)")
    parser.add_argument(
        "--re-ranking", action="store_true", help="also measure re-ranking (MSMT17: 10 minutes per round)"
    )
    parser.add_argument("--growth", action="store_true", help="also measure three sizes")
    parser.add_argument("--variant", choices=FUNCTIONS, help="run only this variant in this process and print JSON")
    parser.add_argument("--features", help="folder with the features of --variant")
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args.variant, Path(args.features), args.runs)))
        return
    print(inspect_environment(torch.device("cpu"), asked="cpu").table(), file=sys.stderr)
    for name in args.sizes:
        variants = tuple(variant for variant in RANKING if not (args.no_argsort and variant == "argsort"))
        print(compare(name, SIZES[name], variants, args.rounds, args.runs), flush=True)
        if args.re_ranking:
            print(compare(name, SIZES[name], RE_RANKING, args.rounds, args.runs), flush=True)
    if args.growth:
        print(growth(args.runs))


if __name__ == "__main__":
    main()
