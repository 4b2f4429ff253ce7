"""Train one config with several seeds, and summarize the results."""

import gc
import itertools
import json
import logging
import math
import numbers
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
from tabulate import tabulate

from fastamp.config import CfgNode
from fastamp.data.random_splits import describe_values
from fastamp.engine.loggers import in_group
from fastamp.utils import comm
from fastamp.utils.errors import ConfigError
from fastamp.utils.files import write_atomically
from fastamp.utils.logger import setup_logger
from fastamp.utils.plural import plural

logger = logging.getLogger(__name__)

FILE = "seeds.json"


def train_seeds(
    cfg: CfgNode,
    seeds: Sequence[int],
    train: Callable[[CfgNode], dict[str, Any]],
    *,
    splits: Sequence[Mapping[str, Any]] = ({},),
) -> dict[str, dict[str, Any]]:
    """Run one training per seed in ``OUTPUT_DIR/seed<N>``, then log mean, standard deviation and range of the metrics.

    The metrics are those of the last evaluation of each run. They are written to ``OUTPUT_DIR/seeds.json``, also after
    each run, with the runs so far.

    Args:
        cfg: config of all runs, except for ``SEED`` and ``OUTPUT_DIR``. In experiment trackers, the runs have one
            group.
        seeds: different values of ``SEED``.
        train: trains a config and returns its metrics, see ``DefaultTrainer.train``.
        splits: config values of each random split, see ``training_splits``, on which each seed is trained, in
            ``OUTPUT_DIR/seed<N>_split<K>``. Default: that of the config.

    Returns:
        ``summarize_seeds`` of all runs; empty on ranks other than 0.

    Raises:
        ConfigError: if a seed occurs twice or is not a valid ``SEED``.
        UserError: if a run fails.
    """
    if len(set(seeds)) < len(seeds):
        raise ConfigError(
            f"--seeds: expected different seeds, got {' '.join(map(str, seeds))}.\n  fix: give each seed once"
        )
    folder, names = Path(cfg.OUTPUT_DIR), list(dict.fromkeys(cfg.DATASETS.TESTS))
    configs: dict[int | str, CfgNode] = {}
    for seed, split in itertools.product(seeds, splits):
        words = describe_values(split)
        name = "_".join([f"seed{seed}", *(word.replace(" ", "") for word in words)])
        run_cfg = cfg.with_values({"SEED": seed, **split, "OUTPUT_DIR": str(folder / name)})
        configs[", ".join([str(seed), *words]) if words else seed] = in_group(run_cfg, folder, name)
    title = plural(len(seeds), "seed") + (f" on {len(splits)} splits" if len(splits) > 1 else "")
    results_of_seed: dict[int | str, dict[str, Any]] = {}
    summary: dict[str, dict[str, Any]] = {}
    for number, (seed, seed_cfg) in enumerate(configs.items(), start=1):
        results = train(seed_cfg)
        _free_memory()
        if comm.is_main_process():
            results_of_seed[seed] = results if len(names) > 1 else {names[0]: results}
            summary = summarize_seeds(results_of_seed)
            content = {"seeds": list(results_of_seed), "requested": list(configs), "metrics": summary}
            _write(folder / FILE, content)
            logger.info("finished %d of %s, the last in %s", number, plural(len(configs), "run"), seed_cfg.OUTPUT_DIR)
    if comm.is_main_process():
        setup_logger(folder)  # the runs have logged to their own folders
        logger.info("results of %s, last evaluation, in percent:\n%s", title, _table(summary, list(configs)))
        logger.info("wrote %s", folder / FILE)
    return summary


def summarize_seeds(results: Mapping[int | str, Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Compute mean, sample standard deviation and range of each metric over the seeds.

    Args:
        results: seed, or seed and split -> dataset -> metrics. Values other than finite floats of Python or NumPy,
            e.g. counts, are skipped.

    Returns:
        ``<dataset>/<metric>`` -> ``values`` by seed, ``mean``, ``std`` (null for one seed), ``min`` and ``max``.
    """
    first, summary = next(iter(results.values())), {}
    for dataset, metrics in first.items():
        for metric in metrics:
            found = [result.get(dataset, {}).get(metric) for result in results.values()]
            values = [
                float(value) for value in found if value is not None and _is_float(value) and math.isfinite(value)
            ]
            if len(values) == len(found):
                summary[f"{dataset}/{metric}"] = {
                    "values": {str(seed): value for seed, value in zip(results, values, strict=True)},
                    "mean": statistics.fmean(values),
                    "std": statistics.stdev(values) if len(values) > 1 else None,
                    "min": min(values),
                    "max": max(values),
                }
    return summary


def _write(file: Path, content: dict[str, Any]) -> None:
    write_atomically(file, lambda stream: stream.write(json.dumps(content, indent=1).encode() + b"\n"))


def _is_float(value: object) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral)  # bool is Integral


def _table(summary: Mapping[str, Mapping[str, Any]], seeds: Sequence[int | str]) -> str:
    rows = [
        [
            name,
            *(f"{value:.2f}" for value in statistics["values"].values()),
            f"{statistics['mean']:.2f}",
            "" if statistics["std"] is None else f"{statistics['std']:.2f}",
            f"{statistics['min']:.2f} to {statistics['max']:.2f}",
        ]
        for name, statistics in summary.items()
    ]
    headers = ["metric", *(f"seed {seed}" for seed in seeds), "mean", "std", "range"]
    return tabulate(rows, headers, tablefmt="github", disable_numparse=True)


def _free_memory() -> None:
    """Free the memory of the trainer of the previous seed."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
