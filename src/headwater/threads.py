"""Work of a thread that begins again after an error, and the errors of all such threads of this process."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

RESTART_SECONDS = 1.0  # from an error to the next call, so that a lasting error costs little

restarts: Counter[str] = Counter()  # after errors, by the thread's name

log = logging.getLogger("headwater.threads")


def run_again(work: Callable[[], None], is_ending: Callable[[], bool]) -> None:
    """Call `work` on this thread until it returns: after an error it is called again, unless `is_ending`."""
    name = threading.current_thread().name
    while True:
        try:
            work()
            return
        except Exception as error:
            restarts[name] += 1
            log.exception("thread %s begins again after an error: %s", name, type(error).__name__)
        if is_ending():
            return
        time.sleep(RESTART_SECONDS)
