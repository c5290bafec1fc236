"""Small requests against a cache, with an executor that remembers what each page holds and checks what plans read."""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from typing import Any

from headwater.cache import PrefixCache
from headwater.cache.changes import IGNORED, Changes
from headwater.cache.eviction.base.policy import Room, Victim
from headwater.cache.eviction.base.worth import Worth
from headwater.cache.eviction.headwater import Headwater
from headwater.cache.node import Node
from headwater.cache.segments.store import SegmentKey, StoredSegment
from headwater.plan import CacheLayout, Draft, Match, Plan, Tail

PAGE = 4
LAYOUT = CacheLayout(
    n_pages=200, page_size=PAGE, unit_tokens=PAGE, unit_bytes=4 * PAGE, checkpoint_pages=2, slot_pages=2
)
Tokens = tuple[int, ...]


def key_of(tokens: Tokens) -> bytes:
    return array("i", tokens).tobytes()


def floor(tokens: int) -> int:
    return tokens // PAGE * PAGE


def changed(draft: Draft, **changes: Any) -> Draft:
    """Return a draft with other values, also of its saving, sharing and hints."""
    for name, part in (("saving", draft.saving), ("sharing", draft.sharing), ("hints", draft.hints)):
        changes[name] = replace(part, **{f.name: changes.pop(f.name) for f in fields(part) if f.name in changes})
    return replace(draft, **changes)


def words(first: int, count: int) -> Tokens:
    """`count` tokens that appear in no other run of words."""
    return tuple(range(first * 10_000, first * 10_000 + count))


def evict(cache: PrefixCache, room: Room) -> None:
    """Evict one checkpoint, or one page, as `reserve` does for room."""
    with reserving(cache):
        cache.evictor.evict(room, 1, cache.now)


@contextmanager
def reserving(cache: PrefixCache) -> Iterator[None]:
    """Stand in for `reserve`: what runs inside may evict for room."""
    cache.evictor.reserving = True
    try:
        yield
    finally:
        cache.evictor.reserving = False


def watch_evictions(cache: PrefixCache, caps: bool) -> None:
    """Fail at any eviction outside of `reserve`, but for those of a policy that `caps`, which `commit` may evict."""
    entries: list[str] = []

    def entering(name: str) -> None:
        operation = getattr(cache, name)

        def entered(*args: Any) -> Any:
            entries.append(name)
            try:
                return operation(*args)
            finally:
                entries.pop()

        setattr(cache, name, entered)

    def checked(owner: Any, name: str) -> None:
        evict = getattr(owner, name)

        def called(*args: Any, evicted: bool = True) -> Any:
            may = entries in (["reserve"], ["reserve_segment"], ["reserve_loaded_segment"]) or (
                caps and entries == ["commit"]
            )
            assert may or not evicted, f"{name} evicts in {entries or 'no operation'}"
            return evict(*args, evicted=evicted) if owner is cache.index else evict(*args)

        setattr(owner, name, called)

    operations = "match", "reserve", "reserve_segment", "reserve_loaded_segment"
    for name in (*operations, "commit", "abandon", "release"):
        entering(name)
    for owner, name in ((cache.index, "drop"), (cache.index, "trim"), (cache.segments, "evict")):
        checked(owner, name)


def reserve_segment(cache: PrefixCache, key: SegmentKey, request: int = -1) -> StoredSegment:
    """Reserve the pages of a segment that is built under this request id."""
    return cache.reserve_segment(request, key)


def publish_segment(cache: PrefixCache, stored: StoredSegment, request: int = -1) -> None:
    """Build the segment in one leg."""
    cache.commit(cache.segments.plan(request, 0, stored.key.tokens - stored.key.widths.tail))
    cache.release(request)


def example(name: str, policy: Callable[..., object]) -> str:
    """Spell a policy by its name, with 1 for each option that it cannot be built without."""
    needed = [one for one in signature(policy).parameters.values() if one.default is one.empty]
    needed = [one for one in needed if one.name != "layout" and one.kind is not one.VAR_KEYWORD]
    return f"{name}({', '.join('1' for _ in needed)})" if needed else name


def assert_only_its_own(cache: PrefixCache, victim: Victim | None, without: Victim | None, hinted: str) -> None:
    """Check that hints of a namespace change at most which checkpoint of its own goes."""
    assert victim is not None
    assert without is not None
    gives_up = cache.index.namespace(victim[0])
    assert gives_up == cache.index.namespace(without[0])
    if gives_up != hinted:
        assert victim == without


def assert_worths_are_those_of_now(cache: PrefixCache) -> None:
    """Check what the default policy holds a checkpoint to be worth."""
    policy = cache.policy
    assert isinstance(policy, Headwater)
    policy.victim(Room.STATE, cache.now)  # computes the worths of checkpoints that changed
    kept, worth = policy.candidates, Worth(cache.layout)
    assert len(kept) == cache.stats().checkpoints
    for row, node in enumerate(kept.keys):
        expected = float("inf") if node.holds else 0.0 if node.speculative else worth.of(node)
        assert kept.worth[row] == expected, f"at {node.end * cache.layout.unit_tokens}"


def dump(cache: PrefixCache) -> Any:
    """All that a cache knows, to compare."""

    def node(at: Node) -> Any:
        below = [node(child) for _, child in sorted(at.children.items())]
        times = (at.kv_time, at.checkpoint_time)
        return (
            at.edge,
            tuple(at.pages),
            at.end,
            at.checkpoint,
            at.speculative,
            times,
            at.pins,
            at.holds,
            at.lost,
            [(tail.ids, tuple(tail.kv), tuple(tail.rows), tail.has_hidden, tail.used, tail.pins) for tail in at.tails],
            below,
        )

    def lease(at: Any) -> Any:
        ends = tuple(None if end is None else end.end for end in (at.node, at.deep))
        return (ends, at.end, at.held, tuple(at.table), at.own_from, tuple(at.duplicates), tuple(at.slot), at.plan)

    return (
        {name: node(root) for name, root in cache.index.roots.items()},
        {request: lease(at) for request, at in cache.leases.items()},
        sorted(cache._plans),
        (sorted(cache.pool.kv.free_ids()), sorted(cache.pool.states.free_ids())),
        list(cache.index.eviction_log._entries),
        [(s.key, s.ready, s.pins, s.used) for s in cache.segments],
        [tail.ids for tail in cache.tails],
        cache.now,
        cache.stats(),
    )


@dataclass
class Toy:
    """A cache and its pages' contents. Every step is followed by `check()`."""

    layout: CacheLayout = LAYOUT
    eviction: str = "lru"
    changes: Changes = IGNORED
    cache: PrefixCache = field(init=False)
    pages: dict[int, object] = field(default_factory=dict)
    states: dict[int, object] = field(default_factory=dict)  # of pages that have some in addition to KV
    requests: int = 0

    def __post_init__(self) -> None:
        self.cache = PrefixCache(self.layout, self.eviction, changes=self.changes)

    def match(self, tokens: Tokens, namespace: str = "") -> Match:
        return self.cache.match(key_of(tokens), len(tokens), namespace)

    def draft(self, tokens: Tokens, start: int, **changes: Any) -> Draft:
        """A leg from `start` to the end of `tokens`, all of whose full pages are published."""
        self.requests += 1
        draft = Draft(self.requests, "", key_of(tokens), start, len(tokens), publish=floor(len(tokens)))
        return changed(draft, **changes)

    def reserve(self, draft: Draft) -> Plan:
        plan = self.cache.reserve(draft)
        self.cache.check()
        return plan

    def run(self, plan: Plan, draft: Draft) -> None:
        """Act as an executor: read the checkpoint and the KV before the leg, write the leg's KV and states."""
        begin = plan.start if plan.kept is None else plan.kept.start
        if plan.restore:
            assert self.state(plan.restore) == (draft.namespace, begin, draft.key[: 4 * begin])
        if plan.kept is not None:
            self.read_tail(plan, draft, plan.kept)
        for at, page in enumerate(plan.table[: plan.write_from]):
            assert self.pages[page] == self.content(draft, at), f"page {page} at {at} is not the prompt's"
        for at, page in enumerate(plan.table[plan.write_from :], plan.write_from):
            self.pages[page] = self.content(draft, at)
        if plan.kept is not None and plan.kept.kv and plan.write_from <= begin // PAGE:
            self.states[plan.table[begin // PAGE]] = self.states.get(plan.kept.kv[0])
        in_pages = self.layout.states_in_pages
        for save in plan.saves:
            for part, page in enumerate(save.pages):
                holder = self.states if in_pages else self.pages
                holder[page] = (part, draft.namespace, save.position, draft.key[: 4 * save.position])
        for tail in plan.tails:
            if in_pages:
                self.states[tail.kv[0]] = self.states.get(plan.table[tail.start // PAGE])
            for part, page in enumerate((*tail.kv, *tail.rows)):
                hidden = tail.has_hidden and tail.end == plan.end
                self.pages[page] = (part, draft.namespace, draft.key[: 4 * tail.end], hidden)

    def read_tail(self, plan: Plan, draft: Draft, kept: Tail) -> None:
        """Check that what a leg continues is the prompt's, up to where the leg starts."""
        assert kept.end == plan.start
        assert kept.start % PAGE == 0
        for part, page in enumerate((*kept.kv, *kept.rows)):
            held = self.pages[page]
            assert isinstance(held, tuple)
            if held[0] == "kv":  # a page of the index
                assert (held[1], held[2][: 4 * plan.start]) == (draft.namespace, draft.key[: 4 * plan.start])
                continue
            assert held[:2] == (part, draft.namespace), f"{held} is not part {part} of a tail"
            assert held[2][: 4 * plan.start] == draft.key[: 4 * plan.start], f"{held} is not the prompt's"
            if kept.has_hidden:
                assert held[2:] == (draft.key[: 4 * plan.start], True), "the hidden row is that of another prompt"
        if plan.start == plan.end:
            assert kept.has_hidden, "a leg without rows needs the hidden row after them"

    def content(self, draft: Draft, at: int) -> object:
        return ("kv", draft.namespace, draft.key[: 4 * min((at + 1) * PAGE, draft.end)])

    def state(self, pages: tuple[int, ...]) -> object:
        in_pages = self.layout.states_in_pages
        parts = [(self.states if in_pages else self.pages)[page] for page in pages]
        n_parts = 1 if in_pages else self.layout.checkpoint_pages
        assert [part[0] for part in parts] == list(range(n_parts))  # type: ignore[index]
        return parts[0][1:]  # type: ignore[index]

    def commit(self, plan: Plan, draft: Draft) -> None:
        self.run(plan, draft)
        self.cache.commit(plan)
        self.cache.check()

    def release(self, request: int) -> None:
        self.cache.release(request)
        self.cache.check()

    def serve(
        self, tokens: Tokens, checkpoints: tuple[int, ...] | None = None, namespace: str = "", **rest: Any
    ) -> Match:
        """One request from match to release; by default with a checkpoint at its last full page."""
        match = self.match(tokens, namespace)
        places = (floor(len(tokens)),) if checkpoints is None else checkpoints
        ahead = tuple(at for at in places if at > match.checkpoint_tokens)
        draft = self.draft(tokens, match.checkpoint_tokens, namespace=namespace, checkpoints=ahead, **rest)
        self.commit(self.reserve(draft), draft)
        self.release(draft.request)
        return match
