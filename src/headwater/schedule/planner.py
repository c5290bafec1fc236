"""Drafts a sequence's next leg and gets it reserved, with less ambition each time memory falls short."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import numpy as np

from headwater.account import Reason
from headwater.cache.branch import Branches
from headwater.cache.positions import Path, Placement, PlacementQuery
from headwater.errors import OutOfPages
from headwater.plan import CacheLayout, Draft, Match, Plan
from headwater.schedule.limits import SCORED_LEG
from headwater.schedule.sequence import Sequence


class Cache(Protocol):
    """What planner and scheduler use of PrefixCache or NoCache (closing a lease is the scheduler's)."""

    branches: Branches

    def match(self, key: bytes, length: int, namespace: str = "") -> Match: ...
    def path(self, key: bytes, length: int, namespace: str = "") -> Path: ...
    def reserve(self, draft: Draft) -> Plan: ...
    def commit(self, plan: Plan) -> None: ...
    def abandon(self, plan: Plan) -> None: ...
    def release(self, request: int) -> None: ...


def common_tokens(a: bytes, b: bytes, layout: CacheLayout) -> int:
    """Length in tokens of the longest common prefix of two keys, in whole units."""
    width = layout.unit_bytes
    units = min(len(a), len(b)) // width
    if not units or a[:width] != b[:width]:
        return 0
    differ = np.frombuffer(a, np.uint8, units * width) != np.frombuffer(b, np.uint8, units * width)
    first = int(differ.argmax())
    return (first // width if differ[first] else units) * layout.unit_tokens


@dataclass(frozen=True, slots=True)
class Budget:
    """What a step has left for prefill."""

    tokens: int
    saves: int


@dataclass(frozen=True, slots=True)
class Wish:
    """How much a leg asks for beside its own pages."""

    speculative: bool = True
    checkpoints: bool = True
    hold_checkpoint: bool = True
    reuse: bool = True


# From the full wish to the bare minimum; the last rung only helps a request that has not begun.
LADDER = (
    Wish(),
    Wish(speculative=False),
    Wish(speculative=False, checkpoints=False),
    Wish(speculative=False, checkpoints=False, hold_checkpoint=False),
    Wish(speculative=False, checkpoints=False, hold_checkpoint=False, reuse=False),
)


class Planner:
    """The one way from a sequence to a frozen plan. Holds no state beside its collaborators."""

    def __init__(self, cache: Cache, placement: Placement, layout: CacheLayout, keeps_answers: bool = True) -> None:
        self.cache = cache
        self.placement = placement
        self.layout = layout
        self.unit = layout.unit_tokens  # positions are on this grid
        self.keeps_answers = keeps_answers

    # -- first leg ---------------------------------------------------------

    def leader_of(self, seq: Sequence, match: Match, open_prefills: Iterable[Sequence]) -> Sequence | None:
        """The running prefill that `seq` should wait for, or None.

        That is one which shares at least a page more with it than it could resume from now, and which has a
        checkpoint in that stretch still ahead, or can be given one there.
        """
        best, best_shared = None, match.checkpoint_tokens + self.unit - 1
        if seq.scores_prompt:
            return None
        for other in open_prefills:
            if other.namespace != seq.namespace or other is seq or other.scores_prompt:
                continue
            shared = min(common_tokens(seq.key, other.key, self.layout), self._last_page(seq))
            if shared > best_shared and self._will_stop_at(other, match.checkpoint_tokens, shared):
                best, best_shared = other, shared
        return best

    def _will_stop_at(self, leader: Sequence, after: int, shared: int) -> bool:
        """Not among segments: there is no state between what is composed."""
        if any(after < c <= shared for c in (*leader.checkpoints, *leader.speculative)):
            return True
        if leader.planned < shared <= self._composes_from(leader, shared):
            leader.checkpoints = tuple(sorted({*leader.checkpoints, shared}))
            return True
        return False

    def first_leg(self, seq: Sequence, budget: Budget, others: Iterable[Sequence]) -> Plan | None:
        """Match, place and reserve. None if the budget is too small for a leg; raises OutOfPages.

        `others` are the requests that wait beside it: where they leave its prompt, it takes a checkpoint.
        """
        match = self.cache.match(seq.key, seq.n_prompt, seq.namespace)
        if seq.scores_prompt:
            return self._whole_leg(seq, budget, match)
        query = self._query(seq, match)
        self._place(seq, query, others)
        for wish in LADDER:
            start = match.checkpoint_tokens if wish.reuse else 0
            try:
                plan = self._reserve(seq, start, budget, wish)
            except OutOfPages as error:
                short = error
                continue
            if plan is not None:
                if not wish.checkpoints:
                    seq.placed_until = start
                if start < match.checkpoint_tokens:
                    match = replace(match, reason=Reason.NO_MEMORY)
                seq.resumed(match, start)
                if seq.samples:
                    self.placement.learn(query)
            return plan
        raise short

    def _whole_leg(self, seq: Sequence, budget: Budget, match: Match) -> Plan | None:
        """Of a prompt that is computed whatever is cached: it finds nothing, and leaves nothing behind."""
        plan = self._reserve(seq, 0, budget, LADDER[-1])
        if plan is not None:
            off = match.reason is Reason.CACHE_OFF
            seq.resumed(Match(0, 0, 0, Reason.CACHE_OFF if off else Reason.PROMPT_LOGPROBS), 0)
        return plan

    def _query(self, seq: Sequence, match: Match) -> PlacementQuery:
        return PlacementQuery(
            length=seq.n_prompt,
            match=match,
            boundaries=seq.generation.boundaries,
            page_size=self.unit,
            answered=self.keeps_answers and seq.generation.keep_output,
            path=partial(self.cache.path, seq.key, seq.n_prompt, seq.namespace),
        )

    def _place(self, seq: Sequence, query: PlacementQuery, others: Iterable[Sequence]) -> None:
        if not seq.samples:
            placed = self.placement.place_answer(query)
            seq.checkpoints, seq.speculative = placed.checkpoints, placed.speculative
            return
        placed, match = self.placement.place(query), query.match
        branches = set()
        if match.reason is not Reason.CACHE_OFF:
            branches = {
                min(common_tokens(seq.key, other.key, self.layout), self._last_page(other))
                for other in others
                if other.namespace == seq.namespace
            }
        ahead = {b for b in branches if match.checkpoint_tokens < b < seq.n_prompt}
        seq.checkpoints = tuple(sorted({*placed.checkpoints, *ahead}))
        seq.placed_until = max(seq.checkpoints, default=match.checkpoint_tokens)
        seq.speculative = tuple(p for p in placed.speculative if p not in seq.checkpoints)

    # -- later legs ----------------------------------------------------------

    def next_leg(self, seq: Sequence, budget: Budget) -> Plan | None:
        """The next leg of a running prefill. None if the budget is too small; raises OutOfPages."""
        for wish in LADDER[:-1]:
            try:
                return self._reserve(seq, seq.computed, budget, wish)
            except OutOfPages as error:
                short = error
        raise short

    def decode_page(self, seq: Sequence) -> Plan:
        """A private page for the token at `seq.computed` and the rest of its page; raises OutOfPages."""
        page = self.layout.page_size
        last = (seq.computed // page + 1) * page - (page > 1)  # its last token may be a leg of its own
        draft = Draft(seq.id, seq.namespace, seq.key, seq.planned, last)
        try:
            plan = self.cache.reserve(draft)
        except OutOfPages:
            plan = self.cache.reserve(replace(draft, hold_checkpoint=False))
        seq.planned = last
        return plan

    def raw_page(self, seq: Sequence) -> Plan | None:
        """Publish decode's own KV of the page that the token at `seq.computed` completes, and the state after it.

        That is what other engines do (decode-reuse raw); it is not bit-exact. None where that page is cached already:
        a preempted sequence's own, say, which it would pin beside its new one. Raises OutOfPages.
        """
        end = seq.computed + 1
        if self.cache.match(seq.key_until(end), end + 1, seq.namespace).kv_tokens >= end:
            return None
        previous = end - self.unit
        plan = self.cache.reserve(
            Draft(
                request=seq.id,
                namespace=seq.namespace,
                key=seq.key_until(end),
                start=seq.planned,
                end=end,
                checkpoints=(end,),
                publish=end,
                replaces=previous if previous > seq.n_prompt else None,
            )
        )
        seq.planned = end
        return plan

    # -- drafting --------------------------------------------------------------

    def _reserve(self, seq: Sequence, start: int, budget: Budget, wish: Wish) -> Plan | None:
        end = self._leg_end(seq, start, budget)
        if end <= start:
            return None
        if seq.composition is not None:
            end = self._composed_end(seq, start, end)
        draft = Draft(
            request=seq.id,
            namespace=seq.namespace,
            key=seq.key,
            start=start,
            end=end,
            checkpoints=tuple(c for c in seq.checkpoints if start < c <= end and wish.checkpoints),
            speculative=tuple(c for c in seq.speculative if start < c <= end and wish.speculative),
            slot=True,
            publish=end // self.unit * self.unit,
            reuse=wish.reuse,
            counts=seq.samples,
            hold_checkpoint=wish.hold_checkpoint,
        )
        plan = self.cache.reserve(draft)
        seq.planned = plan.end
        return plan

    def _composes_from(self, seq: Sequence, otherwise: int) -> int:
        """Where the leg begins that composes `seq`: on the last multiple of the grid before its first segment."""
        return otherwise if seq.composition is None else seq.composition.spans[0].start // self.unit * self.unit

    def _composed_end(self, seq: Sequence, start: int, end: int) -> int:
        """The leg ends where segments begin; one that begins there, with the page on which their text ends."""
        composition, first = seq.composition, self._composes_from(seq, 0)
        assert composition is not None, "only who has segments composes"
        if start < first:
            return min(end, first)
        after = min(seq.n_prompt, (composition.tail_start // self.unit + 1) * self.unit)
        seq.checkpoints = tuple(c for c in seq.checkpoints if c >= after)
        seq.speculative = tuple(c for c in seq.speculative if c >= after)
        return after

    def _leg_end(self, seq: Sequence, start: int, budget: Budget) -> int:
        """As far as tokens and saves reach: the prompt's end or a multiple of the grid."""
        end = start + (min(budget.tokens, SCORED_LEG) if seq.scores_prompt else budget.tokens)
        if end >= seq.n_prompt:
            end = seq.n_prompt
        else:
            end = end // self.unit * self.unit
        ahead = sorted(c for c in (*seq.checkpoints, *seq.speculative) if start < c <= end)
        return end if len(ahead) <= budget.saves else ahead[budget.saves - 1] if budget.saves else start

    def _last_page(self, seq: Sequence) -> int:
        """The deepest position at which `seq` could resume: one token at least is computed."""
        last = seq.n_prompt - 1 if seq.samples else seq.n_prompt
        return last // self.unit * self.unit
