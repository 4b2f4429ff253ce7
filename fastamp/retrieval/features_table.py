"""Extractions as CSV and Parquet tables, for other programs."""

import codecs
import csv
from pathlib import Path
from typing import IO, Any

import numpy as np

from fastamp.retrieval.columns import is_unknown
from fastamp.retrieval.features import Features
from fastamp.utils.errors import optional_package
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
    write_atomically(path, lambda file: write(file, features))


def _columns(features: Features) -> dict[str, np.ndarray]:
    """Return the columns of a table: name -> (N,) values."""
    images = features.images
    labels = {"pid": images.pids, "camid": images.camera_names}
    columns = {"path": images.paths} | {name: values for name, values in labels.items() if not is_unknown(values)}
    if images.split is not None:
        columns["split"] = images.split
    if images.boxes is not None:
        columns |= dict(zip(("x0", "y0", "x1", "y1"), images.boxes.T, strict=True))
    return columns | {name: values for name, values in images.further.items() if values.ndim == 1}


def _write_csv(file: IO[bytes], features: Features) -> None:
    columns, matrix = _columns(features), features.matrix
    writer = csv.writer(codecs.getwriter("utf-8")(file, "surrogateescape"), lineterminator="\n")
    writer.writerow([*columns, *(f"f{number}" for number in range(matrix.shape[1]))])
    for start in range(0, len(matrix), _BLOCK):
        rows = slice(start, start + _BLOCK)
        # NumPy's shortest text from which the same float32 is read.
        parts = [*(values[rows] for values in columns.values()), matrix[rows].astype("U16")]
        writer.writerows([*row, *numbers] for *row, numbers in zip(*(part.tolist() for part in parts), strict=True))


def _write_parquet(file: IO[bytes], features: Features) -> None:
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    columns, matrix = _columns(features), features.matrix
    metadata = {name: vars(features.model)[name] for name in ("config_hash", "checkpoint", "metric")}

    def table(start: int) -> pyarrow.Table:
        rows = slice(start, start + _BLOCK)
        arrays = {
            name: pyarrow.array([_valid_text(value) for value in values[rows].tolist()])
            for name, values in columns.items()
        }
        flat = pyarrow.array(np.ascontiguousarray(matrix[rows]).reshape(-1))
        arrays["features"] = pyarrow.FixedSizeListArray.from_arrays(flat, matrix.shape[1])
        return pyarrow.table(arrays, metadata=metadata)

    with ParquetWriter(file, table(0).schema) as writer:
        for start in range(0, len(matrix), _BLOCK):
            writer.write_table(table(start))


def _valid_text(value: Any) -> Any:
    """Replace characters of a text that UTF-8 cannot represent."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
