"""Renewal of files that a running server has read: its certificate and API keys."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType


class Renewal:
    """Functions that read files again: `renew` calls them if SIGHUP came since the last call."""

    def __init__(self, functions: Iterable[Callable[[], None]]) -> None:
        self._functions = tuple(functions)
        self._is_due = False

    @contextmanager
    def at_hang_up(self) -> Iterator[None]:
        """Note SIGHUP meanwhile. Without functions, and on a thread that gets no signals, do nothing."""
        if not self._functions or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGHUP, self.request)
        try:
            yield
        finally:
            signal.signal(signal.SIGHUP, before)

    def request(self, number: int = signal.SIGHUP, frame: FrameType | None = None) -> None:
        """Let the next `renew` call the functions."""
        self._is_due = True

    def renew(self) -> None:
        """Call the functions if that was requested."""
        if self._is_due:
            self._is_due = False
            for function in self._functions:
                function()
