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
        title: of the search.
        trials: how many there will be.
        epochs: of a whole trial.
        space: what is drawn.
    """

    def __init__(self, title: str, *, trials: int, epochs: int, space: Space) -> None:
        self.title, self.total, self.epochs, self.space = title, trials, epochs, space
        self.best: dict[str, float] = {}
        # Share of a whole trial that each has done; those that ended before their time are whole.
        self.done: dict[str, float] = {}

    def setup(self, **info: Any) -> None:
        self.began = self.shown = time.perf_counter()
        self.done_before = sum(self.done.values())
        _say(f"{self.title}: {self.total} trials of {self.epochs} epochs, of {', '.join(self.space.parameters)}")

    def on_trial_result(self, iteration: int, trials: Sequence[Any], trial: Any, result: dict, **info: Any) -> None:
        self.done[trial.trial_id] = min(1.0, result[EPOCH] / self.epochs)
        if "failure" not in result:
            self.best[trial.trial_id] = max(result[SCORE], self.best.get(trial.trial_id, 0.0))
        if time.perf_counter() - self.shown > _SECONDS_BETWEEN_TABLES:
            self.shown = time.perf_counter()
            _say(f"{self._summary()}\n{self._table(trials)}")

    def on_trial_complete(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        result = trial.last_result or {}
        failure = result.get("failure")
        text = f"epoch {result.get(EPOCH, 0)} of {self.epochs}, last score {result.get(SCORE, float('nan')):.2f}"
        self._end(trials, trial, f"failed: {failure}" if failure else text)

    def on_trial_error(self, iteration: int, trials: Sequence[Any], trial: Any, **info: Any) -> None:
        self._end(trials, trial, f"crashed; its error stands in {trial.path}/error.txt")

    def get_state(self) -> dict[str, Any]:
        return {"best": self.best, "done": self.done}

    def set_state(self, state: dict[str, Any]) -> None:
        self.best, self.done = state["best"], state["done"]

    def _end(self, trials: Sequence[Any], trial: Any, text: str) -> None:
        self.done[trial.trial_id] = 1.0
        # Ray marks a trial as ended after it has told of it.
        ended = sum(each.status in _ENDED or each is trial for each in trials)
        _say(f"trial {ended} of {self.total} ({trial.trial_id}): {text}; {self._summary()}")

    def _summary(self) -> str:
        done = sum(self.done.values())
        parts = ["no score yet"]
        if self.best:
            name = max(self.best, key=self.best.get)
            parts = [f"best so far {self.best[name]:.2f} ({name})"]
        if done > self.done_before:
            seconds = (time.perf_counter() - self.began) / (done - self.done_before) * max(0.0, self.total - done)
            parts.append(f"about {format_duration(seconds)} left")
        return f"{self.title}: {'; '.join(parts)}"

    def _table(self, trials: Sequence[Any]) -> str:
        rows = []
        for each in trials:
            score, values = self.best.get(each.trial_id), self.space.decoded(each.config)
            epoch = round(self.done.get(each.trial_id, 0.0) * self.epochs)
            if each.status in _ENDED:
                epoch = (each.last_result or {}).get(EPOCH, 0)
            rows.append(
                [each.trial_id, each.status.lower(), epoch, "" if score is None else f"{score:.2f}"]
                + [short(values.get(key, "")) for key in self.space.parameters]
            )
        headers = ["trial", "status", "epoch", "best score", *short_keys(self.space)]
        return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
