"""Commands and search terms of plugins, which are listed without importing the plugins."""

import ast
import importlib.util
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastamp.config.component_keys import find_assignment
from fastamp.config.projects import list_projects
from fastamp.utils.errors import ConfigError, summarize_error
from fastamp.utils.plugins import installed_plugins, naming_distribution


@dataclass(frozen=True)
class Declared:
    """Command or search term that a plugin declares.

    Attributes:
        target: module of the command, or ``module:class`` of the search term.
        help: line of help.
        file: file of the plugin.
        folder: folder of the project, from which ``target`` is imported; "" for an installed plugin.
    """

    target: str
    help: str
    file: Path
    folder: str = ""

    def load(self) -> Any:
        """Import the command or search term.

        Raises:
            ConfigError: if it cannot be imported.
        """
        if self.folder and self.folder not in sys.path:
            sys.path.append(self.folder)
        try:
            return pkgutil.resolve_name(self.target)
        except Exception as error:  # anything that code of a plugin raises
            raise ConfigError(
                f"{self.file}: {self.target} cannot be imported: {summarize_error(error)}\n"
                "  fix: correct the name or the module, or uninstall the plugin"
            ) from error


def read_tables(table: str) -> dict[str, Declared]:
    """Read a table of all projects and installed plugins: name -> what they declare, in alphabetical order.

    The file of a plugin contains, at its top level,

        COMMANDS = {"count-parameters": ("my_project.count_parameters", "count the parameters of a model")}

    Only this statement is evaluated, as a literal.

    Args:
        table: ``"COMMANDS"`` or ``"SEARCH_TERMS"``.

    Raises:
        ConfigError: if a table is invalid, two plugins declare the same name, or an installed plugin is not found.
    """
    found: dict[str, Declared] = {}
    for file, folder in _plugin_files():
        for name, (target, text) in _entries(file, table):
            if name in found:
                raise ConfigError(
                    f"{table}: {name!r} is declared by {found[name].file} and {file}.\n  fix: rename one of them"
                )
            found[name] = Declared(target, text, file, folder)
    return dict(sorted(found.items()))


def _plugin_files() -> list[tuple[Path, str]]:
    """Return the file of each plugin, and the folder of the project."""
    files = [(folder / "plugin.py", str(folder)) for folder in list_projects().values()]
    for entry in installed_plugins():
        with naming_distribution(entry):
            spec = importlib.util.find_spec(entry.module)
        if spec is not None and spec.has_location and spec.origin:
            files.append((Path(spec.origin), ""))
    return files


def _entries(file: Path, table: str) -> list[tuple[str, tuple[str, str]]]:
    try:
        entries = ast.literal_eval(find_assignment(file, table) or "{}")
        return [(str(name), (str(target), str(text))) for name, (target, text) in entries.items()]
    except (AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise ConfigError(
            f'{file}: {table}: expected a literal such as {{"name": ("module", "help")}}: {error}.\n'
            "  fix: write names, modules and help as literal texts"
        ) from error
