"""App of the OpenAI-compatible API over an engine."""

from __future__ import annotations

from fastapi import FastAPI

from headwater.config import ServeConfig
from headwater.server.http import errors
from headwater.server.http.exchange import ServedEngine
from headwater.server.http.middleware import install_access
from headwater.server.requests.body import BodyLimits
from headwater.server.routes import generation, info, observe, ollama, tokens
from headwater.server.routes.service import Service, Services

# shared by all apps of a process; paths of other servers' APIs come after those that are offered
ROUTERS = (observe, info, generation, ollama, tokens)
ROUTES = [*(route for part in ROUTERS for route in part.router.routes), *info.absent_routes.routes]


def create_app(engine: ServedEngine, config: ServeConfig, *others: tuple[ServedEngine, ServeConfig]) -> FastAPI:
    """Return an app over this engine, and over engines of other models, which the caller starts and stops.

    Settings of the process, such as keys, are those of `config`. Middleware that is installed later is outside: it sees
    a request first.
    """
    app = FastAPI(title="Headwater", docs_url=None, redoc_url=None, routes=ROUTES)
    services = app.state.services = Services([Service(*one) for one in ((engine, config), *others)])
    app.state.body_limits = BodyLimits.widest(one.body_limits for one in services.all)
    errors.install(app)
    observe.install_recording(app, services.first)
    install_access(app, config)
    observe.install(app, services)
    ollama.install(app, services)
    return app
