"""Figure of a search: scores and lineage of trials over epochs, importance of keys, and scores by key."""

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autotuner.importance import importances
from autotuner.results import short_keys
from autotuner.search import Outcome
from autotuner.space import Parameter, Space
from fastamp.utils.errors import writing

logger = logging.getLogger(f"fastamp.{__name__}")


def draw_trials(outcomes: Sequence[Outcome], space: Space, path: Path) -> Path | None:
    """Draw the figure of a search to a PNG file.

    Args:
        outcomes: trials, best first.
        space: search space of the trials.
        path: output file.

    Returns:
        ``path``; None if matplotlib is not installed.

    Raises:
        ConfigError: if the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        logger.warning('trials.png not drawn: matplotlib is not installed.\n  fix: pip install "fastamp[vis]"')
        return None
    scored = [outcome for outcome in outcomes if outcome.score is not None]
    count = len(space.parameters) + 2
    columns = min(count, 3)
    figure = Figure(figsize=(5 * columns, 3.4 * -(-count // columns)), layout="constrained")
    over_time, bars, *others = figure.subplots(-(-count // columns), columns, squeeze=False).flat
    figure.suptitle("best score of each trial; hollow: stopped before its last epoch", fontsize="medium")
    _draw_lineage(over_time, scored)
    _draw_importance(bars, scored, space)
    for plot, parameter in zip(others, space.parameters.values(), strict=False):
        _draw_key(plot, scored, parameter)
    for plot in others[len(space.parameters) :]:
        plot.remove()
    if len({outcome.stage for outcome in scored}) > 1:
        others[0].legend()
    with writing(path):
        figure.savefig(path, dpi=120)
    return path


def _draw_lineage(plot: Any, scored: Sequence[Outcome]) -> None:
    """Draw scores over epochs, with an arrow from each checkpoint to the trial that continued from it."""
    scores = {outcome.name: dict(outcome.history) for outcome in scored}
    copies = 0
    for number, outcome in list(enumerate(scored))[::-1]:  # the best on top
        best = number == 0
        color = "black" if best else f"C{number % 10}"
        # A line ends where the trial was replaced by a copy of another trial.
        breaks = sorted(epoch for epoch, _ in outcome.parents)
        for segment in _split(outcome.history, breaks):
            plot.plot(
                *zip(*segment, strict=True), ".-", color=color, linewidth=2 if best else 0.8, zorder=3 if best else 2
            )
        for epoch, parent in outcome.parents:
            begin = scores.get(parent, {}).get(epoch)
            end = next(((e, s) for e, s in outcome.history if e > epoch), None)
            if begin is None or end is None:
                continue
            copies += 1
            arrow = {"arrowstyle": "->", "color": color, "linestyle": "dashed", "linewidth": 1.6 if best else 0.9}
            plot.annotate("", xy=end, xytext=(epoch, begin), arrowprops=arrow)
    title = "trials over epochs, best in black"
    if copies:
        title += f"\ndashed: {copies} continued from another trial's checkpoint"
    plot.set(xlabel="epoch", ylabel="score", title=title)
    plot.locator_params(axis="x", integer=True)
    plot.title.set_fontsize("small")


def _split(history: Sequence[tuple[int, float]], breaks: Sequence[int]) -> list[list[tuple[int, float]]]:
    """Split the points of a trial at the given epochs; drop empty segments."""
    edges = [-1, *breaks, float("inf")]
    parts = [[point for point in history if low < point[0] <= high] for low, high in itertools.pairwise(edges)]
    return [part for part in parts if part]


def _draw_importance(plot: Any, scored: Sequence[Outcome], space: Space) -> None:
    importance = importances(scored, space)
    plot.set(title="importance of each key (epsilon squared of the ranks)", xlim=(0, 1))
    plot.title.set_fontsize("small")
    if not importance:
        plot.text(0.5, 0.5, "too few trials", ha="center", va="center", transform=plot.transAxes)
        return
    names = dict(zip(space.parameters, short_keys(space), strict=True))
    keys = list(importance)[::-1]
    drawn = plot.barh([names[key] for key in keys], [importance[key] for key in keys], color="C0")
    plot.bar_label(drawn, fmt="%.2f", padding=3)


def _log_axis(plot: Any, values: Sequence[float]) -> None:
    """Make the x axis logarithmic, with labels that do not overlap."""
    from matplotlib.ticker import LogLocator, NullFormatter

    plot.set_xscale("log")
    plot.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 30 * min(values) else (1,)))
    plot.xaxis.set_major_formatter("{x:g}")
    plot.xaxis.set_minor_formatter(NullFormatter())


def _draw_key(plot: Any, scored: Sequence[Outcome], parameter: Parameter) -> None:
    """Draw the scores of the trials against the values of a key."""
    key = parameter.key
    stages = list(dict.fromkeys(outcome.stage for outcome in scored))
    full = max((outcome.epochs for outcome in scored), default=0)
    # Categorical: each value of a choice is drawn at its index.
    positions = {value: index for index, value in enumerate(map(str, parameter.values))}
    for stage in stages:
        trials = [outcome for outcome in scored if outcome.stage == stage]
        at = [
            positions[str(outcome.values[key])] if parameter.kind == "choice" else outcome.values[key]
            for outcome in trials
        ]
        color = f"C{stages.index(stage)}"
        filled = [color if outcome.epochs == full else "none" for outcome in trials]
        plot.scatter(at, [outcome.score for outcome in trials], c=filled, edgecolors=color, label=stage)
        if scored[0] in trials:
            plot.plot(at[trials.index(scored[0])], scored[0].score, "*", color="black", markersize=12, zorder=3)
    if parameter.kind == "choice":
        plot.set_xticks(list(positions.values()), list(positions))
    elif parameter.kind == "loguniform":
        _log_axis(plot, [outcome.values[key] for outcome in scored])
    else:
        plot.locator_params(axis="x", nbins=6)
    plot.set(xlabel=key, ylabel="score")
