"""Metrics, log lines and ids: none of them holds a value that a client can choose."""

import io
import json
import logging
import re
from importlib.metadata import version

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from headwater.account import CacheAccount, Reason
from headwater.config import ServeConfig
from headwater.events import FinishedEvent
from headwater.server.app import create_app
from headwater.server.http.middleware import RequestContext
from headwater.server.observe.logs import (
    JsonFormatter,
    OncePerSecond,
    RequestLog,
    TextFormatter,
    configure_logging,
    is_logged,
)
from headwater.server.observe.record import GenerationEnd

SECRET = "zanzibar"
PATIENCE = 20


@pytest.fixture
def client(engine):
    with TestClient(create_app(engine, ServeConfig()), raise_server_exceptions=False) as client:
        yield client


def complete(client, prompt="x" * 200, **body):
    return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, **body})


def samples(client):
    """Return {(name, labels): value} of a scrape."""
    text = client.get("/metrics").text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket"))
    }


def test_tokens_hits_and_misses_are_counted_as_requests_end(client):
    complete(client)
    complete(client)
    seen = samples(client)
    assert seen["headwater_prompt_tokens_total",] == 400
    assert seen["headwater_cached_tokens_total",] == 192
    assert seen["headwater_output_tokens_total",] == 16
    assert seen["headwater_hits_total",] == 1
    assert seen["headwater_misses_total", "cold"] == 1
    assert seen["headwater_misses_total", "evicted"] == 0
    assert seen["headwater_time_to_first_token_seconds_count",] == 2
    assert seen["headwater_inter_token_latency_seconds_count",] == 14
    assert seen["headwater_hit_length_tokens_sum",] == 192
    assert seen["headwater_requests_total", "completion", "ok"] == 2


def test_engine_gauges_are_read_at_each_scrape(client, engine):
    complete(client)
    seen = samples(client)
    assert seen["headwater_pages", "kv"] == 3
    assert seen["headwater_pages", "free"] == 997
    assert seen["headwater_page_bytes",] == 1024
    assert seen["headwater_evictions_total", "speculative_checkpoint"] == 0
    assert seen["headwater_computed_tokens_total", "prefill"] == 0
    assert seen["headwater_build_info", "fake", version("headwater")] == 1
    assert seen["headwater_model_info", "bfloat16", "bfloat16"] == 1


def test_requests_are_counted_by_how_they_ended(client, engine):
    assert complete(client, temperature=9).status_code == 400
    engine.fail = RuntimeError("midway")
    assert complete(client).status_code == 500
    complete(client, stream=True)
    client.get("/no/such/path")
    seen = samples(client)
    assert seen["headwater_requests_total", "completion", "refused"] == 1
    assert seen["headwater_requests_total", "completion", "failed"] == 2
    assert seen["headwater_requests_total", "other", "refused"] == 1


def test_no_label_is_a_clients_to_choose(client):
    samples(client)  # which is itself counted
    before = set(samples(client))
    complete(client, cache_salt=SECRET, user=SECRET, model=SECRET)
    client.get(f"/{SECRET}", headers={"x-request-id": SECRET})
    after = set(samples(client))
    assert after - before == {("headwater_requests_total", "other", "refused")}
    assert SECRET not in client.get("/metrics").text


def test_two_apps_do_not_share_their_metrics(client, engine):
    complete(client)
    other = TestClient(create_app(engine, ServeConfig()))
    assert samples(other)["headwater_prompt_tokens_total",] == 0


def test_scrape_may_ask_for_open_metrics(client):
    answer = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_every_answer_has_an_id_and_a_client_may_choose_it(client, engine):
    assert re.fullmatch(r"req-[0-9a-f]{32}", complete(client).headers["x-request-id"])
    named = client.get("/health", headers={"x-request-id": "mine-1"})
    assert named.headers["x-request-id"] == "mine-1"
    for unusable in ("", "a b", "x" * 65, "a\tb"):
        answer = client.get("/health", headers={"x-request-id": unusable})
        assert answer.headers["x-request-id"].startswith("req-")
    engine.fail = RuntimeError("midway")
    assert complete(client).headers["x-request-id"].startswith("req-")


def test_unauthorised_request_has_an_id_and_counts(engine):
    client = TestClient(create_app(engine, ServeConfig(api_key="k" * 16)))
    answer = complete(client)
    assert answer.status_code == 401
    assert answer.headers["x-request-id"].startswith("req-")
    key = {"authorization": f"Bearer {'k' * 16}"}
    assert (
        'headwater_requests_total{endpoint="completion",outcome="refused"} 1.0'
        in client.get("/metrics", headers=key).text
    )


@pytest.fixture
def json_lines():
    """Collect the JSON lines of Headwater's loggers."""
    stream, logger = io.StringIO(), logging.getLogger("headwater")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_request_is_one_json_object_in_one_line(client, json_lines):
    answer = complete(client)
    (line,) = json_lines()
    assert line["request_id"] == answer.headers["x-request-id"]
    assert (line["endpoint"], line["prompt_tokens"], line["reason"]) == ("completion", 200, "cold")
    assert line["output_tokens"] == 8
    assert line["level"] == "info"
    assert line["ttft_seconds"] <= line["total_seconds"]


def test_refusal_and_a_failure_are_lines_with_the_requests_id(client, engine, json_lines):
    refused = complete(client, temperature=9)
    engine.fail = RuntimeError("mid\nway")
    failed = complete(client)
    lines = json_lines()
    assert lines[0]["request_id"] == refused.headers["x-request-id"]
    assert "status=400" in lines[0]["message"]
    assert {line["request_id"] for line in lines[1:]} == {failed.headers["x-request-id"]}
    assert any(line.get("outcome") == "failed" and line["error"] == "RuntimeError" for line in lines)


def test_answers_outside_the_logged_share_have_no_line_and_failures_do(engine, json_lines):
    with TestClient(create_app(engine, ServeConfig(log_requests=0.5)), raise_server_exceptions=False) as client:
        ids = [f"req-{number}" for number in range(40)]
        for one in ids:
            client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1}, headers={"x-request-id": one})
        logged = [line["request_id"] for line in json_lines()]
        assert logged == [one for one in ids if is_logged(one, 0.5)]
        assert 10 < len(logged) < 30
        engine.fail = RuntimeError("midway")
        unlogged = next(one for one in ids if one not in logged)
        client.post("/v1/completions", json={"prompt": "abc"}, headers={"x-request-id": unlogged})
        assert unlogged in [line["request_id"] for line in json_lines()]


def test_log_lines_contain_no_prompt_or_answer(client, engine, json_lines):
    engine.script = f"I say {SECRET} myself"
    complete(client, prompt=f"tell me of {SECRET} " * 30, max_tokens=30)
    client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": SECRET}], "user": SECRET})
    assert len(json_lines()) == 2
    assert SECRET not in json.dumps(json_lines())


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": {"text": SECRET}},
        {"stop": [[SECRET]]},
        {"suffix": SECRET},
        {"response_format": {"type": SECRET}},
        {"temperature": SECRET},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_log_lines_contain_no_refused_values(client, json_lines, fields):
    refused = complete(client, **fields)
    assert refused.status_code == 400
    (line,) = json_lines()
    assert next(iter(fields)) in line["message"]
    assert SECRET not in json.dumps(line)
    assert client.post("/v1/chat/completions", json={"messages": SECRET}).status_code == 400
    assert SECRET not in json.dumps(json_lines())


@pytest.mark.parametrize("said", ["/v1/models\n2026-01-01 forged", "a\r\nb", "\x1b[2Jc", "d\u2028e\x85f"])
def test_text_log_record_is_one_printable_line(said):
    record = logging.makeLogRecord({"name": "headwater.request", "msg": "refused %s status=401", "args": (said,)})
    line = TextFormatter().format(record)
    assert line.splitlines() == [line]
    assert line.isprintable()


def test_text_log_line_keeps_the_request_id_within_200_characters():
    record = logging.makeLogRecord({"name": "headwater.request", "msg": "%s id=req-7", "args": ("word " * 100,)})
    line = TextFormatter().format(record)
    assert 190 <= len(line) <= 200  # whole words
    assert " … " in line
    assert line.endswith(" id=req-7")


def test_line_that_is_cut_loses_whole_words():
    words = [f"counter{number}={number:,}" for number in range(1000, 1040)]
    kept = TextFormatter().formatMessage(
        logging.makeLogRecord({"name": "n", "message": " ".join(words), "asctime": "now"})
    )
    assert len(kept) <= 200
    assert set(kept.split(" ")) - {"now", "n", "…"} <= set(words)
    assert kept.endswith(words[-1])


def test_longest_usual_line_has_200_characters_and_no_zeros(caplog):
    account = CacheAccount(131_072, 131_008, 131_008, 0, Reason.FULL)
    context = RequestContext(id="req-" + "0" * 32)
    finished = FinishedEvent("length", "", account, 16_384)
    with caplog.at_level(logging.INFO, logger="headwater.request"):
        RequestLog().ended(GenerationEnd(context, "completion", 0, finished, 0.0, 12.345, 123.456))
    (record,) = caplog.records
    line = TextFormatter().format(record)
    assert "prompt=131,072 cached=131,008 reason=full output=16,384 finish=length" in line
    assert not re.search(r"=(0|False)\b", line)
    assert "…" not in line
    assert len(line) <= 200


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": "hot"}, "temperature is invalid: a string"),
        ({"temperature": [1]}, "temperature is invalid: a list"),
        ({"max_tokens": None, "stop": {"a": 1}}, "stop is invalid: an object"),
        ({"n": True}, "n is invalid: a boolean"),
        ({"prompt": []}, "prompt is invalid: a list"),
        ({"suffix": "x"}, "suffix is invalid: a string"),
    ],
)
def test_refusal_log_line_names_the_refused_type(client, json_lines, fields, said):
    complete(client, **fields)
    assert client.post("/v1/chat/completions", json={}).status_code == 400
    line, without = json_lines()
    assert line["message"] == f"refused /v1/completions status=400: {said}"
    assert without["message"] == "refused /v1/chat/completions status=400: messages is invalid: missing"


@pytest.mark.parametrize(("kind", "named"), [("image_url", " (image_url)"), (SECRET, "")])
def test_refused_part_is_named_if_its_type_is_the_apis(client, json_lines, kind, named):
    messages = [{"role": "user", "content": [{"type": kind, kind: {"url": SECRET}}]}]
    assert client.post("/v1/chat/completions", json={"messages": messages}).status_code == 400
    (line,) = json_lines()
    assert line["message"] == f"refused /v1/chat/completions status=400: messages is invalid: a list{named}"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_logging_is_configured_in_both_formats(log_format, capsys):
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure_logging(log_format)
        logging.getLogger("headwater.test").info("hello %d", 7)
        (line,) = capsys.readouterr().err.splitlines()
    finally:
        root.handlers[:], level = before
        root.setLevel(level)
    if log_format == "json":
        assert json.loads(line)["message"] == "hello 7"
    else:
        assert line.endswith("headwater.test hello 7")


def test_lines_below_the_log_level_are_left_out(capsys):
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        configure_logging("text", "warning")
        logging.getLogger("headwater.test").info("hello")
        logging.getLogger("headwater.test").warning("careful")
        (line,) = capsys.readouterr().err.splitlines()
    finally:
        root.handlers[:], level = before
        root.setLevel(level)
    assert line.endswith("careful")


def test_repeated_warning_is_one_line_a_second():
    now, lines = [0.0], []
    log = logging.Logger("repeating")
    handler = logging.Handler()
    handler.addFilter(OncePerSecond(clock=lambda: now[0]))
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    for number in range(1000):
        log.warning("no room for %d", number)
    log.warning("another one")
    log.info("all pass")
    log.info("all pass")
    now[0] = 1.5
    log.warning("no room for %d", 7)
    assert lines == [
        "no room for 0",
        "another one",
        "all pass",
        "all pass",
        "no room for 7 (999 more like it since the last)",
    ]
