"""Items of a mutable gallery in an SQLite database: each batch of changes is on the disk before it is acknowledged."""

import math
import os
import sqlite3
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from fastamp.retrieval.model_id import ModelId
from fastamp.utils.errors import ConfigError, DataError, WriteError

DATABASE_FILE = "items.db"
_FORMAT = 1
_SCHEMA = """
CREATE TABLE gallery (
    format INTEGER, width INTEGER, metric TEXT, config_hash TEXT, checkpoint TEXT, next_number INTEGER, token TEXT
);
CREATE TABLE items (
    id TEXT PRIMARY KEY, number INTEGER UNIQUE, name TEXT, identity TEXT, camera TEXT, time REAL,
    feature BLOB, crc INTEGER
);
CREATE TABLE pictures (id TEXT PRIMARY KEY REFERENCES items (id) ON DELETE CASCADE, picture BLOB);
"""
_COLUMNS = "number", "name", "identity", "camera", "time", "feature", "crc"
_WRITE = f"""
    INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET {", ".join(f"{name} = excluded.{name}" for name in _COLUMNS)}
"""
_READ_ROWS = 8192
_BUSY_SECONDS = 60
# Limits of files of other people: bytes of a value, dimension of a feature, numbers of items, and instructions of
# SQLite's virtual machine, which needs fewer than 10 for each byte of a gallery that it reads.
_MOST_BYTES, _LARGEST_WIDTH, _LARGEST_NUMBER = 2**24, 2**20, 2**62
_STEPS, _STEPS_PER_BYTE, _STEPS_AT_ONCE = 10**6, 10, 10**4
_TEXTS = "id", "name", "identity", "camera"
_FIRST_TIME, _LAST_TIME = -62135596800, 253402300800  # years 1 to 9999
_TABLES = [("table", statement.split()[2], statement) for statement in map(str.strip, _SCHEMA.split(";")) if statement]
_VALID_MODEL = f"""
    typeof(width) = 'integer' AND width BETWEEN 1 AND {_LARGEST_WIDTH} AND metric IN ('cosine', 'euclidean')
    AND typeof(config_hash) = 'text' AND typeof(checkpoint) = 'text' AND typeof(token) = 'text'
    AND typeof(next_number) = 'integer' AND next_number BETWEEN 0 AND {_LARGEST_NUMBER}
"""
_VALID_ITEM = f"""
    typeof(id) = 'text' AND typeof(name) = 'text' AND typeof(identity) = 'text' AND typeof(camera) = 'text'
    AND length(id) BETWEEN 1 AND 500 AND instr(CAST(id AS BLOB), x'00') = 0
    AND (time IS NULL OR typeof(time) = 'real' AND time >= {_FIRST_TIME} AND time < {_LAST_TIME})
    AND typeof(number) = 'integer' AND number >= 0 AND number < (SELECT next_number FROM gallery)
    AND typeof(feature) = 'blob' AND length(feature) = 4 * (SELECT width FROM gallery) AND typeof(crc) = 'integer'
"""


@dataclass(frozen=True)
class Item:
    """One image of a mutable gallery, without its feature.

    Attributes:
        id: unique text, at most 500 characters.
        name: name to show, such as a file name. Default: "".
        identity: identity, "" (default) if unknown.
        camera: name of the camera, "" (default) if unknown.
        time: seconds since 1970-01-01 UTC; None (default) if unknown.
        picture: small JPEG file to show; None (default) if there is none. Not read with the items, see ``picture``.
    """

    id: str
    name: str = ""
    identity: str = ""
    camera: str = ""
    time: float | None = None
    picture: bytes | None = None

    def __post_init__(self) -> None:
        wrong = [name for name in _TEXTS if not isinstance(vars(self)[name], str)]
        if not wrong and (not 1 <= len(self.id) <= 500 or "\0" in self.id):
            wrong.append("id")
        if self.time is not None and not _FIRST_TIME <= self.time < _LAST_TIME:
            wrong.append("time")
        if wrong:
            values = ", ".join(f"{name} {vars(self)[name]!r:.50}" for name in wrong)
            raise DataError(
                f"invalid values of the gallery item {self.id!r:.50}: {values}.\n"
                "  fix: pass texts, an id of 1 to 500 characters, and the time in seconds since 1970 in the years 1 to "
                "9999"
            )

    def texts(self) -> dict[str, str]:
        """Return the values as texts, without the picture."""
        return {name: vars(self)[name] for name in _TEXTS} | {"time": format_time(self.time)}


class GalleryStore:
    """Database of a mutable gallery.

    SQLite runs in WAL mode with ``synchronous=FULL``: ``transaction`` returns after the changes are on the disk, and a
    process that is killed leaves all of a transaction or nothing of it. Several processes may open the same gallery.
    The database may be of another person: before any other statement, its tables are compared with those of this
    program, and the types and sizes of all values are checked, in a number of steps that depends on the file size.

    Args:
        folder: folder of the gallery.
        model: model of a new gallery. Default: None, the gallery exists.

    Raises:
        DataError: if the folder contains no gallery, or its database is damaged.
        WriteError: if a new gallery cannot be written.

    Attributes:
        token: random text of this gallery.
        model: model of the features.
    """

    def __init__(self, folder: Path, model: ModelId | None = None) -> None:
        self.path = folder / DATABASE_FILE
        if model is None and not self.path.is_file():
            raise DataError(f"{folder} is not a gallery: it has no {DATABASE_FILE}.\n  fix: correct the path")
        self._files: list[tuple[int, int] | None] = []  # set when they are open
        self._steps = math.inf  # remaining instructions of a bounded read
        with self._errors():
            # Transactions are started explicitly; the lock of ``MutableGallery`` serializes the threads.
            self._connection = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            if sys.version_info >= (3, 11):
                self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
            pragmas = "trusted_schema=OFF", "cell_size_check=ON", "journal_mode=WAL", "synchronous=FULL"
            for pragma in (*pragmas, "foreign_keys=ON"):
                self._connection.execute(f"PRAGMA {pragma}").fetchone()
        if model is not None:
            with self.transaction():
                if not self._connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                    for _, _, statement in _TABLES:
                        self._connection.execute(statement)
                    row = (_FORMAT, model.width, model.metric, model.config_hash, model.checkpoint)
                    self._connection.execute("INSERT INTO gallery VALUES (?, ?, ?, ?, ?, 0, hex(randomblob(8)))", row)
        self.model = self._read_model()
        self._files = self._file_ids()

    def _read_model(self) -> ModelId:
        """Check the tables and return the model.

        Raises:
            DataError: if a table, view, trigger or index is not that of a gallery, or a value is invalid.
        """
        with self._bounded():
            query = "SELECT type, name, sql FROM sqlite_master WHERE sql NOT NULL"
            others = set(self._connection.execute(query).fetchmany(9)) ^ set(_TABLES)
            if others:
                raise DataError(
                    f"{self.path} is not a gallery of this version of fastamp: other definitions of "
                    f"{', '.join(sorted({str(name)[:50] for _, name, _ in others}))}.\n"
                    "  fix: use the version of fastamp that wrote it"
                )
            columns = "format, width, metric, config_hash, checkpoint, token"
            rows = self._connection.execute(f"SELECT {_VALID_MODEL}, {columns} FROM gallery").fetchmany(2)
        if len(rows) != 1 or rows[0][:2] != (1, _FORMAT):
            raise DataError(
                f"{self.path} has an unknown format: {rows[0][1:4] if rows else 'none'}.\n"
                "  fix: use the version of fastamp that wrote it"
            )
        self.token = rows[0][6]
        return ModelId(*rows[0][2:6])

    def close(self) -> None:
        """Close the database."""
        self._connection.close()

    @property
    def version(self) -> int:
        """Number that changes if another process or connection has changed the gallery.

        Raises:
            WriteError: if the files were removed or replaced.
        """
        self._check_files()
        with self._errors():
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def _file_ids(self) -> list[tuple[int, int] | None]:
        """Return the identities of the database, its log and its shared memory; None for a file that cannot be found.

        SQLite keeps these files while a connection in WAL mode is open: https://www.sqlite.org/walformat.html
        """
        ids: list[tuple[int, int] | None] = []
        for suffix in ("", "-wal", "-shm"):
            try:
                status = os.stat(f"{self.path}{suffix}")
                ids.append((status.st_dev, status.st_ino))
            except OSError:
                ids.append(None)
        return ids

    def _check_files(self) -> None:
        """Check that the open files are still those of the folder: SQLite would write to removed ones."""
        if self._files and self._files != self._file_ids():
            raise WriteError(
                f"the gallery {self.path} was removed or replaced after it had been opened.\n"
                "  fix: open it again, or restart the service"
            )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit the changes inside the context, or none of them after an exception.

        Raises:
            WriteError: if the changes cannot be written, or the files were removed or replaced, which loses them.
        """
        self._check_files()
        with self._errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
                self._check_files()
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def write(self, items: Sequence[Item], features: np.ndarray) -> range:
        """Insert items with features (N, D) float32, or replace those with the same ids; call it in a transaction.

        Returns:
            Their numbers, which no feature had before.
        """
        first = int(self._connection.execute("SELECT next_number FROM gallery").fetchone()[0])
        numbers = range(first, first + len(items))
        self._connection.execute("UPDATE gallery SET next_number = ?", (numbers.stop,))
        rows = [
            (item.id, number, item.name, item.identity, item.camera, item.time, *_encode(feature))
            for item, number, feature in zip(items, numbers, features, strict=True)
        ]
        self._connection.executemany(_WRITE, rows)
        self._write_pictures(items)
        return numbers

    def update(self, items: Sequence[Item]) -> None:
        """Replace the values of items, except their features; call it in a transaction."""
        values = [(item.name, item.identity, item.camera, item.time, item.id) for item in items]
        self._connection.executemany("UPDATE items SET name=?, identity=?, camera=?, time=? WHERE id=?", values)
        self._write_pictures(items)

    def delete(self, ids: Sequence[str]) -> None:
        """Delete items; call it in a transaction."""
        self._connection.executemany("DELETE FROM items WHERE id=?", [(item_id,) for item_id in ids])

    def _write_pictures(self, items: Sequence[Item]) -> None:
        rows = [(item.id, item.picture) for item in items if item.picture is not None]
        self._connection.executemany("INSERT OR REPLACE INTO pictures VALUES (?, ?)", rows)

    def picture(self, item_id: str) -> bytes | None:
        """Return the picture of an item; None if it has none."""
        self._check_files()
        with self._errors():
            row = self._connection.execute("SELECT picture FROM pictures WHERE id=?", (item_id,)).fetchone()
        if row and not isinstance(row[0], bytes):
            raise self._damaged(f"the picture of item {item_id!r} is not a file")
        return row[0] if row else None

    def read(self) -> Iterator[tuple[list[Item], list[int], np.ndarray]]:
        """Read all items in the order of their numbers, in blocks: items, numbers and features (N, D) float32.

        Raises:
            DataError: if a value is damaged, or a feature is not finite.
        """
        columns = "id, name, identity, camera, time, number, feature, crc"
        with self._bounded():
            query = f"SELECT quote(substr(id, 1, 50)) FROM items WHERE ({_VALID_ITEM}) IS NOT TRUE LIMIT 1"
            if values := self._connection.execute(query).fetchone():
                raise self._damaged(f"a value of item {values[0]} has a wrong type or size")
            cursor = self._connection.execute(f"SELECT {columns} FROM items ORDER BY number")
            while rows := cursor.fetchmany(_READ_ROWS):
                features = np.frombuffer(b"".join(row[6] for row in rows), "<f4").reshape(len(rows), -1)
                finite = np.isfinite(features).all(1).tolist()
                for row, is_finite in zip(rows, finite, strict=True):
                    if not is_finite or zlib.crc32(row[6]) != row[7]:
                        raise self._damaged(
                            f"the feature of item {row[0]!r} is {'changed' if is_finite else 'not finite'}"
                        )
                yield [Item(*row[:5]) for row in rows], [row[5] for row in rows], features.astype(np.float32)

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Convert errors as ``_errors``; repeating pages of a damaged file do not lead to an endless read."""
        size = sum(os.stat(path).st_size for suffix in ("", "-wal") if os.path.exists(path := f"{self.path}{suffix}"))
        self._steps = _STEPS + _STEPS_PER_BYTE * size

        def has_ended() -> bool:
            self._steps -= _STEPS_AT_ONCE
            return self._steps < 0

        self._connection.set_progress_handler(has_ended, _STEPS_AT_ONCE)
        try:
            with self._errors():
                yield
        finally:
            self._connection.set_progress_handler(None, 0)
            self._steps = math.inf

    def _damaged(self, cause: object) -> DataError:
        return DataError(
            f"{self.path} is damaged: {cause}.\n"
            "  fix: restore the gallery from a backup, or add its images to a new one"
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert errors of SQLite to a WriteError, or a DataError if the file is damaged."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if self._steps < 0 or "decode" in str(error):
                raise self._damaged(error) from error
            raise WriteError(
                f"cannot use the gallery {self.path}: {error}.\n"
                "  fix: check that the folder exists and is writable, the disk has space, and no other process has "
                f"been writing for {_BUSY_SECONDS} seconds"
            ) from error
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error


def _encode(feature: np.ndarray) -> tuple[bytes, int]:
    data = np.asarray(feature, dtype="<f4").tobytes()
    return data, zlib.crc32(data)


def parse_time(text: str) -> float:
    """Convert ISO 8601 text to seconds since 1970-01-01 UTC; without an offset, it is in UTC.

    Raises:
        ConfigError: if the text is not a date with or without time.
    """
    try:
        time = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        seconds = (time if time.tzinfo else time.replace(tzinfo=timezone.utc)).timestamp()
        format_time(seconds)  # years 1 to 9999 in UTC, whatever the offset
        return seconds
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"not a time: {text[:50]!r}.\n  fix: write it as 2026-01-31T14:30:00 (UTC) or 2026-01-31T14:30:00+02:00"
        ) from error


def format_time(time: float | None) -> str:
    """Convert seconds since 1970-01-01 UTC to ISO 8601 text; "" for None."""
    return "" if time is None else datetime.fromtimestamp(time, timezone.utc).isoformat()
