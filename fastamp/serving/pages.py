"""Pages of the service: a picture and its matches, and the description of the routes."""

from collections.abc import Callable
from functools import cache, partial
from importlib.resources import files

from fastapi import FastAPI
from jinja2 import Environment
from starlette.responses import Response

# Nothing of other servers, and no scripts or styles inside the page.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_TYPES = {"page.js": "text/javascript", "page.css": "text/css"}


def add_pages(app: FastAPI) -> None:
    """Add the pages, which need no API key: they contain no data, and ask for the key."""
    folder = files("fastamp.serving") / "static"
    content = {name: (folder / name).read_text(encoding="utf-8") for name in ("page.html", "routes.html", *_TYPES)}
    template = Environment(autoescape=True).from_string(content["routes.html"])

    def add(path: str, media_type: str, text: Callable[[], str]) -> None:
        @app.get(path, include_in_schema=False)
        async def page() -> Response:
            return Response(text(), media_type=media_type, headers=_HEADERS)

    add("/", "text/html", lambda: content["page.html"])
    # Described at the first request, after all routes have been added.
    add("/docs", "text/html", cache(lambda: template.render(api=app.openapi())))
    for name, media_type in _TYPES.items():
        add(f"/{name}", media_type, partial(content.__getitem__, name))
