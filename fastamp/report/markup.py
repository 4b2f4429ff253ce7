"""HTML and SVG that cannot be broken out of: text is escaped where an element takes it."""

import html
import re
from collections.abc import Iterable
from typing import Any

# What XML and HTML forbid, lone surrogates of undecodable file names, and marks that turn the direction of text.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069\ufffe\uffff]")
_VOID = frozenset({"br", "col", "img", "link", "meta"})


class Markup(str):
    """Text that is markup already."""


def escape(text: object) -> Markup:
    """Return text as markup that shows it; markup stays as it is."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(_FORBIDDEN.sub("\ufffd", str(text))))


def join(parts: Iterable[object], separator: str = "") -> Markup:
    """Return the parts one after the other."""
    return Markup(separator.join(escape(part) for part in parts))


def tag(name: str, *children: object, **attributes: Any) -> Markup:
    """Return an element.

    Args:
        name: of the element.
        children: text, which is escaped, or markup.
        attributes: None and False leave one out; an underscore at the end of a name is dropped (``class_``), the others
            become dashes.
    """
    pairs = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items()]
    shown = "".join(f' {key}="{escape(value)}"' for key, value in pairs if value is not None and value is not False)
    if name in _VOID:
        return Markup(f"<{name}{shown}>")
    return Markup(f"<{name}{shown}>{join(children)}</{name}>")
