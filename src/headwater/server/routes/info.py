"""Endpoints about the server: health, version, the served model, and paths of other servers' APIs that it lacks."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from headwater.server.http.errors import refusals
from headwater.server.routes.service import Service

SHOWN_SETTINGS = ("memory", "page_size", "cache", "placement", "eviction", "pool", "decode_reuse", "reproducible")
# paths below /v1 that other servers have
OTHER_MEDIA = ("audio/{rest:path}", "images/{rest:path}", "videos", "realtime")
NUMBERS = ("embeddings", "moderations", "rerank", "score", "pooling", "classify")
STORES = ("files", "batches", "fine_tuning/{rest:path}", "assistants", "threads", "vector_stores", "conversations")
ABSENT = (*OTHER_MEDIA, *NUMBERS, *STORES, "messages/batches", "messages/batches/{rest:path}")
OFFERED = (
    "/v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/models, /api/chat, /api/generate, "
    "/tokenize and /detokenize (/docs describes them)"
)


class Version(BaseModel):
    version: str


class Model(BaseModel):
    """The served model, with the fields of OpenAI's API and of Anthropic's."""

    id: str
    object: str = "model"
    type: str = "model"
    display_name: str
    created: int  # seconds since 1970 at which the server started
    created_at: datetime  # the same time
    owned_by: str = "headwater"
    max_model_len: int  # tokens of prompt and answer together


class Models(BaseModel):
    object: str = "list"
    data: list[Model]
    has_more: bool = False
    first_id: str
    last_id: str


def install_health(app: FastAPI, service: Service) -> None:
    """Add /health, /ping and /version."""
    settings = {name: getattr(service.config, name) for name in SHOWN_SETTINGS}
    unwell: dict[int | str, dict[str, Any]] = {
        503: {"model": dict[str, Any], "description": "The server stops, or its engine failed"}
    }

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


def install_models(app: FastAPI, service: Service) -> None:
    """Add /v1/models, a list of the one model that is served."""
    engine = service.engine

    def served() -> Model:
        name, started = engine.model_name, service.started
        at = datetime.fromtimestamp(started, UTC)
        return Model(id=name, display_name=name, created=started, created_at=at, max_model_len=engine.max_model_len)

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models", responses=refusals(401))
    async def models() -> Models:
        return Models(data=[served()], first_id=engine.model_name, last_id=engine.model_name)

    @app.get("/v1/models/{model_id:path}", responses=refusals(401, 404))
    async def model(model_id: str) -> Model:
        if model_id != engine.model_name:
            raise HTTPException(404, f"there is no model {model_id[:100]!r} here, but {engine.model_name!r}")
        return served()


def install_absent(app: FastAPI, service: Service) -> None:
    """Add paths of other servers' APIs, so that an endpoint that is absent differs from a mistyped one."""

    async def absent(request: Request) -> None:
        raise HTTPException(404, f"this server generates text and offers {OFFERED}, and nothing at this path")

    for path in ABSENT:
        app.add_api_route(f"/v1/{path}", absent, methods=["GET", "POST", "DELETE"], include_in_schema=False)
