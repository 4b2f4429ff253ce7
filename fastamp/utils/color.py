"""Colors of text on terminals."""

import os
import re
from typing import TextIO

_CODES = {"red": "1;31", "green": "32", "yellow": "33", "cyan": "36", "bold": "1"}
_HEADING = re.compile(r"^(\w[\w ]*:)", re.MULTILINE)
_FIX = re.compile(r"^(\s+fix:)", re.MULTILINE)
_ERROR = re.compile(r"^((?:rank \d+: )?(?:[\w -]+: )?error:)", re.MULTILINE)


def has_color(stream: TextIO) -> bool:
    """Return True if a stream is a terminal with colors and NO_COLOR is not set (https://no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and stream.isatty()


def paint(text: str, color: str) -> str:
    """Return text in a color: ``red``, ``green``, ``yellow``, ``cyan`` or ``bold``."""
    return f"\x1b[{_CODES[color]}m{text}\x1b[0m"


def color_message(text: str, stream: TextIO) -> str:
    """Color ``error:`` and ``fix:`` in a message, if the stream has colors."""
    if not has_color(stream):
        return text
    text = _ERROR.sub(lambda match: paint(match[1], "red"), text, count=1)
    return _FIX.sub(lambda match: paint(match[1], "green"), text)


def color_level(text: str, level: str, stream: TextIO) -> str:
    """Color the level, e.g. ``WARNING:``, and ``fix:`` in a log line, if the stream has colors."""
    if not has_color(stream):
        return text
    text = text.replace(f"{level}:", paint(f"{level}:", "yellow" if level == "WARNING" else "red"), 1)
    return _FIX.sub(lambda match: paint(match[1], "green"), text)


def color_help(text: str, stream: TextIO) -> str:
    """Print the headings of a help text in bold, if the stream has colors."""
    return _HEADING.sub(lambda match: paint(match[1], "bold"), text) if has_color(stream) else text
