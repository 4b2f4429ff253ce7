"""Check the project's text against the glossary in CONTRIBUTING.md: ``python .ci/glossary.py [PATH ...]``.

The check reads docstrings, comments, strings with several words, names, and Markdown outside code blocks. Code spans in
backticks are skipped, because text may mention the old name of a key or function. codespell checks the spelling.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]

# Files that hold old names or other people's text on purpose.
EXEMPT = (
    "CONTRIBUTING.md",  # defines the banned words
    ".ci/glossary.py",
    "tests/test_lint_scripts.py",
    "tests/reference/",
    "tests/failures/",
)

# Markers of text that does not read as English of the field, beyond the glossary's list of words.
COMPARISONS = "longer more less larger smaller worse better greater fewer higher lower other".replace(" ", "|")
PHRASES = {
    rf"(?<!there )\b(?:is|are|was|were) no\b(?! (?:{COMPARISONS}))": "is not a",
    r"\b(?:leaves|leaving) out\b": "exclude, skip, omit",
    r"\b(?:go|goes|went|going) on\b": "continue, resume",
    r"\blooks? alike\b": "near-duplicate",
    r"\bshares? of\b": "fraction of",
    r"\bapart from\b": "except for",
    r"\bas there\b(?! (?:is|are|was|were))": "as in X",
    r"\bby heart\b": "store, cache",
    r"\bone's own\b": "custom",
    r"\bin words\b": "as text",
    r"\bat hand\b": "available",
}
TITLE = re.compile(
    r"(?:(?:what|who|whom|whose|where|which|how|when|whether)\b|(?:returns?|yields?) (?:what|whether|how|who|where)\b)",
    re.I,
)
TEST_NAME = re.compile(r"test_(?:\d|(?:what|who|whom|whose|where|which|how|whether)(?:_|$))")


class Finding(NamedTuple):
    """Violation of a language rule in a sentence or name."""

    path: str
    line: int
    text: str
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def banned_words() -> dict[str, str]:
    """Read the words in backticks in the last column of the glossary, each with the term to use instead."""
    words = {}
    for line in (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and line.startswith("|"):
            words |= dict.fromkeys(re.findall(r"`([^`]+)`", cells[2]), cells[0])
    return words


def text_rules() -> list[tuple[re.Pattern, str]]:
    """Compile the rules for running text: patterns, each with its replacement."""
    rules = [(word, f"'{word}' (say: {term})") for word, term in banned_words().items()]
    compiled = [(re.compile(rf"(?<![\w.\-]){re.escape(word)}(?![\w\-]|\.\w)", re.I), rule) for word, rule in rules]
    return compiled + [(re.compile(pattern, re.I), f"say: {better}") for pattern, better in PHRASES.items()]


def python_text(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, kind, text) with kind ``docstring``, ``comment``, ``string`` or ``test``."""
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node) is not None:
                docstrings.add(id(node.body[0].value))
                yield node.body[0].lineno, "docstring", ast.get_docstring(node)
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield node.lineno, "test", node.name
    for node in ast.walk(tree):
        is_string = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if is_string and re.search(r"[A-Za-z]{2,}.* .*[A-Za-z]{2,}", node.value, re.S):
            yield node.lineno, "string", node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(?:noqa|type:|ruff|pragma|!)", token.string):
            yield token.start[0], "comment", token.string.lstrip("# ")


def markdown_text(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, kind, text) with kind ``title`` or ``text``, without fenced code."""
    fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, "title" if line.startswith("#") else "text", line.lstrip("# ")


def check_text(source: str, path: str) -> list[Finding]:
    """List the violations in the text of one file; ``path`` tells Python from Markdown."""
    findings = []
    rules = text_rules()
    for line, kind, text in (python_text if path.endswith(".py") else markdown_text)(source):
        if kind == "test":
            if TEST_NAME.match(text):
                findings.append(Finding(path, line, text, "test name: name the behavior"))
            continue
        if kind in ("docstring", "title") and TITLE.match(text):
            findings.append(Finding(path, line, text.splitlines()[0], "title: imperative sentence or noun phrase"))
        plain = re.sub(r"(`+).+?\1", "X", text, flags=re.S)
        for pattern, rule in rules:
            if match := pattern.search(plain):
                start = max(0, match.start() - 40)
                findings.append(Finding(path, line, plain[start : match.end() + 40].replace("\n", " "), rule))
    return findings


def check_paths(paths: list[str]) -> list[Finding]:
    """Check the tracked files under ``paths``, relative to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *paths], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    findings = []
    for name in listed:
        if name.endswith((".py", ".md")) and not name.startswith(EXEMPT) and (REPOSITORY / name).is_file():
            findings += check_text((REPOSITORY / name).read_text(encoding="utf-8"), name)
    return findings


if __name__ == "__main__":
    problems = check_paths(sys.argv[1:] or ["."])
    print("\n".join(map(str, problems)))
    print(f"{len(problems)} findings")
    sys.exit(bool(problems))
