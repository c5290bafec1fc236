"""Tails of prompts: a worker that prefilled keeps them, and the one that decodes reads them, whole or not at all."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headwater.account import TierOutcome
from headwater.engine.runner import Runner
from headwater.engine.tiers.prefix import PageEntries
from headwater.engine.tiers.tier import Tier
from headwater.schedule.kinds.request import Request
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.tail import FirstToken, Tail, TailPlace
from headwater.schedule.tiers import MAX_CONCURRENT_LOADS
from headwater.tiers.names import TAIL
from headwater.tiers.part import Buffer, Part, Sealer
from headwater.tiers.store import PeerStore

MAX_HELD_TAILS = 8  # the oldest are given up
HELD_SECONDS = 10.0  # in which the other worker is expected to ask; an older tail is given up when another one comes
WAIT_SECONDS = 5.0  # of a request for its tail
FIRST_BYTES = 4096  # of a first token, filled up with blanks

log = logging.getLogger("headwater.engine")


@dataclass(frozen=True, slots=True)
class Kept:
    """A tail for another worker."""

    tail: Tail
    key: bytes  # of the prompt
    until: float


@dataclass(eq=False, slots=True)
class Reading:
    """A tail that is read for a request that waits."""

    seq: Request
    tail: Tail
    place: TailPlace
    until: float


class Tails:
    """Tails that this worker keeps, and reads. Methods without another word are called with the engine's lock held."""

    def __init__(
        self,
        tier: Tier,
        store: PeerStore,
        sealer: Sealer,
        scheduler: Scheduler,
        runner: Runner,
        changed: threading.Condition,
        entries: PageEntries,
        prefill_seconds: Callable[[int], float | None],
    ) -> None:
        """`tier`: of the other workers' memory; `runner`: with the arena; `changed`: the engine's lock.

        `prefill_seconds`: expected seconds for a number of tokens.
        """
        self._prefill_seconds = prefill_seconds
        self._tier, self._store, self._sealer, self._entries = tier, store, sealer, entries
        self._scheduler, self._runner, self._changed = scheduler, runner, changed
        self._kept: dict[bytes, Kept] = {}  # by number, the oldest first
        self._reading: dict[int, Reading] = {}  # by request
        self._unused: list[Tail] = []  # that were read
        self.tokens = 0  # of the tails that were read

    def __len__(self) -> int:
        """Return how many tails are being read."""
        return len(self._reading)

    # -- for other workers

    def keep(self, seq: Request, first: FirstToken) -> None:
        """Keep the tail of a request that was just prefilled (on the engine's thread), if there is memory for it."""
        now, place = time.monotonic(), seq.tail_place
        for id in [id for id, kept in self._kept.items() if now > kept.until]:
            self._kept.pop(id).tail.release()
        while len(self._kept) >= MAX_HELD_TAILS:
            self._kept.pop(next(iter(self._kept))).tail.release()
        tail = self._reserved(seq)
        if tail is None or place is None:
            return
        tail.first = first
        self._runner.keep_tail(seq, tail)
        self._kept[place.id] = Kept(tail, seq.exact_key, now + HELD_SECONDS)

    @contextmanager
    def sealed(self, id: bytes, entries: int) -> Iterator[list[Buffer] | None]:
        """Yield the bytes of a tail, once; None if it is not kept. For any thread.

        `entries`: bytes of the head's entries of a page, as on the other worker; entries of other sizes are left out.
        """
        with self._changed:
            kept = self._kept.pop(id, None)
        if kept is None:
            yield None
            return
        try:
            tail, pages = kept.tail, kept.tail.pages
            views: list[Buffer] = [_blanks(tail.first), *self._runner.arena.bytes.views((*pages.kv, *pages.state))]
            if entries == self._entries.page_bytes:
                views += self._entries.views(pages.kv)
            part = Part(TAIL, tail.start, tail.end, kept.key, views)
            yield self._sealer.seal(self._name(id), part)
        finally:
            with self._changed:
                kept.tail.release()
                self._let_go()

    # -- from other workers

    def holds_back(self, seq: Request) -> bool:
        """Return whether a waiting request is to wait for its tail; begin to read it, unless it is cached here."""
        place, reading = seq.tail_place, self._reading.get(seq.id)
        if place is None or not place.peer:
            return False
        if reading is None and self._scheduler.planner.match(seq).resumed_tokens == seq.n_prompt:
            seq.tail_place = None
            return False
        if reading is None:
            self._unused = [tail for tail in self._unused if not (tail.is_taken or tail.is_released)]
            if len(self._reading) + len(self._unused) >= MAX_CONCURRENT_LOADS:
                return True
            tail = self._reserved(seq) if self._pays(seq) else None
            if tail is not None:
                reading = self._reading[seq.id] = Reading(seq, tail, place, time.monotonic() + WAIT_SECONDS)
                self._tier.parts.submit(self._read, reading)
        if reading is None or time.monotonic() > reading.until:
            seq.tail_place = None
            self.forget(seq.id)
        return seq.tail_place is not None

    def forget(self, request: int) -> None:
        """Give up to read the tail of a request, which begins or ends."""
        if request in self._reading:
            self._reading[request].tail.is_given_up = True

    def give_up(self) -> bool:
        """Give up all tails that no leg copies. False: no memory comes of it now."""
        tails = [kept.tail for kept in self._kept.values()]
        tails += [tail for tail in self._unused if not (tail.is_taken or tail.is_released)]
        self._kept, self._unused = {}, []
        for tail in tails:
            tail.release()
        for reading in self._reading.values():
            reading.tail.is_given_up = True
        return bool(tails)

    def _reserved(self, seq: Request) -> Tail | None:
        """Reserve pages for a request's tail; None if memory is short."""
        return Tail.reserved(self._scheduler.cache, self._scheduler.new_id(), seq.namespace, seq.n_prompt)

    def _pays(self, seq: Request) -> bool:
        """Return whether a tail is expected to be here before its tokens could be computed."""
        layout = self._scheduler.layout
        pages = layout.slot_pages + layout.unit_pages
        size = pages * self._runner.arena.bytes.page_bytes + self._entries.page_bytes
        computing = self._prefill_seconds(seq.n_prompt - (seq.n_prompt - 1) // layout.unit_tokens * layout.unit_tokens)
        return computing is None or self._tier.seconds(size) < computing

    def _read(self, reading: Reading) -> None:
        """Fill the pages of a tail (on a reader's thread). They are its own until a leg copies them."""
        seq, tail, failed = reading.seq, reading.tail, True
        try:
            failed = tail.is_given_up or self._fill(reading) is not None
        except Exception:
            log.exception("the tail of a prompt cannot be read")
        with self._changed:
            del self._reading[seq.id]
            seq.tail_place = None
            if failed or tail.is_given_up:
                tail.release()
            else:
                seq.tail = tail
                self._unused.append(tail)
                self.tokens += tail.end - tail.start
            self._let_go()

    def _fill(self, reading: Reading) -> TierOutcome | None:
        """Read a tail into its pages; return why that failed."""
        seq, tail, place, pages = reading.seq, reading.tail, reading.place, reading.tail.pages
        first, entries = memoryview(bytearray(FIRST_BYTES)), self._entries.views(pages.kv)
        name = self._name(place.id)
        self._store.expect_tail(place.peer, place.id, self._entries.page_bytes, seq.exact_key, name)

        def read(views: list[memoryview]) -> TierOutcome | None:
            return self._tier.read(name, TAIL, tail.end, seq.exact_key, [first, *views, *entries])

        failed = self._runner.arena.bytes.fill((*pages.kv, *pages.state), read)
        if failed is None:
            tail.first = FirstToken.read(bytes(first))
            if tail.first.seed != seq.generation.params.seed:
                failed = TierOutcome.CORRUPT
        return failed

    def _name(self, id: bytes) -> str:
        return self._tier.names.tail("", id, False)

    def _let_go(self) -> None:
        """Note that memory was given back, or that a request need not wait any more."""
        self._scheduler.room_was_made()
        self._changed.notify_all()


def _blanks(first: FirstToken | None) -> bytes:
    """Return a first token as JSON, and blanks after it."""
    assert first is not None, "a tail is kept with its first token"
    return first.as_json().ljust(FIRST_BYTES)
