"""Other workers of a cluster as a tier, and loads that follow a prefill on one of them.

A thread reads the parts of such a prefill as they are published there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace

from headwater.account import TierOutcome
from headwater.cache.segments.store import SegmentKey
from headwater.engine.tiers.own_parts import OwnParts
from headwater.engine.tiers.segments import SegmentIO
from headwater.engine.tiers.tier import Tier, Workers
from headwater.schedule.follows import Follow, Follows
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.tier_load import Load, Source, TierStats
from headwater.schedule.tiers import MAX_CONCURRENT_LOADS, Loads, Peers
from headwater.tiers.store import Followed, PeerStore

POLL_SECONDS = 0.01  # between requests for new parts
STALL_SECONDS = 30.0  # without a new token, after which a prefill is given up; time in a queue there counts

Read = Callable[[Tier, Load, Source, Sequence[str]], TierOutcome | None]
Reads = list[Future[TierOutcome | None]]

log = logging.getLogger("headwater.engine")


class PeerFollows(Follows):
    """Prefills of other workers that are read. Methods are called with the engine's lock held."""

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
        super().__init__(scheduler.cache, loads, scheduler.new_id)
        self._tier, self._store, self._changed = tier, store, changed
        self._read, self._finish = read, finish
        self.threads = Workers(MAX_CONCURRENT_LOADS, "headwater-tier-follow")

    def follow(self, peer: bytes, namespace: str, key: bytes, tokens: int) -> int:
        """Follow a worker's prefill of a prompt of `tokens` tokens; return a number for `cancel` and `arrived`."""
        number, begun = self.begin(peer, namespace, key, tokens, self._tier.number)
        if begun is not None:
            self.threads.submit(self._run, begun)
        return number

    # -- on a thread, without the lock

    def _run(self, follow: Follow) -> None:
        failed: TierOutcome | None = TierOutcome.FAILED
        reads: Reads = []
        try:
            followed = self._store.follow(follow.peer, follow.namespace, follow.key, follow.at)
            failed = failed if followed is None else self._follow(follow, followed, reads)
        except Exception:
            log.exception("a prefill cannot be followed")
        follow.is_over = True
        if follow.load is not None:
            self._end(follow.load, failed, reads)

    def _end(self, load: Load, failed: TierOutcome | None, reads: Reads) -> None:
        """End a load after its reads."""
        wait(reads)  # all of them, even if one fails: none may write to pages that are given back
        load.failed, load.tiers = TierOutcome.FAILED, self._tier.store.kind
        try:
            load.failed = failed or next(filter(None, (read.result() for read in reads)), None)
        except Exception:
            log.exception("a part of a prefill that is followed cannot be read")
        self._finish(load)

    def _follow(self, follow: Follow, followed: Followed, reads: Reads) -> TierOutcome | None:
        """Read parts until all are being read; return why they are not."""
        digests = self._tier.names.digests(follow.namespace, follow.key)
        had, until = (0, 0), time.monotonic() + STALL_SECONDS
        while True:
            is_last = follow.has_ended
            there = followed.progress()
            if there is None:
                return TierOutcome.FAILED
            if there != had:
                had, until = there, time.monotonic() + STALL_SECONDS
            for source in follow.take_ready(there):
                assert follow.load is not None, "its pages are reserved"
                reads.append(self._tier.parts.submit(self._read, self._tier, follow.load, source, digests))
            if follow.is_complete:
                return None
            if is_last or follow.is_given_up:
                return TierOutcome.FAILED
            if time.monotonic() > until:
                log.info("a prefill of %d tokens is followed no more: nothing came for %g s", follow.at, STALL_SECONDS)
                return TierOutcome.FAILED
            time.sleep(POLL_SECONDS)


@dataclass(frozen=True, slots=True)
class PeerIO(Peers):
    """Other workers of a cluster: their memory as a read-only tier, and the parts that they read here."""

    tier: Tier
    store: PeerStore
    own: OwnParts
    follows: PeerFollows
    segments: SegmentIO

    def follow(self, peer: bytes, namespace: str, key: bytes, tokens: int) -> int:
        return self.follows.follow(peer, namespace, key, tokens)

    def unfollow(self, number: int) -> None:
        self.follows.cancel(number)

    def name_holders(self, key: SegmentKey, peers: Sequence[bytes]) -> None:
        self.segments.expect(key, peers)

    @property
    def stats(self) -> TierStats:
        shared, networked = self.store.bytes_by_way
        return replace(self.tier.stats, sent=self.own.sent, bytes_shared=shared, bytes_networked=networked)
