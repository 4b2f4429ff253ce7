"""CSV file of a dataset without the images that a check excludes."""

import logging
import os
from pathlib import Path

from fastamp.data.columns import cell_text
from fastamp.data.datasets.base import ImageDataset, ImageItem
from fastamp.data.datasets.csv_table import DATABASE, SPLITS
from fastamp.data.datasets.custom import CsvDataset
from fastamp.diagnostics.findings import Report
from fastamp.diagnostics.label_check import find_matchless
from fastamp.evaluation import Protocol
from fastamp.utils.errors import DataError, writing
from fastamp.utils.files import write_csv

logger = logging.getLogger(__name__)


def write_clean(
    dataset: ImageDataset, report: Report, path: Path, *, protocol: Protocol | None = None
) -> tuple[int, int]:
    """Write a CSV file with the images of a dataset, without those that ``report`` excludes.

    The file has the columns of ``CsvDataset``, and the further columns of the dataset.
    A random split is written as the column ``split``. If it ignores the cameras, because all test images are from one
    camera, the column ``camid`` is omitted with a warning, unless the protocol ignores cameras, too. Queries without a
    match in the remaining gallery are excluded.

    Args:
        dataset: dataset to write.
        report: result of ``check_dataset``.
        path: CSV file to write. Paths below its folder are written relative to it.
        protocol: see ``check_dataset``.

    Returns:
        ``(number of images in the file, number of excluded images)``.

    Raises:
        DataError: if no images remain.
        WriteError: if the file cannot be written.
    """
    protocol = protocol or Protocol()
    excluded = {image for finding in report.findings for image in finding.excluded}
    kept = {
        split: [(row, item) for row, item in enumerate(dataset.images_in(split)) if (split, row) not in excluded]
        for split in SPLITS
    }
    table = dataset if isinstance(dataset, CsvDataset) else None
    database = table.database_lines if table else frozenset()
    total = sum(len(dataset.images_in(split)) for split in SPLITS) - len(database)
    queries, gallery = ([item for _, item in kept[split]] for split in ("query", "gallery"))
    matchless = find_matchless(dataset, queries, gallery, protocol)
    if not protocol.rule.open_set:
        kept["query"] = [row for row, fault in zip(kept["query"], matchless, strict=True) if not fault]
    if not any(kept.values()):
        raise DataError(f"{dataset.title}: no images remain without the images of the findings.\n  fix: add images")
    extra_names, extra_values = table.further_columns() if table else (_column_names(kept), {})
    has_cameras = _writes_cameras(dataset, {split: [item for _, item in kept[split]] for split in SPLITS}, protocol)
    has_boxes = any(item.box is not None for items in kept.values() for _, item in items)
    folder = os.path.abspath(path.parent)
    lines: list[tuple[int, list[object]]] = []
    for split, items in kept.items():
        for row, item in items:
            number = table.line(split, row) if table else len(lines)
            image = os.path.abspath(item.path)
            if os.path.commonpath((folder, image)) == folder:
                image = os.path.relpath(image, folder)
            if number in database:
                if split == "gallery":  # written with the training images
                    continue
                split = DATABASE
            values: list[object] = [image, dataset.identity(item.pid), split]
            values += [dataset.camera(item.camid)] if has_cameras else []
            values += (item.box or ("",) * 4) if has_boxes else []
            columns = item.columns or {}
            extra = extra_values.get(number, ()) if table else [cell_text(columns.get(name)) for name in extra_names]
            lines.append((number, [*values, *extra]))
    header = ["path", "pid", "split", *["camid"] * has_cameras, *["x0", "y0", "x1", "y1"] * has_boxes, *extra_names]
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_csv(path, [header, *(values for _, values in sorted(lines, key=lambda line: line[0]))])
    return len(lines), total - len(lines)


def _column_names(kept: dict[str, list[tuple[int, ImageItem]]]) -> list[str]:
    return list(dict.fromkeys(name for items in kept.values() for _, item in items for name in item.columns or ()))


def _writes_cameras(dataset: ImageDataset, items: dict[str, list[ImageItem]], protocol: Protocol) -> bool:
    """Decide whether the clean file has a column camid, and log a warning if the cameras of the dataset are dropped.

    A random split ignores the cameras if all test images are from one camera. In a file with the columns split and
    camid, these images would be excluded from the evaluation.
    """
    if dataset.has_cameras:
        return True
    if not all(dataset.camera(item.camid) for split_items in items.values() for item in split_items):
        return False  # the dataset has no cameras
    named = {split: {(item.pid, dataset.camera(item.camid)) for item in items[split]} for split in ("query", "gallery")}
    if not protocol.rule.uses_cameras or named["query"].isdisjoint(named["gallery"]):
        return True
    logger.warning(
        "%s: the clean file has no column camid, because all test images are from the camera %s: with cameras, no "
        "query would have a match\n"
        "  fix: to keep the cameras, set TEST.PROTOCOL to no_camera, or draw other test identities with "
        "DATASETS.FOLDER.SEED",
        dataset.title,
        dataset.camera(items["gallery"][0].camid),
    )
    return False
