"""Process of a server: its listening socket, at an address or a path, and draining before it stops.

Draining refuses new requests, leaves time to the running ones, then stops the engine, then closes the connections.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from headwater.config import ServeConfig
from headwater.errors import ConfigError
from headwater.server.http.connection import MAX_REFUSED, Connection, Gate
from headwater.server.http.middleware import InFlight
from headwater.server.http.renewal import Renewal
from headwater.server.http.service_manager import ServiceManager
from headwater.server.http.tls import renew
from headwater.setting import SettingError

SOCKET_MASK = 0o117  # a Unix socket is for its owner and group: mode 660
CLOSING_SECONDS = 1.0  # seconds for open answers to be written after the engine has ended them
CANCEL_SECONDS = 5  # seconds after which uvicorn cancels the remaining tasks
PROBE_SECONDS = 1.0  # seconds for another server to accept a connection on an existing socket
RESERVED_DESCRIPTORS = 32  # file descriptors that connections leave free, for files

log = logging.getLogger("headwater.connection")
log_server = logging.getLogger("headwater.server")


class ListeningSocket(socket.socket):
    """Listening socket that closes at once the connections that would use the last few file descriptors.

    asyncio accepts many connections before it looks at the first, so the Gate by itself would come too late.
    """

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; raises BlockingIOError, as if none was there, for one that was closed."""
        connection, address = super().accept()
        # each file gets the lowest number that is free
        if connection.fileno() < descriptor_limit() - RESERVED_DESCRIPTORS:
            return connection, address
        connection.close()
        log.warning("refused a connection: only %d file descriptors are left", RESERVED_DESCRIPTORS)
        raise BlockingIOError("too few file descriptors are left")


def descriptor_limit() -> int:
    """Return the number of file descriptors that this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def most_connections(config: ServeConfig) -> int:
    """Return the connections that the process has file descriptors for, at most the setting; log it if it is less."""
    with open(os.devnull) as probe:
        left = descriptor_limit() - probe.fileno() - MAX_REFUSED - RESERVED_DESCRIPTORS
    most = max(1, min(left, config.max_connections))
    if most < config.max_connections:
        log.warning(
            "at most %d connections are accepted: max_connections is %d, the process may open %d files (ulimit -n)",
            most,
            config.max_connections,
            descriptor_limit(),
        )
    return most


def protocol_settings(app: ASGIApp, config: ServeConfig) -> uvicorn.Config:
    """Return uvicorn's settings for an app: its connections have the limits of the settings."""
    return uvicorn.Config(
        app,
        loop="asyncio",  # its loop calls ListeningSocket.accept
        http=partial(Connection, gate=Gate(config, most_connections(config))),  # type: ignore[arg-type]
        ws="none",
        log_config=None,  # uvicorn's lines are written as all others
        log_level="warning",
        access_log=False,
        timeout_keep_alive=config.idle_timeout,  # type: ignore[arg-type]  # accepts a float as well
        timeout_graceful_shutdown=CANCEL_SECONDS,
        ssl_keyfile=config.tls_key,
        ssl_certfile=config.tls_cert,
    )


@contextmanager
def listener(config: ServeConfig) -> Iterator[socket.socket]:
    """Bind a socket; close it at the end and remove its path, if any. Raises ConfigError if that fails."""
    if config.uds is None:
        with tcp_listener(config.host, config.port) as sock:
            yield sock
        return
    with unix_listener(config.uds) as sock:
        inode = config.uds.stat().st_ino
        try:
            yield sock
        finally:
            with suppress(FileNotFoundError):
                if config.uds.stat().st_ino == inode:  # and not that of a later server
                    config.uds.unlink()


def url(sock: socket.socket, config: ServeConfig) -> str:
    """Return the base URL for clients."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = sock.getsockname()[:2]
    scheme = "http" if config.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"


def tcp_listener(host: str, port: int) -> socket.socket:
    """Bind a TCP socket. Raises ConfigError if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio lets a connection send at once, which saves 40 ms an answer, if its protocol is given
    sock = ListeningSocket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        helps = "; --port 0 chooses a free port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}{helps}") from error
    return sock


def unix_listener(path: Path) -> socket.socket:
    """Bind a Unix socket. The socket file of a server that has ended is replaced; any other file is an error."""
    _clear(path)
    sock = ListeningSocket(socket.AF_UNIX)
    mask = os.umask(SOCKET_MASK)
    try:
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise SettingError(
            "uds", repr(str(path)), f"on which no server can listen: {error.strerror or error}"
        ) from error
    finally:
        os.umask(mask)
    return sock


def _clear(path: Path) -> None:
    """Remove the socket file of a server that has ended; raise SettingError for any other file."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SettingError("uds", repr(str(path)), "which exists already and is not a socket")
    with socket.socket(socket.AF_UNIX) as knocker:
        knocker.settimeout(PROBE_SECONDS)
        try:
            knocker.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()  # its server has ended
            return
        except OSError as error:
            raise SettingError("uds", repr(str(path)), f"which exists already: {error.strerror or error}") from error
    raise SettingError("uds", repr(str(path)), "where another server listens")


def requests(number: int) -> str:
    """Return a number of requests in words."""
    return f"{number:,} request{'' if number == 1 else 's'}"


class DrainedEngine(Protocol):
    """Engine that can be drained."""

    def refuse_new(self) -> None: ...

    def stop(self, left: Callable[[], float]) -> None: ...


class DrainingServer(uvicorn.Server):
    """Server that drains at SIGTERM or SIGINT: it stops the engine when it is idle, or after `drain` seconds.

    Until then new requests are refused, and /health reports "draining". A second SIGINT stops at once and sets
    `interrupted`. The log and the service manager are notified of both ends of draining.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        in_flight: InFlight,
        engine: DrainedEngine,
        drain: float,
        manager: ServiceManager | None = None,
        renewals: Iterable[Callable[[], None]] = (),
    ) -> None:
        """`renewals` are called at SIGHUP, and the certificate is read again."""
        super().__init__(config)
        self._in_flight, self._engine, self._drain = in_flight, engine, drain
        self._manager = manager or ServiceManager({})
        self._signal: int | None = None  # the first one
        self._began = 0.0  # monotonic time of that signal
        self._drains: bool | None = None  # whether requests ran when the signal was seen; None: it was not seen yet
        self.interrupted = False
        if not config.loaded:
            config.load()  # makes the context, which the renewal changes
        context, cert, key = config.ssl, config.ssl_certfile, config.ssl_keyfile
        if context is not None and cert is not None and key is not None:
            renewals = (*renewals, partial(renew, context, cert, key))
        self.renewal = Renewal(renewals)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Record a signal, and no more: the interrupted thread may hold the engine's lock."""
        if self._signal is None:
            self._began, self._signal = time.monotonic(), sig
        elif sig == signal.SIGINT:
            self.force_exit = self.interrupted  # a third SIGINT drops the answers that are not written yet
            self.interrupted = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs; SIGHUP only if there is something to renew."""
        with super().capture_signals(), self.renewal.at_hang_up():
            yield

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server ends; uvicorn calls this ten times a second."""
        ends = await super().on_tick(counter)
        self.renewal.renew()
        if self._signal is None:
            self._manager.ping()
            return ends
        self._engine.refuse_new()
        if self._drains is None:
            self._announce()
        if self.interrupted or not self._left() or not self._in_flight.count:
            if self._drains:
                self._announce_end()
            await asyncio.to_thread(self._engine.stop, self._left)
            return True
        return ends

    def _announce(self) -> None:
        self._drains = self._in_flight.count > 0
        again = "Ctrl-C again" if self._signal == signal.SIGINT else "SIGINT"
        text = "stopping: no request is running"
        if self._drains:
            text = f"draining: {requests(self._in_flight.count)}, at most {self._drain:g} s, {again} to stop at once"
        log_server.info(text)
        self._manager.stopping(text)

    def _announce_end(self) -> None:
        left, seconds = self._in_flight.count, time.monotonic() - self._began
        end = f"{requests(left)} ended unfinished" if left else "all requests have ended"
        text = f"drained for {seconds:.1f} s: {end}, the server stops"
        log_server.log(logging.WARNING if left else logging.INFO, text)
        self._manager.status(text)

    def _left(self) -> float:
        """Return how many seconds are left to drain."""
        return 0.0 if self.interrupted else max(0.0, self._began + self._drain - time.monotonic())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close all connections: incomplete requests at once, answers that are not read after CLOSING_SECONDS."""
        for connection in self._connections():
            connection.drop_incomplete()
        late = asyncio.get_running_loop().call_later(CLOSING_SECONDS, self._drop_all)
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()

    def _drop_all(self) -> None:
        for connection in self._connections():
            connection.drop()

    def _connections(self) -> list[Connection]:
        return [one for one in self.server_state.connections if isinstance(one, Connection)]
