"""Tiers of an engine: separate threads look up, read and write parts while the engine runs steps.

A prompt is looked up in each store when its request arrives. A load fills pages that its plan reserved. A copy reads
pages that a lease keeps from eviction. If a store does not answer in time, the request is computed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress

from headwater.account import TierOutcome
from headwater.cache.segments.store import SegmentKey
from headwater.config import ServeConfig
from headwater.engine.runner import Runner
from headwater.engine.tiers.copies import StoreCopies
from headwater.engine.tiers.own_parts import OwnParts
from headwater.engine.tiers.peers import PeerFollows, PeerIO
from headwater.engine.tiers.prefix import Lookup, PrefixParts, Prompt
from headwater.engine.tiers.segments import SegmentIO
from headwater.engine.tiers.tier import Tier, TierFingerprints, Workers, patience
from headwater.schedule.kinds.request import Request
from headwater.schedule.prefill_seconds import PrefillSeconds
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.segment_loads import Awaited
from headwater.schedule.tier_load import Load, Offer, ReadSpeed, Source
from headwater.schedule.tiers import MAX_CONCURRENT_LOADS, Loads, TierFigures, Tiers
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.names import TAIL, Names
from headwater.tiers.part import Sealer
from headwater.tiers.store import OwnStore, PeerStore, Store

POLL_SECONDS = 0.2  # between checks of the remaining time
GIVE_UP_SECONDS = 1.0  # in which a load that is given up is expected to end
CLOSE_SECONDS = 10.0  # for stores that do not answer

log = logging.getLogger("headwater.engine")


class TierIO(Tiers):
    """Stores of an engine. Methods are called with the engine's lock held, unless stated otherwise."""

    copies: StoreCopies

    def __init__(
        self,
        stores: Sequence[Store],
        key: bytes,
        fingerprint: Fingerprint,
        scheduler: Scheduler,
        runner: Runner,
        changed: threading.Condition,
        config: ServeConfig,
        prefill: PrefillSeconds,
    ) -> None:
        """`key`: the secret one; `runner`: with the arena; `changed`: the engine's lock; `prefill`: by tokens."""
        self._scheduler, self._cache, self._layout = scheduler, scheduler.cache, scheduler.layout
        self._runner = runner
        own, sealer = (key, fingerprint, self._layout.unit_bytes), Sealer(key)
        self.tiers = [Tier(number, store, TierFingerprints(store, *own), sealer) for number, store in enumerate(stores)]
        self._names = names = Names(key, fingerprint.digest, self._layout.unit_bytes)
        self._changed, self.timeout = changed, config.tier_timeout
        self._prefixes = PrefixParts(names, self._layout, runner, lambda tokens: self.prefill_seconds(tokens))
        self.run_tokens = self._prefixes.run_tokens
        self._lookup = Lookup(self._layout, self.run_tokens)
        self.loads = Loads(self._cache, self, scheduler.new_id)
        self._stores = tuple(self.tiers)  # that are written
        private = [(tier.store.medium, tier) for tier in self._stores if isinstance(tier.store, OwnStore)]
        self.own = dict(reversed(private))  # tiers that may be private to this server: the fastest of each medium
        self.segments = SegmentIO(self._stores, names, scheduler, runner, changed, self.timeout, self)
        self.loaded_tokens = self.loaded_segments = 0
        self._prefill = prefill
        self._waiting: dict[int, tuple[Request, float]] = {}  # requests that wait, and until when
        self._given_up: dict[int, float] = {}  # loads, and when they were given up
        self._closing = False
        self.pulls: PeerIO | None = None  # the same as `peers`, once there are any
        self._had: dict[int, int] = {}  # of requests that were not looked up: the position at which memory resumes
        self._readers = Workers(MAX_CONCURRENT_LOADS, "headwater-tier-reader")  # a load each
        given = self._stores, scheduler, changed, self._prefixes, self.segments
        self.copies = StoreCopies(*given, config.tier_store == "through")

    # -- other workers of a cluster

    def join_peers(self, store: PeerStore, key: bytes, fingerprint: Fingerprint) -> OwnParts:
        """Read from other workers, too; return the parts that those may read here. `key`: the cluster's secret key."""
        fingerprints = TierFingerprints(store, key, fingerprint, self._layout.unit_bytes)
        tier = Tier(len(self.tiers), store, fingerprints, Sealer(key))
        engine = self._scheduler, self._runner, self._changed, self.prefill_seconds, self.segments.part_of
        own = OwnParts(key, fingerprint, *engine)
        given = tier, store, self._scheduler, self.loads, self._changed, self._read, self._finish
        self.peers = self.pulls = PeerIO(tier, store, own, PeerFollows(*given), self.segments)
        self.tiers.append(tier)
        self.segments.join_peers(tier, store)
        return own

    def figures(self) -> TierFigures:
        pulls, stats = self.pulls, tuple(tier.stats for tier in self._stores)
        return TierFigures(
            loaded_tokens=self.loaded_tokens,
            loaded_segments=self.loaded_segments,
            copies_dropped=self.copies.dropped,
            tiers=stats if pulls is None else (*stats, pulls.stats),
            pull=self._speed(pulls.tier) if pulls is not None and pulls.store.reachable else None,
            loads={medium: self._speed(tier) for medium, tier in self.own.items() if tier.usable},
        )

    def _speed(self, tier: Tier) -> ReadSpeed:
        a_token = self._prefixes.bytes_of(False, self.run_tokens) / self.run_tokens / tier.bytes_a_second
        return ReadSpeed(tier.seconds(self._prefixes.bytes_of(True, 0)), a_token)

    # -- requests that arrive

    def arrived(self, seq: Request) -> None:
        """Look up a request's prompt in the stores, unless memory has all of it."""
        if self.pulls is not None and seq.handover.follows is not None:
            self.pulls.follows.arrived(seq, seq.handover.follows)
        if not self._stores and not seq.handover.peers and seq.load is None:
            return
        match = self._scheduler.planner.match(seq)
        last = seq.last_resumable // self._layout.unit_tokens * self._layout.unit_tokens
        if seq.scores_prompt or self._closing:
            return
        with_tails = self._may_read_tail(seq, match.resumed_tokens)
        if match.checkpoint_tokens >= last and not with_tails:
            self._had[seq.id] = match.checkpoint_tokens
            return
        tiers = [tier for tier in self.tiers if tier.usable and (tier in self._stores or seq.handover.peers)]
        self.loads.ask(seq.id, [tier.number for tier in tiers])
        self._waiting[seq.id] = seq, time.monotonic() + self.timeout
        prompt = Prompt(seq.id, seq.handover.peers, seq.namespace, seq.key, match.checkpoint_tokens, last, with_tails)
        for tier in tiers:
            tier.lookups.submit(self._look_up, tier, prompt)

    def _may_read_tail(self, seq: Request, resumed: int) -> bool:
        """Return whether reading a tail may take less time than computing the tokens that it has."""
        if not self._layout.tail_pages or not seq.may_start_in_mid_page:
            return False
        rest = min(seq.n_prompt - resumed, self._layout.unit_tokens)
        computing = self.prefill_seconds(rest)
        tiers = (tier for tier in self.tiers if tier.usable)
        return rest > 0 and (computing is None or any(self.tail_seconds(t.number, rest) < computing for t in tiers))

    def holds_back(self, seq: Request) -> bool:
        if seq.id not in self._waiting and seq.id not in self._had:
            return False
        match = self._scheduler.planner.match(seq)
        if seq.id in self._had:
            if match.checkpoint_tokens >= self._had[seq.id]:
                return False
            del self._had[seq.id]  # it was evicted since the request arrived
            self.arrived(seq)
        had = seq.load
        holds = self.loads.holds_back(seq, match)
        if seq.load is not had and seq.load is not None:
            computing = self.prefill_seconds(seq.load.end - match.checkpoint_tokens)
            until = time.monotonic() + self.timeout + patience(seq.load.expected, computing)
            self._waiting[seq.id] = seq, until
        return holds

    def prefetch(self, seqs: Sequence[Request]) -> None:
        for seq in seqs:
            if not self.holds_back(seq) and self._stores:  # which segments are used depends on the prefix in memory
                missing, _ = self._scheduler.composer.prepare(seq)
                seq.release_segments()
                self.hold_segments(seq.awaited, missing)

    def forget(self, request: int) -> None:
        self.loads.forget(request)
        self._waiting.pop(request, None)
        self._had.pop(request, None)

    @property
    def busy(self) -> bool:
        of_peers = self.pulls is not None and self.pulls.own.reading
        return bool(len(self.loads) or len(self.segments) or self.copies.busy or of_peers)

    def take_late(self) -> None:
        """Stop the wait of requests that are late: they are computed."""
        now = time.monotonic()
        for seq, until in list(self._waiting.values()):
            if now > until:
                self.loads.stop_waiting(seq)
        self.segments.take_late(now)

    def hold_segments(self, awaited: Awaited, keys: Sequence[SegmentKey]) -> set[SegmentKey]:
        sought = [] if self._closing else [key for key in keys if self.segments.may_hold(key)]
        return self.segments.hold_back(awaited, sought) if sought else set()

    def segment_loaded(self, tokens: int) -> None:
        self.loaded_segments += 1
        self.loaded_tokens += tokens

    def _look_up(self, tier: Tier, prompt: Prompt) -> None:
        """Look a prompt up in a store (on the store's thread)."""
        offer = Offer(tier.number)
        try:
            if self.pulls is not None and tier is self.pulls.tier:
                self.pulls.store.ask(prompt.peers, prompt.namespace, prompt.key, prompt.last + 1)
            offer = self._lookup.offer(tier, prompt)
        except Exception:
            log.exception("tiers cannot be asked")
        with self._changed:
            self.loads.answered(prompt.request, offer)
            self._changed.notify_all()

    # -- costs

    def prefill_seconds(self, tokens: int) -> float | None:
        speed = self._prefill.speed
        return None if speed is None else speed.seconds(0, tokens)

    def load_seconds(self, tier: int, state: bool, tokens: int) -> float:
        return self.tiers[tier].seconds(self._prefixes.bytes_of(state, tokens))

    def tail_seconds(self, tier: int, tokens: int) -> float:
        return self.tiers[tier].seconds(self._prefixes.tail_bytes(tokens))

    # -- loads

    def begin(self, load: Load) -> None:
        for source in load.sources:
            self.tiers[source.tier].waiting += self._prefixes.source_bytes(source)
        self._readers.submit(self._load, load)

    def _load(self, load: Load) -> None:
        """Fill a load's pages (on a reader's thread)."""
        begun = time.perf_counter()
        sources = load.sources
        load.tiers = ",".join(sorted({self.tiers[source.tier].store.kind for source in sources}))
        try:
            tiers = {source.tier: self.tiers[source.tier] for source in sources}
            digests = {number: tier.names.digests(load.namespace, load.key) for number, tier in tiers.items()}
            parts = list[Future[TierOutcome | None]]()
            try:
                for one in sources:
                    tier = tiers[one.tier]
                    parts.append(tier.parts.submit(self._read, tier, load, one, digests[one.tier]))
                with suppress(OSError, MemoryError):  # the step that needs the memory provides it
                    self._runner.arena.expect(load.plan.end)
            finally:
                wait(parts)  # even if one fails: no thread may write to released pages
            self._note_failures(load, [part.result() for part in parts])
        except Exception:
            log.exception("a load failed")
            load.failed = TierOutcome.FAILED
        load.seconds += time.perf_counter() - begun
        with self._changed:
            for source in sources:
                self.tiers[source.tier].waiting -= self._prefixes.source_bytes(source)
        self._finish(load)

    def _note_failures(self, load: Load, outcomes: Sequence[TierOutcome | None]) -> None:
        """Note which reads failed. Without its tail the rest of a prefix is used."""
        *of_prefix, last = outcomes
        if load.sources[-1].kind == TAIL and of_prefix:
            load.tail_failed = last
        else:
            of_prefix.append(last)
        load.failed = next(filter(None, of_prefix), None)

    def _finish(self, load: Load) -> None:
        """Publish the content that was read, or release its pages."""
        with self._changed:
            self.loads.finished(load)
            self._scheduler.room_was_made()
            if load.failed is None:
                self.loaded_tokens += load.end - load.before
            self._changed.notify_all()

    def _read(self, tier: Tier, load: Load, source: Source, digests: Sequence[str]) -> TierOutcome | None:
        return TierOutcome.NO_MEMORY if load.given_up else self._prefixes.read(tier, load, source, digests)

    def give_up_loads(self) -> bool:
        now, loads = time.monotonic(), (*self.loads.give_up(), *self.segments.give_up())
        self._given_up = {load.id: self._given_up.get(load.id, now) for load in loads}
        return any(now - since < GIVE_UP_SECONDS for since in self._given_up.values())

    def make_room(self) -> bool:
        given_up = self.copies.queued
        if self.pulls is not None:
            self.pulls.follows.give_up()
        self.copies.drop_queued()
        return given_up > 0

    # -- the end, without the lock

    def close(self, left: Callable[[], float]) -> None:
        """Copy segments, then checkpoints, the last used first, while `left()` seconds remain; close the stores.

        A store that does not answer is abandoned after CLOSE_SECONDS.
        """
        with self._changed:
            if self._closing:
                return
            wanted = deque(self.copies.uncopied() if left() > 0 else ())
            while (wanted or self.copies.busy) and left() > 0:
                while wanted and not self.copies.queued:
                    wanted.popleft()()
                self._changed.wait(min(POLL_SECONDS, left()))
            self.copies.dropped += len(wanted)
            self.make_room()
            self._closing = True
            self.copies.close()
        until = time.monotonic() + CLOSE_SECONDS
        follows = [self.pulls.follows.threads] if self.pulls is not None else []
        lookups, parts = ([getattr(tier, of) for tier in self.tiers] for of in ("lookups", "parts"))
        # in the order in which they give each other work
        threads = (*lookups, *follows, self._readers, *parts, self.copies.writer)
        ended = [some.end(until - time.monotonic()) for some in threads]
        closing = Workers(len(self.tiers), "headwater-tier-close")
        closed = wait([closing.submit(tier.store.close) for tier in self.tiers], max(0.0, until - time.monotonic()))
        closing.end(0.0)
        if closed.not_done or not all(ended):
            log.warning("a tier has not answered for %g s: its open calls are abandoned", CLOSE_SECONDS)
