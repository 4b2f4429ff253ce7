"""Add a column ``split`` to a table of photographs of animals, and check it for leaks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastamp.data.datasets.base import ImageItem
from fastamp.data.datasets.csv_table import DATABASE, open_table
from fastamp.data.datasets.identity_names import is_unknown_identity, log_excluded, merge_equal_names
from fastamp.data.image_summary import read_fingerprints
from fastamp.data.near_duplicates import group_near_duplicates
from fastamp.data.wildlife_splits import (
    SEED,
    LinearCongruentialGenerator,
    Split,
    closed_split,
    disjoint_split,
    draw_identities,
    encounter_split,
    keep_together,
    open_split,
    parse_day,
    rows_by_identity,
    time_cutoff_split,
    time_proportion_split,
)
from fastamp.utils.errors import ConfigError, DataError, did_you_mean, writing
from fastamp.utils.files import expand, write_csv

METHODS = ("closed", "open", "disjoint", "time", "year", "encounter")
VALIDATION = "validation"
_MAX_LISTED = 5


@dataclass(frozen=True)
class SplitOptions:
    """Settings of a split.

    Attributes:
        method: one of ``METHODS``.
        identity: columns whose values together are the identity.
        train: fraction for training, in 0..1: of the images of an identity (closed), of all images (open), of the days
            (time) or of the encounters (encounter) of an identity. Not used by disjoint and year.
        unknown: fraction of all images whose identities are not in the training set; not used by closed and year.
            Default: 0.1 for open and disjoint, else 0.
        year: year: first year of the test set.
        encounter: column of the encounters.
        date: column of the dates.
        group: column of groups of images of an identity that stay in one split; "" for none.
        near_duplicates: keep the near-duplicates of an identity in one split, which reads all images.
        near_duplicate_bits: see ``group_near_duplicates``.
        validation: fraction of the identities that are held out from training to choose a threshold for *new*.
        seed: seed of the split.
        unlabeled: further name of unknown identities, whose images are excluded, see ``identity_names``.
    """

    method: str
    identity: tuple[str, ...] = ("pid",)
    train: float = 0.8
    unknown: float | None = None
    year: int = 0
    encounter: str = "encounter"
    date: str = "date"
    group: str = ""
    near_duplicates: bool = False
    near_duplicate_bits: int | None = None
    validation: float = 0.0
    seed: int = SEED
    unlabeled: str = "unknown"


@dataclass
class SplitReport:
    """Summary of a split.

    Attributes:
        rows: ``(split, images, identities)`` of each split; the images for validation are counted separately.
        notes: what was excluded or moved.
        leaks: findings of the leak check: text -> True if images that are almost the same are on both sides, None if
            this is possible.
    """

    rows: list[tuple[str, int, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    leaks: dict[str, bool | None] = field(default_factory=dict)


class Table:
    """Lines of a CSV file.

    Args:
        file: CSV file.

    Attributes:
        names: lowercase column names.
        lines: values of each line that is not empty, without surrounding spaces.
        numbers: line numbers.

    Raises:
        DataError: if the file cannot be read, is empty, or a line has another number of values than the header.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines: list[list[str]] = []
        self.numbers: list[int] = []
        with open_table(file) as (reader, self.names):
            for line in reader:
                values = [value.strip() for value in line]
                if not any(values):
                    continue
                if len(values) != len(self.names):
                    raise DataError(
                        f"{file}, line {reader.line_num}: expected {len(self.names)} values, got {len(values)}.\n"
                        "  fix: correct the line"
                    )
                self.lines.append(values)
                self.numbers.append(reader.line_num)
        if not self.lines:
            raise DataError(f"{file}: no images; expected one image per line below the header.\n  fix: add images")

    def column(self, name: str, needed_by: str) -> list[str]:
        """Return the values of a column.

        Raises:
            DataError: if there is no such column; the message lists the available ones.
        """
        if name.lower() not in self.names:
            raise DataError(
                f"{self.file} has no column {name!r}, which {needed_by} needs; available columns: "
                f"{', '.join(self.names)}.{did_you_mean(name, self.names)}\n"
                f"  fix: choose one of these columns with {needed_by}, or add the column"
            )
        number = self.names.index(name.lower())
        return [line[number] for line in self.lines]

    def keep(self, rows: Sequence[int]) -> None:
        """Remove all other lines."""
        self.lines, self.numbers = [self.lines[row] for row in rows], [self.numbers[row] for row in rows]


def split_table(file: Path, out: Path, options: SplitOptions) -> SplitReport:
    """Read a CSV file, split its images, and write it with a column ``split``.

    Images that are not used, e.g. those without a date in a split by time, are not written. With ``validation``, a
    column ``validation`` is 1 for the images of the validation identities, which are query and gallery images.

    Args:
        file: table with the columns ``path`` and those that the options name. It has no column ``split``.
        out: CSV file to write; paths of images are written relative to its folder if they are relative.
        options: how to split.

    Returns:
        The numbers of images, and the leak check.

    Raises:
        DataError: if a column is missing or a date is invalid, or a split has no images.
        ConfigError: if an option is out of range, or ``out`` exists.
    """
    if out.exists():
        raise ConfigError(f"--out {out}: this file exists already.\n  fix: choose another name")
    table, report = Table(file), SplitReport()
    for name in ("split", VALIDATION):
        if name in table.names:
            raise DataError(f"{file} has a column {name!r} already.\n  fix: remove or rename the column")
    _exclude_unlabeled(table, options, report)
    identities = _identities(table, options)
    paths = table.column("path", "the split")
    split = _split(table, identities, options)
    groups = _groups(table, identities, paths, options, report)
    for by, values in groups.items():
        before = len(split.test)
        split = keep_together(split, identities, values)
        moved = before - len(split.test)
        report.notes += [f"{moved} test images moved to training to keep {by} together"] * bool(moved)
    roles = _roles(identities, split, groups, options)
    if ("query", False) not in roles.values():
        raise DataError(
            f"{file}: the split by {options.method} has no query images: no identity has images for both sides.\n"
            "  fix: choose another method, or add images"
        )
    unused = len(identities) - len(roles)
    report.notes += [f"{unused} images are not used"] * bool(unused)
    _summarize(identities, roles, report)
    _check_leaks(table, identities, paths, roles, groups, options, report)
    _write(table, roles, out, with_validation=bool(options.validation))
    return report


def _exclude_unlabeled(table: Table, options: SplitOptions, report: SplitReport) -> None:
    names = table.column(options.identity[0], "--identity")
    empty = [table.numbers[row] for row, name in enumerate(names) if not name]
    if empty:
        raise DataError(
            f"{table.file}, line {empty[0]}: no value for {options.identity[0]} ({len(empty)} such lines).\n"
            f"  fix: add the identity, or write {options.unlabeled or -1}, whose images are excluded"
        )
    excluded = [name == options.unlabeled or is_unknown_identity(name) for name in names]
    kept = [row for row, is_excluded in enumerate(excluded) if not is_excluded]
    note = log_excluded(Counter(name for name, out in zip(names, excluded, strict=True) if out), str(table.file))
    report.notes += [note] * bool(note)
    if not kept:
        raise DataError(f"{table.file}: all images are of unknown identities ({note}).\n  fix: add identities")
    table.keep(kept)


def _identities(table: Table, options: SplitOptions) -> list[str]:
    columns = [table.column(name, "--identity") for name in options.identity]
    names = ["/".join(values) for values in zip(*columns, strict=True)]
    merged = merge_equal_names(dict.fromkeys(names), str(table.file))
    return [merged[name] for name in names]


def _split(table: Table, identities: Sequence[str], options: SplitOptions) -> Split:
    seed, unknown = options.seed, options.unknown
    if options.method == "closed":
        return closed_split(identities, options.train, seed=seed)
    if options.method == "open":
        return open_split(identities, options.train, test_fraction=0.1 if unknown is None else unknown, seed=seed)
    if options.method == "disjoint":
        return disjoint_split(identities, test_fraction=0.1 if unknown is None else unknown, seed=seed)
    if options.method == "year":
        return time_cutoff_split(identities, _days(table, options), options.year)
    if options.method == "time":
        days = _days(table, options)
        split = time_proportion_split(identities, days, options.train)
        usable = [row for row, day in enumerate(days) if day is not None]
    else:
        encounters = [value or None for value in table.column(options.encounter, "--encounter")]
        split = encounter_split(identities, encounters, options.train, seed=seed)
        usable = list(range(len(identities)))
    drawn = draw_identities(identities, fraction=unknown, seed=seed) if unknown else set()
    known = [[row for row in side if identities[row] not in drawn] for side in split]
    return Split(known[0], [*known[1], *(row for row in usable if identities[row] in drawn)])


def _days(table: Table, options: SplitOptions) -> list[Any]:
    days, texts = [], table.column(options.date, "--date")
    for number, text in zip(table.numbers, texts, strict=True):
        try:
            days.append(parse_day(text))
        except DataError as error:
            raise DataError(f"{table.file}, line {number}: {error}") from error
    if not any(days):
        raise DataError(f"{table.file}: the column {options.date} has no dates.\n  fix: choose another method")
    return days


def _groups(
    table: Table, identities: Sequence[str], paths: Sequence[str], options: SplitOptions, report: SplitReport
) -> dict[str, Sequence[Any]]:
    """Return the groups to keep together: description -> group of each image."""
    groups: dict[str, Sequence[Any]] = {}
    if options.group:
        groups[f"the images with the same {options.group}"] = [
            value or None for value in table.column(options.group, "--group")
        ]
    if options.near_duplicates:
        items = [ImageItem(str(table.file.parent / expand(path)), "", 0) for path in paths]
        group_of, note = group_near_duplicates(read_fingerprints(items), identities, bits=options.near_duplicate_bits)
        groups["near-duplicates"] = group_of
        report.notes += [note] * bool(note)
    return groups


def _roles(
    identities: Sequence[str], split: Split, groups: dict[str, Sequence[Any]], options: SplitOptions
) -> dict[int, tuple[str, bool]]:
    """Return the split and whether it is for validation, by row."""
    validation = _validation_identities(identities, split, options)
    if options.method == "disjoint":
        roles = dict.fromkeys(split.train, ("train", False))
        tested = [*split.test, *(row for row in split.train if identities[row] in validation)]
        names = [identities[row] for row in tested]
        parts = closed_split(names, 0.5, seed=options.seed)
        for values in groups.values():
            parts = keep_together(parts, names, [values[row] for row in tested])
        for role, numbers in zip(("gallery", "query"), parts, strict=True):
            roles |= {tested[number]: (role, names[number] in validation) for number in numbers}
        return roles
    return {
        row: (("gallery" if identities[row] in validation else DATABASE), identities[row] in validation)
        for row in split.train
    } | {row: ("query", identities[row] in validation) for row in split.test}


def _validation_identities(identities: Sequence[str], split: Split, options: SplitOptions) -> set[str]:
    """Draw the identities for validation among those with images for both query and gallery."""
    if not options.validation:
        return set()
    training = Counter(identities[row] for row in split.train)
    if options.method == "disjoint":
        candidates = [name for name in rows_by_identity(identities) if training[name] > 1]
    else:
        tested = {identities[row] for row in split.test}
        candidates = [name for name in rows_by_identity(identities) if training[name] and name in tested]
    count = round(options.validation * len(candidates))
    if not 0 < options.validation < 1 or not 2 <= count <= len(candidates) - 2:
        raise ConfigError(
            f"--validation {options.validation:g} gives {count} of {len(candidates)} identities that have both query "
            "and gallery images; expected at least 2 for validation and 2 others.\n  fix: change --validation"
        )
    order = LinearCongruentialGenerator(options.seed).permutation(len(candidates))
    return {candidates[number] for number in order[:count]}


def _summarize(identities: Sequence[str], roles: dict[int, tuple[str, bool]], report: SplitReport) -> None:
    for validation in (False, True):
        for role in ("train", DATABASE, "gallery", "query"):
            rows = [row for row, roles_of_row in roles.items() if roles_of_row == (role, validation)]
            if rows:
                name = f"{role} ({VALIDATION})" if validation else role
                report.rows.append((name, len(rows), len({identities[row] for row in rows})))
    known = {identities[row] for row, (role, _) in roles.items() if role in (DATABASE, "gallery")}
    queries = [row for row, (role, validation) in roles.items() if role == "query" and not validation]
    unknown = [row for row in queries if identities[row] not in known]
    if unknown:
        report.notes.append(
            f"{len(unknown)} of {len(queries)} query images are of {len({identities[row] for row in unknown})} unknown "
            "identities, which are not in the database"
        )


def _check_leaks(
    table: Table,
    identities: Sequence[str],
    paths: Sequence[str],
    roles: dict[int, tuple[str, bool]],
    groups: dict[str, Sequence[Any]],
    options: SplitOptions,
    report: SplitReport,
) -> None:
    """Compare the query images with those of the same identity that are for training or in the gallery."""

    def check(what: str, values: Sequence[Any], *, is_leak: bool | None) -> None:
        sides: list[set[tuple[str, Any]]] = [set(), set()]
        for row, (role, _) in roles.items():
            if values[row] not in (None, ""):
                sides[role == "query"].add((identities[row], values[row]))
        shared = sorted(sides[0] & sides[1], key=str)
        if shared:
            examples = ", ".join(str(name) for name in dict.fromkeys(name for name, _ in shared[:_MAX_LISTED]))
            report.leaks[f"{what} on both sides: {len(shared)} (of {examples}{', ...' * (len(shared) > 5)})"] = is_leak
        else:
            report.leaks[f"{what} on both sides: 0"] = False

    check("image files", paths, is_leak=True)
    if options.encounter.lower() in table.names:
        check("encounters", table.column(options.encounter, "--encounter"), is_leak=True)
    if options.date.lower() in table.names:
        check("days of an identity", _days(table, options), is_leak=None)
    for by, values in groups.items():
        check(by.removeprefix("the images with the same "), values, is_leak=True)


def _write(table: Table, roles: dict[int, tuple[str, bool]], out: Path, *, with_validation: bool) -> None:
    number = table.names.index("path")
    rows = [[*table.names, "split", *[VALIDATION] * with_validation]]
    for row in sorted(roles):
        role, validation = roles[row]
        values = [*table.lines[row], role, *[str(int(validation))] * with_validation]
        values[number] = _relative(values[number], table.file, out)
        rows.append(values)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_csv(out, rows)


def _relative(path: str, file: Path, out: Path) -> str:
    """Return a path of an image for a table in the folder of ``out``."""
    if file.absolute().parent == out.absolute().parent:
        return path
    image = (file.parent / expand(path)).absolute()
    folder = out.absolute().parent
    return str(image.relative_to(folder)) if image.is_relative_to(folder) else str(image)
