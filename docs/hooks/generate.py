"""MkDocs hook: add the generated pages and tables, and link config keys in the text to their description."""

import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url
from models_table import insert_models_tables
from pages import generated_pages
from recipes_table import MARKER, recipes_table
from results_table import RESULTS_MARKER, results_table

from fastamp.config.defaults import KEYS

_CODE = re.compile(r'(?<!">)(?<!<pre>)<code>([A-Z][A-Z0-9_.]+)((?: [^<\n]*)?)</code>')
_REFERENCE = "reference/config.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Insert the tables of recipes, of results and of published weights."""
    for marker, table in ((MARKER, recipes_table), (RESULTS_MARKER, results_table)):
        markdown = markdown.replace(marker, table()) if marker in markdown else markdown
    return insert_models_tables(markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link each config key in a code span, such as ``SOLVER.AMP True``, to its description."""
    reference: Any = files.get_file_from_path(_REFERENCE)
    if page.file.src_uri == _REFERENCE:
        return html
    url = get_relative_url(reference.url, page.url)

    def link(match: re.Match) -> str:
        return f'<a href="{url}#{match[1]}">{match[0]}</a>' if match[1] in KEYS else match[0]

    return _CODE.sub(link, html)
