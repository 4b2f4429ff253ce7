"""Base class and registry of experiment trackers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastamp.utils.registry import Registry

LOGGER_REGISTRY = Registry("LOGGERS")
"""Name in ``LOGGERS`` -> a ``Tracker``, or a function ``build(cfg, start_iter=0)`` that returns a writer.

A writer has the methods ``write(iteration, metrics)`` and ``close()``.
"""

FOLDER = "tracking"
"""Folder in OUTPUT_DIR for the run IDs, the log files and the local data of the trackers."""


@dataclass(frozen=True)
class TrackedRun:
    """Run as it is shown by an experiment tracker.

    Attributes:
        project: project or experiment that contains the run.
        name: name of the run.
        group: group of related runs, e.g. of the seeds of one config; "" for none.
        tags: tags of the run.
        config: dotted config key -> value.
        folder: OUTPUT_DIR, as an absolute path.
        run_id: ID of the run to continue; "" to create a run.
    """

    project: str
    name: str
    group: str
    tags: list[str]
    config: dict[str, Any]
    folder: str
    run_id: str = ""

    @property
    def local_folder(self) -> Path:
        """Folder for local data of the tracker."""
        return Path(self.folder) / FOLDER


class Tracker:
    """Client of an experiment tracking service. Subclasses are registered in ``LOGGER_REGISTRY``.

    A tracker is created in a separate process without PyTorch, which imports only the module of the class. Its methods
    may raise any exception, or not return: the training continues, and one warning is logged. The module must not
    import the package of the service at the top level.

    Attributes:
        name: name of the service in messages.
        package: package of the service, imported by ``start``.
        install: command that installs the package.
        fix: advice if the run cannot be started.
    """

    name = ""
    package = ""
    install = ""
    fix = "see the log file"

    def start(self, run: TrackedRun) -> tuple[str, str]:
        """Create or continue a run.

        Returns:
            The ID of the run, to continue it after a resume, and its address or location.
        """
        raise NotImplementedError

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        """Log one line of ``metrics.json``. After a resume, an iteration may be logged again.

        Args:
            iteration: iteration, from 0.
            metrics: name -> finite number.
        """
        raise NotImplementedError

    def log_file(self, path: Path) -> None:
        """Upload a file."""
        raise NotImplementedError

    def finish(self, status: str) -> None:
        """End the run.

        Args:
            status: ``"finished"``, ``"failed"`` or ``"interrupted"``: stopped or killed by a signal.
        """
        raise NotImplementedError
