"""Notification of a service manager, such as systemd, about the states of this process: the protocol of sd_notify(3).

The manager names a datagram socket in NOTIFY_SOCKET. Without one, nothing is sent.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

SEND_SECONDS = 1.0  # seconds for the manager to accept a message
PINGS_PER_INTERVAL = 4  # of the watchdog; systemd recommends at least 2

log = logging.getLogger("headwater.server")


class ServiceManager:
    """Service manager that started this process, or none."""

    def __init__(
        self, environment: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic
    ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{address[1:]}" if address.startswith("@") else address  # an abstract socket
        own = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self._interval = float(environment.get("WATCHDOG_USEC", 0)) / 1e6 if own else 0.0
        self._turn_seconds: Callable[[], float] | None = None
        self._clock, self._next_ping = clock, 0.0

    def status(self, text: str) -> None:
        """Report one line, which `systemctl status` shows."""
        self._send(f"STATUS={text}")

    def ready(self, turn_seconds: Callable[[], float], text: str) -> None:
        """Report that requests are answered; from now on `ping` keeps the watchdog quiet.

        `turn_seconds`: seconds for which the engine's thread has worked on its current step, 0 while it waits.
        """
        self._turn_seconds = turn_seconds
        self._send(f"READY=1\nSTATUS={text}")

    def stopping(self, text: str) -> None:
        """Report that the process ends."""
        self._turn_seconds = None
        self._send(f"STOPPING=1\nSTATUS={text}")

    def ping(self) -> None:
        """Ping the watchdog if a ping is due and the current step has taken less than half of its interval."""
        now = self._clock()
        if not self._interval or self._turn_seconds is None or now < self._next_ping:
            return
        if self._turn_seconds() < self._interval / 2:
            self._next_ping = now + self._interval / PINGS_PER_INTERVAL
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(SEND_SECONDS)
                sock.sendto(message.encode(), self._address)
        except OSError as error:
            log.warning("the service manager is not notified: %s", error)
