"""Log lines of fastamp with and without setup_logger, and with the user's own logging configuration."""

import contextlib
import io
import json
import logging
import subprocess
import sys

import pytest

from fastamp.utils.logger import log_to_console, log_to_file, setup_logger

LOG = logging.getLogger("fastamp.test")

# In a new process, since pytest has handlers on the root logger.
SCRIPT = """
import contextlib, io, json, logging, sys
from fastamp.utils.logger import log_to_console, setup_logger
out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    exec(sys.argv[1])
    log_to_console()
    log_to_console()
    logging.getLogger("fastamp.test").info("a line")
    logging.getLogger("fastamp.test").warning("a problem")
print(json.dumps([out.getvalue(), err.getvalue()]))
"""


def run(before):
    """Return the console output of two log lines after the statements ``before``: (stdout, stderr)."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, before], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.integration
def test_log_to_console_prints_lines_if_logging_is_not_configured():
    out, err = run("pass")
    assert out == "" and err.count("a line") == err.count("a problem") == 1
    assert "test] WARNING: a problem" in err


@pytest.mark.integration
def test_log_to_console_writes_to_stdout_in_a_notebook():
    out, err = run("sys.modules['ipykernel.zmqshell'] = sys")
    assert out.count("a line") == 1 and err == ""


@pytest.mark.integration
@pytest.mark.parametrize("order", ["setup_logger()", "log_to_console(); setup_logger()"])
def test_lines_appear_once_after_setup_logger(order):
    out, err = run(order)
    assert out.count("a line") == 1 and err == ""


@pytest.mark.integration
@pytest.mark.parametrize(
    "name, level, lines",
    [("", "INFO", 1), ("", "WARNING", 0), ("fastamp", "INFO", 1), ("fastamp", "WARNING", 0)],
)
def test_handlers_and_levels_of_the_user_are_kept(name, level, lines):
    statements = f"logger = logging.getLogger({name!r}); logger.setLevel({level!r})"
    out, err = run(f"{statements}; logger.addHandler(logging.StreamHandler(sys.stdout))")
    assert (out.count("a line"), out.count("a problem"), err) == (lines, 1, "")


@pytest.mark.integration
def test_automatic_console_stops_when_the_user_configures_logging():
    out, err = run("log_to_console(); logging.basicConfig(level='INFO', stream=sys.stdout)")
    assert out.count("a line") == 1 and err == ""


def test_setup_logger_keeps_handlers_of_the_user(tmp_path, capsys):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("fastamp")
    logger.addHandler(handler)
    setup_logger(tmp_path / "first")
    setup_logger(tmp_path / "second")
    LOG.info("a line")
    assert lines == ["a line"] and capsys.readouterr().out.count("a line") == 1
    assert (tmp_path / "first/log.txt").read_text() == ""
    assert "a line" in (tmp_path / "second/log.txt").read_text()


def test_user_console_handler_replaces_the_console_of_setup_logger(capsys):
    logger = logging.getLogger("fastamp")
    logger.addHandler(logging.StreamHandler(sys.stdout))
    setup_logger()
    LOG.info("a line")
    assert capsys.readouterr().out == "a line\n"


def test_file_only_records_are_not_printed(tmp_path, capsys):
    setup_logger(tmp_path)
    LOG.info("a long text", extra={"file_only": True})
    assert capsys.readouterr().out == "" and "a long text" in (tmp_path / "log.txt").read_text()


def test_log_to_file_appends_only_lines_of_its_block(tmp_path):
    with log_to_file(tmp_path):
        LOG.info("inside")
    LOG.info("outside")
    assert "inside" in (text := (tmp_path / "log.txt").read_text()) and "outside" not in text


def test_log_to_file_uses_the_log_file_of_setup_logger(tmp_path):
    setup_logger(tmp_path)
    (tmp_path / "other").mkdir()
    with log_to_file(tmp_path / "other"):
        LOG.info("a line")
    assert "a line" in (tmp_path / "log.txt").read_text() and not (tmp_path / "other/log.txt").exists()


def test_log_to_console_changes_nothing_under_pytest():
    stream = io.StringIO()
    with contextlib.redirect_stderr(stream):
        log_to_console()
        LOG.info("a line")
    assert logging.getLogger("fastamp").handlers == [] and stream.getvalue() == ""
