"""Check datasets for unreadable images, conflicting labels, duplicates across splits and queries without a match."""

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fastamp.data.columns import summarize_columns
from fastamp.data.datasets.base import ImageDataset, ImageItem, count_items
from fastamp.data.datasets.csv_table import SPLITS
from fastamp.data.datasets.custom import (
    CsvDataset,
    describe_invalid_lines,
    path_fix,
)
from fastamp.data.datasets.items import PackedItems
from fastamp.data.decode import BIT_DEPTH, MAX_PIXELS
from fastamp.data.image_summary import ImageSummary, inspect_image
from fastamp.data.jpeg_warnings import decoding_pool, read_all
from fastamp.data.near_duplicates import Fingerprint, NearestImages
from fastamp.data.training_images import LEAK_FIX, leaked_identities
from fastamp.diagnostics.findings import Finding, Report, Row, findings
from fastamp.diagnostics.label_check import JUNK, NO_IMAGE, find_matchless, find_test_problem
from fastamp.evaluation import Protocol
from fastamp.evaluation.identities import SAME_CAMERA
from fastamp.utils.plural import plural
from fastamp.utils.progress import track

logger = logging.getLogger(__name__)

# Pairs from which the threshold of near-duplicates is estimated.
_SAMPLED_PAIRS = 20_000
_AT_ONCE = 64


def check_dataset(
    dataset: ImageDataset,
    *,
    max_pixels: int = MAX_PIXELS,
    bit_depth: int = BIT_DEPTH,
    near_duplicate_bits: int | None = None,
    training_problems: Sequence[str] = (),
    has_config: bool = False,
    protocol: Protocol | None = None,
) -> Report:
    """Read every image in a dataset and check the labels and splits.

    Args:
        dataset: dataset to check.
        max_pixels: maximum width x height of an image; larger images are reported as unreadable. Default 100,000,000.
        bit_depth: see ``read_image``. Default 16.
        near_duplicate_bits: see ``NearestImages``.
        training_problems: result of ``find_training_problems``, to include in the report.
        has_config: whether the config of a run is known, so that what would stop it is an error. Default False: a note.
        protocol: evaluation protocol, whose rule defines which queries have a match. Default: that of Market-1501.

    Returns:
        Image counts, image sizes and findings.

    Raises:
        DataError: if the images of a split cannot be listed.
    """
    protocol = protocol or Protocol()
    splits = {split: items for split in SPLITS if (items := dataset.images_in(split))}
    rows = [(split, *count_items(items, dataset)) for split, items in splits.items()]
    packed = [PackedItems.of(items) for items in splits.values()]
    columns = summarize_columns(PackedItems.concat(packed)) if packed else []
    notes = [note for note in (dataset.split_note, dataset.excluded_note) if note]
    images = list({(item.path, item.box): item for items in splits.values() for item in items}.values())
    inspect = partial(inspect_image, max_pixels=max_pixels, bit_depth=bit_depth)
    inspected: list[ImageSummary] = []
    damaged: dict[str, str] = {}
    starts = range(0, len(images), _AT_ONCE)
    with decoding_pool() as pool:
        for start in track(starts, len(starts), "reading images"):
            block, warnings = read_all(pool, inspect, images[start : start + _AT_ONCE])
            inspected += block
            damaged |= {images[start + number].path: warning for number, warning in warnings.items()}
    summaries = {(item.path, item.box): summary for item, summary in zip(images, inspected, strict=True)}
    sizes = Counter(summary.size for summary in summaries.values() if not summary.fault)
    checked = _CheckedDataset(dataset, splits, summaries, protocol)
    found = [
        *_find_invalid_lines(dataset),
        *_find_unpublished_counts(dataset, rows),
        *_find_other_protocol(dataset, protocol),
        *checked.find_unreadable(),
        *checked.find_damaged(damaged),
        *checked.find_shared_identities(),
        *checked.find_unmatched_queries(),
        *checked.find_duplicates(near_duplicate_bits, notes),
        *checked.find_conflicting_labels(),
        *checked.find_rare_identities(),
        *checked.find_missing_splits(),
        *findings(
            "problems that would stop a run",
            [*training_problems, *find_test_problem(dataset, splits, protocol)],
            is_error=has_config,
        ),
    ]
    return Report(rows, sorted(found, key=lambda finding: not finding.is_error), sizes, notes, columns)


def _find_unpublished_counts(dataset: ImageDataset, rows: Sequence[tuple[str, int, int, int]]) -> Iterable[Finding]:
    """Find splits whose numbers of images or identities differ from the published ones."""
    different = []
    for split, images, identities, _ in rows:
        published = dataset.published_counts.get(split, (0, 0))
        if published[0] not in (0, images):
            different.append(f"{split}: {plural(images, 'image')}, {published[0]} published")
        if published[1] not in (0, identities):
            different.append(f"{split}: {plural(identities, 'identity', 'identities')}, {published[1]} published")
    yield from findings(
        "numbers of images or identities other than the published ones",
        different,
        is_error=False,
        fix=f"restore the original files of {dataset.title}; results on other images are not comparable",
    )


def _find_other_protocol(dataset: ImageDataset, protocol: Protocol) -> Iterable[Finding]:
    """Find a protocol under which no results of the dataset are published."""
    if dataset.protocols and protocol.rule.name not in dataset.protocols:
        yield from findings(
            "a protocol that differs from the published ones",
            [f"TEST.PROTOCOL is {protocol.rule.name}; published: {', '.join(dataset.protocols)}"],
            is_error=False,
            fix=f"set TEST.PROTOCOL to {dataset.protocols[0]}",
        )


def _find_invalid_lines(dataset: ImageDataset) -> Iterable[Finding]:
    if isinstance(dataset, CsvDataset) and dataset.invalid_lines:
        yield Finding(
            "invalid lines",
            describe_invalid_lines(dataset.file, dataset.invalid_lines),
            len(dataset.invalid_lines),
            fix="correct these lines; --write-clean OUT.csv excludes them",
        )


@dataclass
class _CheckedDataset:
    """Dataset whose images were read.

    Args:
        dataset: the dataset.
        splits: images of each split that is not empty.
        summaries: summary of each ``(path, box)``.
        protocol: see ``check_dataset``.
    """

    dataset: ImageDataset
    splits: dict[str, Sequence[ImageItem]]
    summaries: dict[tuple, ImageSummary]
    protocol: Protocol

    def rows(self, *splits: str) -> Iterator[tuple[Row, ImageItem, ImageSummary]]:
        """Yield ``((split, row), image, summary)`` for all images of these splits."""
        for split in splits or self.splits:
            for row, item in enumerate(self.splits.get(split, ())):
                yield (split, row), item, self.summaries[item.path, item.box]

    def label(self, row: Row, *, pid: bool = False) -> str:
        """Return the path of an image, with its line in the CSV file and, on request, its identity."""
        split, number = row
        item = self.splits[split][number]
        notes = [f"identity {self.dataset.identity(item.pid)}"] if pid else []
        notes += [f"line {self.dataset.line(split, number)}"] if isinstance(self.dataset, CsvDataset) else []
        return item.path + (f" ({', '.join(notes)})" if notes else "")

    def find_unreadable(self) -> Iterable[Finding]:
        """Find images that cannot be read."""
        bad = [(row, summary.fault) for row, _, summary in self.rows() if summary.fault]
        yield from findings(
            "unreadable images",
            list(dict.fromkeys(f"{self.label(row)}: {fault}" for row, fault in bad)),
            fix=f"{path_fix(self._item(row).path for row, _ in bad)}; --write-clean OUT.csv excludes the files",
            excluded=(row for row, _ in bad),
        )

    def find_damaged(self, damaged: Mapping[str, str]) -> Iterable[Finding]:
        """Report the JPEG files that are damaged in part, but are decoded: path -> warning."""
        files = {item.path: row for row, item, summary in self.rows() if not summary.fault and item.path in damaged}
        yield from findings(
            "images that are damaged in part",
            [f"{self.label(row)}: {damaged[path]}" for path, row in files.items()],
            is_error=False,
            fix="restore the files; --write-clean OUT.csv excludes them",
            excluded=(row for row, item, _ in self.rows() if item.path in files),
        )

    def find_shared_identities(self) -> Iterable[Finding]:
        """Find identities that are in both the training and the test images."""
        if self.protocol.rule.closed_set:
            return
        shared = leaked_identities(self.dataset)
        yield from findings(
            "identities in both training and test",
            sorted(shared),
            fix=LEAK_FIX,
            excluded=(row for row, item, _ in self.rows("train") if self.dataset.identity(item.pid) in shared),
        )

    def find_unmatched_queries(self) -> Iterable[Finding]:
        """Find queries without a match: without an image of their identity, or only with junk."""
        matchless = find_matchless(
            self.dataset, self.splits.get("query", ()), self.splits.get("gallery", ()), self.protocol
        )
        unmatched, junk = (
            [("query", row) for row, query_fault in enumerate(matchless) if query_fault == fault]
            for fault in (NO_IMAGE, JUNK)
        )
        rule = self.protocol.rule
        open_set = rule.open_set
        yield from findings(
            "queries without a gallery image of their identity",
            [self.label(row, pid=True) for row in unmatched],
            is_error=not open_set,
            fix="" if open_set else "add gallery images of these identities, or remove the queries",
            excluded=() if open_set else unmatched,
        )
        yield from findings(
            "queries whose only matches are from the same camera"
            if rule.junk is SAME_CAMERA
            else f"queries whose only matches are junk of TEST.PROTOCOL={rule.name}",
            [self.label(row, pid=True) for row in junk],
            fix="add gallery images of other cameras; if cameras do not matter, set TEST.PROTOCOL to no_camera, or "
            "remove the column camid"
            if rule.junk is SAME_CAMERA
            else "add gallery images of these identities that the protocol does not exclude, or remove the queries",
            excluded=junk,
        )

    def find_duplicates(self, near_duplicate_bits: int | None, notes: list[str]) -> Iterable[Finding]:
        """Find exact copies and near-duplicates that are in different splits; describe similar images in ``notes``."""
        for number, first in enumerate(SPLITS):
            for second in SPLITS[number + 1 :]:
                first_rows = [row for row, _, summary in self.rows(first) if not summary.fault]
                second_rows = [row for row, _, summary in self.rows(second) if not summary.fault]
                if not first_rows or not second_rows:
                    continue
                has_database = isinstance(self.dataset, CsvDataset) and self.dataset.database_lines
                if (first, second) == ("train", "gallery") and has_database:
                    continue
                by_digest = {self._summary(row).digest: row for row in first_rows}
                same = [
                    (by_digest[digest], row)
                    for row in second_rows
                    if (digest := self._summary(row).digest) in by_digest
                    and not self._is_same_tracklet(by_digest[digest], row)
                ]
                digests = {self._summary(row).digest for _, row in same}
                yield from findings(
                    f"images in both {first} and {second}",
                    [f"{self.label(one, pid=True)} = {self.label(other, pid=True)}" for one, other in same],
                    fix="remove the repetitions, or correct the identities"
                    if self.dataset.split_note
                    else "list each image in one split",
                    excluded=(
                        [row for row in first_rows if self._summary(row).digest in digests]
                        if first == "train"
                        else [row for _, row in same]
                    ),
                )
                search = NearestImages(
                    [self._fingerprint(row) for row in first_rows],
                    [self._fingerprint(row) for row in second_rows],
                    self._sample_different(first_rows, second_rows),
                    bits=near_duplicate_bits,
                )
                if search.note:
                    notes.append(f"images of {first} and {second} are similar: {search.note}")
                yield from findings(
                    f"near-duplicates between {first} and {second}",
                    [
                        f"{' ~ '.join(self.label(row, pid=True) for row in pair)}: {search.describe(distance)}"
                        for distance, *pair in self._near_duplicates(first_rows, second_rows, search)
                    ],
                    is_error=False,
                    fix="compare these images, and keep near-duplicates in one split",
                )

    def _is_same_tracklet(self, query: Row, gallery: Row) -> bool:
        """Return True if a tracklet is in both the query and the gallery set, as in MARS; it is junk for itself."""
        names = [(self._item(row).columns or {}).get("tracklet") for row in (query, gallery)]
        return (
            (query[0], gallery[0]) == ("query", "gallery")
            and names[0] is not None
            and names[0] == names[1]
            and self.protocol.rule.uses_cameras
        )

    def _fingerprint(self, row: Row) -> Fingerprint:
        """Return the fingerprint of an image that can be read."""
        fingerprint = self._summary(row).fingerprint
        assert fingerprint is not None
        return fingerprint

    def _sample_different(
        self, first_rows: Sequence[Row], second_rows: Sequence[Row]
    ) -> list[tuple[Fingerprint, Fingerprint]]:
        """Draw random pairs of images of different identities."""
        rng = np.random.default_rng(0)
        rows = [
            [side[number] for number in rng.integers(len(side), size=_SAMPLED_PAIRS)]
            for side in (first_rows, second_rows)
        ]
        names = {row: self.dataset.identity(self._item(row).pid) for row in {*rows[0], *rows[1]}}
        return [
            (self._fingerprint(a), self._fingerprint(b)) for a, b in zip(*rows, strict=True) if names[a] != names[b]
        ]

    def _near_duplicates(
        self, first_rows: Sequence[Row], second_rows: Sequence[Row], search: NearestImages
    ) -> list[tuple[float, Row, Row]]:
        """List ``(distance, row, row)`` of pairs that are near-duplicates but not copies, most similar first."""
        pairs = []
        for row, distance, number in zip(second_rows, search.distances, search.nearest, strict=True):
            item, near = self._item(row), self._item(first_rows[number])
            is_copy = self._summary(row).digest == self._summary(first_rows[number]).digest
            # Adjacent frames of one camera are excluded from the evaluation: SAME_CAMERA in
            # fastamp.evaluation.identities.
            is_junk = self.protocol.rule.uses_cameras and near.pid == item.pid and near.camid == item.camid
            if distance <= search.threshold and not is_copy and not is_junk:
                pairs.append((distance, first_rows[number], row))
        return sorted(pairs)

    def find_conflicting_labels(self) -> Iterable[Finding]:
        """Find images that a split lists under several identities, or more than once under the same identity."""
        for split in self.splits:
            by_digest: dict[bytes, list[Row]] = defaultdict(list)
            for row, item, summary in self.rows(split):
                by_digest[summary.digest or f"{item.path}{item.box}".encode()].append(row)
            copies = [same for same in by_digest.values() if len(same) > 1]
            two = [same for same in copies if len({self._item(row).pid for row in same}) > 1]
            rest = [same for same in copies if len({self._item(row).pid for row in same}) == 1]
            yield from findings(
                f"images of {split} listed under several identities",
                [" = ".join(self.label(row, pid=True) for row in same[:3]) for same in two],
                fix="correct the identities",
                excluded=(row for same in two for row in same),
            )
            yield from findings(
                f"images of {split} listed more than once",
                [" = ".join(map(self.label, same[:3])) for same in rest],
                is_error=False,
                fix="remove the repetitions",
                excluded=(row for same in rest for row in same[1:]),
            )

    def find_rare_identities(self) -> Iterable[Finding]:
        """Find training sets of one identity, and identities with one training image."""
        counts = Counter(item.pid for item in self.splits.get("train", ()))
        names = {pid: self.dataset.identity(pid) for pid in counts}
        if len(counts) == 1:
            fix = "add images of other identities"
            yield from findings("only one training identity", list(names.values()), fix=fix)
        singles = [names[pid] for pid, count in counts.items() if count == 1]
        yield from findings(
            "identities with a single training image",
            singles,
            is_error=False,
            fix="add images of these identities; the triplet loss needs two of each",
        )

    def find_missing_splits(self) -> Iterable[Finding]:
        """Find splits without images, without which the dataset cannot be used for training or for testing."""
        leaves_one_out = self.protocol.rule.all_images
        test = ("query",) if leaves_one_out else ("query", "gallery")
        for names, key in ((("train",), "DATASETS.NAMES"), (test, "DATASETS.TESTS")):
            missing = [name for name in names if name not in self.splits]
            yield from findings(
                f"splits without images, which {key} needs",
                missing,
                is_error=False,
                fix=f"add {' and '.join(names)} images, or do not use the dataset in {key}",
            )

    def _item(self, row: Row) -> ImageItem:
        return self.splits[row[0]][row[1]]

    def _summary(self, row: Row) -> ImageSummary:
        item = self._item(row)
        return self.summaries[item.path, item.box]
