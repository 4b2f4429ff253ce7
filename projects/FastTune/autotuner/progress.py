"""Progress of a search: a log line per finished trial, periodic tables, and intermediate results."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray.tune
from tabulate import tabulate

from autotuner.results import short, short_keys, write_results
from autotuner.search import Outcome, best_first, outcome_of, prune_losers, read_outcomes, winner_of
from autotuner.settings import Search
from autotuner.trial import run_dir
from autotuner.tune_hooks import EPOCH
from fastamp.utils.errors import UserError
from fastamp.utils.plural import plural
from fastamp.utils.progress import format_duration

logger = logging.getLogger("fastamp.fasttune")
_SECONDS_BETWEEN_TABLES = 60.0
_ENDED = ("TERMINATED", "ERROR")


class Progress(ray.tune.Callback):
    """Log a line per finished trial and, at most once per minute, a table of the trials; update the result files.

    If ``search.fraction`` is positive, each trial that ends updates ``trials.csv`` and ``best_config.yaml`` in
    OUTPUT_DIR. The checkpoints of finished trials and all best weights except those of the best trial are then deleted,
    but not in population based training, where other trials may continue from them.

    Args:
        search: settings of the search.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        # Completed fraction of each trial; a trial that ended early counts as complete.
        self.done: dict[str, float] = {}
        self.ended: dict[str, Outcome] = {}

    def setup(self, **info: Any) -> None:
        search = self.search
        self.began = self.shown = time.perf_counter()
        self.done_before = sum(self.done.values())
        logger.info(
            "%s: %s of %s; keys: %s",
            search.title,
            plural(search.trials, "trial"),
            plural(search.rounds.epochs, "epoch"),
            ", ".join(search.space.parameters),
        )

    def on_trial_result(self, iteration: int, trials: Sequence[Any], trial: Any, result: dict, **info: Any) -> None:
        self.done[trial.trial_id] = min(1.0, result[EPOCH] / self.search.rounds.epochs)
        if time.perf_counter() - self.shown > _SECONDS_BETWEEN_TABLES:
            self.shown = time.perf_counter()
            logger.info("%s\n%s", self._summary(trials), self._table(trials))

    def on_trial_complete(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        self._end(trials, trial, None)

    def on_trial_error(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        # Ray writes error.txt after this callback.
        self._end(trials, trial, RuntimeError(f"trial crashed; see {trial.path}/error.txt"))

    def get_state(self) -> dict[str, Any]:
        return {"done": self.done, "ended": self.ended}

    def set_state(self, state: dict[str, Any]) -> None:
        self.done, self.ended = state["done"], state["ended"]

    def _end(self, trials: Sequence[Any], trial: Any, error: Exception | None) -> None:
        self.done[trial.trial_id] = 1.0
        outcome = self._outcome(trial, error)
        self.ended[trial.trial_id] = outcome
        text = f"epoch {outcome.epochs} of {self.search.rounds.epochs}"
        if outcome.history:
            text += f", last score {outcome.history[-1][1]:.2f}"
        if outcome.score is not None:
            text += f", best score {outcome.score:.2f}"
        if outcome.failure:
            text += f", failed: {outcome.failure}"
        # Ray updates the trial's status after this callback.
        ended = sum(other.status in _ENDED or other is trial for other in trials)
        logger.info(
            "trial %d of %d (%s): %s; %s", ended, self.search.trials, trial.trial_id, text, self._summary(trials)
        )
        if self.search.fraction:
            self._write(Path(trial.path).parent)

    def _write(self, search_dir: Path) -> None:
        """Write intermediate results and delete the files that no trial needs; see ``Progress``."""
        folder = search_dir.parent
        # Outcomes from before a resume have the search folder's earlier path.
        outcomes = best_first(
            replace(outcome, folder=run_dir(search_dir / outcome.name)) for outcome in self.ended.values()
        )
        if not self.search.is_population:  # other trials may continue from these checkpoints
            prune_losers(outcomes, self.search)
        if self.search.title == "refine":  # the trials of the first stage are part of the results
            outcomes = best_first([*outcomes, *read_outcomes(folder / "search")])
        try:
            write_results(outcomes, self.search.cfg, self.search.space, folder)
        except UserError as error:
            logger.warning("%s", error)

    def _outcome(self, trial: Any, error: Exception | None = None) -> Outcome:
        return outcome_of(Path(trial.path), trial.config, error, self.search)

    def _outcomes(self, trials: Sequence[Any]) -> dict[str, Outcome]:
        """Return the current outcome of each trial that has reported or failed: trial ID -> outcome."""
        begun = {
            candidate.trial_id: self.ended.get(candidate.trial_id) or self._outcome(candidate)
            for candidate in trials
            if candidate.path
        }
        return {name: outcome for name, outcome in begun.items() if outcome.history or outcome.failure}

    def _summary(self, trials: Sequence[Any]) -> str:
        best = winner_of(best_first(self._outcomes(trials).values()))
        parts = [f"best so far {best.score:.2f} ({best.name.removeprefix('trial_')})" if best else "no score yet"]
        done = sum(self.done.values())
        if done > self.done_before:
            left = max(0.0, self.search.trials - done)
            seconds = (time.perf_counter() - self.began) / (done - self.done_before) * left
            parts.append(f"about {format_duration(seconds)} left")
        return f"{self.search.title}: {'; '.join(parts)}"

    def _table(self, trials: Sequence[Any]) -> str:
        space, outcomes = self.search.space, self._outcomes(trials)
        rows = []
        for trial in trials:
            outcome, values = outcomes.get(trial.trial_id), space.decoded(trial.config)
            score = "" if outcome is None or outcome.score is None else f"{outcome.score:.2f}"
            rows.append(
                [trial.trial_id, trial.status.lower(), outcome.epochs if outcome else 0, score]
                + [short(values.get(key, "")) for key in space.parameters]
            )
        headers = ["trial", "status", "epoch", "best score", *short_keys(space)]
        return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)
