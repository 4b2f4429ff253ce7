"""Paired comparison of the results of two runs on the same queries."""

import csv
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from fastamp.evaluation.rank import RankingResult
from fastamp.evaluation.result import bootstrap_intervals, chunks
from fastamp.utils.errors import ConfigError, DataError
from fastamp.utils.files import expand

RANKS = (1, 5, 10)
_RESAMPLES = 10_000
# Sums whose difference is below this, relative to the largest possible one, are equal up to rounding.
_ROUNDING = 1e-12
# Errors of reading a damaged npz or CSV file.
_DAMAGED = (OSError, EOFError, RuntimeError, ValueError, TypeError, LookupError, csv.Error, BadZipFile, zlib.error)


@dataclass(frozen=True)
class QueryResults:
    """Results of all queries of one run on one test set.

    Attributes:
        paths: image of each query.
        pids: (Q,) str, identity of each query.
        ranking: results in the same order.
        protocol: description of the evaluation, see ``Protocol.describe``; "" if it is not known.
    """

    paths: list[str]
    pids: np.ndarray
    ranking: RankingResult
    protocol: str = ""


@dataclass(frozen=True)
class MetricDifference:
    """Difference of a metric between two runs, in percent.

    Attributes:
        metric: ``mAP``, ``mINP`` or ``Rank-k``.
        first, second: value of each run.
        difference: ``second - first``.
        low, high: bounds of the 95 % confidence interval of ``difference``.
        p_value: probability in 0..1 of a difference at least as large, in either direction, if both runs were equally
            good.
    """

    metric: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    p_value: float


@dataclass(frozen=True)
class SetComparison:
    """Differences between two runs on one test set.

    Attributes:
        name: test set; names of both if they differ.
        differences: difference of each metric.
        num_queries, num_identities: number of queries with a match, and of their identities.
        protocols: descriptions of both evaluations; "" if one is not known.
    """

    name: str
    differences: list[MetricDifference]
    num_queries: int
    num_identities: int
    protocols: tuple[str, str]


def compare_rankings(
    first: RankingResult,
    second: RankingResult,
    pids: np.ndarray,
    *,
    ranks: Sequence[int] = RANKS,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> list[MetricDifference]:
    """Compare the results of two models on the same queries.

    Queries of one identity resemble each other, so the identities are the independent units. The interval is that of a
    percentile bootstrap over identities. The p value is that of a permutation test, which exchanges the results of both
    models for random identities (Smucker, Allan and Carterette 2007, "A comparison of statistical significance tests
    for information retrieval evaluation").

    Args:
        first, second: results in the same order of queries.
        pids: (Q,) identity of each query, numbers or text.
        ranks: ranks of the CMC. Default: 1, 5 and 10.
        resamples: number of resamples and of permutations. Default: 10,000.
        seed: seed of both. Default: 0.

    Returns:
        Differences of mAP, Rank-k for each rank, and mINP.

    Raises:
        DataError: if the queries with a match or their trials differ, or there are fewer than two identities.
    """
    if first.first_match.shape != second.first_match.shape or not torch.equal(
        first.first_match >= 0, second.first_match >= 0
    ):
        raise DataError(
            f"the queries with a match differ ({first.num_valid} and {second.num_valid}, in "
            f"{first.first_match.shape[1]} and {second.first_match.shape[1]} trials): the galleries or protocols are "
            "not the same.\n  fix: evaluate both runs with the same gallery, TEST.PROTOCOL, TEST.NUM_TRIALS and "
            "TEST.SEED"
        )
    valid = first.valid
    names, groups = np.unique(np.asarray(pids)[valid.numpy()], return_inverse=True)
    if len(names) < 2:
        raise DataError(
            f"expected queries of at least 2 identities with a match, got {len(names)}.\n  fix: use a larger test set"
        )
    weights = first.trials[valid].numpy()
    metrics = [_metrics_of(ranking.select(valid), ranks) for ranking in (first, second)]
    means = [np.array([100 * (weights @ values) / weights.sum() for values in metric.values()]) for metric in metrics]
    changes = [metrics[1][name] - metrics[0][name] for name in metrics[0]]
    sums = np.stack([np.bincount(groups, weights=weights * change) for change in changes])
    bounds = 100 * bootstrap_intervals(sums, np.bincount(groups, weights=weights), resamples, seed)
    columns = (*means, means[1] - means[0], *bounds.T, _p_values(sums.T, resamples, seed))
    return [
        MetricDifference(name, *values)
        for name, *values in zip(metrics[0], *map(np.ndarray.tolist, columns), strict=True)
    ]


def _metrics_of(ranking: RankingResult, ranks: Sequence[int]) -> dict[str, np.ndarray]:
    """Return metric -> (Q,) float64 value of each query in 0..1."""
    hits = {f"Rank-{rank}": ranking.hits(rank).numpy() for rank in sorted(set(ranks))}
    return {"mAP": ranking.ap.numpy(), **hits, "mINP": ranking.inp.numpy()}


def _p_values(sums: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Compute two-sided p values of the column sums under random signs of the rows."""
    generator, count = np.random.default_rng(seed), len(sums)
    observed = np.abs(sums.sum(0)) - _ROUNDING * np.abs(sums).sum(0)
    extreme = np.ones(sums.shape[1])  # the observed signs
    for size in chunks(resamples, count):
        signs = generator.integers(0, 2, (size, count)) * 2.0 - 1
        extreme += (np.abs(signs @ sums) >= observed).sum(0)
    return extreme / (1 + resamples)


def compare_runs(
    first: str | os.PathLike[str], second: str | os.PathLike[str], *, ranks: Sequence[int] = RANKS
) -> list[SetComparison]:
    """Compare the results of two runs on the test sets that both were evaluated on, see ``compare_rankings``.

    The queries of both runs are matched by their paths below their common folder, so that a dataset may have moved.

    Args:
        first, second: run folders, with the results of ``TEST.PER_QUERY`` below ``evaluation``.
        ranks: ranks of the CMC. Default: 1, 5 and 10.

    Returns:
        The comparison on each test set of both runs; if each has only one, their names may differ.

    Raises:
        ConfigError: if a folder does not exist.
        DataError: if there are no such results, they are damaged, or the queries differ.
    """
    runs = [expand(folder) for folder in (first, second)]
    folders = [_result_folders(run) for run in runs]
    names = [(name, name) for name in folders[0] if name in folders[1]]
    if not names and len(folders[0]) == len(folders[1]) == 1:
        names = list(zip(*folders, strict=True))
    if not names:
        raise DataError(
            f"the runs have no test set in common: {runs[0]} has results on {', '.join(folders[0])}, and {runs[1]} on "
            f"{', '.join(folders[1])}.\n  fix: evaluate both on the same test set: {_command(runs[1])}"
        )
    return [_compare_set(folders[0][one], folders[1][other], ranks) for one, other in names]


def _result_folders(run: Path) -> dict[str, Path]:
    """Return name -> folder with the results of a test set, for each test set of a run."""
    if not run.is_dir():
        raise ConfigError(f"{run}: expected a run folder.\n  fix: give the OUTPUT_DIR of a training or evaluation")
    folders = {path.parent.name: path.parent for path in sorted(run.glob("evaluation/*/per_query.npz"))}
    if not folders:
        raise DataError(f"{run} has no results of each query (evaluation/*/per_query.npz).\n  fix: {_command(run)}")
    return folders


def _command(run: Path) -> str:
    return f"fastamp eval {run} TEST.PER_QUERY=on OUTPUT_DIR={run}"


def _compare_set(first: Path, second: Path, ranks: Sequence[int]) -> SetComparison:
    results = [read_query_results(folder) for folder in (first, second)]
    order = _common_order(results[0], results[1], (first, second))
    pids, rankings = results[0].pids, (results[0].ranking, results[1].ranking.select(torch.from_numpy(order)))
    try:
        differences = compare_rankings(*rankings, pids, ranks=ranks)
    except DataError as error:
        raise DataError(f"{first} and {second}: {error}") from error
    name = first.name if first.name == second.name else f"{first.name} and {second.name}"
    valid = rankings[0].valid.numpy()
    protocols = (results[0].protocol, results[1].protocol)
    return SetComparison(name, differences, int(valid.sum()), len(np.unique(pids[valid])), protocols)


def _common_order(first: QueryResults, second: QueryResults, folders: tuple[Path, Path]) -> np.ndarray:
    """Return (Q,) int64, the row in ``second`` of each query of ``first``.

    Raises:
        DataError: if the queries differ, or several have the same path but another order.
    """
    keys = [list(zip(_below_common_folder(run.paths), run.pids.tolist(), strict=True)) for run in (first, second)]
    if keys[0] == keys[1]:
        return np.arange(len(keys[0]))
    counts = [Counter(key) for key in keys]
    if counts[0] != counts[1]:
        only = [list((counts[row] - counts[1 - row]).elements()) for row in (0, 1)]
        examples = "; ".join(
            f"only in {folder}: {len(queries)}, e.g. {queries[0][0]} of identity {queries[0][1]}"
            for folder, queries in zip(folders, only, strict=True)
            if queries
        )
        raise DataError(
            f"the queries differ ({len(keys[0])} and {len(keys[1])}): {examples}.\n"
            "  fix: evaluate both runs on the same test set"
        )
    row_of = {key: row for row, key in enumerate(keys[1])}
    if len(row_of) < len(keys[1]):
        raise DataError(
            f"{folders[0]} and {folders[1]}: several queries have the same image, and their order differs.\n"
            "  fix: evaluate both runs with the same list of images"
        )
    return np.array([row_of[key] for key in keys[0]])


def _below_common_folder(paths: Sequence[str]) -> list[str]:
    try:
        start = len(os.path.commonpath([os.path.dirname(path) for path in paths]))
    except ValueError:  # absolute and relative paths
        return list(paths)
    return [path[start:].lstrip(os.sep) for path in paths]


def read_query_results(folder: Path) -> QueryResults:
    """Read the results of each query that ``TEST.PER_QUERY`` has written to a folder.

    Raises:
        DataError: if ``per_query.npz`` or ``queries.csv`` is missing or damaged, or they are of different evaluations.
    """
    try:
        with np.load(folder / "per_query.npz", allow_pickle=False) as arrays:
            ranking = RankingResult(*(torch.from_numpy(arrays[name]) for name in ("ap", "inp", "first_match")))
            protocol = str(arrays["protocol"]) if "protocol" in arrays else ""
        with (folder / "queries.csv").open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            lines = [(row["path"], row["pid"], row["ap"]) for row in csv.DictReader(file)]
        order = ranking.worst_first()
        expected = [f"{100 * ap:.2f}" for ap in ranking.ap[ranking.valid].sort().values.tolist()]
        if len(order) != len(lines) or [ap for _, _, ap in lines if ap] != expected:
            raise ValueError("queries.csv and per_query.npz are of different evaluations")
    except _DAMAGED as error:
        raise DataError(
            f"{folder}: cannot read the results of each query: {error or type(error).__name__}\n"
            f"  fix: write them again: {_command(folder.parent.parent)}"
        ) from error
    paths, pids = [""] * len(lines), [""] * len(lines)
    for row, (path, pid, _) in zip(order.tolist(), lines, strict=True):
        paths[row], pids[row] = path, pid
    return QueryResults(paths, np.array(pids, dtype=str), ranking, protocol)
