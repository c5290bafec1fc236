"""All that makes an app visible: the log, the metrics, the last requests, their traces."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp

from headwater.server.http import lifespan
from headwater.server.http.context import Identified
from headwater.server.observe import metrics, overview, page
from headwater.server.observe.logs import RequestLog
from headwater.server.observe.metrics import Metrics
from headwater.server.observe.recent import Recent
from headwater.server.observe.timeline import Timeline
from headwater.server.observe.tracing import Tracing, otlp_exporter
from headwater.server.routes.service import Service


def install(app: FastAPI, service: Service) -> None:
    """Watch every request from without all other middleware, so that what is refused has an id and counts, too.

    ConfigError if traces are asked for and OpenTelemetry is not installed.
    """
    engine, endpoint = service.engine, service.config.otlp_endpoint
    recent, numbers = Recent(), Metrics(engine.model_name, engine.stats, engine.spec.page_bytes)
    timeline = Timeline(engine.stats, recent)
    tracing = None if endpoint is None else Tracing(otlp_exporter(endpoint), engine.model_name)
    service.watchers = (RequestLog(), numbers, recent, *([] if tracing is None else [tracing]))
    _identify(app, numbers)
    lifespan.during(app, timeline.sampling)
    if tracing is not None:
        lifespan.during(app, tracing.running)
    metrics.install(app, numbers)
    overview.install(app, service, recent, timeline)
    page.install(app)


def _identify(app: FastAPI, numbers: Metrics) -> None:
    build = app.build_middleware_stack

    def identified_stack() -> ASGIApp:
        return Identified(build(), numbers.request_ended)

    app.build_middleware_stack = identified_stack  # type: ignore[method-assign]
