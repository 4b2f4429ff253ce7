"""FastReID's ``PathManager`` for local files."""

import os
import shutil
from typing import Any

from fastamp.utils.errors import ConfigError
from fastamp.utils.files import expand

__all__ = ["PathManager"]


class _PathManager:
    """File functions of FastReID's ``PathManager``, for local paths. URLs are not supported."""

    def open(self, path: str, mode: str = "r", buffering: int = -1, **kwargs: Any) -> Any:
        """Open a local file; see the built-in ``open``."""
        return open(self.get_local_path(path), mode, buffering, **kwargs)

    def get_local_path(self, path: str, **kwargs: Any) -> str:
        """Expand ``~`` and variables in a path.

        Raises:
            ConfigError: if ``path`` is a URL.
        """
        if "://" in str(path):
            raise ConfigError(f"{path}: URLs are not supported.\n  fix: download the file, and use its local path")
        return str(expand(path))

    def exists(self, path: str) -> bool:
        """Check that a file or folder exists."""
        return os.path.exists(self.get_local_path(path))

    def isfile(self, path: str) -> bool:
        """Check that a file exists."""
        return os.path.isfile(self.get_local_path(path))

    def isdir(self, path: str) -> bool:
        """Check that a folder exists."""
        return os.path.isdir(self.get_local_path(path))

    def ls(self, path: str) -> list[str]:
        """List the names in a folder."""
        return os.listdir(self.get_local_path(path))

    def mkdirs(self, path: str) -> None:
        """Create a folder and its parents; an existing folder is not an error."""
        os.makedirs(self.get_local_path(path), exist_ok=True)

    def rm(self, path: str) -> None:
        """Remove a file."""
        os.remove(self.get_local_path(path))

    def copy(self, src_path: str, dst_path: str, overwrite: bool = False) -> bool:
        """Copy a file; return False if the destination exists and ``overwrite`` is False."""
        if not overwrite and self.exists(dst_path):
            return False
        shutil.copyfile(self.get_local_path(src_path), self.get_local_path(dst_path))
        return True

    def register_handler(self, handler: Any) -> None:
        """Do nothing: only local paths are supported."""


PathManager = _PathManager()
