"""Record next to a published weights file: its size and SHA-256, and the config of its model."""

import json
from pathlib import Path
from typing import Any

from fastamp.utils.files import FORMAT_KEY, write_atomically

FORMAT = 1
"""Number of the format of records; a change that earlier releases cannot read increases it."""


def record_of(path: Path) -> Path:
    """Return the path of the record next to a weights file of the catalog: a JSON file."""
    return path.with_name(f"{path.name}.json")


def read_record(path: Path) -> dict[str, Any]:
    """Read the record of a weights file; empty if there is none, or if the JSON file is not a record."""
    try:
        record = json.loads(record_of(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    is_record = isinstance(record, dict) and record.get(FORMAT_KEY) == FORMAT
    return record if is_record else {}


def add_to_record(path: Path, values: dict[str, Any]) -> None:
    """Add values to the record of a weights file, if they are new.

    Raises:
        WriteError: if the record cannot be written.
    """
    recorded = read_record(path)
    content = {FORMAT_KEY: FORMAT, **recorded, **values}
    if content != recorded:
        write_atomically(record_of(path), lambda file: file.write(json.dumps(content, indent=1).encode()))
