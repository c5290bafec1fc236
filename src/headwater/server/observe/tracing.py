"""OpenTelemetry spans: one for each answer, with children for its wait, prefill and decoding.

Attributes follow the semantic conventions for generative AI if these have a name, else they are headwater.*. Spans are
created when an answer has ended, with the times of its events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool

from headwater.errors import ConfigError
from headwater.server.http.middleware import RequestContext
from headwater.server.observe.record import GenerationEnd, Watcher

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

OPERATIONS = {"chat": "chat", "completion": "text_completion"}  # other endpoints keep their names
NANOSECONDS = 1_000_000_000


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter to `endpoint` over HTTP. Raises ConfigError if the extra is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        needed = "which needs OpenTelemetry: pip install 'headwater[otel]'"
        raise ConfigError(f"otlp_endpoint is {endpoint!r}, {needed}") from error
    path = "" if endpoint.rstrip("/").endswith("/v1/traces") else "/v1/traces"
    return OTLPSpanExporter(endpoint.rstrip("/") + path)


class Tracing(Watcher):
    """Watcher that creates spans, and exports them in batches on a thread of its own."""

    def __init__(self, exporter: SpanExporter, model: str) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({"service.name": "headwater", "service.version": version("headwater")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("headwater", version("headwater"))
        self._propagator = TraceContextTextMapPropagator()
        self._model, self._api = model, trace

    def ended(self, end: GenerationEnd) -> None:
        root = self._begin(end.request, end.endpoint)
        attributes = {
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [end.event.finish_reason],
            "gen_ai.usage.input_tokens": end.account.prompt_tokens,
            "gen_ai.usage.output_tokens": end.event.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": end.account.cached_tokens,
            "headwater.generation": end.number,
        }
        account = {f"headwater.{name}": _plain(value) for name, value in end.account.as_dict().items()}
        root.set_attributes(attributes | account)
        queued = end.event.queued_seconds
        waited = end.submitted + (queued or 0.0)
        self._child(root, end.request, "prepare", 0.0, end.submitted)
        if queued is not None:
            self._child(root, end.request, "queue", end.submitted, waited)
        self._child(root, end.request, "prefill", waited, end.first_token)
        self._child(root, end.request, "decode", end.first_token, end.total)
        root.end(_at(end.request, end.total))

    def lost(self, request: RequestContext, endpoint: str, error: Exception | None) -> None:
        root = self._begin(request, endpoint)
        if error is None:
            root.add_event("cancelled")
        else:
            root.set_attribute("error.type", type(error).__name__)
            root.set_status(self._api.StatusCode.ERROR, type(error).__name__)
        root.end(_at(request, request.seconds))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Export until the block ends, then send the remaining spans."""
        try:
            yield
        finally:
            await run_in_threadpool(self._provider.shutdown)

    def _begin(self, request: RequestContext, endpoint: str) -> Any:
        carrier = {"traceparent": request.traceparent, "tracestate": request.tracestate}
        parent = self._propagator.extract({name: value for name, value in carrier.items() if value})
        operation = OPERATIONS.get(endpoint, endpoint)
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "headwater",
            "gen_ai.request.model": self._model,
            "headwater.request_id": request.id,
        }
        name, kind, start = f"{operation} {self._model}", self._api.SpanKind.SERVER, _at(request, 0.0)
        return self._tracer.start_span(name, parent, kind=kind, attributes=attributes, start_time=start)

    def _child(self, root: Any, request: RequestContext, name: str, start: float, end: float) -> None:
        inside = self._api.set_span_in_context(root)
        self._tracer.start_span(name, inside, start_time=_at(request, start)).end(_at(request, max(start, end)))


def _at(request: RequestContext, seconds: float) -> int:
    """Return the wall-clock time in nanoseconds, `seconds` after the request arrived."""
    return int((request.started_at + seconds) * NANOSECONDS)


def _plain(value: object) -> str | int | bool:
    return value if isinstance(value, str | int | bool) else str(value)
