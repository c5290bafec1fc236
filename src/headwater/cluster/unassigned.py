"""Requests that no worker takes now, until one does or they have waited too long."""

from __future__ import annotations

import time
from collections.abc import Iterator

from headwater.cluster.routed import Routed
from headwater.errors import EngineStopped

MAX_WAIT_SECONDS = 10.0  # seconds for which a request waits for a worker


class NoWorker(EngineStopped):
    """No worker can take a request, or go on with it."""


class Unassigned:
    """Requests that wait for a worker. Methods are for the router's thread."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds for which a request waits."""
        self.patience = patience
        self._requests: list[Routed] = []

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Routed, fingerprint: str | None) -> None:
        """Let a request wait for a worker of this fingerprint, or for any."""
        request.unassigned_since = request.unassigned_since or time.monotonic()
        request.fingerprint = fingerprint
        self._requests.append(request)

    def need(self, fingerprint: str) -> bool:
        """Return whether a request can go on at a worker of this fingerprint alone. For any thread."""
        return any(request.fingerprint == fingerprint for request in tuple(self._requests))

    def take(self) -> Iterator[tuple[Routed, NoWorker | None]]:
        """Yield all of them, to be tried again; with an error, those that have waited too long."""
        requests, self._requests = self._requests, []
        now = time.monotonic()
        for request in requests:
            waited = now - (request.unassigned_since or now)
            if waited <= self.patience:
                yield request, None
            else:
                sent, which = len(request.sent), "with the same fingerprint " if request.sent else ""
                yield request, NoWorker(f"no worker {which}was there for {waited:.1f} s; {sent:,} tokens were sent")
