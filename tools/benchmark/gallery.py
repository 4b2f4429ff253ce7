#!/usr/bin/env python
"""Measure a mutable gallery: items added per minute, time of single changes, opening, search, and recall.

Features are those of `search.py` in this folder. Each batch of added items is on the disk before the next one. The
search of the gallery is compared with that of an index file of the same features, in the same process: one query at a
time in turns, and many at once. Times are medians.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from search import Images
from tabulate import tabulate

from fastamp.diagnostics.environment import inspect_environment
from fastamp.retrieval.features_file import read_features
from fastamp.retrieval.gallery_store import Item
from fastamp.retrieval.model_id import ModelId
from fastamp.retrieval.mutable_gallery import MutableGallery
from fastamp.retrieval.npz import write_arrays
from fastamp.retrieval.open_gallery import with_index
from fastamp.retrieval.search import search

SINGLE, BATCH, CHANGES = 30, 64, 50


def seconds(function: Callable[[], object]) -> float:
    """Return the time of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def write_extraction(path: Path, features: np.ndarray) -> None:
    """Write features as `fastamp extract` does."""
    count = len(features)
    columns = {"paths": np.arange(count).astype(str), "pids": np.arange(count), "camids": np.zeros(count, int)}
    texts = {"config_hash": "hash", "checkpoint": "model.pth", "metric": "cosine"}
    with path.open("wb") as file:
        write_arrays(file, {"features": features} | columns | {name: np.array(text) for name, text in texts.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="number of items (default: %(default)s)")
    parser.add_argument("--width", type=int, default=512, help="dimension of the features (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="items per added batch (default: %(default)s)")
    args = parser.parse_args()
    print(inspect_environment(torch.device("cpu"), asked="cpu").table(), file=sys.stderr)
    print(f"{torch.get_num_threads()} threads; {args.count:,} items of dimension {args.width}")
    identities = args.count // 20
    images = Images(identities, args.width)
    features = images.of(np.arange(args.count) % identities)
    queries = images.of(np.arange(BATCH))
    with TemporaryDirectory() as name:
        folder = Path(name)
        gallery = MutableGallery(folder / "a.gallery", ModelId(args.width, "cosine", "hash", "model.pth"))

        def add_all() -> None:
            for start in range(0, args.count, args.batch):
                rows = range(start, min(args.count, start + args.batch))
                gallery.add([Item(str(row), camera=f"c{row % 8}", time=float(row)) for row in rows], features[rows])

        added = seconds(add_all)
        print(f"add: {60 * args.count / added:,.0f} items per minute, in batches of {args.batch}")
        changes = {
            "add one item": lambda n: gallery.add([Item(f"new {n}")], features[n : n + 1]),
            "update one item": lambda n: gallery.update([Item(f"new {n}")], features[n + 1 : n + 2]),
            "remove one item": lambda n: gallery.remove([f"new {n}"]),
        }
        for title, change in changes.items():
            median = statistics.median(seconds(lambda c=change, n=n: c(n)) for n in range(CHANGES))
            print(f"{title}: {1000 * median:.1f} ms")
        print(f"open: {seconds(lambda: MutableGallery(folder / 'a.gallery')):.1f} s")
        write_extraction(folder / "a.npz", features)
        indices = {
            "features file, flat": with_index(read_features(folder / "a.npz"), folder / "a.index", "flat"),
            "gallery, exact": gallery,
        }
        compare(indices, queries)
        print(f"build candidates: {seconds(gallery.build_candidates):.1f} s")
        if gallery.recall is not None:
            print(f"measured recall: {gallery.recall:.3f}")
            compare({"features file, default kind": with_index(read_features(folder / "a.npz"), folder / "a.index"),
                     "gallery, approximate": gallery}, queries)  # fmt: skip


def compare(indices: dict, queries: np.ndarray) -> None:
    """Print the recall of searches and their times."""
    single: dict[str, list[float]] = {name: [] for name in indices}
    many: dict[str, list[float]] = {name: [] for name in indices}
    for number in range(SINGLE):
        for name, index in indices.items():
            single[name].append(seconds(lambda i=index, n=number: search(queries[n : n + 1], i, 10)))
    for _ in range(5):
        for name, index in indices.items():
            many[name].append(seconds(lambda i=index: search(queries, i, 10)))
    rows = []
    for name, index in indices.items():
        approximate, exact = search(queries, index, 10).rows, search(queries, index, 10, exact=True).rows
        recall = np.mean([len({*a} & {*b}) / 10 for a, b in zip(approximate.tolist(), exact.tolist(), strict=True)])
        times = [1000 * statistics.median(timings[name]) for timings in (single, many)]
        rows.append([name, recall, times[0], times[1] / len(queries)])
    print(
        tabulate(
            rows, ["search", "recall@10", "ms, one query", f"ms per query, {len(queries)} at once"], floatfmt=".3f"
        )
    )


if __name__ == "__main__":
    main()
