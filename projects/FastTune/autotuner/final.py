"""Comparison of the winner with the original recipe over several seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

from tabulate import tabulate

from autotuner.search import Outcome, run_search
from autotuner.settings import Search
from autotuner.space import Parameter, Space
from fastamp.config import CfgNode
from fastamp.utils.files import write_csv

METRICS = ("mAP", "Rank-1")


def train_recipes(
    recipes: Mapping[str, tuple[str, CfgNode]], seeds: int, search: Search, *, resume: bool = False
) -> dict[str, list[Outcome]]:
    """Train each recipe with several seeds on all training identities.

    Each training is evaluated once, at its end, on the test set.

    Args:
        recipes: dict from name to ``(folder, config)``; the folder is created next to the search folder.
        seeds: number of seeds, starting at the config's SEED.
        search: settings of the search; only its resources, parent folder and plugin are used.
        resume: continue interrupted trainings.

    Returns:
        Dict from recipe name to the outcomes of its trainings; failed trainings have no metrics.
    """
    results = {}
    for name, (folder, cfg) in recipes.items():
        once = cfg.with_values({"TEST.EVAL_PERIOD": cfg.SOLVER.MAX_EPOCH})
        repeats = replace(
            search,
            title=f"training {name}",
            folder=search.folder.parent / folder,
            cfg=once,
            space=Space([Parameter("SEED", "choice", tuple(range(cfg.SEED, cfg.SEED + seeds)))]),
            algorithm="grid",
            scheduler="none",
            trials=seeds,
            trials_flag="--seeds",
            with_recipe=False,
            fraction=0.0,
        )
        results[name] = sorted(run_search(repeats, resume=resume), key=lambda outcome: outcome.values["SEED"])
    return results


def write_final(results: Mapping[str, Sequence[Outcome]], path: Path) -> Path:
    """Write one row per training to a CSV file.

    Raises:
        WriteError: if the file cannot be written.
    """
    rows = [
        [name, outcome.values["SEED"], *(outcome.metrics.get(key, "") for key in METRICS), outcome.failure]
        for name, outcomes in results.items()
        for outcome in outcomes
    ]
    write_csv(path, [["recipe", "seed", *METRICS, "failure"], *rows])
    return path


def final_table(results: Mapping[str, Sequence[Outcome]]) -> str:
    """Format a table of each recipe's metrics: mean, sample standard deviation and range over the seeds."""
    rows = []
    for name, outcomes in results.items():
        trained = [outcome.metrics for outcome in outcomes if outcome.metrics]
        rows.append([name, f"{len(trained)} of {len(outcomes)}"])
        for key in METRICS:
            values = [metrics[key] for metrics in trained]
            rows[-1] += _spread(values)
    headers = ["recipe", "seeds", *(f"{key} {what}" for key in METRICS for what in ("mean", "+/-", "from", "to"))]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _spread(values: Sequence[float]) -> list[str]:
    if not values:
        return [""] * 4
    deviation = f"{stdev(values):.2f}" if len(values) > 1 else ""
    return [f"{mean(values):.2f}", deviation, f"{min(values):.2f}", f"{max(values):.2f}"]
