"""The one model that is served."""

from __future__ import annotations

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from headwater.server.http.refusals import refusals
from headwater.server.routes.service import Service


class Model(BaseModel):
    id: str
    object: str = "model"
    created: int  # seconds since 1970 at which the server started
    owned_by: str = "headwater"
    max_model_len: int  # tokens of prompt and answer together


class Models(BaseModel):
    object: str = "list"
    data: list[Model]


def install(app: FastAPI, service: Service) -> None:
    engine = service.engine

    def served() -> Model:
        return Model(id=engine.model_name, created=service.started, max_model_len=engine.max_model_len)

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models", responses=refusals(401))
    async def models() -> Models:
        return Models(data=[served()])

    @app.get("/v1/models/{model_id:path}", responses=refusals(401, 404))
    async def model(model_id: str) -> Model:
        if model_id != engine.model_name:
            raise HTTPException(404, f"there is no model {model_id[:100]!r} here, but {engine.model_name!r}")
        return served()
