"""Requests to an app in this process, and the form of every error."""

from __future__ import annotations

import asyncio

import httpx

from headwater.config import ServeConfig
from headwater.server.app import create_app


def send(engine, method, path, config=None, **kwargs):
    """Send one request to a new app over this engine."""
    return send_all(engine, [(method, path, kwargs)], config)[0]


def send_all(engine, requests, config=None):
    """Send requests, one after the other, to one app, which must answer all of them."""

    return send_to(create_app(engine, config or ServeConfig()), requests)


def send_to(app, requests):
    """Send requests, one after the other, to an app, which must answer all of them."""

    async def go():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.request(method, path, **kwargs) for method, path, kwargs in requests]

    return asyncio.run(go())


def error(response, status=400):
    """Return the error, which must be in OpenAI's form."""
    assert response.status_code == status, response.text[:2000]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


NEEDED = {  # fields that may be refused although a body lacks them
    "/v1/completions": ("prompt",),
    "/v1/responses": ("input",),
    "/v1/messages": ("messages", "max_tokens"),
    "/tokenize": ("prompt", "messages"),
    "/detokenize": ("tokens",),
    "/cache/segments": ("texts",),
}


def assert_names_a_field(error, path, body):
    """Fail unless the error's `param` is in the body, or a field that it lacks."""
    name = (error["param"] or "").partition(".")[0]
    assert name in body or name in NEEDED.get(path, ("messages",)), (error, body)
