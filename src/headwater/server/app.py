"""App of the OpenAI-compatible API over an engine."""

from __future__ import annotations

from fastapi import FastAPI

from headwater.config import ServeConfig
from headwater.server.http import errors
from headwater.server.http.exchange import ServedEngine
from headwater.server.http.middleware import install_access
from headwater.server.routes import generation, info, observe, ollama, tokens
from headwater.server.routes.service import Service

# shared by all apps of a process; paths of other servers' APIs come after those that are offered
ROUTERS = (observe, info, generation, ollama, tokens)
ROUTES = [*(route for part in ROUTERS for route in part.router.routes), *info.absent_routes.routes]


def create_app(engine: ServedEngine, config: ServeConfig) -> FastAPI:
    """Return an app over this engine, which the caller starts and stops.

    Middleware that is installed later is outside: it sees a request first.
    """
    app = FastAPI(title="Headwater", docs_url=None, redoc_url=None, routes=ROUTES)
    service = app.state.service = Service(engine, config)
    app.state.body_limits = service.body_limits
    errors.install(app)
    observe.install_recording(app, service)
    install_access(app, config)
    observe.install(app, service)
    ollama.install(app, service)
    return app
