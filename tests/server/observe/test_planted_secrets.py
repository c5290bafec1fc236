"""A secret in every field of every API, and in what libraries repeat: no log, span, metric or recording has it."""

import io
import json
import logging

import pytest
from fastapi.testclient import TestClient

from headwater.config import ServeConfig
from headwater.engine.constraint import ConstraintCompiler
from headwater.errors import ConstraintError, HeadwaterError, QueueFull, for_log
from headwater.server.app import create_app
from headwater.server.observe.logs import FORMATTERS
from headwater.server.routes import observe
from tests.server.fake_engine import FakeEngine

export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs headwater[otel]")

SECRET = "zanzibar"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [SECRET]}, "b": {"pattern": f"(?={SECRET})("}}}
TOOL = {"type": "function", "function": {"name": f"f_{SECRET}", "parameters": {**SCHEMA, SECRET: 1}}}
CHAT = "/v1/chat/completions"
FAULTS = [  # that libraries and templates repeat in their messages
    (CHAT, {"guided_regex": f"({SECRET}"}),
    (CHAT, {"guided_regex": f"(?={SECRET})"}),
    (CHAT, {"guided_grammar": f"root ::= {SECRET} ("}),
    (CHAT, {"guided_grammar": f'start: "{SECRET}'}),
    (CHAT, {"guided_json": SCHEMA}),
    (CHAT, {"guided_json": f'{{"{SECRET}'}),
    (CHAT, {"guided_json": {"type": SECRET}}),
    (CHAT, {"guided_json": {"$ref": f"#/{SECRET}"}}),
    (CHAT, {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": f"({SECRET}"}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {SECRET: SECRET}}}}),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"strict": True, "schema": SCHEMA}}},
    ),
    (CHAT, {"tools": [TOOL]}),
    (CHAT, {"tools": [TOOL], "tool_choice": "required"}),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": SECRET}}}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": SECRET, "strict": True, "parameters": SCHEMA}}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": SECRET, SECRET: {SECRET: 1}}]}]}),
    (CHAT, {"messages": [{"role": SECRET, "content": SECRET}]}),
    (CHAT, {"logit_bias": {SECRET: SECRET}}),
    (CHAT, {"chat_template_kwargs": {SECRET: SECRET}}),
    ("/v1/completions", {"prompt": "a", "guided_regex": f"[{SECRET}"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "tool_use", "input": SECRET}]}]}),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": {**SCHEMA, SECRET: 1}}]}),
    ("/v1/responses", {"input": [{"type": SECRET, "content": SECRET}]}),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "a", "strict": True, "schema": SCHEMA}}}),
    ("/api/chat", {"format": SCHEMA}),
]
NEEDED = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a", "texts": ["a"], "tokens": [1]}
MODEL = {"model", "name"}  # whose value is logged once
BOUNDS = {"max_tokens": 2, "max_output_tokens": 16}
TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% if tools and loop.first %}{{ raise_exception('bad tools ' ~ tools) }}{% endif %}{% endfor %}assistant:"""


class CompilingEngine(FakeEngine):
    """Fake engine that compiles constraints as the real one does."""

    def submit(self, generation, on_event):
        if generation.params.constraint is not None:
            ConstraintCompiler(self.tokenizer, self.spec.vocab_size, ()).machine(generation.params.constraint)
        return super().submit(generation, on_event)


def bodies(app, kinds):
    """Yield a path and a body with a secret in one field, for each field, with one or two kinds of JSON value."""
    described = app.openapi()
    for path, operations in described["paths"].items():
        if "requestBody" not in operations.get("post", {}):
            continue
        schema = operations["post"]["requestBody"]["content"]["application/json"]["schema"]
        fields = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
        base = {name: value for name, value in (NEEDED | BOUNDS).items() if name in fields}
        for number, name in enumerate(sorted(fields.keys() - MODEL)):
            yield from ((path, base | {name: value}) for value in (planted(name) * 2)[number % 2 :][:kinds])
        yield path, base | {SECRET: SECRET}
    yield from ((path, {**NEEDED, **BOUNDS, **fault}) for path, fault in FAULTS)


def planted(name):
    return (SECRET, [{SECRET: SECRET}]) if name in ("messages", "input", "tools") else (SECRET, {SECRET: [SECRET]})


@pytest.mark.parametrize(
    ("log_format", "kinds"), [("json", 1), pytest.param("text", 2, marks=pytest.mark.full)], ids=["json", "text"]
)
def test_secret_in_any_field_is_in_no_log_span_metric_or_recording(monkeypatch, tmp_path, log_format, kinds):
    exporter, lines = export.InMemorySpanExporter(), io.StringIO()
    handler, root = logging.StreamHandler(lines), logging.getLogger()
    handler.setFormatter(FORMATTERS[log_format]())
    monkeypatch.setattr(observe, "otlp_exporter", lambda endpoint: exporter)
    monkeypatch.setattr(root, "handlers", [handler])
    monkeypatch.setattr(root, "level", logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    config = ServeConfig(otlp_endpoint="http://127.0.0.1:1", record=tmp_path / "my.trace")
    (engine := CompilingEngine(chat_template=TEMPLATE)).start()
    app, refused, sent = create_app(engine, config), 0, 0
    with TestClient(app, raise_server_exceptions=False) as client:
        for path, body in bodies(app, kinds):
            refused += client.post(path, json=body).status_code >= 400
            sent += 1
        client.post(CHAT, content=f'{{"messages": "{SECRET}', headers={"content-type": "application/json"})
        shown = client.get("/metrics").text + client.get("/cache").text
    engine.stop()
    assert sent > 300
    assert refused > 150
    logged = lines.getvalue()
    assert logged.count("\n") > 200
    assert [line for line in logged.splitlines() if SECRET in line] == []
    spans = exporter.get_finished_spans()
    assert len(spans) > 50
    assert SECRET not in shown + json.dumps([json.loads(span.to_json()) for span in spans])
    assert SECRET.encode() not in (tmp_path / "my.trace").read_bytes()


def raised(error):
    try:
        raise error
    except Exception as caught:
        return caught


def test_logged_error_has_class_and_place_unless_its_message_is_of_numbers():
    assert for_log(QueueFull(3, 2, 1)) == "3 requests wait, the server takes 2; retry after 1 s"
    assert for_log(ConstraintError(SECRET, "guided_regex")) == "ConstraintError of guided_regex"
    assert for_log(raised(ValueError(SECRET))).startswith("ValueError at raised:")
    assert for_log(HeadwaterError(f"the step failed: {SECRET}")) == "HeadwaterError"
