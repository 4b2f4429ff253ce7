"""Pages that are generated from other files of the repository."""

import json
from pathlib import Path

from api_pages import api_pages
from commands_page import commands_page
from config_page import config_page

ROOT = Path(__file__).parents[2]


def generated_pages() -> dict[str, str]:
    """Return path below ``docs/`` -> Markdown of each generated page."""
    return {
        "contributing.md": top_level_file("CONTRIBUTING.md"),
        "changelog.md": top_level_file("CHANGELOG.md"),
        "reference/commands.md": commands_page(),
        "reference/config.md": config_page(),
        **api_pages(),
        **{
            path.relative_to(ROOT / "docs").with_suffix(".md").as_posix(): notebook(path)
            for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
        },
    }


def top_level_file(name: str) -> str:
    """Return a file of the top level, with its links relative to ``docs/``."""
    return (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")


def notebook(path: Path) -> str:
    """Return a notebook as Markdown, without outputs, and with a link to the file."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in cells]
    parts = [f"```python\n{text}\n```" if kind == "code" else text for kind, text in texts]
    return "\n\n".join([*parts, f"[Download this notebook]({path.name})\n"])
