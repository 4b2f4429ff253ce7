"""What a search prints as it goes: trials under way, the best so far, the time left."""

import sys
import time
from collections.abc import Sequence
from typing import Any

import ray.tune
from tabulate import tabulate

from autotuner.results import short, short_keys
from autotuner.space import Space
from autotuner.tune_hooks import EPOCH, SCORE
from fastamp.utils.progress import format_duration

_SECONDS_BETWEEN_TABLES = 60.0
_ENDED = ("TERMINATED", "ERROR")


class Progress(ray.tune.Callback):
    """Print a line for each trial that ends, and once a minute where something has changed a table of all.

    Args:
        title: of the stage.
        trials: how many there will be.
        epochs: of a whole trial.
        space: what is drawn.
    """

    def __init__(self, title: str, *, trials: int, epochs: int, space: Space) -> None:
        self.title, self.total, self.epochs, self.space = title, trials, epochs, space
        self.best: dict[str, float] = {}

    def setup(self, **info: Any) -> None:
        self.began = self.shown = time.perf_counter()
        self.done_before: float | None = None

    def on_trial_result(self, iteration: int, trials: Sequence[Any], trial: Any, result: dict, **info: Any) -> None:
        if self.done_before is None:
            self.done_before = self._done(trials, ended_only=True)
        if "failure" not in result:
            self.best[trial.trial_id] = max(result[SCORE], self.best.get(trial.trial_id, 0.0))
        if time.perf_counter() - self.shown > _SECONDS_BETWEEN_TABLES:
            self.shown = time.perf_counter()
            _say(f"{self._summary(trials)}\n{self._table(trials)}")

    def on_trial_complete(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        result = trial.last_result or {}
        failure = result.get("failure")
        epoch = f"epoch {result.get(EPOCH, 0)} of {self.epochs}, score {result.get(SCORE, float('nan')):.2f}"
        self._end(trials, trial, f"failed: {failure}" if failure else epoch)

    def on_trial_error(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        self._end(trials, trial, f"crashed; its error stands in {trial.path}/error.txt")

    def get_state(self) -> dict[str, Any]:
        return {"best": self.best}

    def set_state(self, state: dict[str, Any]) -> None:
        self.best = state["best"]

    def _end(self, trials: Sequence[Any], trial: Any, text: str) -> None:
        # The trial that ends is told of before Ray marks it as ended.
        ended = sum(each.status in _ENDED or each is trial for each in trials)
        _say(f"trial {ended} of {self.total} ({trial.trial_id}): {text}; {self._summary(trials, trial)}")

    def _done(self, trials: Sequence[Any], ending: Any = None, *, ended_only: bool = False) -> float:
        """Return the work done, in whole trials."""
        shares = [
            1.0
            if each.status in _ENDED or each is ending
            else 0.0 if ended_only
            else min(1.0, (each.last_result or {}).get(EPOCH, 0) / self.epochs)
            for each in trials
        ]  # fmt: skip
        return sum(shares)

    def _summary(self, trials: Sequence[Any], ending: Any = None) -> str:
        done = self._done(trials, ending)
        fresh = done - (self.done_before or 0.0)
        left = ""
        if fresh > 0:
            seconds = (time.perf_counter() - self.began) / fresh * max(0.0, self.total - done)
            left = f"; about {format_duration(seconds)} left"
        best = ""
        if self.best:
            name = max(self.best, key=self.best.get)
            best = f"best so far {self.best[name]:.2f} ({name})"
        return f"{self.title}: {best or 'no score yet'}{left}"

    def _table(self, trials: Sequence[Any]) -> str:
        rows = []
        for each in trials:
            result, values = each.last_result or {}, self.space.decoded(each.config)
            score = self.best.get(each.trial_id)
            rows.append(
                [each.trial_id, each.status.lower(), result.get(EPOCH, 0), "" if score is None else f"{score:.2f}"]
                + [short(values.get(key, "")) for key in self.space.parameters]
            )
        headers = ["trial", "status", "epoch", "best score", *short_keys(self.space)]
        return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
