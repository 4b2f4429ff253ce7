"""Render the self-contained HTML report from the templates in ``report/templates``."""

import base64
import hashlib
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fastamp.report.curves import health_panels, training_panels
from fastamp.report.history import History
from fastamp.report.run import Run, config_changes, environment
from fastamp.report.sections import data_rows, precision_facts, results
from fastamp.report.svg import FRAME, draw_panels
from fastamp.utils.errors import writing
from fastamp.utils.files import write_atomically

_TEMPLATES = Path(__file__).parent / "templates"
# Characters that are invalid in XML and HTML, lone surrogates of undecodable file names, and bidi control characters.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")


def write_report(run: Run, folder: Path, *, name: str = "report.html") -> Path:
    """Write the report of a run.

    Args:
        run: data to show in the report.
        folder: output folder, created if necessary.
        name: file name. Default: ``report.html``.

    Returns:
        Path of the file.

    Raises:
        ConfigError: if the file cannot be written.
    """
    path = folder / name
    content = page(run).encode()
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(content))
    return path


def page(run: Run) -> str:
    """Render the report of a run as HTML."""
    return (
        templates()
        .get_template("report.html")
        .render(
            run=run,
            written=time.strftime("%Y-%m-%d %H:%M"),
            **embedded_style(),
            results=[results(test_set, len(run.sets), run.cfg) for test_set in run.sets],
            training=None if run.history is None else draw_panels(training_panels(run.history)),
            precision={"facts": precision_facts(run), "charts": draw_panels(health_panels(run.history or History()))},
            data=data_rows(run),
            config=config_changes(run.cfg),
            environment=environment(run),
        )
    )


def embedded_style() -> dict[str, str]:
    """Return ``style``, the style sheet of all pages, and ``style_digest``, its SHA-256 for the security policy."""
    style = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return {"style": Markup(style), "style_digest": digest}


@cache
def templates() -> Environment:
    """Load the templates in ``report/templates``, with HTML escaping enabled."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_displayable,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["frame"] = FRAME
    return environment


def _displayable(value: Any) -> Any:
    """Replace characters that HTML does not allow, before ``value`` is escaped."""
    return value if isinstance(value, Markup) else _FORBIDDEN.sub("\ufffd", str(value))
