"""Threads for calls that may never return: unlike those of ThreadPoolExecutor, they keep no process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic
from typing import Any, TypeVar

Result = TypeVar("Result")


class Workers:
    """Daemon threads that run calls in the order in which they were submitted."""

    def __init__(self, count: int, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._ended, self._lock = False, threading.Lock()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., Result], *given: Any) -> Future[Result]:
        """Queue a call. After `end` it is cancelled."""
        future: Future[Result] = Future()
        with self._lock:
            if self._ended:
                future.cancel()
            else:
                self._calls.put((future, lambda: call(*given)))
        return future

    def end(self, seconds: float) -> bool:
        """Cancel calls that have not begun, and wait at most so long for the others; return whether all ended."""
        until = monotonic() + seconds
        with self._lock:
            self._ended = True
            for _ in self._threads:
                self._calls.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if self._ended:
                future.cancel()
            elif future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
