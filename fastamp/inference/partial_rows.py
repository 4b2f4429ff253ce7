"""Rows of an unfinished extraction on the disk, from which it continues after an interruption."""

import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fastamp.utils.errors import ConfigError
from fastamp.utils.files import real_path, write_atomically
from fastamp.utils.lock import LOCK_FILE, lock_folder, unlock_folder

logger = logging.getLogger(__name__)

# The number of finished rows is saved after this many seconds.
_SAVE_SECONDS = 30.0
_STATE, _ROWS = "of.json", "rows.f32"
_UNFINISHED = f".{_STATE}.*.tmp"


class PartialRows:
    """Rows (N, W) float32 of consecutive images in a folder, which other processes cannot use at the same time.

    Rows are appended to one file. A second file, which is replaced atomically, states how many of them are complete.

    Args:
        folder: folder of the files; rows of a different extraction are deleted.
        description: settings and images of the extraction, as JSON; contains ``model`` and ``images``.

    Attributes:
        done: number of completed images.
        unreadable: index of each image without a row, because it cannot be read -> message.

    Raises:
        ConfigError: if the folder is a link, contains other files only, or is in use.
    """

    def __init__(self, folder: Path, description: Mapping[str, Any]) -> None:
        self.folder, self._rows, self._description = folder, folder / _ROWS, description
        self.done, self.width, self.unreadable = 0, 0, dict[int, str]()
        self._check_folder()
        lock_folder(folder, "--output")
        try:
            self._check_folder()  # again, now that the lock keeps other extractions out
            self._continue(self._state() or {})
            self._save_state()  # before the rows, which are those of an extraction only with a state
            self._file = os.fdopen(os.open(self._rows, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")
            self._file.truncate(4 * self.width * len(self))
            self._file.seek(0, os.SEEK_END)
        except BaseException:
            self._unlock()
            raise

    def __enter__(self) -> "PartialRows":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Unlock the folder; delete the files, unless an error interrupts the extraction after rows were saved."""
        with suppress(OSError):  # a full disk
            self._file.close()
        if error is None or not self._saved_rows:
            with suppress(OSError):
                for path in (*self.folder.glob(_UNFINISHED), self._rows, self.folder / _STATE):
                    path.unlink(missing_ok=True)
        self._unlock()

    def _unlock(self) -> None:
        """Unlock the folder, and delete it if it is empty."""
        unlock_folder(self.folder)
        with suppress(OSError):  # contains files, or another extraction has started
            self.folder.rmdir()

    def __len__(self) -> int:
        return self.done - len(self.unreadable)

    def _state(self) -> dict[str, Any] | None:
        """Read the state; None if it is missing, or is not that of an extraction by any version."""
        path = self.folder / _STATE
        try:
            state = None if path.is_symlink() else json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return state if isinstance(state, dict) and {"model", "images"} <= state.keys() else None

    def _check_folder(self) -> None:
        """Raise ConfigError if the path is a link, or the folder contains files, but no state."""
        problem = f"is a link to {real_path(self.folder)}" if self.folder.is_symlink() else ""
        if not problem and self.folder.exists() and self._state() is None:
            # An extraction that is killed before it writes the state may leave a lock and a temporary file.
            ignored = {self.folder / LOCK_FILE, *self.folder.glob(_UNFINISHED)}
            others = [path.name for path in self.folder.iterdir() if path not in ignored]
            problem = f"contains {others[0]}, but no state of an extraction ({_STATE})" if others else ""
        if problem:
            raise ConfigError(
                f"cannot store the parts of the extraction in {self.folder}: this path {problem}.\n"
                f"  fix: choose another --output, or move {self.folder} to another location"
            )

    def _continue(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, unless it is of a different extraction or does not fit the rows."""
        changed = [name for name, value in self._description.items() if state.get(name) != value]
        if changed and state:
            logger.warning(
                "%s contains parts of a different extraction (different %s): these parts are deleted, and all images "
                "are extracted.\n  fix: to keep the parts of several extractions, choose an --output for each",
                self.folder,
                ", ".join(changed),
            )
        if not changed:
            self.done, self.width, self.unreadable = state["done"], state["width"], dict(state["unreadable"])
        complete = self._rows.is_file() and self._rows.stat().st_size >= 4 * self.width * len(self)
        if not complete or self._rows.is_symlink():
            self.done, self.width, self.unreadable = 0, 0, {}
            self._rows.unlink(missing_ok=True)

    def append(self, rows: np.ndarray, unreadable: Mapping[int, str]) -> None:
        """Append the rows (B, W) of the next images, of which those in ``unreadable`` have none, as float32."""
        self._file.write(np.ascontiguousarray(rows, dtype=np.float32).data)
        self.done, self.width = self.done + len(rows) + len(unreadable), rows.shape[1]
        self.unreadable |= unreadable
        if time.monotonic() - self._saved > _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Save the rows so far."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._save_state()

    def _save_state(self) -> None:
        state = {"done": self.done, "width": self.width, "unreadable": [*self.unreadable.items()]}
        content = json.dumps({**self._description, **state}).encode()
        write_atomically(self.folder / _STATE, lambda file: file.write(content))
        self._saved, self._saved_rows = time.monotonic(), len(self)

    def matrix(self) -> np.ndarray:
        """Return the rows, memory-mapped; they remain valid after the files are deleted."""
        return np.memmap(self._file, np.float32, "r", shape=(len(self), self.width))
