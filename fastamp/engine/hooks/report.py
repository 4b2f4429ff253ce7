"""Hook that writes the training report."""

from collections.abc import Callable

from fastamp.engine.hooks.base import HookBase
from fastamp.engine.reporting import write_training_report
from fastamp.report import Run


class ReportHook(HookBase):
    """Write ``report.html`` after each evaluation. Register this hook after the hooks that save checkpoints.

    Args:
        run (Callable): returns the data of the last evaluation, or None if its report has already been written.
    """

    saves = True

    def __init__(self, run: Callable[[], Run | None]) -> None:
        self.run = run

    def after_epoch(self) -> None:
        run = self.run()
        if run is not None:
            write_training_report(run)
