"""What a search leaves: a table of trials, the winner's config, and pictures."""

import csv
import logging
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

from autotuner.search import Outcome, winner_of
from autotuner.space import Space
from fastamp.config import CfgNode
from fastamp.utils.errors import writing

logger = logging.getLogger(__name__)
_METRICS = ("mAP", "Rank-1", "skipped_steps", "peak_memory_mb", "images_per_second")


def write_results(outcomes: Sequence[Outcome], cfg: CfgNode, space: Space) -> list[Path]:
    """Write ``trials.csv``, ``best_config.yaml`` and, where matplotlib is installed, ``trials.png`` to OUTPUT_DIR.

    ``best_config.yaml`` is ``cfg`` with the winner's values, and a folder of its own in OUTPUT_DIR as its OUTPUT_DIR.

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
            table.writerow(["stage", "trial", "score", *_METRICS, "epochs", *space.parameters, "failure"])
            for each in outcomes:
                score = "" if each.score is None else each.score
                metrics = [each.metrics.get(name, "") for name in _METRICS]
                values = [each.values.get(key, "") for key in space.parameters]
                table.writerow([each.stage, each.name, score, *metrics, each.epochs, *values, each.failure])
        if winner_of(outcomes):
            paths.append(folder / "best_config.yaml")
            best = space.apply(cfg, outcomes[0].values).clone()
            best.defrost()
            best.OUTPUT_DIR = str(folder / "trained")  # not among the search's files
            paths[-1].write_text(best.dump(), encoding="utf-8")
    picture = _draw(outcomes, space, folder / "trials.png")
    return [*paths, *([picture] if picture else [])]


def table(outcomes: Sequence[Outcome], space: Space, *, most: int = 10) -> str:
    """Return the best trials as a table."""
    rows = [
        [each.stage, each.name, "" if each.score is None else f"{each.score:.2f}", each.epochs]
        + [short(each.values.get(key, "")) for key in space.parameters]
        + [each.failure[:60]]
        for each in outcomes[:most]
    ]
    headers = ["stage", "trial", "score", "epochs", *short_keys(space), "failure"]
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def short(value: object) -> str:
    """Return a value as it stands in a table."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def short_keys(space: Space) -> list[str]:
    """Return the ends of the keys, as long as they must be to differ."""
    keys = [key.split(".") for key in space.parameters]
    ends = []
    for key in keys:
        length = next(n for n in range(1, len(key) + 1) if sum(other[-n:] == key[-n:] for other in keys) == 1)
        ends.append(".".join(key[-length:]))
    return ends


def _draw(outcomes: Sequence[Outcome], space: Space, path: Path) -> Path | None:
    """Draw each trial's score over its epochs, and its best against each parameter."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning('no picture of the trials: it needs matplotlib (pip install "fastamp[vis]")')
        return None
    judged = [each for each in outcomes if each.score is not None]
    stages = list(dict.fromkeys(each.stage for each in judged))
    whole = max((each.epochs for each in judged), default=0)
    columns = min(len(space.parameters) + 1, 3)
    lines = -(-(len(space.parameters) + 1) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.2 * lines), layout="constrained")
    over_time, *others = figure.subplots(lines, columns, squeeze=False).flat
    for each in judged[::-1]:  # the best on top
        style = {"color": "black", "linewidth": 2} if each is judged[0] else {"linewidth": 0.8, "alpha": 0.6}
        over_time.plot(*zip(*each.history, strict=True), ".-", **style)
    over_time.set(xlabel="epoch", ylabel="score", title="trials over time, the best in black")
    figure.suptitle("each trial's best score; hollow: stopped before its last epoch", fontsize="medium")
    for plot, (key, parameter) in zip(others, space.parameters.items(), strict=False):
        # A choice is drawn at its place, so that its values stand in order and no two share a place.
        places = {value: place for place, value in enumerate(map(str, parameter.values))}
        for stage in stages:
            those = [each for each in judged if each.stage == stage]
            at = [places[str(each.values[key])] if parameter.kind == "choice" else each.values[key] for each in those]
            colour = f"C{stages.index(stage)}"
            filled = [colour if each.epochs == whole else "none" for each in those]
            plot.scatter(at, [each.score for each in those], c=filled, edgecolors=colour, label=stage)
            if judged[0] in those:
                plot.plot(at[those.index(judged[0])], judged[0].score, "*", color="black", markersize=12, zorder=3)
        if parameter.kind == "choice":
            plot.set_xticks(list(places.values()), list(places))
        if parameter.kind == "loguniform":
            plot.set_xscale("log")
        plot.set(xlabel=key, ylabel="score")
    for plot in others[len(space.parameters) :]:
        plot.remove()
    if len(stages) > 1:
        others[0].legend()
    with writing(path):
        figure.savefig(path, dpi=120)
    return path
