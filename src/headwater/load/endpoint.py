"""A server's URL, and requests to it that are measured."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from headwater.load.answer import Answer, Json, error_message
from headwater.load.session import Message, Turn

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ABOUT_SERVER = ("/health", "/v1/models", "/version")


def base_url(url: str) -> str:
    """Without the /v1 that users may copy along. Raises ValueError for what is no http(s) URL."""
    url = url.rstrip("/").removesuffix("/v1")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"url is {url!r}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"url is {url!r}, must begin with http:// or https:// and name a host")
    return url


def headers(api_key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def streamed(model: str, fields: Json) -> Json:
    """What all requests have in common."""
    return {"model": model, "stream": True, "stream_options": {"include_usage": True}, **fields}


def about(url: str, api_key: str | None, timeout: float) -> dict[str, Any]:
    """What a server says of itself, by path; a status where it says nothing. Raises httpx.HTTPError if none answers."""
    said: dict[str, Any] = {}
    with httpx.Client(base_url=base_url(url), headers=headers(api_key), timeout=timeout, trust_env=False) as client:
        for path in ABOUT_SERVER:
            response = client.get(path)
            try:
                said[path] = response.json() if response.is_success else response.status_code
            except ValueError:
                said[path] = response.text[:200]
    return said


def first_model(said: dict[str, Any]) -> str:
    """The model that a server lists first, or a name that servers of one model take."""
    models = said.get("/v1/models")
    listed = models.get("data") if isinstance(models, dict) else None
    return listed[0]["id"] if listed else "default"


@dataclass(slots=True)
class Exchange:
    """One request and what came back; times are of `time.perf_counter`."""

    sent: float
    outcome: str = "interrupted"
    ended: float = 0.0
    status: int | None = None
    detail: str = ""
    answer: Answer | None = None


class Endpoint:
    """As many connections as there are requests at once.

    Each has a client of its own: a common pool looks at all of its connections, several times, for each request.
    """

    def __init__(self, url: str, api_key: str | None, model: str, fields: Json, timeout: float) -> None:
        self.url = base_url(url)
        self._model, self._fields, self._timeout = model, fields, timeout
        self._headers = headers(api_key)
        self._tls = httpx.create_ssl_context(trust_env=False)
        self._free: list[httpx.AsyncClient] = []
        self._clients: list[httpx.AsyncClient] = []

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    @contextlib.contextmanager
    def _client(self) -> Iterator[httpx.AsyncClient]:
        """One that nobody uses, with its connection."""
        if self._free:
            client = self._free.pop()
        else:
            client = httpx.AsyncClient(
                base_url=self.url, headers=self._headers, timeout=None, verify=self._tls, trust_env=False
            )
            self._clients.append(client)
        try:
            yield client
        finally:
            self._free.append(client)

    def payload(self, turn: Turn, messages: list[Message], tenant: str) -> tuple[str, bytes]:
        """Path and body of a turn; `messages` are the conversation with it."""
        body = streamed(self._model, {**self._fields, **turn.fields})
        if turn.output_tokens is not None:
            body["max_tokens"] = turn.output_tokens
        if tenant:
            body["cache_salt"] = tenant
        path = CHAT if turn.prompt is None else COMPLETIONS
        body |= {"messages": messages} if turn.prompt is None else {"prompt": turn.prompt}
        return path, json.dumps(body).encode()

    async def exchange(self, path: str, body: bytes) -> Exchange:
        """Send it and read the answer to its end. Failures are outcomes; being cancelled is one too."""
        done = Exchange(time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout):
                await self._read(done, path, body)
        except TimeoutError:
            done.outcome, done.detail = "timeout", f"not complete after {self._timeout:g} s"
        except httpx.HTTPError as error:
            done.outcome, done.detail = "error", f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            done.outcome = "interrupted"
        done.ended = time.perf_counter()
        return done

    async def _read(self, done: Exchange, path: str, body: bytes) -> None:
        with self._client() as client:
            await self._stream(client, done, path, body)

    async def _stream(self, client: httpx.AsyncClient, done: Exchange, path: str, body: bytes) -> None:
        sent = client.stream("POST", path, content=body, headers={"content-type": "application/json"})
        async with sent as response:
            done.status = response.status_code
            if response.status_code != 200:
                done.outcome = "refused" if is_refusal(response) else "error"
                done.detail = refusal_text(await response.aread(), response.status_code)
                return
            answer = done.answer = Answer()
            async for chunk in response.aiter_bytes():
                answer.feed(chunk, time.perf_counter())
            done.outcome = "ok" if answer.fault is None else "refused" if answer.refused else "error"
            done.detail = answer.fault or ""


def is_refusal(response: httpx.Response) -> bool:
    """Too much to do, and said so: not an error."""
    return response.status_code == 429 or (response.status_code == 503 and "retry-after" in response.headers)


def refusal_text(body: bytes, status: int) -> str:
    """The message of an answer that is none."""
    try:
        return error_message(json.loads(body))
    except ValueError:
        return body.decode(errors="replace").strip()[:300] or f"status {status}"
