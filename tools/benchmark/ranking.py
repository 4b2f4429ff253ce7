#!/usr/bin/env python
"""What evaluation costs beyond its matrix product, in time and memory, and what a plain argsort evaluator costs.

Features are generated at the sizes of Market-1501 and MSMT17: clusters of identities with as many images, cameras and
distractors, noisy enough that matches lie near and far. Each variant runs in a process of its own, so that its peak
memory is its own; the variants take turns, and ratios are of medians over the rounds. Memory is what a process takes at
its peak above what it holds before: the features.
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
    """A test set: queries, gallery images, identities among them, cameras, share of distractors in the gallery."""

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
# Standard deviation of an image's own part of a feature, beside an identity's of 1.
NOISE = 2.7


def generate(size: Size, path: Path) -> None:
    """Write features and identities to ``path``."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((size.identities + 1, WIDTH), dtype=np.float32)
    arrays = {}
    for side, count in (("query", size.queries), ("gallery", size.gallery)):
        pids = random.integers(1, size.identities + 1, count)
        if side == "gallery":
            pids[random.random(count) < size.distractors] = 0
        # Some images are much harder than others.
        hardness = random.gamma(4.0, NOISE / 4, (count, 1)).astype(np.float32)
        features = random.standard_normal((count, WIDTH), dtype=np.float32)
        features *= hardness
        features += np.where(pids[:, None] > 0, centres[pids], 0)
        arrays |= {f"{side}_features": features, f"{side}_pids": pids}
        arrays[f"{side}_camids"] = random.integers(0, size.cameras, count)
    for name, array in arrays.items():
        np.save(path / name, array)


def load(path: Path) -> tuple[torch.Tensor, torch.Tensor, Identities]:
    """Return query and gallery features, and who is on them."""
    arrays = {
        name: torch.from_numpy(np.load(path / f"{name}.npy"))
        for name in (f"{side}_{column}" for side in ("query", "gallery") for column in ("features", "pids", "camids"))
    }
    ids = Identities(*(arrays[f"{side}_{column}"] for column in ("pids", "camids") for side in ("query", "gallery")))
    return arrays["query_features"], arrays["gallery_features"], ids


def product(queries: torch.Tensor, gallery: torch.Tensor, ids: Identities) -> dict[str, float]:
    """Run the matrix product alone, in the blocks that ranking has."""
    shape = DistanceBlocks()
    shape.shape, shape.dtype, shape.memory_budget_mb = (len(queries), len(gallery)), torch.float32, 256
    rows = shape.block_rows
    block = torch.empty(min(rows, len(queries)), len(gallery))
    for part in queries.split(rows):
        matrix_product(part, gallery, block[: len(part)])
    return {}


def fastamp(queries: torch.Tensor, gallery: torch.Tensor, ids: Identities) -> dict[str, float]:
    """Run the whole evaluation, as ReidEvaluator does, with its defaults."""
    return compute_metrics(queries, gallery, ids).metrics()


def argsort(queries: torch.Tensor, gallery: torch.Tensor, ids: Identities) -> dict[str, float]:
    """Run a common evaluator, without code of fastamp: all distances, all sorted, then a loop over queries."""
    unit = [torch.nn.functional.normalize(side, dim=1) for side in (queries, gallery)]
    distances = (1 - unit[0] @ unit[1].t()).numpy()
    order = np.argsort(distances, axis=1)
    query_pids, gallery_pids, query_camids, gallery_camids = (
        each.numpy() for each in (ids.query_pids, ids.gallery_pids, ids.query_camids, ids.gallery_camids)
    )
    matches = gallery_pids[order] == query_pids[:, None]
    precisions, firsts = [], []
    for number in range(len(queries)):
        ranked = order[number]
        junk = (gallery_pids[ranked] == query_pids[number]) & (gallery_camids[ranked] == query_camids[number])
        found = matches[number][~junk]
        if not found.any():
            continue
        hits = found.cumsum()
        precisions.append((hits / np.arange(1, len(found) + 1) * found).sum() / found.sum())
        firsts.append(found[0])
    return {"mAP": 100 * float(np.mean(precisions)), "Rank-1": 100 * float(np.mean(firsts))}


def search(queries: torch.Tensor, gallery: torch.Tensor, ids: Identities) -> dict[str, float]:
    """Run the neighbour search of re-ranking alone."""
    features = torch.nn.functional.normalize(torch.cat((queries, gallery)), dim=1)
    nearest_neighbors(features, features, ReRanking().num_neighbors)
    return {}


def re_ranking(queries: torch.Tensor, gallery: torch.Tensor, ids: Identities) -> dict[str, float]:
    """Run the whole evaluation with re-ranking."""
    return compute_metrics(queries, gallery, ids, Protocol(re_ranking=ReRanking())).metrics()


FUNCTIONS: dict[str, Callable[..., dict[str, float]]] = {
    "product": product,
    "fastamp": fastamp,
    "argsort": argsort,
    "search": search,
    "re-ranking": re_ranking,
}


def memory_mb(field: str) -> float:
    """Return this process's memory in MiB: ``"VmRSS"`` at present, ``"VmHWM"`` at its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(variant: str, path: Path, runs: int) -> dict[str, float]:
    """Run one variant in this process; return its metrics, the seconds of the fastest run, and the peak of the first.

    The peak is in MiB above the features. The first run meets memory that the system has to find first.
    """
    queries, gallery, ids = load(path)
    # Threads and libraries start outside the measurement.
    few = Identities(
        *(side[:1000] for side in (ids.query_pids, ids.gallery_pids, ids.query_camids, ids.gallery_camids))
    )
    FUNCTIONS[variant](queries[:1000], gallery[:1000], few)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
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
    """Run ``measure`` in a process of its own."""
    command = [sys.executable, __file__, "--variant", variant, "--features", folder, "--runs", str(runs)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def compare(name: str, size: Size, variants: tuple[str, ...], rounds: int, runs: int) -> str:
    """Return the table of ``variants``, with ratios to the first."""
    results: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    with TemporaryDirectory() as folder:
        generate(size, Path(folder))
        for number in range(rounds):
            for variant in variants:
                print(f"{name}, round {number + 1} of {rounds}: {variant}", file=sys.stderr)
                results[variant].append(measured(variant, folder, runs))
    medians = {
        variant: {key: statistics.median(each[key] for each in runs) for key in runs[0]}
        for variant, runs in results.items()
    }
    first = medians[variants[0]]["seconds"]
    rows = [
        (
            variant,
            f"{found['seconds']:.2f}",
            f"{found['seconds'] / first:.2f}",
            f"{found['memory']:.0f}",
            *(f"{found[metric]:.2f}" if metric in found else "" for metric in ("mAP", "Rank-1")),
        )
        for variant, found in medians.items()
    ]
    headers = ["variant", "s", f"x {variants[0]}", "MiB above the features", "mAP", "Rank-1"]
    title = f"{name}: {size.queries} x {size.gallery} x {WIDTH}, {rounds} rounds"
    return f"{title}\n{tabulate(rows, headers=headers, tablefmt='github', disable_numparse=True)}"


def growth(runs: int) -> str:
    """Return the table of three sizes, each with twice the queries and twice the gallery of the one before."""
    rows = []
    with TemporaryDirectory() as folder:
        for factor in (1, 2, 4):
            size = Size(1000 * factor, 10_000 * factor, 500 * factor, 6, 0.1)
            print(f"growth: {size.queries} x {size.gallery}", file=sys.stderr)
            generate(size, Path(folder))
            seconds = measured("fastamp", folder, runs)["seconds"]
            products = size.queries * size.gallery * WIDTH
            rows.append((size.queries, size.gallery, f"{seconds:.2f}", f"{1e12 * seconds / products:.2f}"))
    headers = ["queries", "gallery", "s", "ps for each query x gallery x width"]
    return f"growth\n{tabulate(rows, headers=headers, tablefmt='github', disable_numparse=True)}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["market1501", "msmt17"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--runs", type=int, default=2, help="in each process; the fastest counts (default: %(default)s)"
    )
    parser.add_argument("--no-argsort", action="store_true", help="leave the plain evaluator out (MSMT17: 13 GB)")
    parser.add_argument(
        "--re-ranking", action="store_true", help="measure re-ranking, too (MSMT17: 10 minutes a round)"
    )
    parser.add_argument("--growth", action="store_true", help="measure three sizes, too")
    parser.add_argument("--variant", choices=FUNCTIONS, help="measure this one alone, in this process, as JSON")
    parser.add_argument("--features", help="the folder of its features")
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args.variant, Path(args.features), args.runs)))
        return
    print(inspect_environment(torch.device("cpu"), asked="cpu").table(), file=sys.stderr)
    for name in args.sizes:
        variants = tuple(each for each in RANKING if not (args.no_argsort and each == "argsort"))
        print(compare(name, SIZES[name], variants, args.rounds, args.runs), flush=True)
        if args.re_ranking:
            print(compare(name, SIZES[name], RE_RANKING, args.rounds, args.runs), flush=True)
    if args.growth:
        print(growth(args.runs))


if __name__ == "__main__":
    main()
