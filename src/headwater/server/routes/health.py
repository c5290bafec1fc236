"""Whether the server is well, and which one it is."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from headwater.server.http.refusals import refusals
from headwater.server.routes.service import Service

SHOWN_SETTINGS = ("memory", "page_size", "cache", "placement", "eviction", "pool", "decode_reuse", "reproducible")


class Version(BaseModel):
    version: str


def install(app: FastAPI, service: Service) -> None:
    settings = {name: getattr(service.config, name) for name in SHOWN_SETTINGS}
    unwell = {503: {"model": dict[str, Any], "description": "The server stops, or its engine failed"}}

    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_model=dict[str, Any], responses=unwell)
    async def health() -> Response:
        state = service.engine.health()
        return JSONResponse({**state, "settings": settings}, 200 if state["status"] == "ok" else 503)

    @app.head("/ping", include_in_schema=False)
    @app.get("/ping", response_model=dict[str, Any], responses=refusals(401))
    async def ping() -> Response:
        return JSONResponse({})

    @app.get("/version", responses=refusals(401))
    async def of_the_package() -> Version:
        return Version(version=version("headwater"))
