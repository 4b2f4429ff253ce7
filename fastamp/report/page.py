"""The report: one page in one file, that asks nobody for anything."""

import base64
import hashlib
import time
from pathlib import Path

from fastamp.report.markup import Markup, tag
from fastamp.report.run import Run
from fastamp.report.sections import (
    config_section,
    data_section,
    environment_section,
    health_section,
    results_section,
    training_section,
)
from fastamp.report.style import STYLE
from fastamp.utils.errors import writing
from fastamp.utils.files import write_atomically


def write_report(run: Run, folder: Path, *, name: str = "report.html") -> Path:
    """Write the report of a run to a file in a folder, which is made when missing; return its path.

    Raises:
        ConfigError: it cannot be written.
    """
    path = folder / name
    content = page(run).encode()
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda file: file.write(content))
    return path


def page(run: Run) -> str:
    """Return the report of a run as HTML."""
    sections: list[tuple[str, str, Markup]] = []
    for number, each in enumerate(run.sets, start=1):
        sections.append((f"set-{number}", each.name, results_section(each, number, len(run.sets))))
    if run.history is not None:
        sections.append(("training", "Training", training_section(run.history)))
    sections.append(("precision", "Mixed precision", health_section(run)))
    sections.append(("data", "Data", data_section(run)))
    sections.append(("config", "Config", config_section(run)))
    sections.append(("environment", "Environment", environment_section(run)))
    links = (tag("li", tag("a", title, href=f"#{anchor}")) for anchor, title, _ in sections)
    header = tag(
        "header",
        tag("p", "fastamp report", class_="kind"),
        tag("h1", run.cfg.OUTPUT_DIR),
        tag("p", f"{run.weights}; written {time.strftime('%Y-%m-%d %H:%M')}", class_="note"),
        tag("p", tag("strong", "How it was measured: "), run.protocol, class_="protocol"),
        tag("nav", tag("ul", *links), aria_label="Sections"),
    )
    body = tag("body", header, tag("main", *(section for _, _, section in sections)))
    title = f"{run.cfg.OUTPUT_DIR} \u2013 fastamp report"
    return "<!doctype html>\n" + tag("html", _head(title), "\n", body, lang="en") + "\n"


def _head(title: str) -> Markup:
    """Return the head: nothing may be loaded, and no style but the page's own is followed."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    allowed = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{allowed}">'),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("meta", name_="referrer", content="no-referrer"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        Markup(f"<style>{STYLE}</style>"),
    )
