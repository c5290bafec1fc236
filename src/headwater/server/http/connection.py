"""HTTP/1.1 connections whose clients have limited time, in limited number.

uvicorn limits the time between requests only. Here a client has also limited time for the head and for the body of a
request, and for each step forward in reading an answer. Nothing limits how long an answer is computed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from headwater.config import ServeConfig

LINGER_SECONDS = 1.0  # seconds in which a client may read the answer to a request that was not read to its end
MAX_REFUSED = 64  # connections beyond the limit that are answered at the same time; further ones are closed at once
IDLE_SECONDS = 1.0  # seconds without a byte after which a waiting connection may be closed for a new one
PROGRESS_CHECKS = 4  # of a reading client's progress, in each `send_timeout`
PHRASES = {400: "Bad Request", 408: "Request Timeout", 503: "Service Unavailable"}
MAX_HEAD_BYTES = 16 * 1024  # of a request
MAX_HEADERS = 128  # of a request
VERSIONS = (b"1.0", b"1.1")
RETRY_SECONDS = 1  # seconds after which a refused client may try again

log = logging.getLogger("headwater.connection")


class Gate:
    """Open connections by their clients' addresses, and the limits on their number; one for a server.

    At a limit the connection that has waited longest for its client's next byte, at least IDLE_SECONDS, is closed for
    the new one. Clients that send nothing thus exclude no others. If all clients are active, the new one is refused.
    """

    def __init__(self, config: ServeConfig, most: int | None = None) -> None:
        """`most` is a lower limit than the setting, for a process with too few file descriptors."""
        self.config = config
        self.most = config.max_connections if most is None else min(most, config.max_connections)
        self._per_address = config.max_connections_per_address
        # all open connections, and those of each address, those that were heard longest ago first
        self._all: OrderedDict[Connection, None] = OrderedDict()
        self._open: dict[str, OrderedDict[Connection, None]] = {}
        self.refused = 0  # connections that are open to be answered with a refusal

    def enter(self, connection: Connection) -> str | None:
        """Admit a connection, or return the limit that refuses it."""
        own = self._open.get(connection.address, OrderedDict())
        limit = self._per_address
        if limit is not None and connection.address and len(own) >= limit and not self._makes_room(own):
            return f"{len(own):,} connections from {connection.address} are open, at most {limit:,} are accepted"
        if self.count >= self.most and not self._makes_room(self._all):
            return f"{self.count:,} connections are open, at most {self.most:,} are accepted"
        self._open.setdefault(connection.address, OrderedDict())[connection] = None
        self._all[connection] = None
        return None

    @property
    def count(self) -> int:
        """Number of open connections."""
        return len(self._all)

    def heard(self, connection: Connection) -> None:
        """Note that a connection was heard last."""
        connection.heard = connection.loop.time()
        if connection in self._all:
            self._all.move_to_end(connection)
            self._open[connection.address].move_to_end(connection)

    def leave(self, connection: Connection) -> None:
        """Forget a connection; does nothing if it was refused, or forgotten before."""
        if connection not in self._all:
            return
        del self._all[connection], self._open[connection.address][connection]
        if not self._open[connection.address]:
            del self._open[connection.address]

    def _makes_room(self, among: OrderedDict[Connection, None]) -> bool:
        """Close the connection that has waited longest. One that computes counts as heard: it is seen once a second."""
        for longest in tuple(among):
            if longest.loop.time() - longest.heard < IDLE_SECONDS:
                return False
            if longest.waits_for_client:
                longest.drop()
                return True
            self.heard(longest)
        return False


class StrictConnection(h11.Connection):
    """Parser that refuses what h11 lets pass. `fault`: of the refused request."""

    fault = ""

    def next_event(self) -> Any:
        """Return the next event. Raises h11.RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.fault = _fault_of(event)
            if self.fault:
                raise h11.RemoteProtocolError(self.fault)
        return event


def _fault_of(request: h11.Request) -> str:
    """Return why a head is refused; empty if it is not.

    With two lengths, a proxy and this server may see two different requests (RFC 9112, section 6.1).
    """
    names = {name for name, _ in request.headers}
    if request.http_version not in VERSIONS:
        return "the request is not HTTP/1.1"
    if len(request.headers) > MAX_HEADERS:
        return f"the request has {len(request.headers):,} headers, at most {MAX_HEADERS:,} are accepted"
    if {b"content-length", b"transfer-encoding"} <= names:
        return "the request has both Content-Length and Transfer-Encoding"
    return ""


class Connection(H11Protocol):
    """Connection with a limited time for each part of a request, and for a client that does not read its answer."""

    def __init__(self, *args: Any, gate: Gate, **named: Any) -> None:
        super().__init__(*args, **named)
        self.conn: StrictConnection = StrictConnection(h11.SERVER, MAX_HEAD_BYTES)
        self._gate, self._config = gate, gate.config
        self.address = ""  # of the client; empty on a Unix socket
        self.heard = self.loop.time()  # time of the client's last byte
        self._part: tuple[str, object] | None = None  # the incomplete part of a request, and the request before it
        self._part_timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._unsent, self._moved = 0, 0.0  # bytes that the client has to read; time at which they last became fewer
        self._send_timer: asyncio.TimerHandle | None = None

    @property
    def waits_for_client(self) -> bool:
        """True between requests, and while one arrives; False while an answer is computed, written or read."""
        idle = self.cycle is None or self.cycle.response_complete
        return (idle or self._part is not None) and not self.transport.get_write_buffer_size()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, Lingering(transport, self)))
        self.address = self.client[0] if self.client else ""
        refusal = self._gate.enter(self)
        if refusal is None:
            self._time_part()
            return
        log.warning("refused a connection: %s", refusal)
        self._refused = True
        self._gate.refused += 1
        if self._gate.refused > MAX_REFUSED:
            self.transport.abort()
        else:
            self._answer(503, f"{refusal}; try again later", "service_unavailable", "too_many_connections")

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # the rest of a request that was refused
        self._gate.heard(self)
        super().data_received(data)
        self._time_part()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._time_part()
        self._watch_sending()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.leave(self)
        self._gate.refused -= self._refused
        for timer in (self._part_timer, self._send_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn leaves this timer if the client reset the connection

    def drop(self) -> None:
        """Close at once, without an answer."""
        self._gate.leave(self)
        self.transport.abort()

    def drop_incomplete(self) -> None:
        """Close at once if the client has not sent its whole request."""
        if self.incomplete:
            self.drop()

    @property
    def incomplete(self) -> bool:
        """True if a part of a request has not arrived, or the connection was refused before one arrived."""
        return self._part is not None or self._refused

    def send_400_response(self, msg: str) -> None:
        """Answer to bytes that are not HTTP/1.1; uvicorn would raise if an answer has begun."""
        self._answer(400, self.conn.fault or "the request is not valid HTTP/1.1", "invalid_request_error", None)

    def _time_part(self) -> None:
        """Limit the time for the incomplete part of a request, if any, from the moment at which it began."""
        part = None if self.transport.is_closing() else self._incomplete_part()
        if part == self._part:
            return
        self._part = part
        if self._part_timer is not None:
            self._part_timer.cancel()
        self._part_timer = None if part is None else self.loop.call_later(self._limit(part[0]), self._late)

    def _incomplete_part(self) -> tuple[str, object] | None:
        if self.conn.their_state is h11.SEND_BODY:
            return "body", self.cycle
        if self.conn.their_state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            return "head", self.cycle
        return None

    def _limit(self, part: str) -> float:
        return self._config.head_timeout if part == "head" else self._config.body_timeout

    def _late(self) -> None:
        """End a request that did not arrive in time. A connection that sent nothing at all gets no answer."""
        if self._part is None:
            return
        part = self._part[0]
        if self.cycle is None and not self.conn.trailing_data[0]:
            self.transport.abort()
            return
        message = f"the {part} of the request did not arrive within {self._limit(part):g} seconds ({part}_timeout)"
        log.warning("refused a request: its %s did not arrive in time", part)
        self._answer(408, message, "timeout", "request_timeout")

    def _answer(self, status: int, message: str, kind: str, code: str | None) -> None:
        """Answer without the app, and close; only close if an answer has begun."""
        cycle = self.cycle
        begun = cycle is not None and cycle.response_started and not cycle.response_complete
        if begun or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
        retry = f"retry-after: {RETRY_SECONDS}\r\n" if status == 503 else ""
        head = f"HTTP/1.1 {status} {PHRASES[status]}\r\ncontent-type: application/json\r\n{retry}"
        end = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(f"{head}{end}".encode() + body)
        if cycle is not None and not cycle.response_complete:  # the app that waits for the body
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def _watch_sending(self) -> None:
        """Watch whether the client reads the written bytes; nothing more is written meanwhile."""
        if self._send_timer is not None:
            self._send_timer.cancel()
        if self.transport.is_closing():
            return
        self._unsent, self._moved = self.transport.get_write_buffer_size(), self.loop.time()
        self._check_sending_later()

    def _check_sending_later(self) -> None:
        ends = self._config.send_timeout / PROGRESS_CHECKS
        self._send_timer = self.loop.call_later(ends, self._check_sending) if self._unsent else None

    def _check_sending(self) -> None:
        if not (self.flow.write_paused or self.cycle is None or self.cycle.response_complete):
            return  # the answer continues, until it is paused again
        unsent, now = self.transport.get_write_buffer_size(), self.loop.time()
        if unsent < self._unsent:
            self._moved = now
        elif now - self._moved >= self._config.send_timeout * (PROGRESS_CHECKS - 0.5) / PROGRESS_CHECKS:
            log.warning("closed a connection: its client read nothing for %g seconds", self._config.send_timeout)
            self.transport.abort()
            return
        self._unsent = unsent
        self._check_sending_later()


class Lingering:
    """Transport that a server closes in two steps if the client may still be sending its request.

    Bytes that arrive after a close reset the connection, and the client loses an answer that it has not read. So the
    sending half is closed first, what arrives is discarded, and the rest is closed LINGER_SECONDS seconds later.
    """

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport, self._connection = transport, connection
        self._lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._lingers or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if not self._connection.incomplete or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._lingers = True
        self._transport.write_eof()
        self._transport.resume_reading()
        self._connection.loop.call_later(LINGER_SECONDS, self._transport.close)
