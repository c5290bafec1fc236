"""A server's URL, and requests to it: measured streams of the load generator, and blocking ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from headwater.errors import HeadwaterError
from headwater.load.answer import Answer, Json, error_message, list_of, object_of, text_of
from headwater.load.session import Message, Turn

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ABOUT_SERVER = ("/health", "/v1/models", "/version")
CONNECT_SECONDS = 10.0


class ServerError(HeadwaterError):
    """A server's refusal or failure; `status` is None if no response came."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Blocking requests to one server, without any proxy of the environment; threads may share it."""

    def __init__(self, url: str, api_key: str | None, timeout: float | None, ca: Path | None = None) -> None:
        """Raises ValueError for a malformed URL. `timeout` is in seconds; None is no limit. `ca`: see `trusted`."""
        limits = httpx.Timeout(timeout, connect=CONNECT_SECONDS)
        self.url = base_url(url)
        self.http = httpx.Client(
            base_url=self.url, headers=headers(api_key), timeout=limits, trust_env=False, verify=trusted(ca)
        )
        self.close = self.http.close

    def get(self, path: str) -> Any:
        """Return a page's JSON. Raises ServerError."""
        return self._json("GET", path, timeout=CONNECT_SECONDS)

    def post(self, path: str, body: Json) -> Any:
        """Return a response's JSON. Raises ServerError."""
        return self._json("POST", path, json=body)

    def _json(self, method: str, path: str, **options: Any) -> Any:
        try:
            response = self.http.request(method, path, **options)
            if response.is_success:
                return response.json()
        except httpx.ConnectError as error:
            raise unreachable(self.url, error) from error
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        raise ServerError(refusal_text(response.content, response.status_code), response.status_code)


def trusted(ca: Path | None = None) -> ssl.SSLContext:
    """Return the certificates to trust: those of a file (PEM), of SSL_CERT_FILE or SSL_CERT_DIR, or the usual ones."""
    return httpx.create_ssl_context() if ca is None else ssl.create_default_context(cafile=ca)


def unreachable(url: str, error: httpx.ConnectError) -> ServerError:
    """Return the error for a server that cannot be connected to, with what helps."""
    helps = "`headwater serve` starts a server here, --url names another one"
    if "CERTIFICATE" in str(error):
        helps = "the variable SSL_CERT_FILE, or --ca of `headwater chat`, names certificates to trust"
    return ServerError(f"{url}: {error}; {helps}")


def base_url(url: str) -> str:
    """Strip a trailing /v1 from a URL. Raises ValueError if it is not an http(s) URL."""
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
    """Return the body of a streamed request."""
    return {"model": model, "stream": True, "stream_options": {"include_usage": True}, **fields}


def about(url: str, api_key: str | None, timeout: float) -> dict[str, Any]:
    """Return the pages that describe a server by path, or their status. Raises ServerError if none answers."""
    pages: dict[str, Any] = {}
    try:
        with httpx.Client(
            base_url=base_url(url), headers=headers(api_key), timeout=timeout, trust_env=False, verify=trusted()
        ) as client:
            for path in ABOUT_SERVER:
                response = client.get(path)
                try:
                    pages[path] = response.json() if response.is_success else response.status_code
                except ValueError:
                    pages[path] = response.text[:200]
    except httpx.ConnectError as error:
        raise unreachable(url, error) from error
    except httpx.HTTPError as error:
        raise ServerError(f"{url}: {error}") from error
    return pages


def first_model(pages: dict[str, Any]) -> str:
    """Return the model that a server lists first, or a name that servers of one model accept if it lists none.

    Raises ServerError for a list of another form than OpenAI's.
    """
    listed = object_of(pages.get("/v1/models")).get("data")
    if not listed:
        return "default"
    name = text_of(object_of(next(iter(list_of(listed)), None)).get("id"))
    if not name:
        raise ServerError(f"data of /v1/models is {str(listed)[:80]}, must be objects with an id: name the model")
    return name


@dataclass(slots=True)
class Exchange:
    """One request and its response; times are of `time.perf_counter`."""

    sent: float
    outcome: str = "interrupted"
    ended: float = 0.0
    status: int | None = None
    detail: str = ""
    answer: Answer | None = None


class Endpoint:
    """A server under load, with one connection for each concurrent request.

    Each connection has a client of its own: a common pool scans all of its connections, several times a request.
    """

    def __init__(self, url: str, api_key: str | None, model: str, fields: Json, timeout: float) -> None:
        self.url = base_url(url)
        self._model, self._fields, self._timeout = model, fields, timeout
        self._headers = headers(api_key)
        self._tls = trusted()
        self._free: list[httpx.AsyncClient] = []
        self._clients: list[httpx.AsyncClient] = []

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()

    @contextlib.contextmanager
    def _client(self) -> Iterator[httpx.AsyncClient]:
        """Lend an idle client with its connection, or a new one."""
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
        """Return path and body of a turn; `messages` are the conversation up to and including it."""
        body = streamed(self._model, {**self._fields, **turn.fields})
        if turn.output_tokens is not None:
            body["max_tokens"] = turn.output_tokens
        if tenant:
            body["cache_salt"] = tenant
        path = CHAT if turn.prompt is None else COMPLETIONS
        body |= {"messages": messages} if turn.prompt is None else {"prompt": turn.prompt}
        return path, json.dumps(body).encode()

    async def exchange(self, path: str, body: bytes) -> Exchange:
        """Send a request and read its answer to the end. A failure or a cancellation is an outcome."""
        done = Exchange(time.perf_counter())
        try:
            with self._client() as client:
                async with asyncio.timeout(self._timeout):
                    await self._stream(client, done, path, body)
        except TimeoutError:
            done.outcome, done.detail = "timeout", f"not complete after {self._timeout:g} s"
        except httpx.HTTPError as error:
            done.outcome, done.detail = "error", f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            done.outcome = "interrupted"
        done.ended = time.perf_counter()
        return done

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
    """Return whether a response reports an overloaded server, which is counted separately from errors."""
    return response.status_code == 429 or (response.status_code == 503 and "retry-after" in response.headers)


def refusal_text(body: bytes, status: int) -> str:
    """Return the message of a response that is an error."""
    try:
        return error_message(json.loads(body))
    except ValueError:
        return body.decode(errors="replace").strip()[:300] or f"status {status}"
