"""Loads that follow a prefill on another worker: its parts are read as they are published there.

Pages for KV and state are reserved once the first part is there, and are published together when the state at the
prefix's end has come, or given back. Requests that go on with the same prefix share a load, and join it when they
arrive. A load that follows is optional: it is given up if pages are short, or if nothing comes for a while, and the
requests pull or compute then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from headwater.account import TierOutcome
from headwater.cache.segments.compose import is_marked
from headwater.engine.tier import Tier
from headwater.engine.workers import Workers
from headwater.schedule.kinds.request import Request
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.tier_load import Load, Source
from headwater.schedule.tiers import AT_ONCE, Loads
from headwater.tiers.store import Followed, PeerStore

POLL = 0.01  # seconds between questions for new parts
STALLED = 30.0  # seconds without a new token after which a prefill is given up; a long queue there counts, too

Read = Callable[[Tier, Load, Source, Sequence[str]], TierOutcome | None]

log = logging.getLogger("headwater.engine")


@dataclass(eq=False, slots=True)
class Follow:
    """A prefill that is followed, until one of its requests arrives or all are cancelled."""

    peer: bytes
    namespace: str
    key: bytes  # of the index, up to `at`
    at: int  # tokens
    has_ended: bool = False  # the prefill: what is not there by then does not come
    is_cancelled: bool = False
    is_over: bool = False  # no more parts are asked for
    load: Load | None = None
    reads: list[Future[TierOutcome | None]] = field(default_factory=list)


class Follows:
    """Prefills that are followed. Methods are called with the engine's lock held."""

    def __init__(
        self,
        tier: Tier,
        store: PeerStore,
        scheduler: Scheduler,
        loads: Loads,
        changed: threading.Condition,
        read: Read,
        finish: Callable[[Load], None],
    ) -> None:
        """`read`: reads a part, on any thread; `finish`: ends a load, without the lock."""
        self._tier, self._store, self._loads, self._changed = tier, store, loads, changed
        self._cache, self._new_id, self._layout = scheduler.cache, scheduler.new_id, scheduler.layout
        self._read, self._finish = read, finish
        self._open: dict[int, Follow] = {}
        self.threads = Workers(AT_ONCE, "headwater-tier-follow")

    def begin(self, peer: bytes, namespace: str, key: bytes, tokens: int) -> int:
        """Follow a worker's prefill of a prompt of `tokens` tokens; return a number for `cancel` and `arrived`.

        Requests with the same prefix, as the choices of one prompt, share what is read.
        """
        unit, number = self._layout.unit_tokens, self._new_id()
        end = max(0, tokens - 1) // unit
        if end and not is_marked(key):
            key = key[: end * self._layout.unit_bytes]
            follow = next((one for one in self._open.values() if _is_for(one, peer, namespace, key)), None)
            if follow is None:
                follow = Follow(peer, namespace, key, end * unit)
                self.threads.submit(self._run, follow)
            self._open[number] = follow
        return number

    def cancel(self, number: int) -> None:
        """Give a prefill up, unless another request waits for it. Unknown numbers are ignored."""
        follow = self._open.pop(number, None)
        if follow is not None and follow not in self._open.values():
            self._give_up(follow)

    def arrived(self, seq: Request, number: int) -> None:
        """Let a request wait for what is read of its prefix: the prefill has ended. Unknown numbers are ignored."""
        follow = self._open.pop(number, None)
        if follow is None:
            return
        follow.has_ended = True
        if follow.load is None:
            follow.is_cancelled = True  # the request's own load begins as soon
        elif follow.load.failed is None:
            follow.load.is_awaited, seq.load = True, follow.load

    def give_up(self) -> None:
        """Give all up for which no request has come: pages are short."""
        for follow in self._open.values():
            self._give_up(follow)

    def _give_up(self, follow: Follow) -> None:
        if follow.has_ended:
            return  # a request waits for it
        follow.is_cancelled = True
        if follow.load is not None and not follow.load.is_finished:
            follow.load.given_up = True

    # -- on a thread, without the lock

    def _run(self, follow: Follow) -> None:
        failed: TierOutcome | None = TierOutcome.FAILED
        try:
            followed = self._store.follow(follow.peer, follow.namespace, follow.key, follow.at)
            failed = failed if followed is None else self._follow(follow, followed)
        except Exception:
            log.exception("a prefill cannot be followed")
        follow.is_over = True
        if follow.load is not None:
            self._end(follow, follow.load, failed)

    def _end(self, follow: Follow, load: Load, failed: TierOutcome | None) -> None:
        """End a load after its reads."""
        wait(follow.reads)  # all of them, even if one fails: none may write to pages that are given back
        load.failed, load.tiers = TierOutcome.FAILED, self._tier.store.kind
        try:
            load.failed = failed or next(filter(None, (read.result() for read in follow.reads)), None)
        except Exception:
            log.exception("a part of a prefill that is followed cannot be read")
        self._finish(load)

    def _follow(self, follow: Follow, followed: Followed) -> TierOutcome | None:
        """Read parts until all are being read; return why they are not."""
        digests = self._tier.names.digests(follow.namespace, follow.key)
        left: list[Source] = []
        had, until = (0, 0), time.monotonic() + STALLED
        while True:
            is_last = follow.has_ended
            there = followed.progress()
            if there is None:
                return TierOutcome.FAILED
            if there != had:
                had, until = there, time.monotonic() + STALLED
            if follow.load is None and max(there):
                with self._changed:
                    left = self._reserve(follow)
                if not left:
                    return None
            for source in [one for one in left if one.end <= there[one is left[-1]]]:
                assert follow.load is not None
                follow.reads.append(self._tier.parts.submit(self._read, self._tier, follow.load, source, digests))
                left.remove(source)
            if follow.load is not None and not left:
                return None
            if is_last or follow.is_cancelled or (follow.load is not None and follow.load.given_up):
                return TierOutcome.FAILED
            if time.monotonic() > until:
                log.info("a prefill of %d tokens is followed no more: nothing came for %g s", follow.at, STALLED)
                return TierOutcome.FAILED
            time.sleep(POLL)

    def _reserve(self, follow: Follow) -> list[Source]:
        """Begin a load; return what it reads, the state last, or nothing if there is none to begin."""
        match = self._cache.match(follow.key, follow.at + 1, follow.namespace)
        if follow.is_cancelled or match.checkpoint_tokens >= follow.at:
            return []
        follow.load = self._loads.follow(follow.namespace, follow.key, follow.at, match, self._tier.number)
        if follow.load is None:
            return []
        return [*follow.load.runs, follow.load.state]


def _is_for(follow: Follow, peer: bytes, namespace: str, key: bytes) -> bool:
    """Return whether a prefix that is to be followed is being read already."""
    is_same = (follow.peer, follow.namespace, follow.key) == (peer, namespace, key)
    return is_same and not (follow.has_ended or follow.is_cancelled or follow.is_over)
