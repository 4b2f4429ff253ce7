"""Markdown of plain text and tables."""

import re
from collections.abc import Iterable, Sequence


def escape(text: str) -> str:
    """Escape the characters of plain text that Markdown interprets, except in code spans."""
    parts = re.split(r"(`[^`\n]+`)", text)  # code spans at odd numbers
    return "".join(
        part if number % 2 else re.sub(r"([\\`*_<\[|{])", r"\\\1", part) for number, part in enumerate(parts)
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the cells are Markdown without line breaks."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
