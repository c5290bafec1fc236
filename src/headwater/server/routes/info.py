"""Endpoints about the server: health, version, the served model, and paths of other servers' APIs that it lacks."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from headwater.server.http.errors import refusals
from headwater.server.routes.service import Service, json_routes, service_of

SHOWN_SETTINGS = ("memory", "page_size", "cache", "placement", "eviction", "decode_reuse", "reproducible")
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


UNWELL: dict[int | str, dict[str, Any]] = {
    503: {"model": dict[str, Any], "description": "The server stops, or its engine failed"}
}
router, absent_routes = json_routes(), json_routes()


@router.head("/health", include_in_schema=False)
@router.get("/health", response_model=dict[str, Any], responses=UNWELL)
async def health(request: Request) -> Response:
    service = service_of(request)
    state = service.engine.health()
    settings = {name: getattr(service.config, name) for name in SHOWN_SETTINGS}
    return JSONResponse({**state, "settings": settings}, 200 if state["status"] == "ok" else 503)


@router.head("/ping", include_in_schema=False)
@router.get("/ping", response_model=dict[str, Any], responses=refusals(401))
async def ping() -> Response:
    return JSONResponse({})


@router.get("/version", responses=refusals(401))
async def of_the_package() -> Version:
    return Version(version=version("headwater"))


@router.head("/v1/models", include_in_schema=False)
@router.get("/v1/models", responses=refusals(401))
async def models(request: Request) -> Models:
    served = served_model(service_of(request))
    return Models(data=[served], first_id=served.id, last_id=served.id)


@router.get("/v1/models/{model_id:path}", responses=refusals(401, 404))
async def model(model_id: str, request: Request) -> Model:
    served = served_model(service_of(request))
    if model_id != served.id:
        raise HTTPException(404, f"model {model_id[:100]!r} is not served here; the model is {served.id!r}")
    return served


def served_model(service: Service) -> Model:
    """Describe the served model."""
    name, started = service.engine.model_name, service.started
    at = datetime.fromtimestamp(started, UTC)
    most = service.engine.max_model_len
    return Model(id=name, display_name=name, created=started, created_at=at, max_model_len=most)


async def absent() -> None:
    """Refuse a request to a path of another server's API, so that it differs from a mistyped one."""
    raise HTTPException(404, f"this server generates text and offers {OFFERED}, and nothing at this path")


for path in ABSENT:
    absent_routes.add_api_route(f"/v1/{path}", absent, methods=["GET", "POST", "DELETE"], include_in_schema=False)
