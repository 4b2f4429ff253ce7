"""Record next to a published weights file: its size and SHA-256, and the config of its model.

If the folder of the file is read-only, the record is in the cache of the user.
"""

import errno
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from fastamp.utils.errors import WriteError, writing
from fastamp.utils.files import FORMAT_KEY, user_cache, write_atomically

logger = logging.getLogger(__name__)

_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
FORMAT = 1
"""Number of the format of records; a change that earlier releases cannot read increases it."""


def record_of(path: Path) -> Path:
    """Return the path of the record of a weights file of the catalog: a JSON file next to it, or in the cache."""
    cached = _cached_record_of(path)  # written later, and contains the other one
    return cached if cached.is_file() else path.with_name(f"{path.name}.json")


def _cached_record_of(path: Path) -> Path:
    """Return the path of the record of a file in a read-only folder."""
    digest = hashlib.sha256(os.fsencode(os.path.abspath(path))).hexdigest()[:16]
    return user_cache() / "records" / f"{path.name}-{digest}.json"


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
        WriteError: if the record cannot be written, neither there nor, if the folder is read-only, in the cache.
    """
    recorded = read_record(path)
    content = {FORMAT_KEY: FORMAT, **recorded, **values}
    if content == recorded:
        return
    text, cached = json.dumps(content, indent=1).encode(), _cached_record_of(path)
    try:
        write_atomically(record_of(path), lambda file: file.write(text))
    except WriteError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in _READ_ONLY:
            raise
        if not cached.is_file():
            logger.warning("%s is read-only: the size, hash and config of %s are in %s", path.parent, path.name, cached)
        with writing(cached):
            cached.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(cached, lambda file: file.write(text))
