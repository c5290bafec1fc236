"""Planner: drafts a sequence's next leg and reserves it, asking for less each time memory falls short."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from headwater.account import Reason
from headwater.cache.placement.base import Placement, PlacementQuery
from headwater.cache.prefix_cache import PrefixCache
from headwater.errors import OutOfPages, PlanClosed
from headwater.plan import CacheLayout, Draft, Hints, Match, Plan, Saving, Sharing
from headwater.schedule.limits import SCORED_LEG_TOKENS, Budget
from headwater.schedule.sequence import TOKEN_BYTES, Sequence

DecodeReuse = Literal["canonical", "raw", "none"]


def common_tokens(a: bytes, b: bytes, layout: CacheLayout) -> int:
    """Return the length in tokens of the longest common prefix of two keys, in whole units."""
    width = layout.unit_bytes
    units = min(len(a), len(b)) // width
    if not units or a[:width] != b[:width]:
        return 0
    differ = np.frombuffer(a, np.uint8, units * width) != np.frombuffer(b, np.uint8, units * width)
    first = int(differ.argmax())
    return (first // width if differ[first] else units) * layout.unit_tokens


def common_ids(a: bytes, b: bytes) -> int:
    """Return the length in tokens of the longest common prefix of two keys of token ids."""
    n = min(len(a), len(b)) // TOKEN_BYTES
    if not n:
        return 0
    differ = np.frombuffer(a, np.uint32, n) != np.frombuffer(b, np.uint32, n)
    first = int(differ.argmax())
    return first if differ[first] else n


@dataclass(frozen=True, slots=True)
class Wish:
    """Pages that a leg asks for in addition to its own."""

    speculative: bool = True  # and optional checkpoints
    checkpoints: bool = True
    hold_checkpoint: bool = True
    reuse: bool = True

    def takes(self, is_optional: bool) -> bool:
        """Return whether a checkpoint is wanted that is not speculative."""
        return self.checkpoints and (self.speculative or not is_optional)


# From the full wish to the bare minimum; the last one only helps a sequence that has not begun.
LADDER = (
    Wish(),
    Wish(speculative=False),
    Wish(speculative=False, checkpoints=False),
    Wish(speculative=False, checkpoints=False, hold_checkpoint=False),
    Wish(speculative=False, checkpoints=False, hold_checkpoint=False, reuse=False),
)


class Planner:
    """The one path from a sequence to a frozen plan. It has no state of its own."""

    def __init__(self, cache: PrefixCache, placement: Placement, keeps_answers: bool = True) -> None:
        self.cache = cache
        self.placement = placement
        self.layout = cache.layout
        self.unit = cache.layout.unit_tokens  # positions are on this grid
        self.keeps_answers = keeps_answers

    # -- first leg

    def match(self, seq: Sequence) -> Match:
        """Return what is cached of the prompt; looked up again only if the index has changed since the last time."""
        if seq.match is None or seq.match.version != self.cache.version:
            seq.match = self.cache.match(seq.key, seq.n_prompt, seq.namespace)
        return seq.match

    def leader_of(self, seq: Sequence, open_prefills: Iterable[Sequence]) -> Sequence | None:
        """Return the running prefill that `seq` should wait for, or None.

        It shares at least a page more with `seq` than is cached, and has a checkpoint in that stretch still ahead, or
        can be given one there.
        """
        if seq.scores_prompt:
            return None
        match = self.match(seq)
        best, best_shared = None, match.checkpoint_tokens + self.unit - 1
        for other in open_prefills:
            if other.namespace != seq.namespace or other is seq or other.scores_prompt:
                continue
            shared = min(common_tokens(seq.key, other.key, self.layout), self._last_page(seq))
            if shared > best_shared and self._will_stop_at(other, match.checkpoint_tokens, shared):
                self._keep_tail(other, shared, seq)
                best, best_shared = other, shared
        return best

    def _will_stop_at(self, leader: Sequence, after: int, shared: int) -> bool:
        """Return whether the leader saves a state in (`after`, `shared`]; make it save one at `shared` if possible."""
        if any(after < c <= shared for c in (*leader.checkpoints, *leader.speculative)):
            return True
        if leader.may_stop_at(shared, self.unit):
            leader.checkpoints = tuple(sorted({*leader.checkpoints, shared}))
            return True
        return False

    def _keep_tail(self, leader: Sequence, shared: int, follower: Sequence) -> None:
        """Let the leader keep a tail from `shared`, if a checkpoint is there, to where the follower parts from it."""
        if not (self.layout.tail_pages and leader.may_start_in_mid_page) or self.layout.is_stateless:
            return
        parts_at = min(common_ids(leader.key, follower.key), follower.last_resumable)
        has_state = self.layout.every_page or shared in leader.checkpoints
        if has_state and shared < parts_at < shared + self.unit and leader.planned <= shared:
            leader.tails = tuple(sorted({*leader.tails, parts_at}))

    def first_leg(self, seq: Sequence, budget: Budget, others: Iterable[Sequence]) -> Plan | None:
        """Match, place and reserve. None: the budget is too small for a leg. Raises OutOfPages.

        `others` are the other waiting requests: where they leave the prompt, it takes a checkpoint.
        """
        match = self.match(seq)
        if seq.scores_prompt:
            return self._whole_leg(seq, budget, match)
        query = self._query(seq, match)
        self._place(seq, query, others)
        begin = seq.resumes_at(match)
        for wish in LADDER:
            start = begin if wish.reuse else 0
            try:
                plan = self._reserve(seq, start, budget, wish, match)
            except OutOfPages as error:
                short = error
                continue
            if plan is not None:
                if not wish.checkpoints:
                    seq.placed_until = start
                seq.match = None
                short_of = start < begin
                seq.begun(replace(match, reason=Reason.NO_MEMORY) if short_of else match, start, self.placement, query)
            return plan
        raise short

    def _whole_leg(self, seq: Sequence, budget: Budget, match: Match) -> Plan | None:
        """Reserve the first leg of a prompt that is computed whole: it reuses nothing, and caches nothing."""
        plan = self._reserve(seq, 0, budget, LADDER[-1])
        if plan is not None:
            off = match.reason is Reason.CACHE_OFF
            found = Match(0, 0, 0, Reason.CACHE_OFF if off else Reason.PROMPT_LOGPROBS)
            seq.match = None
            seq.begun(found, 0, self.placement, None)
        return plan

    def _query(self, seq: Sequence, match: Match) -> PlacementQuery:
        return PlacementQuery(
            length=seq.n_prompt,
            match=match,
            boundaries=seq.generation.boundaries,
            page_size=self.unit,
            answered=self.keeps_answers and seq.generation.keep_output,
            path=partial(self.cache.path, match),
        )

    def _place(self, seq: Sequence, query: PlacementQuery, others: Iterable[Sequence]) -> None:
        placed, match = seq.place(self.placement, query), query.match
        branches = set()
        if match.reason is not Reason.CACHE_OFF:
            branches = {
                min(common_tokens(seq.key, other.key, self.layout), self._last_page(other))
                for other in others
                if other.namespace == seq.namespace
            }
        ahead = {b for b in branches if match.checkpoint_tokens < b < seq.n_prompt}
        seq.checkpoints = tuple(sorted({*placed.checkpoints, *ahead}))
        seq.learned = tuple(at for at in placed.learned if at not in ahead)
        seq.optional = frozenset((*placed.learned, *placed.optional)) - ahead
        seq.placed_until = max(seq.checkpoints, default=match.checkpoint_tokens)
        seq.speculative = tuple(p for p in placed.speculative if p not in seq.checkpoints)
        seq.tails = self._tails(seq, match, others) if self.layout.tail_pages else ()

    def _tails(self, seq: Sequence, match: Match, others: Iterable[Sequence]) -> tuple[int, ...]:
        """Return the ends of tails to keep: where later prompts are likely to part from this one, and its own end.

        Each begins at a checkpoint that the prompt has or takes. Without states any cached page serves.
        Before composed segments the last one ends where the first of them begins.
        """
        ends = {seq.n_prompt}
        if not self.layout.is_stateless:
            parts = seq.generation.boundaries
            known = (parts.system_end, parts.query_start, parts.query_end, *parts.extra, seq.exact_until)
            ends.update(at for at in known if at is not None)
            ends.add(match.kv_tokens + match.parted_tokens)
            ends.update(common_ids(seq.key, other.key) for other in others if other.namespace == seq.namespace)
            states = {match.checkpoint_tokens, *seq.checkpoints}
            long = (at for at in ends if at % self.unit >= self.layout.min_tail_tokens)
            every = self.layout.every_page
            ends = {at for at in long if every or at // self.unit * self.unit in states} | {seq.n_prompt}
        return tuple(sorted(at for at in ends if match.resumed_tokens < at <= seq.exact_until))

    # -- later legs ----------------------------------------------------------

    def next_leg(self, seq: Sequence, budget: Budget) -> Plan | None:
        """Reserve the next leg of a running prefill. None: the budget is too small. Raises OutOfPages."""
        for wish in LADDER[:-1]:
            try:
                return self._reserve(seq, seq.computed, budget, wish)
            except OutOfPages as error:
                short = error
        raise short

    def extend(self, seq: Sequence, end: int) -> None:
        """Reserve private pages for the tokens before `end`. Raises OutOfPages; pages reserved until then are kept."""
        while self.layout.kv_pages_per_unit and len(seq.table) * self.layout.page_size < end:
            plan = self._decode_page(seq)
            try:
                self.cache.commit(plan)
            except Exception:
                with suppress(PlanClosed):
                    self.cache.abandon(plan)
                raise
            seq.table = plan.table

    def _decode_page(self, seq: Sequence) -> Plan:
        """Reserve a private page for the tokens after the last page."""
        page = self.layout.page_size
        last = (len(seq.table) + 1) * page - (page > 1)  # its last token may be a leg of its own
        draft = Draft(seq.id, seq.namespace, seq.key, seq.planned, last)
        try:
            plan = self.cache.reserve(draft)
        except OutOfPages:
            plan = self.cache.reserve(replace(draft, sharing=Sharing(hold_checkpoint=False)))
        seq.planned = last
        return plan

    def raw_page(self, seq: Sequence, end: int) -> Plan | None:
        """Reserve a leg that publishes decode's KV of the page that ends at `end`, and the state after it.

        Other engines do so (decode-reuse raw); it is not bit-exact. None: that page is cached already, for example
        by the same sequence before it was preempted. Raises OutOfPages.
        """
        if self.cache.match(seq.key_until(end), end + 1, seq.namespace).kv_tokens >= end:
            return None
        previous = end - self.unit
        gap = 0 if self.layout.states_in_pages else None  # the state before the last token is gone
        plan = self.cache.reserve(
            Draft(
                request=seq.id,
                namespace=seq.namespace,
                key=seq.key_until(end),
                start=seq.planned,
                end=end,
                publish=end,
                saving=Saving((end,), replaces=previous if previous > seq.n_prompt else None, gap=gap),
                hints=Hints(priority=seq.generation.priority),
            )
        )
        seq.planned = end
        return plan

    def end_conversation(self, seq: Sequence) -> None:
        """Mark the checkpoints beyond system prompt and tools that only the sequence's conversation could use again."""
        self.cache.end_conversation(seq.namespace, seq.key, seq.generation.boundaries.system_end or 0)

    # -- drafting --------------------------------------------------------------

    def _reserve(
        self, seq: Sequence, start: int, budget: Budget, wish: Wish, match: Match | None = None
    ) -> Plan | None:
        end = self._leg_end(seq, start, budget)
        kept = start - match.checkpoint_tokens if match is not None and start else 0
        if end <= start and not (kept and end == seq.n_prompt):
            return None
        end = seq.leg_end(start, end, self.unit)
        begin = start - kept if start < end else end  # a leg without rows saves nothing
        saving = Saving(
            checkpoints=tuple(c for c in seq.checkpoints if begin < c <= end and wish.takes(c in seq.optional)),
            speculative=tuple(c for c in seq.speculative if begin < c <= end and wish.speculative),
            learned=seq.learned,
            tails=tuple(at for at in seq.tails if start < at <= end),
            ends=end == seq.n_prompt,
            is_passed=self.keeps_answers and seq.is_answered,
            gap=seq.composed_from(end) if self.layout.states_in_pages else None,
        )
        draft = Draft(
            request=seq.id,
            namespace=seq.namespace,
            key=seq.key,
            start=start,
            end=end,
            publish=end // self.unit * self.unit,
            saving=saving,
            slot=True,
            sharing=Sharing(wish.reuse, seq.counts_as_hit, wish.hold_checkpoint),
            hints=Hints(seq.generation.boundaries.retained, seq.generation.priority),
            kept=kept or None,
        )
        plan = self.cache.reserve(draft, match)
        seq.planned = plan.end
        try:
            return seq.complete(plan)
        except Exception:
            self.cache.abandon(plan)
            if seq.slot is None:
                self.cache.release(seq.id)  # of a first leg: the sequence does not run, so nothing else would
            raise

    def _leg_end(self, seq: Sequence, start: int, budget: Budget) -> int:
        """Return how far tokens and saves reach: the prompt's end or a multiple of the grid."""
        end = start + (min(budget.tokens, SCORED_LEG_TOKENS) if seq.scores_prompt else budget.tokens)
        if end >= seq.n_prompt:
            end = seq.n_prompt
        else:
            end = end // self.unit * self.unit
        if self.layout.every_page:
            return end
        ahead = sorted(c for c in (*seq.checkpoints, *seq.speculative) if start < c <= end)
        return end if len(ahead) <= budget.saves else ahead[budget.saves - 1] if budget.saves else start

    def _last_page(self, seq: Sequence) -> int:
        """Return the deepest position on the grid at which `seq` could resume."""
        return seq.last_resumable // self.unit * self.unit
