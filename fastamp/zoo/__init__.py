"""Published weights by name: the catalog, download, and the folder with the files."""

from fastamp.zoo.catalog import PREFIX, Entry, find, list_entries, matches, names
from fastamp.zoo.files import (
    checkpoint,
    entry_of,
    local_file,
    path_of,
    warn_of_differences,
    with_local_files,
    zoo_folder,
)

__all__ = [
    "PREFIX",
    "Entry",
    "checkpoint",
    "entry_of",
    "find",
    "list_entries",
    "local_file",
    "matches",
    "names",
    "path_of",
    "warn_of_differences",
    "with_local_files",
    "zoo_folder",
]
