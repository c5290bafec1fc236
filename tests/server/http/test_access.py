"""Access: keys and origins, neither of which delays a stream."""

import asyncio
import base64
import socket
from functools import partial

import httpx
import pytest

from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.server.app import create_app
from headwater.server.http import keys
from tests.server.client import error
from tests.server.routes.test_serving import PATIENCE, Server

KEY = "klüch-7"
PAGE = "https://chat.example"
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


@pytest.fixture
def call(engine):
    """Send one request to a server that needs a key and admits one origin."""
    return partial(request, engine, ServeConfig(api_key=KEY, cors=(PAGE,)))


def request(engine, config, method, path, **kwargs):
    async def go():
        transport = httpx.ASGITransport(create_app(engine, config), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(go())


def bearer(key):
    return {"authorization": f"Bearer {key}".encode()}


def basic(user, key):
    return {"authorization": f"Basic {base64.b64encode(f'{user}:{key}'.encode()).decode()}"}


@pytest.mark.parametrize("headers", [bearer(KEY), {"x-api-key": KEY.encode()}, basic("", KEY), basic("any", KEY)])
def test_key_opens_every_path(call, headers):
    assert call("GET", "/v1/models", headers=headers).status_code == 200
    assert call("POST", "/v1/chat/completions", json=HELLO, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(""),
        bearer(KEY[:-1]),
        bearer(KEY + "7"),
        {"authorization": KEY.encode()},
        {"authorization": "Basic %%%"},
        {"authorization": "Basic ü".encode()},
        {"authorization": b"Bearer \xff"},
        {"authorization": "Basic " + base64.b64encode(KEY.encode()).decode()},
        basic(KEY, "password"),
        {"x-api-key": ""},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/nowhere")]
)
def test_without_the_key_every_path_is_401_in_openais_form(call, engine, headers, method, path):
    answer = call(method, path, headers=headers, json=HELLO if method == "POST" else None)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert engine.seen == []


def test_health_needs_no_key_and_without_a_setting_nothing_does(call, engine):
    for path in ("/health", "/health/live", "/health/ready"):
        assert call("GET", path).status_code == 200
    assert request(engine, ServeConfig(), "GET", "/v1/models").status_code == 200


def test_browser_is_asked_for_the_key_as_a_password(call):
    answer = call("GET", "/", headers={"accept": "text/html,*/*;q=0.8"})
    assert (answer.status_code, answer.headers["www-authenticate"].split()[0]) == (401, "Basic")


def test_key_may_be_in_a_file(engine, tmp_path):
    (tmp_path / "key").write_text(f"{KEY}\n")
    config = ServeConfig(api_key_file=tmp_path / "key")
    assert request(engine, config, "GET", "/v1/models", headers=bearer(KEY)).status_code == 200
    assert request(engine, config, "GET", "/v1/models").status_code == 401


def test_preflight_needs_no_key_and_lets_the_key_through(call):
    ask = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    answer = call("OPTIONS", "/v1/chat/completions", headers=ask)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in answer.headers["access-control-allow-headers"].lower()
    assert "POST" in answer.headers["access-control-allow-methods"]


def test_another_origin_is_not_let_in(call):
    ask = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answer = call("OPTIONS", "/v1/chat/completions", headers=ask)
    assert answer.status_code == 400
    assert "access-control-allow-origin" not in answer.headers


def test_page_may_read_every_error(call, engine):
    """Errors: a refused key, an unknown path, a bad body, and an unexpected exception."""
    opened = {"origin": PAGE, **bearer(KEY)}
    engine.fail = RuntimeError("unforeseen")
    answers = [
        call("GET", "/v1/models", headers={"origin": PAGE}),
        call("GET", "/nowhere", headers=opened),
        call("POST", "/v1/chat/completions", headers=opened, json={}),
        call("POST", "/v1/chat/completions", headers=opened, json=HELLO),
    ]
    assert [answer.status_code for answer in answers] == [401, 404, 400, 500]
    assert {answer.headers["access-control-allow-origin"] for answer in answers} == {PAGE}


def test_stream_passes_as_it_is_made(engine):
    """The first event arrives while the engine still holds the rest back."""
    engine.hold_after = 3
    config = ServeConfig(api_key=KEY, cors=("*",))
    with socket.create_server(("127.0.0.1", 0)) as sock, Server(create_app(engine, config), sock):
        url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1/chat/completions"
        headers = {"origin": PAGE, **bearer(KEY)}
        body = {**HELLO, "stream": True}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            assert not engine.was_cancelled.is_set()


def test_keys_are_compared_in_constant_time(monkeypatch, call):
    compared = []
    monkeypatch.setattr(keys.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or False)
    assert call("GET", "/v1/models", headers={**bearer(KEY), "x-api-key": "other"}).status_code == 401
    assert compared == [(b"other", KEY.encode()), (KEY.encode(), KEY.encode())]


def hosted(engine, host, allowed=(), local=("127.0.0.1", 8000), path="/v1/models"):
    """Return the answer to a request with this Host header over a connection to this local address."""

    async def go():
        app = create_app(engine, ServeConfig(allowed_hosts=allowed))

        async def arrived(scope, receive, send):
            if scope["type"] == "http":
                scope["server"] = local
            await app(scope, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(arrived), base_url="http://test") as client:
            return await client.get(path, headers={"host": host})

    return asyncio.run(go())


LOOPBACK_NAMES = ["localhost", "LocalHost:8000", "localhost.", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", ""]


@pytest.mark.parametrize("local", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_on_loopback_a_page_that_was_rebound_is_refused(engine, local):
    for path in ("/", "/health", "/v1/models", "/page/page.js"):
        told = error(hosted(engine, "evil.example:8000", local=(local, 8000), path=path), 403)
        assert told["code"] == "host_not_allowed"
        assert "'evil.example:8000'" in told["message"]
        assert "localhost" in told["message"]
    assert hosted(engine, "localhost:8000", local=(local, 8000)).status_code == 200


@pytest.mark.parametrize("host", LOOPBACK_NAMES)
def test_on_loopback_its_names_are_served(engine, host):
    assert hosted(engine, host).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil",
        "localhost.evil",
        "127.0.0.1.evil",
        "evil:127.0.0.1",
        "[evil]",
        "0.0.0.0",
        "[::1",
        "user@evil",
        "localhost:80@evil",
        "[::1]@evil",
    ],
)
def test_names_that_resemble_those_of_loopback_are_refused(engine, host):
    assert hosted(engine, host).status_code == 403


def test_allowed_hosts_are_served_on_loopback(engine):
    allowed = ("Chat.Example", "10.0.0.7")
    assert hosted(engine, "chat.example:443", allowed).status_code == 200
    assert hosted(engine, "10.0.0.7", allowed).status_code == 200
    told = error(hosted(engine, "sub.chat.example", allowed), 403)
    assert "10.0.0.7, chat.example are served" in told["message"]
    assert hosted(engine, "anything", ("*",)).status_code == 200


@pytest.mark.parametrize("local", [("192.168.1.5", 8000), ("/run/headwater.sock", None), None])
def test_only_loopback_looks_at_the_host(engine, local):
    assert hosted(engine, "chat.example", local=local).status_code == 200


@pytest.mark.parametrize("host", ["chat.example:443", "http://chat.example", "[::1]", "a b"])
def test_allowed_host_is_a_name_without_a_port(host):
    with pytest.raises(ConfigError, match="allowed_hosts is"):
        ServeConfig(allowed_hosts=(host,))
