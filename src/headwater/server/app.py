"""App of the OpenAI-compatible API over an engine."""

from __future__ import annotations

from fastapi import FastAPI

from headwater.config import ServeConfig
from headwater.server.http import errors
from headwater.server.http.access import install_access
from headwater.server.http.exchange import ServedEngine
from headwater.server.requests.body import JsonRoute
from headwater.server.routes import generation, info, observe, ollama, reference, tokens
from headwater.server.routes.service import Service


def create_app(engine: ServedEngine, config: ServeConfig) -> FastAPI:
    """Return an app over this engine, which the caller starts and stops.

    Middleware that is installed later is outside: it sees a request first.
    """
    app = FastAPI(title="Headwater", docs_url=None, redoc_url=None, strict_content_type=False)
    app.router.route_class = JsonRoute
    service = Service(engine, config)
    app.state.body_limits = service.body_limits
    errors.install(app)
    observe.install_recording(app, service)
    install_access(app, config)
    observe.install(app, service)
    info.install_health(app, service)
    info.install_models(app, service)
    generation.install(app, service)
    ollama.install(app, service)
    ollama.install_models(app, service)
    tokens.install(app, service)
    tokens.install_warming(app, service)
    reference.install(app)
    info.install_absent(app, service)
    return app
