#!/usr/bin/env python
"""Compare time and memory of sparse clustering with dense N x N matrices, and measure large numbers of images.

Features are generated: identities in a space of 64 dimensions, with noise that differs between images, as 2,048 values.
Both variants find the k-reciprocal Jaccard distances of the same features and cluster them with DBSCAN:

- dense: the structure of the published programs. N x N weights, a loop over the images, N x N distances, and
  scikit-learn's DBSCAN.
- sparse: fastamp.evaluation.clustering.

Each variant runs in a process of its own; memory is the increase of the peak over the memory before the features are
generated. Without --dense, only the sparse variant runs, in stages that are saved to --folder: the neighbors of each
part of the images, and the weights. The same command continues an interrupted measurement. The required memory is
estimated and printed beforehand.

With --search, only the search of neighbors is measured, for the first of the images as queries, in interleaved rounds:
all distances, and lower bounds of them (fastamp.evaluation.projected_neighbors). Both must find the same neighbors.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from scipy.sparse import load_npz, save_npz
from tabulate import tabulate

from fastamp.diagnostics.environment import inspect_environment
from fastamp.evaluation.clustering import (
    Clustering,
    centered_unit_features,
    cluster_features,
    cluster_quality,
    dbscan,
    distances_of_weights,
)
from fastamp.evaluation.neighbors import nearest_neighbors
from fastamp.evaluation.rerank import ReRanking, reciprocal_weights
from fastamp.utils.env import available_memory, peak_memory_mb
from fastamp.utils.progress import format_duration, track

LATENT = 64
IMAGES_PER_IDENTITY = 17
# Mean standard deviation of the noise of an image; that of the identities is 1.
NOISE = 0.65
# Images whose features are generated at once, and whose neighbors are one stage.
PART = 20_000
# Nonzero weights of an image, for the estimate of the memory; measured with these features.
WEIGHTS = 150
OPTIONS = Clustering()


def generate(count: int, width: int, latent: int = LATENT) -> tuple[torch.Tensor, np.ndarray]:
    """Generate (count, width) float32 features and their identities (count,); the same in each process."""
    random = np.random.default_rng(0)
    centers = random.standard_normal((max(2, count // IMAGES_PER_IDENTITY), latent), dtype=np.float32)
    basis = random.standard_normal((latent, width), dtype=np.float32)
    features, identities = np.empty((count, width), dtype=np.float32), random.integers(0, len(centers), count)
    for first in range(0, count, PART):
        chosen = centers[identities[first : first + PART]]
        noise = random.standard_normal(chosen.shape, dtype=np.float32)
        noise *= random.gamma(4.0, NOISE / 4, (len(chosen), 1)).astype(np.float32)
        np.matmul(chosen + noise, basis, out=features[first : first + PART])
    return torch.from_numpy(features), identities


def dense_clusters(features: torch.Tensor) -> np.ndarray:
    """Cluster features as the published programs do, with N x N matrices."""
    from sklearn.cluster import DBSCAN

    unit = centered_unit_features(features)
    count, k1 = len(unit), OPTIONS.k1
    neighbors = nearest_neighbors(unit, unit, k1).indices
    near = [_mutual(neighbors[:, :k1], row) for row in range(count)]
    half = [_mutual(neighbors[:, : round(k1 / 2) + 1], row) for row in range(count)]
    weights = np.zeros((count, count), dtype=np.float32)
    for row, members in enumerate(near):
        grown = [members, *(half[j] for j in members if 3 * len(np.intersect1d(half[j], members)) > 2 * len(half[j]))]
        columns = np.unique(np.concatenate(grown))
        squared = (unit[row] - unit[columns]).square().sum(1)
        weights[row, columns] = torch.softmax(-squared, dim=0)
    weights = np.stack([weights[neighbors[row, : OPTIONS.k2]].mean(0) for row in range(count)])
    images_of = [np.flatnonzero(weights[:, column]) for column in range(count)]
    distances = np.empty((count, count), dtype=np.float32)
    for row in range(count):
        overlap = np.zeros(count, dtype=np.float32)
        for column in np.flatnonzero(weights[row]):
            others = images_of[column]
            overlap[others] += np.minimum(weights[row, column], weights[others, column])
        distances[row] = 1 - overlap / (2 - overlap)
    distances[distances < 0] = 0
    return DBSCAN(eps=OPTIONS.eps, min_samples=OPTIONS.min_samples, metric="precomputed").fit_predict(distances)


def _mutual(neighbors: np.ndarray, row: int) -> np.ndarray:
    """Return the neighbors of an image that have it among their own neighbors."""
    neighbors_of_row = neighbors[row]
    return neighbors_of_row[(neighbors[neighbors_of_row] == row).any(1)]


def sparse_clusters(features: torch.Tensor) -> np.ndarray:
    """Cluster features with fastamp."""
    return cluster_features(features, OPTIONS)


VARIANTS: dict[str, Callable[[torch.Tensor], np.ndarray]] = {"dense": dense_clusters, "sparse": sparse_clusters}


def measure(variant: str, count: int, width: int) -> dict[str, Any]:
    """Run one variant in this process; return seconds, CPU seconds, peak memory in MiB, and labels as a list."""
    before = peak_memory_mb(torch.device("cpu"))
    features, identities = generate(count, width)
    start, cpu_start = time.perf_counter(), time.process_time()
    labels = VARIANTS[variant](features)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    peak = peak_memory_mb(torch.device("cpu")) - before
    return {
        "seconds": seconds,
        "CPU seconds": cpu_seconds,
        "MiB": peak,
        "labels": labels.tolist(),
        "quality": str(cluster_quality(labels, identities)),
    }


def estimated_memory(count: int, width: int) -> int:
    """Estimate the bytes of the sparse variant: the features and their copy, a block, and the weights."""
    return 2 * count * width * 4 + 512 * 2**20 + count * (16 * OPTIONS.k1 + 40 * WEIGHTS)


def measure_in_stages(count: int, width: int, folder: Path) -> dict[str, Any]:
    """Run the sparse variant in stages, each of which is saved to ``folder`` and not repeated.

    Returns:
        Seconds over all processes, the largest peak memory in MiB, and the quality of the clusters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{count}x{width}.json"
    state = json.loads(log.read_text()) if log.exists() else {"seconds": {}, "MiB": 0.0}
    device, before = torch.device("cpu"), peak_memory_mb(torch.device("cpu"))
    features, identities = generate(count, width)

    def stage(name: str, run: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = run()
        state["seconds"][name] = time.perf_counter() - start
        state["MiB"] = max(state["MiB"], peak_memory_mb(device) - before)
        log.write_text(json.dumps(state, indent=1))
        return result

    weights_file = folder / f"{count}x{width}.weights.npz"
    if not weights_file.exists():
        unit, parts = centered_unit_features(features), []
        for first in track(range(0, count, PART), -(-count // PART), "parts"):
            file = folder / f"{count}x{width}.neighbors.{first}.npy"
            if not file.exists():
                part = unit[first : first + PART]
                of_part = stage(
                    file.stem, lambda part=part: nearest_neighbors(part, unit, OPTIONS.k1, farthest=False).indices
                )
                np.save(folder / "unfinished.npy", of_part.astype(np.int32))
                (folder / "unfinished.npy").rename(file)
                print(f"{first + len(part):,} of {count:,} images: {_left(state, count)} left", file=sys.stderr)
            parts.append(np.load(file).astype(np.int64))
        reranking = ReRanking(k1=OPTIONS.k1, k2=OPTIONS.k2, variant="fastreid")
        neighbors, farthest = np.concatenate(parts), np.zeros(count, dtype=np.float32)
        weights = stage("weights", lambda: reciprocal_weights(unit, neighbors, farthest, reranking))
        save_npz(folder / "unfinished.npz", weights, compressed=False)
        (folder / "unfinished.npz").rename(weights_file)
        del unit, neighbors, weights
    weights = load_npz(weights_file)
    distances = stage("distances", lambda: distances_of_weights(weights, OPTIONS.eps))
    labels = stage("DBSCAN", lambda: dbscan(distances, min_samples=OPTIONS.min_samples))
    print(f"{weights.nnz / count:.0f} weights and {distances.nnz / count:.0f} neighbors per image", file=sys.stderr)
    neighbors_seconds = sum(value for name, value in state["seconds"].items() if ".neighbors." in name)
    return {
        "neighbors s": neighbors_seconds,
        **{f"{name} s": state["seconds"].get(name, 0.0) for name in ("weights", "distances", "DBSCAN")},
        "MiB": state["MiB"],
        "quality": str(cluster_quality(labels, identities)),
        "labels": labels.tolist(),
    }


def measure_search(count: int, width: int, latent: int, queries: int, rounds: int) -> list[dict[str, Any]]:
    """Search the neighbors of the first ``queries`` images with and without lower bounds; return a row per round."""
    features = centered_unit_features(generate(count, width, latent)[0])
    rows = []
    for number in range(rounds):
        row: dict[str, Any] = {"images": count, "dimensions": latent, "queries": queries, "round": number + 1}
        columns = []
        # Lower bounds from this number of images on.
        for name, smallest in {"all distances": count + 1, "lower bounds": 0}.items():
            with mock.patch("fastamp.evaluation.neighbors.MIN_GALLERY", smallest):
                start = time.process_time()
                columns.append(nearest_neighbors(features[:queries], features, OPTIONS.k1, farthest=False).indices)
            row[f"{name}, CPU s"] = time.process_time() - start
        rows.append(row | {"neighbors": "identical" if np.array_equal(*columns) else "differ"})
    return rows


def _left(state: dict[str, Any], count: int) -> str:
    """Return the estimated time left for the neighbors of all images."""
    times = [value for name, value in state["seconds"].items() if ".neighbors." in name]
    return format_duration(sum(times) / len(times) * (-(-count // PART) - len(times)))


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the benchmark, print a table and return its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, nargs="+", default=[13_000], help="numbers of images (default: 13000)")
    parser.add_argument("--width", type=int, default=2048, help="feature width (default: %(default)s)")
    parser.add_argument("--dense", action="store_true", help="compare with dense matrices")
    parser.add_argument("--search", type=int, metavar="QUERIES", help="compare the search for this number of queries")
    parser.add_argument(
        "--latent", type=int, default=LATENT, help="dimensions of the features with --search (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="rounds of a comparison (default: %(default)s)")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("logs/clustering"),
        help="folder of the stages without --dense (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    print(inspect_environment(torch.device("cpu"), asked="cpu").table(), file=sys.stderr)
    rows = []
    for count in args.images:
        needed = estimated_memory(count, args.width) + (3 * 4 * count**2 if args.dense else 0)
        free = available_memory()
        print(f"{count:,} x {args.width}: about {needed / 2**30:.1f} GiB of memory", file=sys.stderr)
        if free is not None and needed > free:
            parser.error(f"{count:,} images need about {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free")
        if args.search:
            rows += measure_search(count, args.width, args.latent, args.search, args.rounds)
            continue
        for number in range(args.rounds if args.dense else 1):
            labels = []
            for variant in ("dense", "sparse") if args.dense else ("stages",):
                # A new process for each row: the peak of the resident set cannot be reset.
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    if args.dense:
                        row = pool.apply(measure, (variant, count, args.width))
                    else:
                        row = pool.apply(measure_in_stages, (count, args.width, args.folder))
                labels.append(row.pop("labels"))
                rows.append({"images": count, "variant": variant, "round": number + 1, **row})
            if args.dense:
                rows[-1]["labels"] = "identical" if labels[0] == labels[1] else "differ"
    print(tabulate(rows, headers="keys", floatfmt=",.1f", intfmt=",", tablefmt="github"))
    return rows


if __name__ == "__main__":
    main()
