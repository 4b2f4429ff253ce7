"""Code of the documentation, for tests that run it."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def documented_file(page: str, title: str) -> str:
    """Return the Python block with the title ``title`` of the page ``page``, e.g. ``extending/loss``."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf'^```python title="{re.escape(title)}"\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
    return block


def documented_config(page: str) -> str:
    """Return the first YAML block of the page ``page``."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.search(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE).group(1)
