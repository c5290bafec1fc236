"""Answering a request: its prompt is prefilled, then it decodes a token a step."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace

from headwater.account import CacheAccount, Reason, TierOutcome
from headwater.cache.placement.base import Placed, Placement, PlacementQuery
from headwater.cache.prefix_cache import PrefixCache
from headwater.cache.segments.compose import Widths, runs
from headwater.cache.segments.store import SegmentKey, StoredSegment
from headwater.draft.forced import Grammar
from headwater.plan import CacheLayout, Composed, Match, Plan
from headwater.request import Span
from headwater.schedule.handover import NO_HANDOVER, Handover
from headwater.schedule.kinds.answer import FinishedAnswer
from headwater.schedule.segment_loads import Awaited, SegmentLoad
from headwater.schedule.sequence import TOKEN_BYTES, Phase, Purpose, Sequence
from headwater.schedule.speculation import Speculator
from headwater.schedule.tier_load import Load


@dataclass(frozen=True, slots=True)
class Composition:
    """Stored segments that a request is going to be composed of, pinned, and their places in its prompt."""

    cache: PrefixCache
    spans: tuple[Span, ...]
    stored: tuple[StoredSegment, ...]
    widths: Widths
    carries: bool  # whether a segment's transition is applied to the state before it

    @property
    def interiors(self) -> int:
        """Number of tokens that are not computed."""
        return sum(self.widths.interior(span.end - span.start) for span in self.spans)

    def interiors_of(self, keys: Container[SegmentKey]) -> int:
        """Number of these tokens that belong to segments with one of `keys`."""
        return sum(self.widths.interior(stored.key.tokens) for stored in self.stored if stored.key in keys)

    def start(self, unit: int) -> int:
        """Begin of the composed leg: the last multiple of the grid before the first segment."""
        return self.spans[0].start // unit * unit

    @property
    def tail_start(self) -> int:
        """Position after the last interior."""
        return self.spans[-1].end - self.widths.tail

    def applied_to(self, plan: Plan) -> Plan:
        """Return the plan of the leg from before the first segment until after the last one."""
        in_pages = self.cache.layout.states_in_pages
        parts = tuple(
            Composed(
                at=span.start,
                start=self.widths.head,
                end=span.end - span.start - self.widths.tail,
                table=stored.kv,
                state=stored.kv[-1:] if in_pages else stored.state,
                transition=() if not self.carries else stored.kv[-1:] if in_pages else stored.transition,
            )
            for span, stored in zip(self.spans, self.stored, strict=True)
        )
        return replace(plan, composed=parts, runs=runs(self.spans, self.widths, plan.start, plan.end))

    def use(self) -> None:
        """Count one use of each segment."""
        for stored in self.stored:
            self.cache.use_segment(stored)

    def release(self) -> None:
        """Unpin the segments."""
        for stored in self.stored:
            self.cache.segments.unpin(stored)


@dataclass(eq=False)
class Request(Sequence):
    """A request with a client: it hits the cache, is charged to its namespace, and samples tokens."""

    purpose = Purpose.PROMPT
    counts_as_hit = True

    account: CacheAccount | None = None
    waited: bool = False  # for a request that computes the same prefix
    preemptions: int = 0
    started_over: bool = False  # preempted while it ran alone, for want of memory
    composition: Composition | None = None  # until its composed leg ran
    tried: set[SegmentKey] = field(default_factory=set)  # segments built for it, or tried, or awaited
    built: set[SegmentKey] = field(default_factory=set)  # segments whose build it started
    plain: bool = False  # computed without segments: they could not be held beside it
    grammar: Grammar | None = None  # constraint of the answer, which drafts keep to
    speculator: Speculator | None = None  # once it drafts
    handover: Handover = NO_HANDOVER
    load: Load | None = None  # that it waits for, or waited for
    tier_outcome: TierOutcome | None = None  # why nothing was loaded
    awaited: Awaited = field(default_factory=Awaited)  # segments that it waited for in tiers

    # -- prompt and output

    def prompt_ids(self, span: Span) -> bytes:
        """Token ids of a part of the prompt, four bytes each."""
        return self.exact_key[TOKEN_BYTES * span.start : TOKEN_BYTES * span.end]

    @property
    def composes(self) -> bool:
        """True if stored segments may be part of the prompt."""
        return bool(self.generation.segments) and not (self.plain or self.scores_prompt)

    def answer_end(self, layout: CacheLayout) -> int | None:
        """Position up to which the answer is to be prefilled, so that the next turn resumes there.

        Without tails that is a page boundary: None if prompt and answer end on the same page, and the prompt's own last
        checkpoint does as well.
        """
        if layout.tail_pages and self.may_start_in_mid_page and self.known_tokens > self.n_prompt:
            return self.known_tokens
        unit = layout.unit_tokens
        end = self.known_tokens // unit * unit
        if end > self.n_prompt // unit * unit:
            return end
        return None if self.placed_until >= (self.n_prompt - 1) // unit * unit else end or None

    def answer(self, id: int, end: int) -> FinishedAnswer:
        """Return the prefill of the first `end` tokens, output included."""
        answer = FinishedAnswer.of(id, self.generation, tuple(self.tokens[:end]))
        answer.marked_from, answer.whole, answer.key = self.marked_from, self.whole, self.key_until(end)
        return answer

    @property
    def scores_prompt(self) -> bool:
        return self.generation.params.prompt_logprobs is not None

    def wants_token_after(self, end: int) -> bool:
        return end == len(self.tokens)

    # -- prefill

    @property
    def is_answered(self) -> bool:
        return self.generation.keep_output and self.generation.params.max_tokens > 0

    @property
    def last_resumable(self) -> int:
        """At least one token is computed, for its logits."""
        return self.n_prompt - 1

    @property
    def exact_until(self) -> int:
        """The first segment that is composed begins there: a tail may end in its page, and before it."""
        return super().exact_until if self.composition is None else self.composition.spans[0].start

    def place(self, placement: Placement, query: PlacementQuery) -> Placed:
        return placement.place(query)

    def begun(self, match: Match, start: int, placement: Placement, query: PlacementQuery | None) -> None:
        if self.account is not None:  # a preempted request was counted at its first start
            return
        self.account = self._account(match, start)
        if query is not None:
            placement.learn(query)

    def _account(self, match: Match, start: int) -> CacheAccount:
        composition, marked_from = self.composition, self.n_prompt if self.marked_from is None else self.marked_from
        interiors = 0 if composition is None else composition.interiors
        cold = 0 if composition is None else composition.interiors_of(self.built)
        ahead = sum(span.end - max(span.start, min(start, span.end)) for span in self.generation.segments)
        loaded, outcome = self._loaded(start)
        segments = self._loaded_segments()
        prefix = (self.load,) if loaded and self.load is not None else ()
        tiers = {tier for load in (*prefix, *segments.values()) for tier in load.tiers.split(",")}
        reading = (load.seconds for load in segments.values())  # side by side
        return CacheAccount(
            prompt_tokens=self.n_prompt,
            cached_tokens=start + interiors - cold,
            resumed_at=start,
            stranded_tokens=max(0, match.kv_tokens - start),
            reason=match.reason,
            diverged_in=self.generation.message_at(match.kv_tokens) if match.reason is Reason.DIVERGED else None,
            waited_for_leader=self.waited,
            segments=0 if composition is None else len(composition.spans),
            composed_tokens=interiors,
            cold_tokens=cold,
            recomputed_tokens=ahead - interiors,
            approximate_tokens=max(0, start - marked_from),
            loaded_tokens=loaded + (0 if composition is None else composition.interiors_of(segments)),
            loaded_segments=len(segments),
            loaded_from=",".join(sorted(tiers)) or None,
            load_seconds=round(sum(load.seconds for load in prefix) + max(reading, default=0.0), 6),
            tier_outcome=self._outcome(outcome),
        )

    def _loaded(self, start: int) -> tuple[int, TierOutcome | None]:
        """Return how many tokens before `start` were loaded for the request, and the outcome in tiers."""
        load = self.load
        if load is not None and load.failed is not None and load.earlier is not None:
            load = load.earlier
        if load is None or self.tier_outcome is not None:
            return 0, self.tier_outcome
        if load.failed is not None or start < load.at or start <= load.before:
            return 0, load.failed or TierOutcome.NO_MEMORY
        return min(start, load.end) - load.before, TierOutcome.LOADED

    def _loaded_segments(self) -> dict[SegmentKey, SegmentLoad]:
        """Return the loads of the segments that the request is composed of and that were not built for it since."""
        stored = () if self.composition is None else self.composition.stored
        loaded = self.awaited.loaded
        return {one.key: loaded[one.key] for one in stored if one.key in loaded and one.key not in self.built}

    def _outcome(self, of_prefix: TierOutcome | None) -> TierOutcome | None:
        """Return the outcome in tiers of prefix and segments together."""
        found = [one for one in (of_prefix, *self.awaited.outcomes.values()) if one is not None]
        if TierOutcome.LOADED in found:
            return TierOutcome.LOADED
        return next((one for one in found if one is not TierOutcome.MISS), found[0] if found else None)

    def leg_end(self, start: int, end: int, unit: int) -> int:
        """A leg ends where segments begin; one that begins there ends with the page on which their text ends."""
        if self.composition is None:
            return end
        if start < self.composition.start(unit):
            return min(end, self.composition.start(unit))
        after = min(self.n_prompt, (self.composition.tail_start // unit + 1) * unit)
        self.checkpoints = tuple(c for c in self.checkpoints if c >= after)
        self.speculative = tuple(c for c in self.speculative if c >= after)
        return after

    def may_stop_at(self, position: int, unit: int) -> bool:
        """No state exists between composed segments."""
        before = self.composition is None or position <= self.composition.start(unit)
        return before and super().may_stop_at(position, unit)

    def composed_from(self, end: int) -> int | None:
        composition = self.composition
        if composition is None or end <= composition.tail_start:
            return None
        return composition.spans[0].start + composition.widths.head

    def complete(self, plan: Plan) -> Plan:
        if self.composition is not None and self.composed_from(plan.end) is not None:
            return self.composition.applied_to(plan)
        return plan

    def segments_of(self, plan: Plan) -> tuple[StoredSegment, ...]:
        if not plan.composed or self.composition is None:
            return ()
        return tuple(stored for stored in self.composition.stored if stored.key not in self.built)

    def leg_ended(self, plan: Plan) -> None:
        super().leg_ended(plan)
        if plan.composed and self.composition is not None:
            self.composition.use()
            self.release_segments()

    def prefill_ended(self) -> Phase:
        return Phase.DECODE

    # -- segments

    def release_segments(self) -> bool:
        if self.composition is None:
            return False
        self.composition.release()
        self.composition = None
        return True

    def start_without_segments(self) -> None:
        """Compute the whole prompt exactly, under its exact key. The first leg is not reserved yet."""
        self.release_segments()
        self.key, self.marked_from, self.match, self.plain = self.exact_key, None, None, True

    def compute_segments(self) -> bool:
        """Some legs have run under the marked key: later ones stay under it, and the account is corrected."""
        if not self.release_segments():
            return False
        self.plain = True
        if self.account is not None:
            self.account = replace(
                self.account,
                cached_tokens=self.account.resumed_at,
                segments=0,
                composed_tokens=0,
                cold_tokens=0,
                recomputed_tokens=self.account.recomputed_tokens + self.account.composed_tokens,
                loaded_tokens=self._loaded(self.account.resumed_at)[0],
                loaded_segments=0,
            )
        return True
