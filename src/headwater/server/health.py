"""Whether the server is well, and which one it is."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from headwater.server.service import Service

SHOWN_SETTINGS = ("memory", "page_size", "cache", "placement", "eviction", "pool", "decode_reuse", "reproducible")


def install(app: FastAPI, service: Service) -> None:
    settings = {name: getattr(service.config, name) for name in SHOWN_SETTINGS}

    @app.get("/health")
    async def health() -> Response:
        state = service.engine.health()
        return JSONResponse({**state, "settings": settings}, 200 if state["status"] == "ok" else 503)
