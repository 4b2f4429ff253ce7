"""Stopwatch."""

import time


class Timer:
    """Stopwatch that can be paused; it starts when it is created."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Restart from 0."""
        self._start, self._excluded = time.perf_counter(), 0.0
        self._paused: float | None = None

    def pause(self) -> None:
        """Stop the watch.

        Raises:
            ValueError: if it is paused already.
        """
        if self._paused is not None:
            raise ValueError("the timer is paused already")
        self._paused = time.perf_counter()

    def is_paused(self) -> bool:
        """Return True if the watch is paused."""
        return self._paused is not None

    def resume(self) -> None:
        """Continue after ``pause``.

        Raises:
            ValueError: if it is not paused.
        """
        if self._paused is None:
            raise ValueError("the timer is not paused")
        self._excluded += time.perf_counter() - self._paused
        self._paused = None

    def seconds(self) -> float:
        """Return the time since the start, in seconds, without pauses."""
        end = time.perf_counter() if self._paused is None else self._paused
        return end - self._start - self._excluded
