"""Check that docstrings repeat no types of annotations: ``python .ci/docstring_types.py``.

Entries of ``Args:`` and ``Attributes:`` are ``name: text``; ``Returns:`` and ``Yields:`` do not begin with a type.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"(Args|Attributes|Returns|Yields):")
TYPED_ENTRY = re.compile(r"    [\w*]+(?:(?:, | and | or )[\w*]+)* \(.+?\):(?: |$)")
NAME = r"(?:[A-Z]\w*|\w+\.[\w.]+|str|int|bool|float|bytes|dict|list|tuple|set)(?:\[.*?\]+)?"
TYPE = re.compile(rf"    {NAME}(?: \| \w+)*(?:, optional)?: ")


def typed_lines(source: str) -> Iterator[str]:
    """Yield "line: text" of docstrings with the type of a parameter, attribute or return value."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        section = ""
        for number, line in enumerate((ast.get_docstring(node) or "").splitlines()):
            if line and not line.startswith(" "):
                section = match[1] if (match := SECTION.fullmatch(line)) else ""
            elif section and (TYPED_ENTRY if section in ("Args", "Attributes") else TYPE).match(line):
                yield f"{node.body[0].lineno + number}: {line.strip()}"


if __name__ == "__main__":
    folders = ("fastamp", "projects", "tools", "tests", "docs", ".ci")
    files = [file for folder in folders for file in sorted((REPOSITORY / folder).rglob("*.py"))]
    findings = [
        f"{file.relative_to(REPOSITORY)}:{line}"
        for file in files
        for line in typed_lines(file.read_text(encoding="utf-8"))
    ]
    print("\n".join(findings))
    print(f"{len(findings)} types in docstrings")
    sys.exit(bool(findings))
