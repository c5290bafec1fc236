"""Loads that follow a prefill on another worker: its parts are read as they are published there.

Pages for KV and state are reserved once the first part is there, and are published together when the state at the
prefix's end has come, or given back. The request that goes on with the prefix joins the load when it arrives. A load
that follows is optional: it is given up if pages are short, and the request pulls or computes then.
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

Read = Callable[[Tier, Load, Source, Sequence[str]], TierOutcome | None]

log = logging.getLogger("headwater.engine")


@dataclass(eq=False, slots=True)
class Follow:
    """A prefill that is followed, until its request arrives or it is cancelled."""

    peer: bytes
    namespace: str
    key: bytes  # of the index, up to `at`
    at: int  # tokens
    has_ended: bool = False  # the prefill: what is not there by then does not come
    is_cancelled: bool = False
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
        """Follow a worker's prefill of a prompt of `tokens` tokens; return a number for `cancel`."""
        unit, number = self._layout.unit_tokens, self._new_id()
        end = max(0, tokens - 1) // unit
        if end and not is_marked(key):
            follow = Follow(peer, namespace, key[: end * self._layout.unit_bytes], end * unit)
            self._open[number] = follow
            self.threads.submit(self._run, follow)
        return number

    def cancel(self, number: int) -> None:
        """Give a prefill up. Unknown numbers are ignored."""
        follow = self._open.pop(number, None)
        if follow is not None:
            self._give_up(follow)

    def arrived(self, seq: Request) -> None:
        """Let a request wait for what is read of its prefix: its prefill has ended."""
        number = next((number for number, one in self._open.items() if _is_of(one, seq)), None)
        if number is None:
            return
        follow = self._open.pop(number)
        follow.has_ended = True
        if follow.load is None:
            follow.is_cancelled = True  # the request's own load begins as soon
        elif follow.load.failed is None:
            follow.load.is_awaited, seq.load = True, follow.load

    def give_up(self) -> None:
        """Give all up whose request has not come: pages are short."""
        for follow in self._open.values():
            self._give_up(follow)

    def _give_up(self, follow: Follow) -> None:
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
        while True:
            is_last = follow.has_ended
            there = followed.progress()
            if there is None:
                return TierOutcome.FAILED
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


def _is_of(follow: Follow, seq: Request) -> bool:
    return follow.namespace == seq.namespace and seq.key.startswith(follow.key)
