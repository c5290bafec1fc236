"""Tiers for the scheduler: a prefix that a store holds is loaded before its request begins, if that is faster.

A load is a leg without computation: it reserves pages as any leg does, a reader fills them, and its commit publishes
them. Other requests continue meanwhile; one whose prefix is being loaded waits for it. If a load fails, its request
computes. The cache knows nothing of tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from headwater.account import TierOutcome
from headwater.cache.prefix_cache import PrefixCache
from headwater.cache.segments.store import SegmentKey, StoredSegment
from headwater.errors import OutOfPages
from headwater.plan import Draft, Match, Saving, Sharing, Tail
from headwater.schedule.kinds.request import Request
from headwater.schedule.planner import common_ids, common_tokens
from headwater.schedule.segment_loads import Awaited
from headwater.schedule.tier_load import Candidate, Load, Offer, ReadSpeed, Source, TierReader, TierStats
from headwater.tiers.names import RUN, STATE, TAIL, runs_of

MAX_CONCURRENT_LOADS = 4


@dataclass(frozen=True, slots=True)
class TierFigures:
    """Reads from tiers and copies to them since the start, and the speeds of reads now."""

    loaded_tokens: int = 0
    loaded_segments: int = 0
    copies_dropped: int = 0  # that were given up
    tiers: tuple[TierStats, ...] = ()
    pull: ReadSpeed | None = None  # from other workers of a cluster; None: nothing can be pulled now
    loads: dict[str, ReadSpeed] = field(default_factory=dict)  # from stores that may be this server's own, by medium


class Copies:
    """Copies of cached content to stores. This one makes none."""

    def saved(self, namespace: str, key: bytes, positions: Sequence[int], tails: Sequence[Tail] = ()) -> None:
        """Note that checkpoints and tails were published."""

    def resumed(self, namespace: str, key: bytes, at: int) -> None:
        """Note that a request resumed from a checkpoint in memory."""

    def built(self, segments: Sequence[StoredSegment]) -> None:
        """Note that segments were built."""

    def reused(self, segments: Sequence[StoredSegment]) -> None:
        """Note that a request was composed of segments that were not built for it."""


class Peers:
    """Other workers of a cluster, whose memory is read. This one has none."""

    def follow(self, peer: bytes, namespace: str, key: bytes, tokens: int) -> int:
        """Follow another worker's prefill of a prompt of `tokens` tokens; return its number."""
        return 0

    def unfollow(self, number: int) -> None:
        """Give up a prefill that is followed. Unknown numbers are ignored."""

    def name_holders(self, key: SegmentKey, peers: Sequence[bytes]) -> None:
        """Note that other workers have a segment, or had it a short time ago."""


class Tiers:
    """Stores below memory, as a scheduler sees them: loads for requests that wait. This one has none."""

    copies = Copies()
    peers = Peers()

    @property
    def busy(self) -> bool:
        """True if a lookup, a load or a copy is in progress, each of which ends without another step."""
        return False

    def figures(self) -> TierFigures:
        """Return counters and speeds."""
        return TierFigures()

    def arrived(self, seq: Request) -> None:
        """Look up the prompt of a request that was queued."""

    def forget(self, request: int) -> None:
        """Note that a request begins, or ends."""

    def holds_back(self, seq: Request) -> bool:
        """Return whether a waiting request is to wait for content of its prompt in tiers."""
        return False

    def hold_segments(self, awaited: Awaited, keys: Sequence[SegmentKey]) -> set[SegmentKey]:
        """Return those of the missing segments `keys` that their requester is to wait for: others are built."""
        return set()

    def prefetch(self, seqs: Sequence[Request]) -> None:
        """Begin to load prompts and segments of requests that wait for a slot."""

    def make_room(self) -> bool:
        """Give up copies that have not begun, so that their pages can be evicted. False: there are none."""
        return False

    def give_up_loads(self) -> bool:
        """Give up loads, all of which are for requests that wait. False: no pages come of it soon."""
        return False


@dataclass(slots=True)
class _Lookup:
    """Lookup of a prompt in tiers."""

    unanswered: set[int]  # numbers of tiers
    offers: list[Offer] = field(default_factory=list)  # of the other tiers, the fastest first


class Loads:
    """Loads of a scheduler, and offers of tiers for waiting prompts. Guarded by the scheduler's lock."""

    def __init__(self, cache: PrefixCache, reader: TierReader, new_id: Callable[[], int]) -> None:
        self._cache, self._reader, self._new_id = cache, reader, new_id
        self._unit = cache.layout.unit_tokens
        self._lookups: dict[int, _Lookup] = {}  # by request
        self._held: set[int] = set()  # requests that wait for their offers or for a load
        self.open: dict[int, Load] = {}

    def __len__(self) -> int:
        """Return the number of loads and lookups in progress."""
        return len(self.open) + sum(bool(lookup.unanswered) for lookup in self._lookups.values())

    # -- offers

    def ask(self, request: int, tiers: Iterable[int]) -> None:
        """Note that a request waits for offers of these tiers."""
        self._lookups[request] = _Lookup(set(tiers))

    def answered(self, request: int, offer: Offer) -> None:
        """Add a tier's offer for a request, if the request waits for it."""
        lookup = self._lookups.get(request)
        if lookup is not None and offer.tier in lookup.unanswered:
            lookup.unanswered.remove(offer.tier)
            lookup.offers = sorted([*lookup.offers, offer], key=lambda offer: offer.tier)

    def forget(self, request: int) -> None:
        """Drop the offers of a request that begins, or ends."""
        self._lookups.pop(request, None)
        self._held.discard(request)

    # -- loads

    def holds_back(self, seq: Request, match: Match) -> bool:
        """Return whether a request waits for its lookup or for a load; begin a load if one pays."""
        lookup = self._lookups.get(seq.id)
        if lookup is None:
            return False
        is_loading = seq.load is not None and seq.load.id in self.open
        holds = bool(lookup.unanswered) or is_loading or self._begins(seq, match, lookup.offers)
        (self._held.add if holds else self._held.discard)(seq.id)
        return holds

    def _begins(self, seq: Request, match: Match, offers: Sequence[Offer]) -> bool:
        """Return whether a load is begun or joined. A composed prefix is not stored, so it has none."""
        if seq.load is not None and seq.load.follows and seq.load.failed is not None:
            seq.load = None  # the followed prefill failed: another load may succeed
        may_load = seq.load is None or (seq.load.follows and seq.load.is_finished)  # a tail is still to be read
        return may_load and seq.marked_from is None and self._load_for(seq, match, offers)

    def stop_waiting(self, seq: Request) -> None:
        """End the wait of a request for its lookup or for a load: it computes; the load continues for other requests.

        If some tiers have offered states of its prompt, only the wait for the other tiers ends.
        """
        if seq.id not in self._held:
            return
        lookup = self._lookups[seq.id]
        if lookup.unanswered and any(offer.states for offer in lookup.offers):
            lookup.unanswered.clear()
            self._held.remove(seq.id)
        else:
            seq.tier_outcome = TierOutcome.SLOW
            self.forget(seq.id)

    def give_up(self) -> list[Load]:
        """Give up all loads in progress, and return them: their pages are free once they are finished."""
        for load in self.open.values():
            load.given_up = True
        return list(self.open.values())

    def finished(self, load: Load) -> None:
        """Publish what was read, or give its pages back if it failed."""
        del self.open[load.id]
        load.is_finished = True
        if load.tail_failed is not None:
            self._cache.drop_tails(load.plan)
        load.close(self._cache)

    def _load_for(self, seq: Request, match: Match, offers: Sequence[Offer]) -> bool:
        """Begin a load for a request, or join one in progress. False: it computes; `tier_outcome` has the reason."""
        have = seq.resumes_at(match)
        best = self._best(seq, match, offers)
        covering = self._covering(seq, have if best is None else best.end - 1)
        if covering is not None:
            seq.load, seq.waited = covering, True
            return True
        if best is None:
            is_there = next(self._candidates(seq, match, offers), None) is not None
            is_elsewhere = any(offer.other_fingerprint for offer in offers)
            missed = TierOutcome.OTHER_FINGERPRINT if is_elsewhere else TierOutcome.MISS
            if match.checkpoint_tokens < seq.last_resumable // self._unit * self._unit:
                seq.tier_outcome = TierOutcome.COMPUTING_IS_FASTER if is_there else missed
            return False
        if sum(not load.follows for load in self.open.values()) >= MAX_CONCURRENT_LOADS:
            return True
        return self._begin(seq, match, best)

    def _best(self, seq: Request, match: Match, offers: Sequence[Offer]) -> Candidate | None:
        """Return the parts with which the prompt is in memory soonest."""
        soonest, best = self._reader.prefill_seconds(seq.n_prompt - seq.resumes_at(match)), None
        for one in self._candidates(seq, match, offers):
            rest = self._reader.prefill_seconds(seq.n_prompt - one.end)
            total = None if rest is None else self._seconds(one.sources) + rest
            if total is None or soonest is None:
                return one  # nothing is measured yet: the deepest position
            if total < soonest:
                best, soonest = one, total
        return best

    def _candidates(self, seq: Request, match: Match, offers: Sequence[Offer]) -> Iterator[Candidate]:
        """Yield parts that let a prompt resume deeper than memory does, the deepest position first."""
        have = match.checkpoint_tokens
        for state in self._states(seq, match, offers):
            runs = self._runs(state.end, match.kv_tokens, offers)
            if runs is not None:
                yield from self._with_tail(seq, Candidate(state.end, state.end, (*runs, state)), offers)
                yield Candidate(state.end, state.end, (*runs, state))
        yield from (
            one for one in self._with_tail(seq, Candidate(have, have, ()), offers) if one.end > match.resumed_tokens
        )

    def _with_tail(self, seq: Request, prefix: Candidate, offers: Sequence[Offer]) -> Iterator[Candidate]:
        """Yield a prefix with the tail after it that has most tokens of the prompt, if there is one."""
        tails = [(tail, offer.tier) for offer in offers for tail in offer.tails if tail.start == prefix.at]
        if tails:
            tail, tier = max(tails, key=lambda one: (one[0].usable_end(seq.n_prompt), one[0].has_hidden, -one[1]))
            source = Source(tail.start, tail.end, tier, TAIL)
            end = tail.usable_end(seq.n_prompt)
            yield Candidate(prefix.at, end, (*prefix.sources, source), tail.has_hidden)

    def _states(self, seq: Request, match: Match, offers: Sequence[Offer]) -> Iterator[Source]:
        """Yield states that a prompt can resume from, the deepest first."""
        last = seq.last_resumable // self._unit * self._unit
        found = {at: offer.tier for offer in reversed(offers) for at in offer.states}
        for at in sorted(found, reverse=True):
            if match.checkpoint_tokens < at <= last:
                yield Source(0, at, found[at], STATE)

    def _runs(self, end: int, have: int, offers: Sequence[Offer]) -> tuple[Source, ...] | None:
        """Return the runs of KV in [`have`, `end`); None if one of them is in no tier."""
        if not self._cache.layout.kv_pages_per_unit:
            return ()
        runs = []
        for run in runs_of(end, self._reader.run_tokens):
            if run[1] <= have:
                continue
            tier = next((offer.tier for offer in offers if run in offer.runs), None)
            if tier is None:
                return None
            runs.append(Source(*run, tier))
        return tuple(runs)

    def _seconds(self, sources: Sequence[Source]) -> float:
        prefix, tails = [s for s in sources if s.kind != TAIL], [s for s in sources if s.kind == TAIL]
        tokens = dict.fromkeys((source.tier for source in prefix), 0)
        for source in prefix:
            tokens[source.tier] += source.end - source.start if source.kind == RUN else 0
        states = {source.tier for source in prefix if source.kind == STATE}
        of_prefix = sum(self._reader.load_seconds(tier, tier in states, n) for tier, n in tokens.items())
        return of_prefix + sum(self._reader.tail_seconds(tail.tier, tail.end - tail.start) for tail in tails)

    def _covering(self, seq: Request, after: int) -> Load | None:
        """Return a load in progress with which the request's prompt can resume deeper than at `after`."""
        for load in self.open.values():
            if not load.is_awaited or load.namespace != seq.namespace or load.at > seq.last_resumable:
                continue
            if common_tokens(seq.key, load.key, self._cache.layout) >= load.at:
                shared = min(load.end, common_ids(seq.key, load.key)) if load.end > load.at else load.at
                if after < shared:
                    return load
        return None

    def _begin(self, seq: Request, match: Match, best: Candidate) -> bool:
        """Reserve the pages of a load, and begin it. False: there is no memory for it."""
        end = best.sources[-1].end
        key = seq.key[
            : end // self._unit * self._cache.layout.unit_bytes + end % self._unit * self._cache.tails.token_bytes
        ]
        load = self._reserved(seq.namespace, key, match, best, self._seconds(best.sources))
        if load is None:
            seq.tier_outcome = TierOutcome.NO_MEMORY
            return False
        if seq.load is not None:
            load.earlier, load.before, load.seconds = seq.load, seq.load.before, seq.load.seconds
        seq.tier_outcome, seq.load = None, load
        self._reader.begin(load)
        return True

    def follow(self, namespace: str, key: bytes, at: int, match: Match, tier: int) -> Load | None:
        """Reserve the pages of a load that follows a prefill on another worker; None if there is no memory for it.

        All its parts come later, from one tier; the caller reads them.
        """
        all_runs = runs_of(at, self._reader.run_tokens) if self._cache.layout.kv_pages_per_unit else ()
        runs = tuple(Source(*run, tier) for run in all_runs if run[1] > match.kv_tokens)
        sources = (*runs, Source(0, at, tier, STATE))
        load = self._reserved(namespace, key, match, Candidate(at, at, sources), self._seconds(sources))
        if load is not None:
            load.follows, load.is_awaited = True, False
        return load

    def _reserved(self, namespace: str, key: bytes, match: Match, wanted: Candidate, seconds: float) -> Load | None:
        """Reserve the pages of a load of the prefix `key`; None if there is no memory for it."""
        tails = [source.end for source in wanted.sources if source.kind == TAIL]
        draft = Draft(
            request=self._new_id(),
            namespace=namespace,
            key=key,
            start=match.checkpoint_tokens,
            end=wanted.sources[-1].end,
            publish=wanted.at,
            saving=Saving(
                (wanted.at,) if wanted.at > match.checkpoint_tokens else (), tails=tuple(tails), ends=wanted.has_hidden
            ),
            sharing=Sharing(counts=False),
        )
        try:
            plan = self._cache.reserve(draft, match)
        except OutOfPages:
            return None
        sources = wanted.sources if plan.tails else tuple(s for s in wanted.sources if s.kind != TAIL)
        load = Load(draft.request, plan, seconds, namespace, key, wanted.at, sources, match.resumed_tokens)
        if not sources:
            load.failed = TierOutcome.NO_MEMORY
            load.close(self._cache)
            return None
        self.open[load.id] = load
        return load
