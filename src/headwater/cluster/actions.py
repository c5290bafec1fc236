"""Actions that other threads queue for a router's thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from headwater.cluster.sockets import Waker

MAX_ACTIONS = 64  # between two looks at workers and heartbeats, which a burst of requests must not delay
ACTIONS_SECONDS = 0.05  # seconds, likewise


class Actions:
    """Queue of actions, and what wakes the thread that runs them."""

    def __init__(self) -> None:
        self.waker = Waker()
        self._queue: deque[Callable[[], None]] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, action: Callable[[], None]) -> None:
        """Queue an action. For any thread."""
        self._queue.append(action)
        self.waker.wake()

    def run(self) -> None:
        """Run at most `MAX_ACTIONS`, and none that would begin more than `ACTIONS_SECONDS` after the first one."""
        until = time.monotonic() + ACTIONS_SECONDS
        for _ in range(min(len(self._queue), MAX_ACTIONS)):
            self._queue.popleft()()
            if time.monotonic() > until:
                break
