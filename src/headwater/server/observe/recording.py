"""`--record`: the traffic, without its text, in a file that `headwater replay` takes.

Requests are told to a thread of their own, which hashes and writes. Neither the event loop nor the engine waits for it:
where it falls behind, requests are left out and counted.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import zstandard
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from headwater.errors import ConfigError
from headwater.events import Event, FinishedEvent, TokenEvent
from headwater.request import Generation
from headwater.server.http import lifespan
from headwater.server.routes.service import Service
from headwater.traces.recordings import PageHashes, first_line, line_of
from headwater.traces.request import Request

WAITING = 256  # requests that may wait to be written

log = logging.getLogger("headwater.record")


def install(app: FastAPI, service: Service) -> None:
    """Record what the service's engine is asked for, if a file is set. ConfigError where it cannot be written."""
    config = service.config
    if config.record is None:
        return
    recorder = Recorder(config.record, config.page_size, service.engine.model_name)
    service.engine = RecordedEngine(service.engine, recorder)
    lifespan.during(app, recorder.running)


@dataclass(slots=True)
class Heard:
    """A request as it went by."""

    generation: Generation
    at: float  # of the wall's clock
    number: int | None = None  # the engine's id
    output: list[int] = field(default_factory=list)
    kept: bool = False  # its answer is complete, and may be cached
    ended: bool = False

    def request(self, hashes: PageHashes) -> Request:
        """With page hashes in the place of tokens."""
        prompt, one = self.generation.prompt, self.generation
        known = (*prompt, *self.output) if self.kept else prompt
        lengths = len(prompt), len(self.output), len(known)
        name = hashes.name(one.namespace)
        parts = one.boundaries, name, one.segments, one.fidelity
        return Request("", hashes.of(one.namespace, known), *lengths, round(self.at, 3), None, *parts)

    def line(self, hashes: PageHashes) -> bytes:
        """As it is written."""
        one = self.generation
        segments = [hashes.segment(one.namespace, one.prompt[span.start : span.end]) for span in one.segments]
        return line_of(self.request(hashes), segments)


class RecordedEngine:
    """An engine that tells a recorder what it answered. What was never begun is not told."""

    def __init__(self, engine: Any, recorder: Recorder) -> None:
        self._engine, self._recorder = engine, recorder
        self._open: dict[int, Heard] = {}
        self._lock = threading.Lock()  # the engine's thread and the event loop may both end a request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, generation: Generation, on_event: Callable[[Event], None]) -> int:
        heard = Heard(generation, time.time())

        def told(event: Event) -> None:
            if isinstance(event, TokenEvent):
                heard.output.append(event.token)
            else:
                self._end(heard, isinstance(event, FinishedEvent) and generation.keep_output)
            on_event(event)

        number = self._engine.submit(generation, told)
        with self._lock:
            heard.number = number
            if not heard.ended:
                self._open[number] = heard
        return number

    def cancel(self, request_id: int) -> None:
        with self._lock:
            heard = self._open.get(request_id)
        if heard is not None:
            self._end(heard, kept=False)
        self._engine.cancel(request_id)

    def _end(self, heard: Heard, kept: bool) -> None:
        with self._lock:
            if heard.ended:
                return
            heard.ended, heard.kept = True, kept
            if heard.number is not None:
                self._open.pop(heard.number, None)
        if heard.output:
            self._recorder.add(heard)


class Sink(Protocol):
    """Where lines go."""

    def write(self, lines: bytes) -> object: ...

    def flush(self) -> object: ...


class Recorder:
    """Writes requests to a file as they end. What has been written can be read, even if the process is killed."""

    def __init__(self, path: Path, page_size: int, model: str) -> None:
        """The file is a new one: where there is one of that name, a number is added. Raises ConfigError."""
        self._hashes = PageHashes(secrets.token_bytes(32), page_size)
        self._first = first_line(page_size, model)
        self._waiting: queue.Queue[Heard | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._write, name="headwater-record", daemon=True)
        self.dropped = 0
        self.path, self._file = _new_file(path)

    def add(self, heard: Heard) -> None:
        """From any thread; does not wait."""
        try:
            self._waiting.put_nowait(heard)
        except queue.Full:
            self.dropped += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Until the block ends; then what waits is written."""
        self._thread.start()
        log.info("recording to %s: page hashes, lengths and times, no text", self.path)
        try:
            yield
        finally:
            await run_in_threadpool(self._finish)

    def _finish(self) -> None:
        while self._thread.is_alive():
            with suppress(queue.Full):
                self._waiting.put(None, timeout=0.1)
                break
        self._thread.join()
        if self.dropped:
            log.warning("%d requests are not in %s: writing fell behind, or failed", self.dropped, self.path)

    def _write(self) -> None:
        batches = self._batches()
        try:
            with self._file, self._packed() as sink:
                sink.write(self._first)
                sink.flush()
                for batch in batches:
                    sink.write(b"".join(heard.line(self._hashes) for heard in batch))
                    sink.flush()
        except OSError as error:  # a full disk must not end the service
            log.error("recording to %s has ended: %s", self.path, error)
        for batch in batches:
            self.dropped += len(batch)

    def _batches(self) -> Iterator[list[Heard]]:
        """All that waits, as often as something does, until the end."""
        while True:
            batch = [self._waiting.get()]
            while batch[-1] is not None and not self._waiting.empty():
                batch.append(self._waiting.get())
            if heard := [one for one in batch if one is not None]:
                yield heard
            if batch[-1] is None:
                return

    @contextmanager
    def _packed(self) -> Iterator[Sink]:
        if self.path.suffix != ".zst":
            yield self._file
            return
        with zstandard.ZstdCompressor(write_checksum=True).stream_writer(self._file, closefd=False) as writer:
            yield writer


def _new_file(path: Path) -> tuple[Path, Any]:
    stem, dot, endings = path.name.partition(".")
    for number in count(1):
        name = path if number == 1 else path.with_name(f"{stem}-{number}{dot}{endings}")
        try:
            return name, open(name, "xb", opener=partial(os.open, mode=0o600))  # for nobody else to read
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"record is {str(path)!r}, which cannot be written: {error}") from error
    raise AssertionError("numbers do not end")
