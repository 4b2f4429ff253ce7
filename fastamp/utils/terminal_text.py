"""Text from files and folders that a terminal shows, and does not obey."""

import re

from fastamp.utils.moved import moved_names

__getattr__ = moved_names(__name__, {"printable": "fastamp.utils.terminal_text.sanitize_terminal_text"})

# Control characters but tab and line feed, lone surrogates (bytes of file names that are no UTF-8), and what changes
# the direction of writing, so that one name could look like another.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def sanitize_terminal_text(text: str) -> str:
    r"""Return ``text`` with what a terminal would take as commands written as escapes, e.g. ``\x1b``."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
