"""Record the messages of invocations, and list the statements in the source that raise, warn or log."""

import argparse
import ast
import contextlib
import logging
import os
import re
import shlex
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

from fastamp.utils.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
_LOG_CALLS = {f"logger.{level}" for level in ("info", "warning", "error", "exception")}
_NUMBERS = re.compile(r"(?<![\w.])\d+(\.\d+(e[+-]?\d+)?|e[+-]?\d+)(?![\w.])")
_VOLATILE = [
    # Measured on features of a network, which depend on the processor.
    (re.compile(r"measured \S+ % \(\S+ to \S+ %\)"), "measured N % (N to N %)"),
    (re.compile(r"was built (for CUDA [\d.]+|without CUDA)"), "was built ..."),
    (re.compile(r"\b[0-9a-f]{16}(-[0-9a-f]{32})?\b"), "HASH"),
    (re.compile(r"(?:[\d.]+ of )?\d+(?:\.\d+)?(?:e-?\d+)? (MiB|GiB|MB|GB)\b"), r"N \1"),
    (re.compile(r"\d+ images/s"), "N images/s"),
    (re.compile(r"limit (is|of) \d+"), r"limit \1 N"),
    (re.compile(r"18\.\.\d+"), "18..N"),
    (re.compile(r"\.py:\d+"), ".py:N"),
    (re.compile(r"\b\d{1,2}:\d\d(?::\d\d)?\b"), "M:SS"),
    (re.compile(r"process \d+( on \S+, since [-\d]+ M:SS)?"), "process N"),
    (re.compile(r"0x[0-9a-f]{6,}"), "0xN"),
    (re.compile(r"\brun_\w{8}\b"), "run"),
    (re.compile(r"\b\d+\.\d+\.\d+(\+\w+)?\b"), "X.Y.Z"),
    # Results of a computation, whose last digits depend on the machine.
    (re.compile(r"\b\d\.\d+e[+-]\d+|\b[1-9]\d*\.\d{2,}\b|\b0\.[1-9]\d{3,}\b"), "N"),
    (re.compile(r"((?:choices|there are): (?:[^\s,;.]+, ){6})[^\n.;]+"), r"\1..."),
    (re.compile(r"usage: .*?(?=\n\S[^\n]*: error: )", re.DOTALL), "usage: ..."),
]


class Site(NamedTuple):
    """Statement that raises, warns or logs."""

    file: str
    function: str
    text: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.text}"


def list_sites(folder: str) -> list[Site]:
    """Return the sites in one Python file, or in all Python files of a folder in the repository."""
    path = REPOSITORY / folder
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [site for file in files for site in _sites_of(file)]


def _sites_of(file: Path) -> Iterator[Site]:
    source = file.read_text()

    def visit(node: ast.AST, scope: tuple[str, ...]) -> Iterator[Site]:
        for child in ast.iter_child_nodes(node):
            if _is_site(child):
                text = " ".join(ast.get_source_segment(source, child).split())
                text = text if len(text) <= 100 else f"{text[:97]}..."
                name = ".".join(scope) or "<module>"
                yield Site(str(file.relative_to(REPOSITORY)), name, text, child.lineno, child.end_lineno)
            is_scope = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            yield from visit(child, (*scope, child.name) if is_scope else scope)

    yield from visit(ast.parse(source), ())


def _is_site(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise):  # `raise error` repeats a message that was counted where it was made
        return isinstance(node.exc, ast.Call) and ast.unparse(node.exc.func) != "NotImplementedError"
    return isinstance(node, ast.Call) and ast.unparse(node.func) in {*_LOG_CALLS, "warnings.warn"}


class Recorder:
    """Run invocations and collect their messages as text.

    Args:
        root: folder for the files of the invocations; replaced with ``TMP`` in the text.
        names: other paths to replace in the text: path -> replacement.
    """

    def __init__(self, root: Path, names: dict[Path, str] | None = None) -> None:
        self.root = root
        self.lines: list[str] = []
        self.locations: dict[tuple[str, int], str] = {}  # (file, line) -> first message
        self._names = {**(names or {}), root: "TMP", REPOSITORY: "REPOSITORY"}
        self._errors: list[BaseException] = []

    # Invocations

    @contextlib.contextmanager
    def __call__(self, title: str) -> Iterator[None]:
        """Context manager that records the messages of its block, and the exception that ends the block."""
        with self._collecting(f"# {title}"):
            try:
                yield
            except (Exception, SystemExit) as error:
                self._follow(error)
                if isinstance(error, SystemExit):
                    self._add("exit code", str(error.code))
                else:
                    self._add(type(error).__name__, _masked(error))

    def command(self, main: Callable[[list[str]], int | None], program: str, *argv: Any, output: bool = False) -> None:
        """Record the messages and exit code of a command line, and its printed text if ``output`` is true."""
        arguments = [str(argument) for argument in argv]
        printed: dict[str, list[str]] = {"stdout": [], "stderr": []}
        with self._collecting(f"$ {program} {shlex.join(arguments)}"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("sys.argv", [program, *arguments])
                for stream, texts in printed.items():
                    patch.setattr(f"sys.{stream}", _Stream(texts))
                try:
                    code = main(arguments)
                except SystemExit as stop:
                    code = stop.code
            stderr = "".join(printed["stderr"])
            for error in self._errors:  # the text of other libraries' errors depends on their versions
                if str(error) in stderr:
                    stderr = stderr.replace(str(error), _masked(error))
            self._add("", stderr.rstrip())
            if output:
                self._add("", "".join(printed["stdout"]).rstrip())
            if code:
                self._add("exit code", str(code))

    def fastamp(self, *argv: Any, output: bool = False) -> None:
        """Record ``fastamp ARGV``."""
        from fastamp.cli import main

        self.command(main, "fastamp", *argv, output=output)

    def train(self, *argv: Any, program: str = "train") -> None:
        """Record ``fastamp train`` with the tiny model on the demo data, in a separate folder."""
        from tiny import tiny_config

        config = self.root / "tiny.yml"
        if not config.exists():
            config.write_text(tiny_config(Path("logs/tiny"), "SOLVER.MAX_EPOCH", "1").dump())
        output = () if "OUTPUT_DIR" in argv else ("OUTPUT_DIR", tempfile.mkdtemp(prefix="run_", dir=self.root))
        self.fastamp(program, "--config-file", config, *argv, *output)

    def file(self, name: str, content: str | bytes = "") -> Path:
        """Write a file to the root folder."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    # Results

    def text(self) -> str:
        """Return all messages."""
        return "\n".join(self.lines).strip() + "\n"

    def examples(self, folders: list[str]) -> list[list[str]]:
        """Return [site, first message] for each site in ``folders``; "" if no invocation reached the site."""
        found = []
        for site in [site for folder in folders for site in list_sites(folder)]:
            lines = range(site.first, site.last + 1)
            texts = [text for (file, line), text in self.locations.items() if file == site.file and line in lines]
            found.append([str(site), texts[0] if texts else ""])
        return found

    # Collection

    @contextlib.contextmanager
    def _collecting(self, title: str) -> Iterator[None]:
        """Record log records, warnings and caught errors under the heading ``title``; omit an empty section."""
        start = len(self.lines)
        self.lines += ["", self._normalize(title)]
        create = logging.getLogRecordFactory()
        warn = warnings.warn
        initialize = Exception.__init__
        self._errors = []

        def create_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = create(*args, **kwargs)
            self._log(record)
            return record

        def record_warning(message: Any, category: Any = UserWarning, stacklevel: int = 1, **kwargs: Any) -> None:
            frame: FrameType = traceback.sys._getframe(1)
            if _is_ours(frame.f_code.co_filename):
                self._visit(frame.f_code.co_filename, frame.f_lineno, f"{category.__name__}: {message}")
                self._add(f"{category.__name__}", str(message))

        def initialize_error(error: Exception, *args: Any) -> None:
            self._errors.append(error)
            initialize(error, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(warnings, "warn", record_warning)
            for kind in (UserError, argparse.ArgumentTypeError):  # their catchers drop the traceback
                patch.setattr(kind, "__init__", initialize_error, raising=False)
            logging.setLogRecordFactory(create_record)
            try:
                yield
            finally:
                logging.setLogRecordFactory(create)
                for error in self._errors:
                    self._follow(error)
        assert warnings.warn is warn
        if len(self.lines) == start + 2:
            del self.lines[start:]

    def _log(self, record: logging.LogRecord) -> None:
        if not _is_ours(record.pathname) or record.levelno < logging.INFO:
            return
        message = record.getMessage()
        if record.levelno == logging.INFO:
            # A run logs tables and measurements: their first line tells them apart.
            first, *rest = message.strip("\n").split("\n")
            message = _NUMBERS.sub("N", self._normalize(first)) + (" ..." if rest else "")
        location = (record.pathname, record.lineno)
        if record.levelno > logging.INFO or not self._is_visited(*location):
            self._add(record.levelname, message)
        self._visit(*location, f"{record.levelname}: {message}")

    def _follow(self, error: BaseException | None, seen: tuple[BaseException, ...] = ()) -> None:
        """Mark the sites that raised an error or one of its causes as reached."""
        if error is None or error in seen:
            return
        frames = traceback.extract_tb(error.__traceback__)
        if frames and _is_ours(frames[-1].filename):
            self._visit(frames[-1].filename, frames[-1].lineno, f"{type(error).__name__}: {_masked(error)}")
        for cause in (error.__cause__, error.__context__):
            self._follow(cause, (*seen, error))

    def _is_visited(self, filename: str, line: int | None) -> bool:
        return (os.path.relpath(filename, REPOSITORY), line or 0) in self.locations

    def _visit(self, filename: str, line: int | None, message: str) -> None:
        self.locations.setdefault((os.path.relpath(filename, REPOSITORY), line or 0), self._normalize(message))

    def _add(self, label: str, message: str) -> None:
        lines = self._normalize(message).split("\n") if message or label else []
        if lines:
            lines[0] = f"{label}: {lines[0]}" if label else lines[0]
        self.lines += [f"  {line}".rstrip() for line in lines]

    def _normalize(self, text: str) -> str:
        for path, name in sorted(self._names.items(), key=lambda item: -len(str(item[0]))):
            text = text.replace(str(path), name)
        for pattern, replacement in _VOLATILE:
            text = pattern.sub(replacement, text)
        return text


def _is_ours(filename: str) -> bool:
    return os.path.abspath(filename).startswith(f"{REPOSITORY}/")


class _Stream:
    """Text stream that is not a terminal."""

    encoding = "utf-8"

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def write(self, text: str) -> int:
        self.texts.append(text)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise OSError("no file")


def _masked(error: BaseException) -> str:
    """Return the text of an error; the text of a cause from another library is replaced with its class name."""
    text = str(error)
    cause = error.__cause__
    if cause is None or isinstance(cause, UserError) or not str(cause):
        return text
    frames = traceback.extract_tb(cause.__traceback__)
    # A compiled module has a relative file name.
    if frames and frames[-1].filename.startswith(f"{REPOSITORY}/"):
        return text
    for found in (str(cause), str(cause).splitlines()[0]):
        text = text.replace(found, f"<{type(cause).__name__}>")
    return text
