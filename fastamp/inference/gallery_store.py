"""Items of a mutable gallery in an SQLite database: each batch of changes is on the disk before it is acknowledged."""

import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from fastamp.utils.errors import ConfigError, DataError, WriteError

DATABASE = "items.db"
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
_READ_ROWS = 8192
_BUSY_SECONDS = 60


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
        if not self.id or len(self.id) > 500 or "\0" in self.id:
            raise DataError(
                f"invalid id of a gallery item: {self.id[:50]!r} ({len(self.id)} characters).\n"
                "  fix: choose 1 to 500 characters"
            )


@dataclass(frozen=True)
class GalleryModel:
    """The model of a gallery's features: their dimension, metric, hash and checkpoint, see ``Extraction``."""

    width: int
    metric: str
    config_hash: str
    checkpoint: str


class GalleryStore:
    """Database of a mutable gallery.

    SQLite runs in WAL mode with ``synchronous=FULL``: ``transaction`` returns after the changes are on the disk, and a
    process that is killed leaves all of a transaction or nothing of it. Several processes may open the same gallery.

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

    def __init__(self, folder: Path, model: GalleryModel | None = None) -> None:
        self.path = folder / DATABASE
        if model is None and not self.path.is_file():
            raise DataError(f"{folder} is not a gallery: it has no {DATABASE}.\n  fix: correct the path")
        self._files: list[tuple[int, int] | None] = []  # set when they are open
        with self._errors():
            # Transactions are started explicitly; the lock of ``MutableGallery`` serializes the threads.
            self._connection = sqlite3.connect(
                self.path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
                self._connection.execute(f"PRAGMA {pragma}").fetchone()
        if model is not None:
            with self.transaction():
                if not self._connection.execute("SELECT 1 FROM sqlite_master").fetchone():
                    for statement in filter(str.strip, _SCHEMA.split(";")):
                        self._connection.execute(statement)
                    row = (_FORMAT, model.width, model.metric, model.config_hash, model.checkpoint)
                    self._connection.execute("INSERT INTO gallery VALUES (?, ?, ?, ?, ?, 0, hex(randomblob(8)))", row)
        self.model = self._read_model()
        self._files = self._file_ids()

    def _read_model(self) -> GalleryModel:
        with self._errors():
            row = self._connection.execute(
                "SELECT format, width, metric, config_hash, checkpoint, token FROM gallery"
            ).fetchone()
        if row is None or row[0] != _FORMAT or row[2] not in ("cosine", "euclidean") or not int(row[1]) > 0:
            raise DataError(
                f"{self.path} has an unknown format: {row[:3] if row else 'none'}.\n"
                "  fix: use the version of fastamp that wrote it"
            )
        self.token = row[5]
        return GalleryModel(*row[1:5])

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
        found: list[tuple[int, int] | None] = []
        for suffix in ("", "-wal", "-shm"):
            try:
                status = os.stat(f"{self.path}{suffix}")
                found.append((status.st_dev, status.st_ino))
            except OSError:
                found.append(None)
        return found

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

    def reserve_numbers(self, count: int) -> range:
        """Return new numbers, which no item had before; call it in a transaction."""
        first = int(self._connection.execute("SELECT next_number FROM gallery").fetchone()[0])
        self._connection.execute("UPDATE gallery SET next_number = ?", (first + count,))
        return range(first, first + count)

    def insert(self, items: Sequence[Item], numbers: Iterable[int], features: np.ndarray) -> None:
        """Insert items with features (N, D) float32; call it in a transaction."""
        rows = [
            (item.id, number, item.name, item.identity, item.camera, item.time, *_encode(feature))
            for item, number, feature in zip(items, numbers, features, strict=True)
        ]
        self._connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        self._write_pictures(items)

    def update(self, items: Sequence[Item], numbers: Iterable[int], features: np.ndarray | None) -> None:
        """Replace the values of items, and their features and numbers if there are new features, in a transaction."""
        values = [(item.name, item.identity, item.camera, item.time, item.id) for item in items]
        self._connection.executemany("UPDATE items SET name=?, identity=?, camera=?, time=? WHERE id=?", values)
        if features is not None:
            rows = [
                (number, *_encode(feature), item.id)
                for item, number, feature in zip(items, numbers, features, strict=True)
            ]
            self._connection.executemany("UPDATE items SET number=?, feature=?, crc=? WHERE id=?", rows)
        self._write_pictures(items)

    def delete(self, ids: Sequence[str]) -> None:
        """Delete items; call it in a transaction."""
        self._connection.executemany("DELETE FROM items WHERE id=?", [(each,) for each in ids])

    def _write_pictures(self, items: Sequence[Item]) -> None:
        rows = [(item.id, item.picture) for item in items if item.picture is not None]
        self._connection.executemany("INSERT OR REPLACE INTO pictures VALUES (?, ?)", rows)

    def picture(self, item_id: str) -> bytes | None:
        """Return the picture of an item; None if it has none."""
        self._check_files()
        with self._errors():
            row = self._connection.execute("SELECT picture FROM pictures WHERE id=?", (item_id,)).fetchone()
        return bytes(row[0]) if row else None

    def read(self) -> Iterator[tuple[list[Item], list[int], np.ndarray]]:
        """Read all items in the order of their numbers, in blocks: items, numbers and features (N, D) float32.

        Raises:
            DataError: if a feature is damaged.
        """
        columns = "id, name, identity, camera, time, number, feature, crc"
        with self._errors():
            cursor = self._connection.execute(f"SELECT {columns} FROM items ORDER BY number")
            while rows := cursor.fetchmany(_READ_ROWS):
                damaged = next(
                    (row[0] for row in rows if len(row[6]) != 4 * self.model.width or zlib.crc32(row[6]) != row[7]),
                    None,
                )
                if damaged is not None:
                    raise DataError(
                        f"{self.path}: the feature of item {damaged!r} is damaged.\n"
                        "  fix: restore the gallery from a backup, or add its images to a new one"
                    )
                features = np.frombuffer(b"".join(row[6] for row in rows), "<f4").reshape(len(rows), -1)
                yield [Item(*row[:5]) for row in rows], [row[5] for row in rows], features.astype(np.float32)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Convert errors of SQLite to a WriteError, or a DataError if the file is damaged."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise WriteError(
                f"cannot use the gallery {self.path}: {error}.\n"
                "  fix: check that the folder exists and is writable, the disk has space, and no other process has "
                f"been writing for {_BUSY_SECONDS} seconds"
            ) from error
        except sqlite3.DatabaseError as error:
            raise DataError(
                f"{self.path} is damaged: {error}.\n"
                "  fix: restore the gallery from a backup, or add its images to a new one"
            ) from error


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
