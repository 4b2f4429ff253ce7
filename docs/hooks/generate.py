"""MkDocs hook: pages that are generated from other files of the repository."""

import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]


def top_level_file(name: str) -> str:
    """Return a file of the top level, with its links relative to ``docs/``."""
    return (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")


def notebook(path: Path) -> str:
    """Return a notebook as Markdown, without outputs."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"]).strip()) for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in texts)


def pages() -> dict[str, str]:
    """Return path below ``docs/`` -> Markdown of each generated page."""
    return {
        "contributing.md": top_level_file("CONTRIBUTING.md"),
        "changelog.md": top_level_file("CHANGELOG.md"),
        "reference/commands.md": "# Commands\n\nEach command with its arguments.\n",
        "reference/config.md": "# Config keys\n\nEach config key with its default and meaning.\n",
        "reference/messages.md": "# Messages\n\nEach warning and error with its cause and fix.\n",
        "reference/api/index.md": "# Python API\n\nThe public classes and functions by package.\n",
        **{
            path.relative_to(ROOT / "docs").with_suffix(".md").as_posix(): notebook(path)
            for path in sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
        },
    }


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
