"""Markdown pages of the repository: links, anchors, code blocks and commands, and the checks of them."""

import argparse
import ast
import importlib
import io
import itertools
import re
import runpy
import shlex
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from components import unregister_projects

from fastamp import cli
from fastamp.cli.options import parse_arguments
from fastamp.config import get_cfg
from fastamp.config.defaults import KEYS
from fastamp.config.releases import current_path
from fastamp.utils.errors import ConfigError

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^([ >]*)(```+|~~~+)([^\n`]*)\n(.*?)^\1\2[ \t]*$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`+[^`]+`+")
_HEADING = re.compile(r"^#{1,6} +(.*?)(?:\s*\{[^}]*#([\w.-]+)[^}]*\})?\s*$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]*\]\(([^()\s]*(?:\([^()]*\))?[^()\s]*)(?: \"[^\"]*\")?\)")


def markdown_files() -> list[Path]:
    """Return the Markdown files that people read, in the documentation and next to code."""
    folders = (ROOT.glob("*.md"), DOCS.rglob("*.md"), (ROOT / "projects").rglob("*.md"), [ROOT / "datasets/README.md"])
    return sorted(path for folder in folders for path in folder)


# Links


def prose(text: str) -> str:
    """Return a text without code blocks, code spans and comments."""
    return _CODE.sub("", re.sub(r"<!--.*?-->", "", _FENCE.sub("", text), flags=re.DOTALL))


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: those of its headings, explicit ones, and objects of the Python API."""
    text = _FENCE.sub("", text)
    found = set(re.findall(r"""\b(?:id|name)=["']([^"']+)["']""", text))
    found |= set(re.findall(r"^::: ([\w.]+)", text, re.MULTILINE))
    for title, explicit in _HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        number = 1
        while (anchor := explicit or (slug if number == 1 else f"{slug}_{number - 1}")) in found and not explicit:
            number += 1
        found.add(anchor)
    return found


def broken_links(path: str, text: str, pages: dict[str, str]) -> list[str]:
    """Return the relative links of a page whose file or anchor does not exist.

    Args:
        path: path of the page in the repository.
        text: content of the page.
        pages: path in the repository -> content, of all pages, including generated ones.
    """
    broken = []
    for target in _LINK.findall(prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = Path(path).parent / file if file else Path(path)
        name = (ROOT / linked).resolve().relative_to(ROOT).as_posix()
        if name not in pages and not (ROOT / name).exists():
            broken.append(target)
        elif path.startswith("docs/") and not name.startswith("docs/"):
            broken.append(f"{target} (outside the site)")
        elif anchor and name in pages:
            found = anchors(pages[name])
            member = anchor.rpartition(".")[0]  # of a class of the Python API; the build of the site checks it
            if anchor not in found and not (name.startswith("docs/reference/api/") and member in found):
                broken.append(target)
    return broken


def missing_blank_lines(text: str) -> list[str]:
    """Return the first lines of lists and tables that directly follow a paragraph, which MkDocs does not recognize."""
    found = []
    before, inside = "", False
    for line in _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text).splitlines():
        starts = re.match(r"\s*(?:[-*+] |\d+\. |\|)", line)
        if starts and before.strip() and not inside and not re.match(r"\s*(?:#|<|!!!|\?\?\?|===)", before):
            found.append(line)
        inside = bool(starts) or (inside and line.startswith(" ") and bool(line.strip()))
        before = line
    return found


# Code blocks


def blocks(text: str, *languages: str) -> list[str]:
    """Return the code blocks in these languages, without their indentation."""
    found = []
    for _, _, info, code in _FENCE.findall(text):
        if re.match(r"\w*", info.strip())[0] in languages:
            found.append(textwrap.dedent(code))
    return found


def python_errors(code: str) -> list[str]:
    """Return the errors of a Python block: wrong syntax, and names that fastamp does not have."""
    code = re.sub(r"^(?:>>> |\.\.\. )", "", code, flags=re.MULTILINE) if code.startswith(">>>") else code
    code = re.sub(r"^[%!].*$", "pass", code, flags=re.MULTILINE)  # magics of notebooks
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        return [f"line {error.lineno}: {error.msg}"]
    return [error for node in ast.walk(tree) if (error := _import_error(node))]


def _import_error(node: ast.AST) -> str:
    names: list[tuple[str, str]] = []
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        names = [(node.module, alias.name) for alias in node.names]
    elif isinstance(node, ast.Import):
        names = [(alias.name, "") for alias in node.names]
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fastamp":
        names = [("fastamp", node.attr)]
    for module, name in names:
        if module.partition(".")[0] != "fastamp":
            continue
        try:
            imported = importlib.import_module(module)
            if name and name != "*" and not hasattr(imported, name):
                importlib.import_module(f"{module}.{name}")
        except ImportError as error:
            return str(error)
    return ""


# Config keys


def declared_keys(text: str) -> set[str]:
    """Return the keys that exist besides those of fastamp: in the Python code of projects, and of the page ``text``."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "projects").rglob("*.py")]
    code = "\n".join([*sources, *blocks(text, "python", "py")])
    return set(re.findall(r'"((?:[A-Z][A-Z0-9_]*\.)*[A-Z][A-Z0-9_]*)"', code))


def is_known(path: str, declared: set[str]) -> bool:
    """Return True if a config key or section exists, in its own or FastReID's spelling."""
    current = current_path(path)
    free_form = any(key.is_free_form and current.startswith(f"{key.path}.") for key in KEYS.values())
    return free_form or any(f"{key}.".startswith(f"{current}.") for key in {*KEYS, *declared})


def unknown_keys(text: str) -> list[str]:
    """Return the keys in YAML blocks and code spans of a page that do not exist.

    Names in lower case in YAML are not config keys. In a code span, a key has a section, e.g. ``SOLVER.BASE_LR 1e-3``.
    """
    declared = declared_keys(text)
    found = [key for block in blocks(text, "yaml", "yml") for key in _unknown_in_yaml(block, declared)]
    for span in re.findall(r"`([^`\n]+)`", _FENCE.sub("", text)):
        name = re.match(r"((?:[A-Z][A-Z0-9_]*\.)+[A-Z][A-Z0-9_]*)(?: |$)", span)
        if name and not is_known(name[1], declared):
            found.append(name[1])
    return found


def _unknown_in_yaml(code: str, declared: set[str]) -> Iterator[str]:
    def visit(node: dict, prefix: str) -> Iterator[str]:
        for name, value in node.items():
            path = f"{prefix}{name}"
            if not re.fullmatch(r"[A-Z][A-Z0-9_.]*", str(name)):
                continue
            if not is_known(path, declared):
                yield path
            elif isinstance(value, dict):
                yield from visit(value, f"{path}.")

    for document in yaml.safe_load_all(code):
        if isinstance(document, dict):
            yield from visit(document, "")


# Commands


class Command(NamedTuple):
    """Command line of fastamp: the program, ``fastamp`` or the path of a script, and its arguments."""

    program: str
    arguments: list[str]
    is_complete: bool  # False in running text, which may omit required arguments

    def __str__(self) -> str:
        return shlex.join([self.program, *self.arguments])


def commands(text: str) -> list[Command]:
    """Return the commands in the shell blocks of a page, and its code spans that begin with ``fastamp``."""
    lines = [(line, True) for block in blocks(text, "sh", "bash", "console", "shell") for line in _lines(block)]
    spans = re.findall(r"`(fastamp [a-z][^`]*)`", _FENCE.sub("", text))
    found = []
    for line, is_complete in [*lines, *((span, False) for span in spans)]:
        words = shlex.split(line.removeprefix("$ ").replace("...", ""), comments=True)
        for is_end, part in itertools.groupby(words, lambda word: word in (";", "&&", "|", "||", ">", ">>", "&")):
            if not is_end and (found_program := _find_program(list(part))):
                found.append(Command(*found_program, is_complete))
    return found


def _lines(block: str) -> list[str]:
    return re.sub(r"\\\n\s*", " ", block).splitlines()


def _find_program(words: list[str]) -> tuple[str, list[str]] | None:
    for number, word in enumerate(words):
        if word == "fastamp" and (number == 0 or words[number - 1] == "-m" or "=" in words[number - 1]):
            return "fastamp", words[number + 1 :]
        if re.fullmatch(r"(?:tools|projects|tests)/[\w/]+\.py", word):
            return word, words[number + 1 :]
    return None


def command_error(command: Command, declared: set[str]) -> str:
    """Parse a command with the parser of its program, and its config keys and values; return the error, or ""."""
    printed = io.StringIO()
    try:
        with redirect_stderr(printed), redirect_stdout(io.StringIO()):
            namespace = _parse(command)
    except SystemExit as stop:
        error = printed.getvalue().strip().splitlines()[-1] if stop.code else ""
        return "" if "arguments are required" in error and not command.is_complete else error
    except FileNotFoundError as error:
        return str(error)
    pairs = [word for name in ("opts", "key_values") for word in getattr(namespace, name, None) or ()]
    try:
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if key == "KEY" and value == "VALUE":
                continue
            if not is_known(key, declared):
                return f"unknown config key {key!r}"
            if current_path(key) not in declared:
                get_cfg().merge_from_list([key, value])
    except (ConfigError, ValueError) as error:
        return str(error)
    return ""


def _parse(command: Command) -> argparse.Namespace:
    arguments = ["my.yml" if word == "SOURCE" else word for word in command.arguments]
    if command.program == "fastamp":
        name, *rest = arguments or ["help"]
        if name in ("help", "version", "--version"):
            return argparse.Namespace()
        if name not in cli.commands():
            print(f"unknown command {name!r}", file=sys.stderr)
            raise SystemExit(2)
        return parse_arguments(cli.command_parser(name), rest)
    path = ROOT / command.program
    alias = re.search(r'run_command\("([\w-]+)"', path.read_text(encoding="utf-8"))
    return parse_arguments(cli.command_parser(alias[1]), arguments) if alias else _parse_script(path, arguments)


class _Parsed(Exception):
    """Raised after a script has parsed its arguments."""


def _parse_script(path: Path, arguments: list[str]) -> argparse.Namespace:
    """Run a script up to the call that parses its arguments; components that it registers are removed again."""
    parse = argparse.ArgumentParser.parse_args
    with unregister_projects(), pytest.MonkeyPatch.context() as patch:

        def stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
            raise _Parsed(parse(self, *args, **kwargs))

        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", [str(path), *arguments])
        patch.syspath_prepend(str(path.parent))
        try:
            runpy.run_path(str(path), run_name="__main__")
        except _Parsed as parsed:
            return parsed.args[0]
    raise AssertionError(f"{path} does not parse its arguments with argparse")
