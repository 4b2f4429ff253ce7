"""Count the operations that make the host wait for a CUDA device."""

import contextlib
import warnings
from collections.abc import Iterator

import torch


class DeviceWaits:
    """Messages of the operations that made the host wait."""

    def __init__(self, caught: list[warnings.WarningMessage]) -> None:
        self._caught = caught

    @property
    def messages(self) -> list[str]:
        # Not the warning that the debug mode is a prototype, which is raised once per process.
        return [text for text in map(str, (w.message for w in self._caught)) if "called a synchronizing" in text]

    @property
    def count(self) -> int:
        return len(self.messages)


@contextlib.contextmanager
def count_device_waits() -> Iterator[DeviceWaits]:
    """Record the operations inside the context that make the host wait for the current CUDA device."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield DeviceWaits(caught)
        finally:
            torch.cuda.set_sync_debug_mode("default")
