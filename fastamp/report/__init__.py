"""Figures and the self-contained HTML report of a run."""

from fastamp.report.history import History, read_history
from fastamp.report.page import write_report
from fastamp.report.run import ClusterSheets, EvaluatedSet, Run, evaluated_set, items_of, source_of
from fastamp.report.worst_queries import rank_list_image

__all__ = [
    "ClusterSheets",
    "EvaluatedSet",
    "History",
    "Run",
    "evaluated_set",
    "items_of",
    "rank_list_image",
    "read_history",
    "source_of",
    "write_report",
]
