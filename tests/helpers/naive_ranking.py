"""Features and identities for evaluation tests, and a naive ranking loop as reference."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import torch

from fastamp.config import read_config
from fastamp.evaluation import PROTOCOL_REGISTRY, Identities, Protocol

REFERENCE = Path(__file__).parents[1] / "reference/ranking"


def load(name):
    """Load a reference file; return its arrays, query features, gallery features and identities."""
    data = np.load(REFERENCE / f"{name}.npz")
    tensors = {key: torch.from_numpy(data[key]) for key in ("qf", "gf", "qp", "gp", "qc", "gc")}
    ids = Identities(*(tensors[key].long() for key in ("qp", "gp", "qc", "gc")))
    return data, tensors["qf"], tensors["gf"], ids


def random_set(seed, queries=30, gallery=120, *, width=16, pids=8, cameras=3, noise=1.0):
    """Create query and gallery features in one cluster per identity, and the identities; identity 0 is a distractor."""
    random = np.random.default_rng(seed)
    centers = random.standard_normal((pids + 1, width))
    sides = [random.integers(low, pids + 1, n) for low, n in ((1, queries), (0, gallery))]
    features = [
        torch.from_numpy((centers[side] + noise * random.standard_normal((len(side), width))).astype(np.float32))
        for side in sides
    ]
    camids = [random.integers(0, cameras, len(side)) for side in sides]
    return *features, Identities(*(torch.from_numpy(values) for values in (*sides, *camids)))


def naive_rows(distances, ids, *, cross_camera=True, same_identity_only=True):
    """Yield for each query the ranks (from 1) of its matches in a stable sort without junk.

    Junk are the gallery images from the query's camera: those of the query's identity, or all of them if
    ``same_identity_only`` is False. Without ``cross_camera``, there is no junk.
    """
    for q in range(len(distances)):
        order = sorted(range(len(distances[q])), key=lambda g: (distances[q][g], g))
        same = ids.gallery_pids == ids.query_pids[q]
        junk = (same | (not same_identity_only)) & (ids.gallery_camids == ids.query_camids[q]) & cross_camera
        kept = [g for g in order if not junk[g]]
        yield [i for i, g in enumerate(kept, start=1) if same[g]]


def naive(distances, ids, **rule):
    """Yield for each query AP, INP, the 0-based rank of the first match, and True if there is a match."""
    for ranks in naive_rows(distances, ids, **rule):
        if not ranks:
            yield 0.0, 0.0, -1, False
            continue
        precisions = [(i + 1) / rank for i, rank in enumerate(ranks)]
        yield sum(precisions) / len(ranks), len(ranks) / ranks[-1], ranks[0] - 1, True


def random_distances(seed, num_query, num_gallery, levels, dtype=np.float32, pids=4):
    """Draw distances with ties (if ``levels`` is small), and identities; identity 0 is a distractor."""
    rng = np.random.default_rng(seed)
    distances = torch.from_numpy(rng.integers(0, levels, (num_query, num_gallery)).astype(dtype))
    ids = Identities(
        torch.from_numpy(rng.integers(1, pids, num_query)),
        torch.from_numpy(rng.integers(0, pids, num_gallery)),
        torch.from_numpy(rng.integers(0, 3, num_query)),
        torch.from_numpy(rng.integers(0, 3, num_gallery)),
    )
    return distances, ids


def rows_of(result):
    """Return (AP, INP, 0-based rank of the first match, valid) for each query."""
    columns = (result.ap, result.inp, result.first_match[:, 0], result.valid)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def protocol(*opts):
    """Build the protocol of the default config with the given keys and values."""
    cfg = read_config("", opts)
    return Protocol.from_config(cfg)


def protocol_of(rule="market1501", **options):
    """Build a protocol from the name of its rule, with options of both."""
    rule = PROTOCOL_REGISTRY.get(rule)
    names = {field.name for field in fields(rule)}
    own = {name: value for name, value in options.items() if name in names}
    rest = {name: value for name, value in options.items() if name not in names or name == "seed"}
    return Protocol(rule=rule(**own), **rest)


def naive_reciprocal_weights(order, values, k1, k2, wide):
    """Compute the weights of the k-reciprocal neighbors with Python sets; ``wide`` neighbors are examined first."""
    count = len(order)

    def reciprocal(i, k):
        return {int(j) for j in order[i, :k] if i in order[j, :k]}

    weights = np.zeros((count, count))
    for i in range(count):
        members = reciprocal(i, wide)
        grown = set(members)
        for j in members:
            near = reciprocal(j, round(k1 / 2) + 1)
            if len(near & members) > 2 / 3 * len(near):
                grown |= near
        weights[i, list(grown)] = np.exp(-values[i, list(grown)])
        weights[i] /= weights[i].sum()
    return np.stack([weights[order[i, :k2]].mean(0) for i in range(count)])
