"""The OpenAI-compatible API over an engine: a list of what installs its routes."""

from __future__ import annotations

from fastapi import FastAPI

from headwater.config import ServeConfig
from headwater.server.http import access, errors, refusals
from headwater.server.observe import recording, telemetry
from headwater.server.requests.body import JsonRoute
from headwater.server.routes import absent, generate, health, models, responses, tokens, warming
from headwater.server.routes.service import ServedEngine, Service

# each adds its routes, or its middleware: the last one added sees a request first
PARTS = (
    recording.install,
    access.install,
    telemetry.install,
    health.install,
    models.install,
    generate.install,
    responses.install,
    tokens.install,
    warming.install,
    absent.install,
)


def create_app(engine: ServedEngine, config: ServeConfig) -> FastAPI:
    """The engine is started and stopped by the caller."""
    app = FastAPI(title="Headwater", docs_url=None, redoc_url=None, strict_content_type=False)
    app.router.route_class = JsonRoute
    service = Service(engine, config)
    errors.install(app)
    refusals.install(app)
    for install in PARTS:
        install(app, service)
    return app
