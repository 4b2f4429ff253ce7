"""Reference of the messages: an example for each statement that warns or raises, from the snapshot of the tests."""

import itertools
import json
import re
import textwrap
from collections import defaultdict
from pathlib import Path

from markdown_text import escape

SNAPSHOT = Path(__file__).parents[2] / "tests/messages/snapshot"
_INTRODUCTION = """---
search: {boost: 0.5}
---

# Messages

After this page you can find the cause and the fix of a warning or an error: search for its words.

There is one entry per place in the code that warns or raises an error, with an example. Names and numbers in your
message differ; `TMP`, `RUN` and `DATASETS` stand for folders. An error of the class `ConfigError`, `DataError`,
`WeightsError`, `TrainingError` or another `UserError` ends the run with exit code 2 and without a traceback. Errors of
other classes are for developers.
"""
_PART = re.compile(r"\s*(found|cause|fix):\s+(.*)")
_TITLE_LENGTH = 150


def messages_page() -> str:
    """Return the page as Markdown."""
    packages: dict[str, list[str]] = defaultdict(list)
    seen = set()
    for file in sorted(SNAPSHOT.glob("*.json")):
        for site, message in json.loads(file.read_text(encoding="utf-8")):
            path, function = site.partition(": ")[0].split(" ")
            label, _, text = message.partition(": ")
            if text and label != "INFO" and text not in seen:
                seen.add(text)
                package = ".".join(Path(path).parts[:-1][: 2 if path.startswith("fastamp/") else 1])
                packages[package].append(_describe(label, text, f"{path}, {function}"))
    parts = [_INTRODUCTION]
    for package, entries in packages.items():
        parts += [f"## {package} {{ #{package} }}\n", *entries]
    return "\n".join(parts)


def _describe(label: str, text: str, place: str) -> str:
    first, *rest = text.splitlines()
    title = first if len(first) <= _TITLE_LENGTH else textwrap.shorten(first, _TITLE_LENGTH, placeholder=" ...")
    kind = label.capitalize() if label.isupper() else f"`{label}`"
    lines = [f"#### {escape(title)}\n", f"{kind} in `{place}`\n"]
    if title != first:
        lines.append(f"{escape(first)}\n")
    for is_part, group in itertools.groupby(rest, lambda line: bool(_PART.match(line))):
        block = list(group)
        if is_part:
            parts = [_PART.match(line).groups() for line in block]
            lines += [f"- **{name.capitalize()}**: {escape(value)}" for name, value in parts]
        else:
            lines.append("\n```text\n" + textwrap.dedent("\n".join(block)) + "\n```\n")
    return "\n".join([*lines, ""])
