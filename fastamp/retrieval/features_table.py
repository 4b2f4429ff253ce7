"""Extractions as CSV and Parquet tables, for other programs."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from fastamp.retrieval.columns import is_unknown
from fastamp.retrieval.features import Features
from fastamp.utils.errors import optional_package, writing
from fastamp.utils.files import write_atomically

SUFFIXES = (".csv", ".parquet")
_BLOCK = 4096


def check_table_format(path: Path) -> None:
    """Check that a table of this format can be written.

    Raises:
        ConfigError: if the name ends in ``.parquet`` and pyarrow is not installed.
    """
    if path.suffix == ".parquet":
        alternative = ", or use a name that ends in .npz or .csv"
        with optional_package(f"writing {path} requires pyarrow", "parquet", alternative):
            import pyarrow  # noqa: F401


def write_table(path: Path, features: Features) -> None:
    """Write features as a table with one row per image: ``path`` and, if known, ``pid``, ``camid``, ``split``,
    ``x0``, ``y0``, ``x1``, ``y1`` and further columns with one value per image; then the features.

    Cameras are written by name if the dataset names them. A CSV file has the features in the columns ``f0``, ``f1``,
    ...; a Parquet file has them in the column ``features`` (lists of float32), and ``config_hash``, ``checkpoint`` and
    ``metric`` in the metadata of its schema.

    Args:
        path: file to write, whose name ends in ``.csv`` or ``.parquet``.
        features: features to write.

    Raises:
        WriteError: if the file cannot be written.
    """
    write = _write_parquet if path.suffix == ".parquet" else _write_csv
    with writing(path):
        write_atomically(path, lambda file: write(file, features))


def _blocks(features: Features) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Yield ``(column name -> values, features)`` of consecutive rows."""
    images = features.images
    labels = {"pid": images.pids, "camid": images.camera_names}
    columns = {"path": images.paths} | {name: values for name, values in labels.items() if not is_unknown(values)}
    if images.split is not None:
        columns["split"] = images.split
    if images.boxes is not None:
        columns |= dict(zip(("x0", "y0", "x1", "y1"), images.boxes.T, strict=True))
    columns |= {name: values for name, values in images.further.items() if values.ndim == 1}
    for start in range(0, len(features), _BLOCK):
        rows = slice(start, start + _BLOCK)
        yield {name: values[rows].tolist() for name, values in columns.items()}, np.asarray(features.matrix[rows])


def _write_csv(file: IO[bytes], features: Features) -> None:
    header = True
    for columns, matrix in _blocks(features):
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        if header:
            writer.writerow([*columns, *(f"f{number}" for number in range(matrix.shape[1]))])
            header = False
        # NumPy's shortest text from which the same float32 is read.
        numbers = matrix.astype("U16").tolist()
        writer.writerows([*row, *values] for *row, values in zip(*columns.values(), numbers, strict=True))
        file.write(text.getvalue().encode("utf-8", "surrogateescape"))


def _write_parquet(file: IO[bytes], features: Features) -> None:
    import pyarrow
    import pyarrow.parquet

    writer = None
    try:
        for columns, matrix in _blocks(features):
            arrays = {
                name: pyarrow.array(
                    [value.encode("utf-8", "replace").decode() if isinstance(value, str) else value for value in values]
                )
                for name, values in columns.items()
            }
            flat = pyarrow.array(np.ascontiguousarray(matrix).reshape(-1))
            arrays["features"] = pyarrow.FixedSizeListArray.from_arrays(flat, matrix.shape[1])
            table = pyarrow.table(arrays)
            metadata = {name: vars(features.model)[name] for name in ("config_hash", "checkpoint", "metric")}
            table = table.replace_schema_metadata(metadata)
            writer = writer or pyarrow.parquet.ParquetWriter(file, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()
