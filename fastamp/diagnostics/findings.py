"""Findings of the check of a dataset."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

Row = tuple[str, int]
"""Split and row of an image."""


@dataclass(frozen=True)
class Finding:
    """Problem found in a dataset.

    Attributes:
        fault: short description of the problem.
        examples: the occurrences, one line each; occurrences of the same problem may share a line.
        count: number of occurrences.
        is_error: True if the problem makes results wrong, False for a warning.
        fix: what to change.
        excluded: ``(split, row)`` of the images that ``write_clean`` excludes.
    """

    fault: str
    examples: list[str]
    count: int
    is_error: bool = True
    fix: str = ""
    excluded: frozenset[tuple[str, int]] = frozenset()


@dataclass
class Report:
    """Result of ``check_dataset``.

    Attributes:
        rows: ``(split, images, identities, cameras)`` for each split that is not empty; the last three are counts.
        columns: ``(name, type, number of distinct values, number of missing values, examples)`` for each column of the
            images of all splits.
        findings: problems, errors first.
        sizes: (width, height) -> number of images.
        notes: how a random split was drawn, and how near-duplicates were found.
    """

    rows: list[tuple[str, int, int, int]]
    findings: list[Finding] = field(default_factory=list)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    columns: list[tuple[str, str, int, int, str]] = field(default_factory=list)

    @property
    def has_errors(self) -> bool:
        """True if at least one finding is an error."""
        return any(finding.is_error for finding in self.findings)


def findings(
    fault: str, examples: list[str], *, is_error: bool = True, fix: str = "", excluded: Iterable[Row] = ()
) -> Iterable[Finding]:
    """Yield a finding if there are examples; see ``Finding``."""
    if examples:
        yield Finding(fault, examples, len(examples), is_error, fix, frozenset(excluded))
