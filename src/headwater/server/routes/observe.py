"""Endpoints /metrics and /cache, the live page at /, the chat at /chat, and the watchers of requests for these."""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from headwater.config import ServeConfig
from headwater.errors import CheckpointError
from headwater.models.files import model_config
from headwater.models.hub import folder_of
from headwater.server import observe
from headwater.server.http.errors import BODY_REFUSALS, refusals
from headwater.server.http.exchange import ServedEngine
from headwater.server.http.middleware import Identified, around, during
from headwater.server.observe.logs import RequestLog
from headwater.server.observe.metrics import ByModel, Metrics
from headwater.server.observe.overview import Overview
from headwater.server.observe.recording import RecordedEngine, Recorder
from headwater.server.observe.tracing import Tracing, otlp_exporter
from headwater.server.requests.chat import ChatRequest
from headwater.server.routes.service import Service, Services, json_routes, service_of
from headwater.traces.recordings import Served

# description of /metrics in /openapi.json
EXPOSITION: dict[str, Any] = {
    "description": "In Prometheus' text format, or as OpenMetrics if the client accepts that",
    "content": {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")},
}
PAGE = Path(observe.__file__).parent / "page"
PAGE_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "content-security-policy": PAGE_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def install_recording(app: FastAPI, service: Service) -> None:
    """Record the engine's requests if a file is set. Raises ConfigError if it cannot be created."""
    config = service.config
    if config.record is None:
        return
    recorder = Recorder(config.record, _served(config, service.engine))
    service.engine = RecordedEngine(service.engine, recorder)
    during(app, recorder.running)


def _served(config: ServeConfig, engine: ServedEngine) -> Served:
    """Describe the server for its recording, so that `replay` and `size` take its model and policies."""
    try:
        keys = model_config(folder_of(config.model))
    except CheckpointError:  # a recording without the model's sizes is still of use
        keys = {}
    sizes = {name: value for name, value in keys.items() if not name.startswith("_")}
    dtype = getattr(engine.spec, "dtype_name", "")
    policies = config.placement, config.eviction
    return Served(config.page_size, engine.model_name, sizes, dtype, *policies, config.weights)


def install(app: FastAPI, services: Services) -> None:
    """Watch every request, outside of all other middleware, so that refused requests have an id and are counted, too.

    A request that names no model counts for the first one. Raises ConfigError if traces are configured and
    OpenTelemetry is not installed.
    """
    metrics = {service.engine.model_name: _watch(app, service) for service in services.all}
    first = metrics[services.first.engine.model_name]
    around(app, lambda stack: Identified(stack, lambda ended: metrics.get(ended.model, first).request_ended(ended)))
    registries = {name: one.registry for name, one in metrics.items()}
    app.state.registry = ByModel(registries) if services.several else first.registry


def _watch(app: FastAPI, service: Service) -> Metrics:
    """Let a model's requests be logged, counted, shown and traced; return their metrics."""
    engine, endpoint = service.engine, service.config.otlp_endpoint
    spec = engine.spec
    formats = spec.dtype_name, spec.weights_held
    exact = partial(_is_proven_exact, engine)
    metrics = Metrics(engine.model_name, engine.stats, spec.page_bytes, formats, exact)
    overview = service.overview = Overview(engine, service.prefills)
    tracing = None if endpoint is None else Tracing(otlp_exporter(endpoint), engine.model_name)
    service.watchers = (
        RequestLog(service.config.log_requests),
        metrics,
        overview.recent,
        *([] if tracing is None else [tracing]),
    )
    during(app, overview.timeline.sampling)
    if tracing is not None:
        during(app, tracing.running)
    return metrics


def _is_proven_exact(engine: ServedEngine) -> bool:
    """Return whether hits of an engine change no bit, as /health reports it."""
    return engine.health().get("deterministic") == "yes"


router = json_routes()


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", response_model=None, responses={200: EXPOSITION, **refusals(401)})
async def scrape(request: Request) -> Response:
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    text = await run_in_threadpool(encode, request.app.state.registry)  # waits for the engine's lock
    return Response(text, media_type=content_type)


@router.get("/cache", response_model=dict[str, Any], responses=refusals(400, 401, 404))
async def cache(
    http_request: Request,
    sample: Annotated[int, Query(ge=0, description="The last sample of the timeline that is known already.")] = 0,
    request: Annotated[int, Query(ge=0, description="The last request that is known already.")] = 0,
    tick: Annotated[int, Query(ge=-1, description="The tick of the tree that is known already.")] = -1,
    model: Annotated[str | None, Query(description="One of several models; without it, the first.")] = None,
) -> Response:
    body = await service_of(http_request).overview.since(sample, request, tick)
    return JSONResponse(body, headers={"cache-control": "no-store"})


class TreePath(BaseModel):
    """Path of a prompt in the tree of /cache."""

    nodes: list[int]  # ids, from the root of its namespace down


@router.post("/cache/path", responses=BODY_REFUSALS)
async def tree_path(body: ChatRequest, request: Request) -> TreePath:
    service = service_of(request)
    prompt = (await run_in_threadpool(service.conversation_prompt, body)).prompt
    return TreePath(nodes=await service.overview.path(body.salt, prompt, service.config.page_size))


@functools.cache
def page_files() -> dict[str, bytes]:
    """Return the files of the live page and the chat by name."""
    return {path.name: path.read_bytes() for path in PAGE.iterdir() if path.suffix in PAGE_TYPES}


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def page() -> Response:
    return await part("index.html")


@router.head("/chat", include_in_schema=False)
@router.get("/chat", include_in_schema=False)
async def chat_page() -> Response:
    return await part("chat.html")


@router.get("/page/{name}", include_in_schema=False)
async def part(name: str) -> Response:
    files = page_files()
    if name not in files:
        raise HTTPException(404, "Not Found")
    return Response(files[name], media_type=PAGE_TYPES[Path(name).suffix], headers=PAGE_HEADERS)
