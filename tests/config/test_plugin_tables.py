"""Commands and search terms that plugins declare."""

import pytest

from fastamp.cli import command_parser
from fastamp.config import plugin_tables
from fastamp.config.plugin_tables import read_tables
from fastamp.utils import plugins
from fastamp.utils.errors import ConfigError


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Function that writes a project with a plugin, which is the only one."""
    monkeypatch.setattr(plugins, "installed_plugins", lambda: ())
    monkeypatch.setattr(plugin_tables, "installed_plugins", lambda: ())
    projects = {}
    monkeypatch.setattr(plugin_tables, "list_projects", lambda: projects)

    def write(source, name="Mine"):
        projects[name] = tmp_path / name
        projects[name].mkdir()
        (projects[name] / "plugin.py").write_text(f'"""Plugin."""\n\nraise SystemExit\n{source}\n')
        return projects[name]

    return write


def test_table_is_read_without_running_the_plugin_and_its_entries_are_imported_on_demand(project, monkeypatch):
    monkeypatch.setattr("sys.path", [])
    folder = project('SEARCH_TERMS = {"near": ("mine_near:Near", "images near a place")}')
    (folder / "mine_near.py").write_text("class Near:\n    pass\n")
    (name, declared), *others = read_tables("SEARCH_TERMS").items()
    assert (name, declared.help, others) == ("near", "images near a place", [])
    assert declared.load().__name__ == "Near"
    assert read_tables("COMMANDS") == {}


def test_installed_plugin_declares_a_table(tmp_path, monkeypatch, project):
    from importlib.metadata import EntryPoint

    (tmp_path / "table_of_plugin.py").write_text('raise SystemExit\nCOMMANDS = {"count": ("counting", "count")}\n')
    monkeypatch.syspath_prepend(tmp_path)
    entries = (EntryPoint("mine", "table_of_plugin", plugins.GROUP),)
    monkeypatch.setattr(plugin_tables, "installed_plugins", lambda: entries)
    assert read_tables("COMMANDS")["count"].target == "counting"


def test_table_may_be_the_first_line_of_a_file(project):
    (project("") / "plugin.py").write_text('COMMANDS = {"count": ("counting", "count")}\n')
    assert list(read_tables("COMMANDS")) == ["count"]


@pytest.mark.parametrize("value", ['["a"]', '{"a": "module"}', "{name: 1}", "dict(a=1)"])
def test_invalid_table_names_the_file(project, value):
    folder = project(f"COMMANDS = {value}")
    with pytest.raises(ConfigError, match=f"{folder}.*COMMANDS"):
        read_tables("COMMANDS")


def test_name_of_two_plugins_is_an_error(project):
    for name in ("One", "Two"):
        project('COMMANDS = {"count": ("counting", "count")}', name)
    with pytest.raises(ConfigError, match="'count'.*One.*Two"):
        read_tables("COMMANDS")


def test_plugin_with_a_syntax_error_is_named(project):
    folder = project('COMMANDS = {"count": ("counting", "count")}\ndef')
    with pytest.raises(ConfigError, match=f"{folder}.*COMMANDS"):
        read_tables("COMMANDS")


@pytest.mark.parametrize("target", ["missing_module_of_plugin", "json:Missing"])
def test_plugin_of_a_command_that_cannot_be_imported_is_named(project, monkeypatch, target):
    monkeypatch.setattr("sys.path", [])
    folder = project(f'COMMANDS = {{"count": ({target!r}, "count")}}')
    with pytest.raises(ConfigError, match=f"{folder}.*{target}"):
        read_tables("COMMANDS")["count"].load()


def test_search_term_named_as_an_option_is_an_error(project):
    folder = project('SEARCH_TERMS = {"top": ("mine_near:Near", "images near a place")}')
    with pytest.raises(ConfigError, match=f"{folder}.*--top"):
        command_parser("search", "fastamp search")
