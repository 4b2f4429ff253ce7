"""Escaping of untrusted text for terminals."""

import re

# Control characters except tab and line feed, lone surrogates (file names that are not UTF-8), and characters that
# change the writing direction, so that one name can look like another.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def sanitize_terminal_text(text: str) -> str:
    r"""Replace characters that a terminal could interpret as commands by escape sequences, e.g. ``\x1b``."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
