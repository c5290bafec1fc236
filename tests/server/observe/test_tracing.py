"""Spans of requests, as OpenTelemetry's own exporter receives them."""

import asyncio
import sys

import pytest
from fastapi.testclient import TestClient

from headwater.account import CacheAccount, Reason
from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.events import FinishedEvent
from headwater.server.app import create_app
from headwater.server.http.middleware import RequestContext
from headwater.server.observe import tracing
from headwater.server.observe.record import GenerationEnd
from headwater.server.routes import observe

export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs headwater[otel]")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONFIG = ServeConfig(otlp_endpoint="http://127.0.0.1:1")


@pytest.fixture
def spans(engine, monkeypatch):
    """Run requests against an app; return the spans that were exported when the app had ended."""
    exporter = export.InMemorySpanExporter()
    monkeypatch.setattr(observe, "otlp_exporter", lambda endpoint: exporter)

    def run(*requests):
        with TestClient(create_app(engine, CONFIG), raise_server_exceptions=False) as client:
            for body, headers in requests:
                client.post("/v1/completions", json=body, headers=headers)
        return exporter.get_finished_spans()

    return run


def test_request_span_has_its_account_and_a_child_per_phase(spans):
    *children, root = spans(({"prompt": "x" * 200, "max_tokens": 8}, {"x-request-id": "mine"}))
    assert root.name == "text_completion fake"
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert root.attributes["gen_ai.usage.input_tokens"] == 200
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert root.attributes["headwater.reason"] == "cold"
    assert root.attributes["headwater.request_id"] == "mine"
    assert [child.name for child in children] == ["prepare", "prefill", "decode"]
    assert {child.parent.span_id for child in children} == {root.context.span_id}
    moments = [moment for child in children for moment in (child.start_time, child.end_time)]
    assert [root.start_time, *moments, root.end_time] == sorted([root.start_time, *moments, root.end_time])


def test_clients_trace_id_continues_in_the_span(spans):
    *_, root = spans(({"prompt": "abc"}, {"traceparent": f"00-{TRACE}-{PARENT}-01"}))
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT


def test_trace_that_makes_no_sense_is_not_gone_on_with(spans):
    *_, root = spans(({"prompt": "abc"}, {"traceparent": "00-nonsense"}))
    assert root.parent is None


def test_failure_is_an_error_of_its_span(spans, engine):
    engine.fail = RuntimeError("about zanzibar")
    (root,) = spans(({"prompt": "abc"}, {}))
    assert not root.status.is_ok
    assert root.attributes["error.type"] == "RuntimeError"
    assert "zanzibar" not in root.to_json()


def test_spans_contain_no_prompt_or_answer(spans, engine):
    engine.script = "zanzibar it is"
    made = spans(({"prompt": "zanzibar " * 20, "max_tokens": 20, "cache_salt": "zanzibar"}, {}))
    assert not any("zanzibar" in span.to_json() for span in made)


def test_without_the_extra_the_setting_is_refused_by_name(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"otlp_endpoint .*headwater\[otel\]"):
        create_app(engine, CONFIG)


def test_without_the_setting_nothing_of_opentelemetry_is_loaded(engine, monkeypatch):
    made = []
    monkeypatch.setattr(observe, "otlp_exporter", made.append)
    create_app(engine, ServeConfig())
    assert made == []


@pytest.mark.parametrize("given", ["http://h:4318", "http://h:4318/", "http://h:4318/v1/traces"])
def test_spans_go_to_the_endpoints_path_for_traces(given):
    assert tracing.otlp_exporter(given)._endpoint == "http://h:4318/v1/traces"


def test_time_in_the_queue_is_a_child_of_its_own():
    exporter = export.InMemorySpanExporter()
    tracer = tracing.Tracing(exporter, "m")
    account = CacheAccount(200, 128, 128, 0, Reason.DIVERGED)
    event = FinishedEvent("stop", "", account, 8, queued_seconds=1.0)
    tracer.ended(GenerationEnd(RequestContext(started_at=1000.0), "chat", 0, event, 0.5, 2.0, 4.0))
    asyncio.run(leave(tracer.running()))
    spans = {
        span.name: (span.start_time / 1e9 - 1000, span.end_time / 1e9 - 1000) for span in exporter.get_finished_spans()
    }
    assert spans == {
        "prepare": (0, 0.5),
        "queue": (0.5, 1.5),
        "prefill": (1.5, 2),
        "decode": (2, 4),
        "chat m": (0, 4),
    }


async def leave(context):
    async with context:
        pass
