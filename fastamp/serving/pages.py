"""Pages of the service: a picture and its matches, and the description of the routes."""

from functools import cache
from importlib.resources import files

from fastapi import FastAPI
from jinja2 import Environment
from starlette.responses import HTMLResponse, Response

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

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(content["page.html"], headers=_HEADERS)

    @cache
    def described_routes() -> str:  # at the first request, after all routes have been added
        return template.render(api=app.openapi())

    @app.get("/docs", include_in_schema=False)
    async def routes() -> Response:
        return HTMLResponse(described_routes(), headers=_HEADERS)

    def add_file(name: str, media_type: str) -> None:
        @app.get(f"/{name}", include_in_schema=False)
        async def file() -> Response:
            return Response(content[name], media_type=media_type, headers=_HEADERS)

    for name, media_type in _TYPES.items():
        add_file(name, media_type)
