"""Recording of traffic without its text (`--record`), in a file for `headwater replay`.

A thread of its own hashes and writes the requests. Neither the event loop nor the engine waits for it: if it falls
behind, requests are dropped and counted.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import zstandard
from starlette.concurrency import run_in_threadpool

from headwater.errors import ConfigError
from headwater.events import Event, FailedEvent, FinishedEvent, TokenEvent
from headwater.request import Generation
from headwater.server.http.exchange import ServedEngine
from headwater.traces.recordings import PageHashes, Served, line_of
from headwater.traces.request import Request

MAX_QUEUED_REQUESTS = 256  # waiting to be written

log = logging.getLogger("headwater.record")


@dataclass(slots=True)
class RecordedRequest:
    """Request that is being recorded."""

    generation: Generation
    at: float  # wall clock
    number: int | None = None  # the engine's id
    output: list[int] = field(default_factory=list)
    kept: bool = False  # the answer is complete, and may be cached
    ended: bool = False

    def request(self, hashes: PageHashes) -> Request:
        """Return the request with page hashes instead of tokens."""
        one = self.generation
        known = (*one.prompt, *self.output) if self.kept else one.prompt
        pages, lengths = hashes.of(one.namespace, known), (len(one.prompt), len(self.output), len(known))
        name = hashes.name(one.namespace)
        at = round(self.at, 3)
        return Request("", pages, *lengths, at, None, one.boundaries, name, one.segments, one.fidelity)

    def line(self, hashes: PageHashes) -> bytes:
        """Return the request's line in the file."""
        one = self.generation
        segments = [hashes.segment(one.namespace, one.prompt[span.start : span.end]) for span in one.segments]
        return line_of(self.request(hashes), segments)


class RecordedEngine:
    """Engine that passes answered requests to a recorder, without those that have no output."""

    def __init__(self, engine: ServedEngine, recorder: Recorder) -> None:
        self._engine, self._recorder = engine, recorder
        self._open: dict[int, RecordedRequest] = {}
        self._lock = threading.Lock()  # both the engine's thread and the event loop may end a request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, generation: Generation, on_event: Callable[[Event], None]) -> int:
        request = RecordedRequest(generation, time.time())

        def record(event: Event) -> None:
            if isinstance(event, TokenEvent):
                request.output.append(event.token)
            elif isinstance(event, FinishedEvent | FailedEvent):
                self._end(request, isinstance(event, FinishedEvent) and generation.keep_output)
            on_event(event)

        number = self._engine.submit(generation, record)
        with self._lock:
            request.number = number
            if not request.ended:
                self._open[number] = request
        return number

    def cancel(self, request_id: int) -> None:
        with self._lock:
            request = self._open.get(request_id)
        if request is not None:
            self._end(request, kept=False)
        self._engine.cancel(request_id)

    def _end(self, request: RecordedRequest, kept: bool) -> None:
        with self._lock:
            if request.ended:
                return
            request.ended, request.kept = True, kept
            if request.number is not None:
                self._open.pop(request.number, None)
        if request.output:
            self._recorder.add(request)


class Recorder:
    """Writer of requests to a file as they end. Written requests are readable even if the process is killed."""

    def __init__(self, path: Path, served: Served) -> None:
        """Create the file, with a number added to its name if that exists. Raises ConfigError if that fails."""
        self._hashes = PageHashes(secrets.token_bytes(32), served.page_size)
        self._first = served.first_line()
        self._waiting: queue.Queue[RecordedRequest | None] = queue.Queue(MAX_QUEUED_REQUESTS)
        self._thread = threading.Thread(target=self._write, name="headwater-record", daemon=True)
        self.dropped = 0
        self.path, self._file = _new_file(path)

    def add(self, request: RecordedRequest) -> None:
        """Queue a request to be written, or drop it if the queue is full. May be called from any thread."""
        try:
            self._waiting.put_nowait(request)
        except queue.Full:
            self.dropped += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write until the block ends, then write the requests that still wait."""
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
                    sink.write(b"".join(request.line(self._hashes) for request in batch))
                    sink.flush()
        except OSError as error:  # a full disk must not stop the server
            log.error("recording to %s has ended: %s", self.path, error)
        for batch in batches:
            self.dropped += len(batch)

    def _batches(self) -> Iterator[list[RecordedRequest]]:
        """Yield all waiting requests together, repeatedly, until the end."""
        while True:
            batch = [self._waiting.get()]
            while batch[-1] is not None and not self._waiting.empty():
                batch.append(self._waiting.get())
            if request := [one for one in batch if one is not None]:
                yield request
            if batch[-1] is None:
                return

    def _packed(self) -> AbstractContextManager[Any]:
        if self.path.suffix != ".zst":
            return nullcontext(self._file)
        return zstandard.ZstdCompressor(write_checksum=True).stream_writer(self._file, closefd=False)


def _new_file(path: Path) -> tuple[Path, Any]:
    stem, dot, endings = path.name.partition(".")
    name, number = path, 1
    while True:
        try:
            return name, open(name, "xb", opener=partial(os.open, mode=0o600))  # readable by its owner only
        except FileExistsError:
            number += 1
            name = path.with_name(f"{stem}-{number}{dot}{endings}")
        except OSError as error:
            raise ConfigError(f"record is {str(path)!r}, which cannot be written: {error}") from error
