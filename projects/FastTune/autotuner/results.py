"""Result files of a search: the table of trials and the winner's config."""

from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from autotuner.search import Outcome, winner_of
from autotuner.space import Space
from fastamp.config import CfgNode
from fastamp.utils.files import write_atomically, write_csv

_METRICS = ("mAP", "Rank-1", "skipped_steps", "peak_memory_mb", "images_per_second")


def write_results(outcomes: Sequence[Outcome], cfg: CfgNode, space: Space, folder: Path) -> list[Path]:
    """Write ``trials.csv`` and, if there is a winner, ``best_config.yaml``.

    ``best_config.yaml`` is ``cfg`` with the winner's values, and with OUTPUT_DIR set to ``folder/trained``.

    Args:
        outcomes: trials, best first.
        cfg: base config of the search.
        space: search space of the trials.
        folder: OUTPUT_DIR of the search.

    Returns:
        Paths of the written files.

    Raises:
        WriteError: if a file cannot be written.
    """
    rows = [["stage", "trial", "score", *_METRICS, "epochs", *space.parameters, "failure"]]
    for outcome in outcomes:
        score = "" if outcome.score is None else outcome.score
        metrics = [outcome.metrics.get(name, "") for name in _METRICS]
        values = [outcome.values.get(key, "") for key in space.parameters]
        rows.append([outcome.stage, outcome.name, score, *metrics, outcome.epochs, *values, outcome.failure])
    paths = [folder / "trials.csv"]
    write_csv(paths[0], rows)
    winner = winner_of(list(outcomes))
    if winner:
        # A new training must not overwrite the files of the search.
        best = space.apply(cfg, winner.values).with_values({"OUTPUT_DIR": str(folder / "trained")})
        paths.append(folder / "best_config.yaml")
        write_atomically(paths[1], lambda file: file.write(best.saved_text().encode()))
    return paths


def table(outcomes: Sequence[Outcome], space: Space, *, most: int = 10) -> str:
    """Format at most ``most`` trials as a table, in the order of ``outcomes``."""
    rows = [
        [outcome.stage, outcome.name, "" if outcome.score is None else f"{outcome.score:.2f}", outcome.epochs]
        + [short(outcome.values.get(key, "")) for key in space.parameters]
        + [outcome.failure[:60]]
        for outcome in outcomes[:most]
    ]
    headers = ["stage", "trial", "score", "epochs", *short_keys(space), "failure"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def short(value: object) -> str:
    """Format a value for a table; a float is rounded to three significant digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def short_keys(space: Space) -> list[str]:
    """Return the shortest suffix of each key that is unique in the search space."""
    keys = [key.split(".") for key in space.parameters]
    ends = []
    for key in keys:
        length = next(n for n in range(1, len(key) + 1) if sum(other[-n:] == key[-n:] for other in keys) == 1)
        ends.append(".".join(key[-length:]))
    return ends
