"""Items of a mutable gallery in an SQLite database: each batch of changes is on the disk before it is acknowledged."""

import itertools
import os
import sqlite3
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from fastamp.retrieval.model_id import ModelId
from fastamp.utils.errors import ConfigError, DataError, WriteError
from fastamp.utils.files import check_format

DATABASE_FILE = "items.db"
_FORMAT = 1
_SCHEMA = """
CREATE TABLE gallery (width INTEGER, metric TEXT, config_hash TEXT, checkpoint TEXT, token TEXT);
CREATE TABLE items (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, name TEXT, identity TEXT, camera TEXT, time REAL,
    feature BLOB, crc INTEGER, picture BLOB
)
"""
# A new number states a change; the old feature and picture are kept if there is no new one.
_WRITE = """
INSERT OR REPLACE INTO items
SELECT NULL, :id, :name, :identity, :camera, :time,
    coalesce(:feature, old.feature), coalesce(:crc, old.crc), coalesce(:picture, old.picture)
FROM (SELECT 1) LEFT JOIN items AS old ON old.id = :id
"""
_READ = "SELECT id, name, identity, camera, time, number, feature, crc FROM items WHERE number > ? ORDER BY number"
_READ_ROWS = 8192
_BUSY_SECONDS = 60
# Limits of files of other people: bytes of a value, and instructions of SQLite's virtual machine, which needs fewer
# than 10 for each byte of a gallery that it reads.
_MOST_BYTES = 2**24
_STEPS, _STEPS_PER_BYTE, _STEPS_AT_ONCE = 10**6, 10, 10**4
_TEXTS = "id", "name", "identity", "camera"
_FIRST_TIME, _LAST_TIME = -62135596800, 253402300800  # years 1 to 9999
_TABLES = [("table", statement.split()[2], statement) for statement in map(str.strip, _SCHEMA.split(";"))]
_NUMBERS = "table", "sqlite_sequence", "CREATE TABLE sqlite_sequence(name,seq)"  # SQLite's, of AUTOINCREMENT


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
        number: number in the gallery, larger than those before; each change gives the item a new one. Default: -1.
    """

    id: str
    name: str = ""
    identity: str = ""
    camera: str = ""
    time: float | None = None
    picture: bytes | None = None
    number: int = field(default=-1, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        wrong = [name for name in _TEXTS if not isinstance(vars(self)[name], str)]
        if not wrong and (not 1 <= len(self.id) <= 500 or "\0" in self.id):
            wrong.append("id")
        is_time = isinstance(self.time, (int, float)) and _FIRST_TIME <= self.time < _LAST_TIME
        if self.time is not None and not is_time:
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
        self._paths = [f"{self.path}{suffix}" for suffix in ("", "-wal", "-shm")]
        self._files: dict[str, os.stat_result] = {}  # set when they are open
        with self._errors():
            # Transactions are started explicitly; the lock of ``MutableGallery`` serializes the threads.
            self._connection = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            if sys.version_info >= (3, 11):
                self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
            for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "journal_mode=WAL", "synchronous=FULL"):
                self._connection.execute(f"PRAGMA {pragma}").fetchone()
        if model is not None:
            with self.transaction():
                if not self._connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                    for _, _, statement in _TABLES:
                        self._connection.execute(statement)
                    self._connection.execute(
                        "INSERT INTO gallery VALUES (?, ?, ?, ?, hex(randomblob(8)))", astuple(model)
                    )
                    self._connection.execute(f"PRAGMA user_version={_FORMAT}")
        self.model = self._read_model()
        self._files = {path: os.stat(path) for path in self._paths if os.path.exists(path)}

    def _read_model(self) -> ModelId:
        """Check the tables and return the model.

        Raises:
            DataError: if a table, view, trigger or index is not that of a gallery, or a value is invalid.
        """
        with self._errors():
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
        check_format(version, _FORMAT, self.path, DataError)
        with self._bounded():
            query = "SELECT type, name, sql FROM sqlite_master WHERE sql NOT NULL"
            others = {*self._connection.execute(query).fetchmany(9)} ^ {*_TABLES, _NUMBERS}
            if others:
                raise ValueError(f"other definitions of {', '.join(sorted({str(name)[:50] for _, name, _ in others}))}")
            ((*values, self.token),) = self._connection.execute("SELECT * FROM gallery").fetchmany(2)
            if not isinstance(self.token, str):
                raise ValueError(f"the token of the gallery is {self.token!r:.50}")
            return ModelId(*values)

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

    def _check_files(self) -> None:
        """Check that the open files are still those of the folder: SQLite would write to removed ones.

        SQLite keeps its log and its shared memory while a connection in WAL mode is open:
        https://www.sqlite.org/walformat.html
        """
        try:
            are_same = all(os.path.samestat(os.stat(path), status) for path, status in self._files.items())
        except OSError:
            are_same = False
        if not are_same:
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
        with self._errors(), self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
        self._check_files()

    def write(self, items: Sequence[Item], features: np.ndarray | None) -> None:
        """Insert items, or replace those with the same ids; call it in a transaction.

        Args:
            items: N items, which get larger numbers than all before; one without a picture keeps the stored picture.
            features: (N, D) float32. None: those that are stored are kept.
        """
        for row, item in enumerate(items):
            data = None if features is None else features[row].astype("<f4").tobytes()
            values = vars(item) | {"feature": data, "crc": None if data is None else zlib.crc32(data)}
            self._connection.execute(_WRITE, values)

    def delete(self, ids: Sequence[str]) -> None:
        """Delete items; call it in a transaction."""
        self._connection.executemany("DELETE FROM items WHERE id=?", [(item_id,) for item_id in ids])

    def picture(self, item_id: str) -> bytes | None:
        """Return the picture of an item; None if it has none."""
        self._check_files()
        with self._errors():
            row = self._connection.execute("SELECT picture FROM items WHERE id=?", (item_id,)).fetchone()
        if row and not isinstance(row[0], (bytes, type(None))):
            raise self.damaged(f"the picture of item {item_id!r} is not a file")
        return row[0] if row else None

    def numbers(self) -> set[int]:
        """Return the numbers of all items."""
        with self._bounded():
            return {number for (number,) in self._connection.execute("SELECT number FROM items")}

    def read(self, after: float) -> Iterator[tuple[list[Item], np.ndarray]]:
        """Read the items with larger numbers than ``after`` in blocks: items, and their features (N, D) float32.

        Raises:
            DataError: if a value is damaged, or a feature is not finite.
        """
        size, ids = 4 * self.model.width, set[str]()
        with self._bounded():
            cursor = self._connection.execute(_READ, (after,))
            while rows := cursor.fetchmany(_READ_ROWS):
                for *values, number, data, crc in rows:
                    is_feature = isinstance(data, bytes) and len(data) == size and zlib.crc32(data) == crc
                    if number <= max(after, -1) or values[0] in ids or not is_feature:
                        raise ValueError(f"the feature of item {values[0]!r:.50} is changed, or the item repeats")
                    after = number
                    ids.add(values[0])
                features = np.frombuffer(b"".join(row[-2] for row in rows), "<f4").reshape(len(rows), -1)
                if not np.isfinite(features).all():
                    raise ValueError("a feature is not finite")
                yield [Item(*row[:5], number=row[5]) for row in rows], features.astype(np.float32)

    @contextmanager
    def _bounded(self) -> Iterator[None]:
        """Convert errors as ``_errors``, and those of invalid values; limit the steps of SQLite.

        Repeating pages of a damaged file do not lead to an endless read.
        """
        size = sum(os.path.getsize(path) for path in self._paths if os.path.exists(path))
        steps = itertools.repeat(0, (_STEPS + _STEPS_PER_BYTE * size) // _STEPS_AT_ONCE)
        self._connection.set_progress_handler(lambda: next(steps, 1), _STEPS_AT_ONCE)
        with self._errors():
            try:
                yield
            except (ValueError, DataError) as error:
                raise self.damaged(str(error).partition("\n")[0]) from error
            finally:
                self._connection.set_progress_handler(None, 0)

    def damaged(self, cause: object) -> DataError:
        """Return the error of a damaged file."""
        return DataError(
            f"{self.path} is damaged: {cause}.\n"
            "  fix: restore the gallery from a backup, or add its images to a new one"
        )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert errors of SQLite to a WriteError, or a DataError if the file is damaged."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            is_damaged = not isinstance(error, sqlite3.OperationalError)
            if is_damaged or "interrupted" in str(error) or "decode" in str(error):
                raise self.damaged(error) from error
            raise WriteError(
                f"cannot use the gallery {self.path}: {error}.\n"
                "  fix: check that the folder exists and is writable, the disk has space, and no other process has "
                f"been writing for {_BUSY_SECONDS} seconds"
            ) from error


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
