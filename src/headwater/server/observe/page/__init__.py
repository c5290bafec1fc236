"""The live page: one HTML file with its scripts and its style, served as they are."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.exceptions import HTTPException

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def install(app: FastAPI) -> None:
    files = {path.name: path.read_bytes() for path in Path(__file__).parent.iterdir() if path.suffix in TYPES}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return _answer(files, "index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return _answer(files, name)


def _answer(files: dict[str, bytes], name: str) -> Response:
    if name not in files:
        raise HTTPException(404, "Not Found")
    return Response(files[name], media_type=TYPES[Path(name).suffix], headers=HEADERS)
