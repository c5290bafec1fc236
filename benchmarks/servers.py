"""Servers over HTTP on loopback: one in this process around an engine, one as a process; and a plain client."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from headwater.config import ServeConfig
from headwater.server.app import create_app
from headwater.server.http.exchange import ServedEngine

PATIENCE = 120  # seconds
LONGEST = 900  # seconds that one answer may take
TOO_MANY_TOKENS = 10**9  # of an answer
JSON = {"content-type": "application/json"}


class ServerThread(uvicorn.Server):
    """Serves in a thread; `with` starts and stops it."""

    def __init__(self, engine: ServedEngine, config: ServeConfig) -> None:
        super().__init__(uvicorn.Config(create_app(engine, config), log_level="warning", access_log=False))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self.run, args=([self._socket],), daemon=True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening.set()

    def __enter__(self) -> ServerThread:
        self._thread.start()
        if not self._listening.wait(PATIENCE):
            raise TimeoutError(f"the server did not listen within {PATIENCE} seconds")
        return self

    def __exit__(self, *_: object) -> None:
        self.should_exit = True
        self._thread.join(PATIENCE)
        self._socket.close()


@dataclass(frozen=True)
class Serving:
    """A `headwater serve` of its own."""

    process: subprocess.Popen[str]
    port: int
    start_seconds: float  # from the process's start until /health answered


@contextmanager
def serve(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Serving]:
    """Runs `headwater serve` on a free port until the block ends. Raises RuntimeError with its log if it does not."""
    command = [sys.executable, "-m", "headwater", "serve", "--port", "0", *arguments]
    with tempfile.TemporaryFile("w+") as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **(environment or {})}
        )
        try:
            port = _port(process, log)
            _wait_healthy(port)
            yield Serving(process, port, time.perf_counter() - started)
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _port(process: subprocess.Popen[str], log: Any) -> int:
    """As the server says it; ends with the process if it never does."""
    for line in process.stdout or ():
        if found := re.search(r"http://127\.0\.0\.1:(\d+)/v1", line):
            return int(found[1])
    log.seek(0)
    raise RuntimeError(f"headwater serve ended: {log.read()[-2000:]}")


def _wait_healthy(port: int) -> None:
    """Until /health answers 200."""
    deadline = time.perf_counter() + PATIENCE
    while time.perf_counter() < deadline:
        try:
            health_seconds(port)
            return
        except (ConnectionError, RuntimeError):
            time.sleep(0.005)
    raise TimeoutError(f"/health did not answer within {PATIENCE} seconds")


def health_seconds(port: int) -> float:
    """Return how long /health takes, connection included. Raises RuntimeError if it does not answer 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    started = time.perf_counter()
    connection.request("GET", "/health")
    response = connection.getresponse()
    response.read()
    connection.close()
    if response.status != 200:
        raise RuntimeError(f"/health answered {response.status}")
    return time.perf_counter() - started


def status_mb(pid: int, field: str) -> float:
    """Return a line of /proc/PID/status, in MB. Raises RuntimeError if there is none."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"/proc has no {field} of process {pid}")


@dataclass(frozen=True)
class Streamed:
    """A streamed answer. `times` are those of its choices' chunks with text, by choice."""

    sent: float
    times: dict[int, list[float]]
    account: dict[str, Any]
    usage: dict[str, Any]
    text: str = ""  # of all choices

    @property
    def ttft(self) -> float:
        return min(times[0] for times in self.times.values()) - self.sent


@contextmanager
def completion(
    port: int, prompt: Any, max_tokens: int, **fields: object
) -> Iterator[tuple[float, http.client.HTTPResponse]]:
    """POST /v1/completions, greedy and streamed, on a connection of its own that is open before the clock starts.

    Yields the time at which the request was sent, and the response.
    """
    body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONGEST)
    connection.connect()
    sent = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), JSON)
    yield sent, connection.getresponse()
    connection.close()


def complete(port: int, prompt: Any, max_tokens: int = 1, ignore_eos: bool = True) -> Streamed:
    """Return the answer to a prompt. Raises RuntimeError if it fails."""
    times: dict[int, list[float]] = {}
    account: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    text = ""
    with completion(port, prompt, max_tokens, ignore_eos=ignore_eos) as (sent, response):
        if response.status != 200:
            raise RuntimeError(f"/v1/completions answered {response.status}: {response.read()[:500]!r}")
        for line in response:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise RuntimeError(f"/v1/completions failed: {chunk['error']}")
                for choice in chunk["choices"]:
                    if choice["text"]:
                        times.setdefault(choice["index"], []).append(now)
                        text += choice["text"]
                account = chunk.get("headwater") or account
                usage = chunk.get("usage") or usage
    return Streamed(sent, times, account, usage, text)


def refusal_seconds(port: int, prompt: Any) -> float:
    """Return the seconds in which Headwater refuses a prompt for its answer's length: all but the engine's work.

    Raises RuntimeError if the request is not refused.
    """
    with completion(port, prompt, TOO_MANY_TOKENS) as (sent, response):
        answer = response.read()
        if b"context_length_exceeded" not in answer:
            raise RuntimeError(f"a request of {TOO_MANY_TOKENS:,} tokens was answered: {answer[:500]!r}")
        return time.perf_counter() - sent
