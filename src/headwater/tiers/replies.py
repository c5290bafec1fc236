"""Limits of a server's replies: bytes and time of all that it sends after one call, whatever lengths it declares."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MIN_BYTES_A_SECOND = 1 << 20


class ReplyLimit(threading.local):
    """Most bytes of the replies to one call, for each thread."""

    def __init__(self, usual: int, seconds: float) -> None:
        """`seconds`: for a reply, in addition to the time of its bytes."""
        self.usual = self.bytes = usual
        self.seconds = seconds

    @contextmanager
    def of(self, size: int) -> Iterator[None]:
        """Let replies of this thread have `size` bytes in the block."""
        self.bytes = size
        try:
            yield
        finally:
            self.bytes = self.usual


class LimitedSocket:
    """Socket whose replies to one call are limited in bytes, and in the time that these take."""

    def __init__(self, sock: Any, limit: ReplyLimit) -> None:
        self._sock, self._limit = sock, limit
        self._received, self._sent = 0, time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendall(self, data: Any) -> None:
        self._sock.sendall(data)
        self._received, self._sent = 0, time.monotonic()

    def recv(self, size: int) -> bytes:
        data: bytes = self._sock.recv(size)
        self._count(len(data))
        return data

    def recv_into(self, buffer: Any, *sizes: int) -> int:
        size: int = self._sock.recv_into(buffer, *sizes)
        self._count(size)
        return size

    def _count(self, size: int) -> None:
        """Raise OSError beyond the limits."""
        self._received += size
        if self._received > self._limit.bytes:
            raise OSError(f"a reply has more than {self._limit.bytes:,} bytes, more than was stored")
        if time.monotonic() - self._sent > self._limit.seconds + self._received / MIN_BYTES_A_SECOND:
            raise OSError(f"a reply has only {self._received:,} bytes after {self._limit.seconds:g} s")


def limited(connection: type[Any], limit: ReplyLimit) -> type[Any]:
    """Return a class of connections whose replies are limited."""

    class Limited(connection):  # type: ignore[misc]
        def _connect(self) -> Any:
            return LimitedSocket(super()._connect(), limit)

    return Limited
