"""Several API keys: names, namespaces, limits and ends, and their renewal while a server runs."""

import asyncio
import json
import logging
import os
import signal

import httpx
import pytest

from headwater.api_keys import ApiKey
from headwater.config import ServeConfig
from headwater.server.app import create_app
from headwater.server.http.keys import Tenant, Tenants, Use
from headwater.server.observe.logs import JsonFormatter
from tests.forked import address, serving
from tests.server.client import error, send_to
from tests.server.http.test_draining import FOREVER, draining, engine  # noqa: F401  # fixtures

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
KEYS = """\
[ann]
key = "secret of ann"
share = 3
[bob]
key = "secret of bob"
namespace = "ann"
[eve]
key = "secret of eve"
requests_per_minute = 2
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "keys.toml").write_text(KEYS)
    return ServeConfig(api_key_file=tmp_path / "keys.toml")


@pytest.fixture
def app(engine, config):  # noqa: F811
    engine.hold_after = None
    yield create_app(engine, config)
    engine.stop()


def by(name, body=HELLO, path=CHAT, method="POST"):
    headers = {"authorization": f"Bearer secret of {name}"}
    return method, path, {"headers": headers, "json": body} if method == "POST" else {"headers": headers}


def test_keys_share_content_only_within_a_namespace(app, engine):  # noqa: F811
    long = {"messages": [{"role": "user", "content": "hello " * 50}], "max_tokens": 2}
    requests = [by("ann", long), by("bob", long), by("eve", long), by("eve", {**long, "cache_salt": "ann"})]
    answers = send_to(app, requests)
    cached = [one.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0 for one in answers]
    assert cached == [False, True, False, False]
    assert [(one.namespace, one.key, one.share) for one in engine.seen] == [
        ("ann", "ann", 3),
        ("ann", "bob", 1),
        ("eve", "eve", 1),
        ("eve/ann", "eve", 1),
    ]


def test_segments_are_stored_for_the_key(app, engine):  # noqa: F811
    send_to(app, [by("eve", {"texts": ["a text with more tokens than two seams"]}, "/cache/segments")])
    assert {namespace for namespace, _ in engine.segments} == {"eve"}


def test_request_beyond_a_limit_gets_429_in_its_form(app):
    bodies = {
        CHAT: HELLO,
        "/v1/messages": HELLO,
        "/api/chat": {"messages": HELLO["messages"], "stream": False},
    }
    answers = send_to(app, [by("eve"), by("eve"), *(by("eve", body, path) for path, body in bodies.items())])
    assert [one.status_code for one in answers] == [200, 200, 429, 429, 429]
    refused = dict(zip(bodies, answers[2:], strict=True))
    message = "2 requests were used, the key has 2 a minute; retry after 30 s"
    assert {one.headers["retry-after"] for one in refused.values()} == {"30"}
    assert error(refused[CHAT], 429) == {
        "message": message, "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded",
    }  # fmt: skip
    assert refused["/v1/messages"].json()["error"]["type"] == "rate_limit_error"
    assert refused["/api/chat"].json() == {"error": message}
    listed, another = send_to(app, [by("eve", path="/v1/models", method="GET"), by("ann")])
    assert (listed.status_code, another.status_code) == (200, 200)


def test_metrics_and_logs_name_the_key_and_never_hold_it(app, caplog):
    with caplog.at_level(logging.INFO):
        answers = send_to(app, [by("ann"), by("eve"), by("eve"), by("eve"), by("ann", path="/metrics", method="GET")])
    scraped = answers[-1].text
    assert 'headwater_key_requests_total{key="eve",outcome="refused"} 1.0' in scraped
    assert 'headwater_key_requests_total{key="ann",outcome="ok"} 1.0' in scraped
    assert 'headwater_key_tokens_total{key="ann",kind="output"} 5.0' in scraped
    lines = [record.getMessage() for record in caplog.records if record.name == "headwater.request"]
    assert [line.rsplit("key=", 1)[1].split()[0] for line in lines] == ["ann", "eve", "eve", "eve"]
    objects = [json.loads(JsonFormatter().format(record)) for record in caplog.records if hasattr(record, "fields")]
    assert [one["key"] for one in objects] == ["ann", "eve", "eve"]
    assert "secret" not in caplog.text + scraped


def tenant(clock, **limits):
    return Tenant(ApiKey(b"k", **limits), Use(lambda: clock[0]))


def test_tokens_a_minute_are_those_of_prompts_and_answers():
    clock = [0.0]
    one = tenant(clock, tokens_per_minute=600)
    one.charge(599)
    assert one.refusal() is None
    one.charge(401)
    assert one.refusal() == ("1,000 tokens were used, the key has 600 a minute", 41)
    clock[0] = 40.2
    assert one.refusal() is None


def test_requests_at_once_are_limited_until_one_ends(engine, config):  # noqa: F811
    config.api_key_file.write_text("[ann]\nkey = 'secret of ann'\nrunning = 1\n")
    app = create_app(engine, config)

    async def go():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def ask():
                method, path, given = by("ann")
                return await client.request(method, path, **given)

            first = asyncio.create_task(ask())
            await asyncio.to_thread(engine.held.wait)
            second = await ask()
            engine.was_cancelled.set()
            return await first, second, await ask()

    answers = asyncio.run(go())
    assert [one.status_code for one in answers] == [200, 429, 200]
    assert (answers[1].headers["retry-after"], "1 requests run" in answers[1].text) == ("1", True)
    engine.stop()


def test_answers_charge_prompt_and_output(engine, config):  # noqa: F811
    engine.hold_after = None
    config.api_key_file.write_text("[ann]\nkey = 'secret of ann'\ntokens_per_minute = 20\n")
    first, second = send_to(create_app(engine, config), [by("ann"), by("ann")])
    used = first.json()["usage"]["total_tokens"]
    assert f"{used} tokens were used, the key has 20 a minute" in error(second, 429)["message"]
    engine.stop()


def test_ended_key_gets_401_with_its_end(engine, config):  # noqa: F811
    config.api_key_file.write_text("[ann]\nkey = 'secret of ann'\nuntil = 2020-01-31\n")
    (answer,) = send_to(create_app(engine, config), [by("ann")])
    assert error(answer, 401)["message"] == "the API key has ended at 2020-02-01 00:00 UTC"
    engine.stop()


def test_renewed_keys_are_used_and_invalid_ones_are_not(config, caplog):
    tenants = Tenants(config)
    first = tenants.find([b"secret of eve"])
    first.begin()
    config.api_key_file.write_text("[eve]\nkey = 'another'\nrunning = 1\n")
    tenants.renew()
    assert tenants.find([b"secret of ann", b"secret of eve"]) is None
    eve = tenants.find([b"another"])
    assert eve.refusal() == ("1 requests run, the key has 1 at once", 1)  # the use outlives the change
    first.end()
    assert eve.refusal() is None
    config.api_key_file.write_text("[eve]\nkey = 'a third'\nrunning = 0\n")
    tenants.renew()
    assert tenants.find([b"another"]) == eve
    assert "the earlier API keys stay: api_key_file is" in caplog.text
    assert "line 3: [eve] running is 0" in caplog.text
    assert "third" not in caplog.text


def test_hang_up_reads_the_keys_of_a_running_server_again(draining, config):  # noqa: F811
    server = draining(FOREVER, api_key_file=config.api_key_file)
    headers = {"x-api-key": "renewed"}
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 401
    config.api_key_file.write_text("[ann]\nkey = 'renewed'\n")
    server.renewal.request()
    while httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 401:
        pass


@pytest.mark.full
def test_signal_reads_the_keys_of_a_process_again(config):
    with serving("--port", "0", "--api-key-file", str(config.api_key_file)) as (process, said):
        url, headers = address(said), {"x-api-key": "renewed"}
        assert httpx.get(f"{url}/models", headers=headers).status_code == 401
        config.api_key_file.write_text("[ann]\nkey = 'renewed'\n")
        os.kill(process.pid, signal.SIGHUP)
        while httpx.get(f"{url}/models", headers=headers).status_code == 401:
            assert process.poll() is None
