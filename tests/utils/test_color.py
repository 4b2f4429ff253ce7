"""Colors on terminals; none on other streams or with NO_COLOR."""

import io
import logging
import os
import pty
import re
import subprocess
import sys

import pytest

from fastamp.utils.color import color_help, color_message, has_color
from fastamp.utils.progress import ConsoleHandler

TEXT = "error: no such file.\n  fix: correct the path"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def plain(text):
    return re.sub("\x1b\\[[0-9;]*m", "", text)


def test_messages_and_help_are_colored_on_terminals_only(monkeypatch):
    colored = color_message(TEXT, Terminal())
    assert colored.startswith("\x1b[1;31merror:\x1b[0m no") and "\x1b[32m  fix:" in colored and plain(colored) == TEXT
    assert color_message("fastamp train: error: x", Terminal()).startswith("\x1b[1;31mfastamp train: error:")
    assert color_help("usage: x\n\noptions:\n  -h", Terminal()).count("\x1b[1m") == 2
    assert color_message(TEXT, io.StringIO()) == TEXT
    for name, value in (("TERM", "dumb"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
        assert not has_color(Terminal()) and color_message(TEXT, Terminal()) == TEXT


def test_console_colors_the_level_of_warnings_but_not_info_lines():
    for stream, count in ((Terminal(), 1), (io.StringIO(), 0)):
        handler = ConsoleHandler(stream)
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        for level in (logging.INFO, logging.WARNING):
            handler.emit(logging.LogRecord("fastamp", level, "", 0, "WARNING: text", None, None))
        lines = stream.getvalue().splitlines()
        assert lines[0] == "INFO: WARNING: text" and plain(lines[1]) == "WARNING: WARNING: text"
        assert lines[1].count("\x1b[33m") == count


@pytest.mark.integration
@pytest.mark.parametrize("no_color", [False, True])
def test_help_in_a_pseudo_terminal_respects_no_color(no_color):
    master, slave = pty.openpty()
    environment = {**os.environ, **({"NO_COLOR": "1"} if no_color else {})}
    process = subprocess.Popen([sys.executable, "-m", "fastamp", "--help"], stdout=slave, env=environment)
    os.close(slave)
    text = b""
    try:
        while part := os.read(master, 4096):
            text += part
    except OSError:  # end of the output of a pseudo-terminal
        pass
    os.close(master)
    assert process.wait() == 0 and b"usage: fastamp" in re.sub(rb"\x1b\[[0-9;]*m", b"", text)
    assert (b"\x1b[" in text) != no_color
