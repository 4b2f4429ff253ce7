"""What a run is shown as: pictures, and a report in one file."""

from fastamp.report.history import History, read_history
from fastamp.report.page import write_report
from fastamp.report.run import EvaluatedSet, Run, evaluated_set, items_of

__all__ = ["EvaluatedSet", "History", "Run", "evaluated_set", "items_of", "read_history", "write_report"]
