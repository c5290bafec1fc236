"""One line in the log for each request: what it asked, what the cache did for it and why, and how long it took."""

from __future__ import annotations

import logging
import time

from headwater.server.exchange import Events
from headwater.types import FinishedEvent, TokenEvent

log = logging.getLogger("headwater.request")


class RequestRecord:
    """Watches a request's events go by."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._started = time.perf_counter()
        self._first_token: float | None = None
        self._open = True

    async def watch(self, events: Events) -> Events:
        """The same events; logs each generation's end, or that there was none."""
        try:
            async for number, event in events:
                if isinstance(event, TokenEvent) and self._first_token is None:
                    self._first_token = time.perf_counter()
                if isinstance(event, FinishedEvent):
                    log.info(self.line(number, event))
                yield number, event
            self._open = False
        except Exception as error:
            self._open = False
            log.warning("%s failed=%s: %s", self._endpoint, type(error).__name__, error)
            raise

    def close(self) -> None:
        """Call when the answer is out; says so if the client left before."""
        if self._open:
            self._open = False
            log.info("%s cancelled total=%.3fs", self._endpoint, time.perf_counter() - self._started)

    def line(self, number: int, end: FinishedEvent) -> str:
        now = time.perf_counter()
        account = " ".join(f"{name}={_shown(value)}" for name, value in end.account.as_dict().items())
        first = (now if self._first_token is None else self._first_token) - self._started
        times = f"ttft={first:.3f}s total={now - self._started:.3f}s"
        return f"{self._endpoint}[{number}] {account} output={end.output_tokens:,} finish={end.finish_reason} {times}"


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
