"""The one model that is served."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from headwater.server.service import Service


def install(app: FastAPI, service: Service) -> None:
    engine = service.engine
    model = {"id": engine.model_name, "object": "model", "created": service.started, "owned_by": "headwater"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{**model, "max_model_len": engine.max_model_len}]}
