"""Report of a training."""

from collections.abc import Callable

from fastamp.engine.hooks.base import HookBase
from fastamp.engine.reporting import write_training_report
from fastamp.report import Run


class ReportHook(HookBase):
    """Write ``report.html`` after each evaluation. Register after the hooks that save checkpoints.

    Args:
        run (Callable): returns the last evaluated run, or None if its report has been written.
    """

    saves = True

    def __init__(self, run: Callable[[], Run | None]) -> None:
        self.run = run

    def after_epoch(self) -> None:
        run = self.run()
        if run is not None:
            write_training_report(run)
