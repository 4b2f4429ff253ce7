"""What a search leaves: a table of trials, the winner's config, and pictures."""

import csv
import logging
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from autotuner.search import Outcome
from autotuner.space import Space
from fastamp.config import CfgNode
from fastamp.utils.errors import writing

logger = logging.getLogger(__name__)


def write_results(outcomes: Sequence[Outcome], cfg: CfgNode, space: Space) -> list[Path]:
    """Write ``trials.csv``, ``best_config.yaml`` and, where matplotlib is installed, ``trials.png`` to OUTPUT_DIR.

    ``best_config.yaml`` is ``cfg`` with the winner's values: data sets, OUTPUT_DIR and all else are those of ``cfg``.

    Args:
        outcomes: the best first.
        cfg: that the values were put into.
        space: what was drawn.

    Returns:
        The paths.

    Raises:
        ConfigError: a file cannot be written.
    """
    folder = Path(cfg.OUTPUT_DIR)
    paths = [folder / "trials.csv"]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with paths[0].open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["trial", "score", "epochs", *space.parameters, "failure"])
            for each in outcomes:
                values = [each.values.get(key, "") for key in space.parameters]
                table.writerow(
                    [each.name, "" if each.score is None else each.score, each.epochs, *values, each.failure]
                )
        if outcomes and outcomes[0].score is not None:
            paths.append(folder / "best_config.yaml")
            paths[-1].write_text(space.apply(cfg, outcomes[0].values).dump(), encoding="utf-8")
    picture = _draw(outcomes, space, folder / "trials.png")
    return [*paths, *([picture] if picture else [])]


def table(outcomes: Sequence[Outcome], space: Space, *, most: int = 10) -> str:
    """Return the best trials as a table."""
    rows = [
        [each.name, "" if each.score is None else f"{each.score:.2f}", each.epochs]
        + [_short(each.values.get(key, "")) for key in space.parameters]
        + [each.failure[:60]]
        for each in outcomes[:most]
    ]
    headers = ["trial", "score", "epochs", *(key.split(".")[-1] for key in space.parameters), "failure"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _draw(outcomes: Sequence[Outcome], space: Space, path: Path) -> Path | None:
    """Draw the score against each parameter, and each trial's score over its epochs."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning('no picture of the trials: it needs matplotlib (pip install "fastamp[vis]")')
        return None
    judged = [each for each in outcomes if each.score is not None]
    count = len(space.parameters) + 1
    figure = Figure(figsize=(4 * min(count, 3), 3 * -(-count // 3)), layout="constrained")
    plots = figure.subplots(-(-count // 3), min(count, 3), squeeze=False).flat
    for each in judged:
        plots[0].plot(*zip(*each.history, strict=True), ".-", linewidth=1)
    plots[0].set(xlabel="epoch", ylabel="score", title="trials over time")
    for plot, (key, parameter) in zip(list(plots)[1:], space.parameters.items(), strict=False):
        values = [each.values[key] for each in judged]
        if parameter.kind == "choice":
            values = [str(value) for value in values]
        plot.plot(values, [each.score for each in judged], "o")
        plot.set(xlabel=key, ylabel="score", xscale="log" if parameter.kind == "loguniform" else plot.get_xscale())
    with writing(path):
        figure.savefig(path, dpi=120)
    return path
