"""The cache under random requests, against a naive model of published prefixes and of the content of pages.

The toy executor checks on each commit that the checkpoint and the KV that the plan names are those of the prompt.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headwater.cache.eviction.base.policy import Room
from headwater.cache.segments.compose import Widths
from headwater.cache.segments.store import SegmentKey, StoredSegment
from headwater.errors import OutOfPages
from headwater.plan import CacheLayout, Draft, Plan
from tests.cache.toy import (
    LAYOUT,
    PAGE,
    Tokens,
    Toy,
    changed,
    dump,
    evict,
    floor,
    key_of,
    publish_segment,
    reserve_segment,
    watch_evictions,
)
from tests.support import examples

IN_PAGES = replace(LAYOUT, checkpoint_pages=0, slot_pages=1, resumable="every_page", states_in_pages=True)
LAYOUTS = {
    "unified": replace(LAYOUT, n_pages=26),
    "split": replace(LAYOUT, n_pages=30, state_fraction=0.5),
    "elastic": replace(LAYOUT, n_pages=30, state_fraction=0.5, elastic_pages=3),
    "ample": replace(LAYOUT, n_pages=3000),
    "no attention": replace(LAYOUT, n_pages=14, kv_pages_per_unit=0),
    "segments": replace(LAYOUT, n_pages=40, transition_pages=1),
    "segments in split pools": replace(LAYOUT, n_pages=60, state_fraction=0.5, transition_pages=1),
    "no recurrence": replace(LAYOUT, n_pages=20, checkpoint_pages=0, slot_pages=0, resumable="every_page"),
    "states in pages": replace(IN_PAGES, n_pages=20),
    "states in pages, tails": replace(IN_PAGES, n_pages=24, tail_pages=(1, 1, 2, 2, 3)),
    "states in pages, segments in split pools": replace(IN_PAGES, n_pages=60, state_fraction=0.5),
    "tails": replace(LAYOUT, n_pages=40, tail_pages=(1, 1, 2, 2, 3)),
    "ample tails": replace(LAYOUT, n_pages=3000, tail_pages=(1, 1, 2, 2, 3)),
    "tails without attention": replace(LAYOUT, n_pages=24, kv_pages_per_unit=0, tail_pages=(1, 1, 2, 2, 3)),
    "tails without recurrence": replace(
        LAYOUT, n_pages=24, checkpoint_pages=0, slot_pages=0, resumable="every_page", tail_pages=(1, 1, 1, 1, 1)
    ),
}
CAPPED = ["path_cap(2)", "last_n(3)"]  # give up what there would be room for
POLICIES = ["lru", "lru_path", "gdsf", "seglen", "flop_aware", "clairvoyant", "headwater", *CAPPED]
PROMPTS = st.lists(st.sampled_from([(0,) * PAGE, (1,) * PAGE]), min_size=1, max_size=8)
TAILS = st.lists(st.integers(2, 3), max_size=3)


@dataclass
class Running:
    """A request between its first reserve and its release."""

    tokens: Tokens
    draft: Draft
    plan: Plan | None
    published: int = 0


class CacheMachine(RuleBasedStateMachine):
    """Requests start, continue leg by leg, decode, are abandoned and released in any order."""

    @initialize(kind=st.sampled_from(sorted(LAYOUTS)), eviction=st.sampled_from(POLICIES))
    def make(self, kind: str, eviction: str) -> None:
        self.ample = kind in ("ample", "ample tails") and eviction not in CAPPED
        self.toy = self.new_toy(LAYOUTS[kind], eviction)
        watch_evictions(self.toy.cache, caps=eviction in CAPPED)
        self.running: dict[int, Running] = {}
        self.published: set[tuple[str, bytes]] = set()
        self.saved: set[tuple[str, bytes]] = set()
        self.ended: set[tuple[str, bytes]] = set()  # prompts whose last hidden row was kept
        self.building: dict[int, StoredSegment] = {}  # by request
        self.loads: list[Plan] = []  # of segments
        self.builds = 0
        self.used: list[StoredSegment] = []

    def new_toy(self, layout: CacheLayout, eviction: str) -> Toy:
        return Toy(layout, eviction)

    def reserve(self, draft: Draft) -> Plan | None:
        before = dump(self.toy.cache)
        try:
            return self.toy.reserve(draft)
        except OutOfPages as error:
            short = error
        assert dump(self.toy.cache) == before
        assert short.needed > short.free + short.evictable
        return None

    @rule(pages=PROMPTS, tail=TAILS, salt=st.sampled_from(["", "b"]), legs=st.integers(1, 3), data=st.data())
    def start(self, pages: list[Tokens], tail: list[int], salt: str, legs: int, data: st.DataObject) -> None:
        tokens = tuple(token for page in pages for token in page) + tuple(tail)
        match = self.toy.match(tokens, salt)
        self.check_match(tokens, salt, match.kv_tokens, match.checkpoint_tokens)
        if match.resumed_tokens == len(tokens):
            assert (salt, key_of(tokens)) in self.ended
        reuse = data.draw(st.sampled_from([True, True, True, False]))
        kept = match.tail_tokens if reuse and match.tail_tokens else None
        start = match.checkpoint_tokens + (kept or 0) if reuse else 0
        if start == len(tokens) and kept is None:
            return
        end = min(len(tokens), max(min(start + 1, len(tokens)), len(tokens) // legs))
        draft = self.toy.draft(
            tokens, start, end=end, publish=floor(end), namespace=salt, reuse=reuse, slot=True, kept=kept
        )
        self.launch(tokens, self.with_checkpoints(changed(draft, hold_checkpoint=data.draw(st.booleans())), data))

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        request = self.pick(data, is_open=False)
        if request is None:
            return
        now = self.running[request]
        start = now.draft.end
        draft = changed(
            now.draft,
            start=start,
            kept=None,
            checkpoints=(),
            speculative=(),
            gap=None,
            tails=(),
            ends=False,
            hold_checkpoint=True,
        )
        if start < len(now.tokens):
            draft = changed(draft, end=len(now.tokens), publish=floor(len(now.tokens)))
            draft = changed(draft, hold_checkpoint=data.draw(st.booleans()), replaces=floor(start))
            draft = self.with_checkpoints(draft, data)
        else:
            draft = changed(draft, end=start + data.draw(st.integers(1, 6)), publish=0, replaces=None)
        self.launch(now.tokens, draft)

    @rule(data=st.data(), good=st.sampled_from([True, True, False]))
    def close(self, data: st.DataObject, good: bool) -> None:
        request = self.pick(data, is_open=True)
        if request is None:
            return
        now = self.running[request]
        plan, now.plan = now.plan, None
        assert plan is not None
        if not good:
            self.toy.cache.abandon(plan)
            now.draft = changed(now.draft, end=plan.start)
            return
        self.toy.commit(plan, now.draft)
        if now.draft.sharing.reuse:
            key, salt = now.draft.key, now.draft.namespace
            now.published = max(now.published, now.draft.publish)
            self.published |= {(salt, key[: 4 * at]) for at in range(PAGE, now.draft.publish + 1, PAGE)}
            self.saved |= {(salt, key[: 4 * save.position]) for save in plan.saves}
            self.ended |= {(salt, key[: 4 * tail.end]) for tail in plan.tails if tail.has_hidden}
            if now.draft.saving.replaces is not None:
                self.saved.discard((salt, key[: 4 * now.draft.saving.replaces]))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        request = self.pick(data, is_open=False)
        if request is not None:
            self.toy.release(request)
            del self.running[request]

    @rule(name=st.integers(0, 5), length=st.integers(5, 14), salt=st.sampled_from(["", "b"]))
    def begin_segment(self, name: int, length: int, salt: str) -> None:
        cache = self.toy.cache
        key = SegmentKey(salt, key_of((name,) * length), Widths(2, 2))
        if cache.segments.find(key) is not None:
            return
        before = dump(cache)
        try:
            self.builds -= 1
            self.building[self.builds] = reserve_segment(cache, key, self.builds)
        except OutOfPages:
            assert dump(cache) == before

    @rule(good=st.booleans())
    def close_segment(self, good: bool) -> None:
        if self.building:
            request = max(self.building)
            stored = self.building.pop(request)
            if good:
                publish_segment(self.toy.cache, stored, request)
            else:
                self.toy.cache.release(request)

    @rule(name=st.integers(0, 5), length=st.integers(5, 14), salt=st.sampled_from(["", "b"]))
    def begin_load(self, name: int, length: int, salt: str) -> None:
        cache, key = self.toy.cache, SegmentKey(salt, key_of((name,) * length), Widths(2, 2))
        before, found = dump(cache), cache.segments.find(key)
        try:
            self.builds -= 1
            self.loads.append(cache.reserve_loaded_segment(self.builds, key))
        except OutOfPages:
            assert dump(cache) == before
        else:
            assert found is None or cache.segments.find(key) in (found, None), "what is loaded is not found yet"

    @rule(good=st.booleans())
    def close_load(self, good: bool) -> None:
        if self.loads:
            cache, plan = self.toy.cache, self.loads.pop()
            (cache.commit if good else cache.abandon)(plan)
            cache.release(plan.request)

    @rule(data=st.data())
    def use_segment(self, data: st.DataObject) -> None:
        ready = [s for s in self.toy.cache.segments if s.ready]
        if ready:
            self.used.append(data.draw(st.sampled_from(ready)))
            self.toy.cache.segments.pin(self.used[-1])
            self.toy.cache.use_segment(self.used[-1])

    @rule()
    def leave_segment(self) -> None:
        if self.used:
            self.toy.cache.segments.unpin(self.used.pop())

    def launch(self, tokens: Tokens, draft: Draft) -> None:
        plan = self.reserve(draft)
        if plan is not None:
            published = self.running[draft.request].published if draft.request in self.running else floor(draft.start)
            self.running[draft.request] = Running(tokens, draft, plan, published if draft.sharing.reuse else 0)
            assert len(plan.table) == -(-draft.end // PAGE) * self.toy.layout.kv_pages_per_unit
            saved = {save.position for save in plan.saves}
            if self.toy.layout.states_in_pages:
                assert saved <= set(range(floor(draft.resumes_at) + PAGE, draft.publish + 1, PAGE))
            else:
                assert saved <= {*draft.saving.checkpoints, *draft.saving.speculative}

    def with_checkpoints(self, draft: Draft, data: st.DataObject) -> Draft:
        grid = range(floor(draft.resumes_at) + PAGE, draft.publish + 1, PAGE)
        marks = {at: data.draw(st.sampled_from([None, "checkpoints", "speculative"])) for at in grid}
        placed: dict[str, Any] = {
            kind: tuple(at for at in grid if marks[at] == kind) for kind in ("checkpoints", "speculative")
        }
        if self.toy.layout.states_in_pages:  # segments are composed from there on, or nothing is
            placed["gap"] = data.draw(st.sampled_from([None, None, *range(draft.resumes_at, draft.end)]))
        if not self.toy.layout.tail_pages or draft.publish < floor(draft.start):
            return changed(draft, **placed)
        ends = data.draw(st.booleans())
        inner = data.draw(st.lists(st.integers(draft.start + 1, max(draft.start + 1, draft.end - 1)), max_size=2))
        tails = {at for at in inner if at < draft.end and at % PAGE} | ({draft.end} if ends else set())
        return changed(draft, **placed, tails=tuple(sorted(tails)), ends=ends)

    def pick(self, data: st.DataObject, is_open: bool) -> int | None:
        requests = [request for request, now in self.running.items() if (now.plan is not None) is is_open]
        return data.draw(st.sampled_from(requests)) if requests else None

    def check_match(self, tokens: Tokens, salt: str, kv: int, checkpoint: int) -> None:
        """Nothing is matched that was not published; with ample memory, all that was."""
        key, grid = key_of(tokens), range(PAGE, len(tokens), PAGE)
        known = max((at for at in grid if (salt, key[: 4 * at]) in self.published), default=0)
        saved = max((at for at in grid if (salt, key[: 4 * at]) in self.saved), default=0)
        assert kv <= known
        if self.toy.layout.is_stateless:
            assert checkpoint == kv
        elif self.toy.layout.states_in_pages:
            assert checkpoint <= kv
            if checkpoint:
                table = [page for node in self.toy.cache.index.find(salt, key)[0] for page in node.pages]
                at = self.toy.state((table[checkpoint // PAGE - 1],))
                assert at == (salt, checkpoint, key[: 4 * checkpoint])
        elif self.ample:
            assert kv == known
            assert checkpoint >= saved
        if checkpoint and self.toy.layout.resumable == "checkpoints":
            node = self.toy.cache.index.roots[salt]
            last, _ = self.toy.cache.index.walk(node, key, checkpoint // PAGE)
            assert last.checkpoint is not None
            assert self.toy.state(last.checkpoint) == (salt, checkpoint, key[: 4 * checkpoint])

    @invariant()
    def pages_add_up_and_what_is_used_stays(self) -> None:
        cache = self.toy.cache
        cache.check()
        for kept in (*self.building.values(), *self.used):
            assert cache.segments.find(kept.key) is kept
        if cache.segments.is_hard:
            assert cache.segments.pages <= cache.segments.budget_pages

    @invariant()
    def what_leases_name_is_never_evicted(self) -> None:
        for request, now in self.running.items():
            if now.draft.sharing.reuse:
                index = self.toy.cache.index
                end = index.walk(index.roots[now.draft.namespace], now.draft.key, now.published // PAGE)[1]
                assert end * PAGE == now.published, f"request {request} lost KV that it published"
            if now.plan is not None and now.plan.restore:
                start = now.plan.start if now.plan.kept is None else now.plan.kept.start
                key = now.draft.key[: 4 * start]
                assert self.toy.state(now.plan.restore) == (now.draft.namespace, start, key)
            if now.plan is not None and now.plan.kept is not None:
                self.toy.read_tail(now.plan, now.draft, now.plan.kept)

    def teardown(self) -> None:
        for request in getattr(self, "building", ()):
            self.toy.cache.release(request)
        for request, now in getattr(self, "running", {}).items():
            if now.plan is not None:
                self.toy.cache.abandon(now.plan)
            self.toy.release(request)
        if hasattr(self, "toy"):
            stats = self.toy.cache.stats()
            assert stats.pages_private == stats.pages_slot == stats.leases == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=examples(150), stateful_step_count=40)


def test_machine_notices_a_checkpoint_of_another_prompt() -> None:
    toy = Toy()
    toy.serve((0,) * 8)
    draft = toy.draft((0,) * 12, 8)
    plan = toy.reserve(draft)
    toy.pages[plan.restore[0]] = (0, "", 8, key_of((1,) * 8))
    with pytest.raises(AssertionError):
        toy.commit(plan, draft)


def test_machine_notices_an_eviction_outside_of_reserve() -> None:
    toy = Toy()
    toy.serve((0,) * 12)
    watch_evictions(toy.cache, caps=False)
    with pytest.raises(AssertionError, match="no operation"):
        evict(toy.cache, Room.ANY)
