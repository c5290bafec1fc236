"""Endpoints about the server: health, version, the served model, paths of other servers' APIs that it lacks, and /docs.

/docs is a page about the API, written from /openapi.json, that loads nothing from other hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from headwater.server.http.errors import refusals
from headwater.server.routes.observe import PAGE_HEADERS
from headwater.server.routes.service import Residence, Service, Services, json_routes, service_of, services_of
from headwater.threads import restarts

Json = dict[str, Any]

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


class Model(Residence):
    """A served model, with the fields of OpenAI's API and of Anthropic's."""

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
    service, services = service_of(request), services_of(request)
    state = service.engine.health()
    if services.several:
        of_all = {one.engine.model_name: one.engine.health()["status"] for one in services.all}
        state |= {"status": status_of(services), "models": of_all}
    settings = {name: getattr(service.config, name) for name in SHOWN_SETTINGS}
    state |= {"thread_restarts": dict(restarts), "settings": settings}
    return JSONResponse(state, 200 if state["status"] == "ok" else 503)


@router.head("/health/ready", include_in_schema=False)
@router.get("/health/ready", response_model=dict[str, Any], responses=UNWELL)
async def ready(request: Request) -> Response:
    """Return 200 if requests are answered now, as /health does."""
    status = status_of(services_of(request))
    return JSONResponse({"status": status}, 200 if status == "ok" else 503)


@router.head("/health/live", include_in_schema=False)
@router.get("/health/live", response_model=dict[str, Any], responses=UNWELL)
async def live(request: Request) -> Response:
    """Return 200 unless only a restart helps; a server that drains lives."""
    status = status_of(services_of(request))
    return JSONResponse({"status": status}, 503 if status.startswith("failed") else 200)


def status_of(services: Services) -> str:
    """Return the status of the first engine that failed, or of the first that is not well; "ok" if all are."""
    found = [str(service.engine.health()["status"]) for service in services.all]
    return next((one for one in found if one.startswith("failed")), next((one for one in found if one != "ok"), "ok"))


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
    served = [await run_in_threadpool(served_model, service) for service in services_of(request).all]
    return Models(data=served, first_id=served[0].id, last_id=served[-1].id)


@router.get("/v1/models/{model_id:path}", responses=refusals(401, 404))
async def model(model_id: str, request: Request) -> Model:
    return await run_in_threadpool(served_model, services_of(request).named(model_id))


def served_model(service: Service) -> Model:
    """Describe the served model."""
    name, started = service.engine.model_name, service.started
    at = datetime.fromtimestamp(started, UTC)
    most = service.model_len
    held = service.residence().model_dump()
    return Model(id=name, display_name=name, created=started, created_at=at, max_model_len=most, **held)


async def absent() -> None:
    """Refuse a request to a path of another server's API, so that it differs from a mistyped one."""
    raise HTTPException(404, f"this server generates text and offers {OFFERED}, and nothing at this path")


for path in ABSENT:
    absent_routes.add_api_route(f"/v1/{path}", absent, methods=["GET", "POST", "DELETE"], include_in_schema=False)


REFERENCES = "#/components/schemas/"
HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Headwater: API</title><link rel="icon" href="/page/icon.svg"><link rel="stylesheet" href="/page/page.css">
<header><h1>Headwater: API</h1></header><main>
<section><p>Each path with the fields that it reads. <a href="/openapi.json">/openapi.json</a> has the same for
programs, such as a viewer or a generator of clients.</p></section>
"""


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    described = request.app.openapi()
    schemas = described.get("components", {}).get("schemas", {})
    sections = (
        section(f"{method.upper()} {path}", operation, schemas)
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
    )
    return HTMLResponse(HEAD + "".join(sections) + "</main></html>", headers=PAGE_HEADERS)


def section(title: str, operation: Json, schemas: Json) -> str:
    """Return the HTML of one operation: its parameters and the fields of its body."""
    rows = [(one["name"], one["schema"], one.get("required", False)) for one in operation.get("parameters", ())]
    for content in operation.get("requestBody", {}).get("content", {}).values():
        body = schemas.get(content["schema"].get("$ref", "").removeprefix(REFERENCES), {})
        needed = body.get("required", ())
        rows += [(name, schema, name in needed) for name, schema in body.get("properties", {}).items()]
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(type_of(schema))}</td><td>{'required' * needed}</td></tr>"
        for name, schema, needed in rows
    )
    table = f"<table><tr><th>field</th><th>type</th><th></th></tr>{cells}</table>" if rows else ""
    return f"<section><h2>{escape(title)}</h2>{table}</section>\n"


def type_of(schema: Json) -> str:
    """Return the type of a JSON schema in a few words."""
    return " or ".join(dict.fromkeys(_types(schema))) or "any"


def _types(schema: Json) -> Iterator[str]:
    if "$ref" in schema:
        yield schema["$ref"].removeprefix(REFERENCES)
    elif "anyOf" in schema:
        for part in schema["anyOf"]:
            yield from _types(part)
    elif "enum" in schema:
        yield from map(str, schema["enum"])
    elif schema.get("type") == "array":
        yield f"list of {type_of(schema.get('items', {}))}"
    elif schema.get("type") not in (None, "null"):
        bounds = [f"{word} {schema[key]:,}" for key, word in BOUNDS.items() if key in schema]
        yield " ".join([schema["type"], *bounds])


BOUNDS = {
    "exclusiveMinimum": "more than",
    "minimum": "from",
    "exclusiveMaximum": "less than",
    "maximum": "to",
    "minLength": "with at least",
}
