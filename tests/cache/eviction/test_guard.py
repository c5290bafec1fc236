"""Guard: it hits what the best of its policies would, less a price for what it lacks, whatever the traffic is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import attrgetter
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, example, given, settings

from headwater.cache import PrefixCache
from headwater.cache.eviction.guard import Guard
from headwater.cache.eviction.headwater import Headwater
from headwater.cache.index import Index
from headwater.cache.node import Node
from headwater.cache.order.ghosts import prefix_ids
from headwater.cache.shadows import Shadow, Shadows
from headwater.cache.spelling import split
from headwater.errors import ConfigError
from headwater.plan import Draft
from tests.cache.toy import LAYOUT, PAGE, Tokens, Toy, dump, key_of, words

SMALL = replace(LAYOUT, n_pages=14, checkpoint_pages=1, slot_pages=1)
EXPERTS = ("lru", "gdsf", "headwater")
GUARD = f"guard('{', '.join(EXPERTS)}', window=5)"


@dataclass
class World:
    """A guarded cache under one request at a time, and what the theorem says of it.

    A request takes a checkpoint at its end, and at each position that it computes and at which the followed shadow has
    one, up to where that one resumes.
    """

    spelling: str = GUARD
    toy: Toy = field(init=False)
    hits: int = 0
    hits_of: list[int] = field(default_factory=lambda: [0] * len(EXPERTS))
    price: int = 0  # tokens that checkpoints of the followed shadow save, once for each time that the memory lost one
    switches: int = 0
    lost: int = 0  # requests that evicted what the followed shadow has, though they resumed no higher than there
    crowded: int = 0  # requests that resumed above the shadow and, needing more room, evicted what it has

    def __post_init__(self) -> None:
        self.toy = Toy(SMALL, self.spelling)

    @property
    def cache(self) -> PrefixCache:
        return self.toy.cache

    @property
    def shadows(self) -> Shadows:
        assert self.cache._shadows is not None
        return self.cache._shadows

    def request(self, prompt: Tokens) -> None:
        tokens = (*prompt, 0)
        ids = prefix_ids(key_of(tokens), LAYOUT.unit_bytes, hash("")).tobytes()
        resumed = [shadow.cache.match(ids, len(tokens), "").checkpoint_tokens for shadow in self.shadows._all]
        self.hits_of = [before + now for before, now in zip(self.hits_of, resumed, strict=True)]
        following = self._next(resumed)
        shadow = self.shadows._all[following]
        if following != self.shadows.best:
            self.switches += 1
            self.price += sum(self.lacking(shadow).values())
        match = self.toy.match(tokens)
        start = match.checkpoint_tokens
        path, _ = shadow.cache._index.find("", ids)
        there = {node.end * PAGE for node in path if node.checkpoint is not None}
        wanted = {len(prompt), *(at for at in there if at <= resumed[following])}
        before = self.lacking(shadow)
        self.toy.serve(tokens, tuple(sorted(wanted)))
        assert self.shadows.best == following
        self.hits += start
        lost = {prefix: saved for prefix, saved in self.lacking(shadow).items() if prefix not in before}
        if lost and start < resumed[following]:
            self.crowded += 1
            self.price += sum(lost.values())
        elif lost:
            self.lost += 1

    def _next(self, resumed: list[int]) -> int:
        """Return the policy that is going to be followed."""
        shadows = self.shadows
        hits = [shadows._decay * before + now for before, now in zip(shadows.hits, resumed, strict=True)]
        return shadows.best if max(hits) <= hits[shadows.best] else hits.index(max(hits))

    def lacking(self, shadow: Shadow) -> dict[int, int]:
        """Return the shadow's checkpoints that the memory lacks, by prefix, and the tokens each saves in the shadow."""
        index = shadow.cache._index
        lacking = (node for node in index if node.checkpoint is not None and id_of(node) not in self.policy._nodes)
        above = ((node, Index.deepest_checkpoint(node.parent, node.end)) for node in lacking)
        return {id_of(node): PAGE * (node.end - (0 if base is None else base.end)) for node, base in above}

    @property
    def policy(self) -> Guard:
        assert isinstance(self.cache.policy, Guard)
        return self.cache.policy


def id_of(node: Node) -> int:
    return int.from_bytes(node.edge[-8:], "little", signed=True)


# Prompts of a small tree: three roots, two branches of one or two pages at each node, and depths of up to four nodes.
prompts = st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=0, max_size=3))
patterns = st.lists(prompts, min_size=2, max_size=9)


@st.composite
def traffic(draw) -> list[Tokens]:
    """Phases, each of which repeats a few prompts in turns: what one policy is best at, the next one is not."""
    phases = draw(st.lists(st.tuples(patterns, st.integers(1, 6)), min_size=2, max_size=5))
    return [tokens_of(*prompt) for pattern, times in phases for _ in range(times) for prompt in pattern]


def tokens_of(root: int, branches: list[int]) -> Tokens:
    parts = [words(root, PAGE)]
    for depth, branch in enumerate(branches):
        parts.append(words(10 + 8 * root + 2 * depth + branch, PAGE * (1 + branch)))
    return tuple(token for part in parts for token in part)


# At the end one resumes at its first page, where the shadow of `lru` has the whole prompt and no longer that page. The
# page cannot go while it runs: in its place the memory evicts the prompt that is asked for next.
CROWDED = [
    *[tokens_of(0, []), tokens_of(0, [1, 0]), tokens_of(0, [0, 0]), tokens_of(1, [0, 1])] * 2,
    *[tokens_of(0, [0, 1, 1]), tokens_of(1, [0, 0, 1])] * 2,
]


def run(world: World, requests: list[Tokens]) -> World:
    for tokens in requests:
        world.request(tokens)
    return world


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(traffic())
@example(CROWDED)
def test_it_hits_as_much_as_the_best_policy_less_the_price_of_what_it_lacks(requests: list[Tokens]) -> None:
    world = run(World(), requests)
    assert not world.lost
    assert world.hits >= max(world.hits_of) - world.price


@pytest.mark.full
@pytest.mark.parametrize("seed", range(100, 160))
def test_it_hits_as_much_in_more_traffic(seed: int) -> None:
    world = run(World(), drawn(seed))
    assert not world.lost
    assert world.hits >= max(world.hits_of) - world.price


def drawn(seed: int) -> list[Tokens]:
    """Phases of prompts in turns, as in `traffic`."""
    rng, requests = Random(seed), []
    for _ in range(rng.randint(2, 6)):
        pattern = [
            tokens_of(rng.randrange(3), [rng.randrange(2) for _ in range(rng.randrange(4))])
            for _ in range(rng.randint(2, 9))
        ]
        requests += pattern * rng.randint(1, 8)
    return requests


def test_policies_change_places_in_such_traffic() -> None:
    worlds = [run(World(), drawn(seed)) for seed in range(3)]
    assert {world.hits_of.index(max(world.hits_of)) for world in worlds} >= {0, 1}
    assert sum(world.switches for world in worlds) > 3


def test_a_request_that_resumes_above_the_shadow_may_evict_what_the_shadow_has() -> None:
    world = run(World(), CROWDED)
    assert (world.crowded, world.switches) == (1, 2)
    assert world.price == 12 + 24 + 20, "two switches, and the prompt that went"
    assert world.hits < max(world.hits_of) - 12 - 24


def test_control_one_that_never_switches_breaks_the_bound() -> None:
    world = World()
    expect = world.shadows.expect

    def stay(draft: Draft, is_first: bool) -> None:
        expect(draft, is_first)
        world.shadows.best = 0

    world.shadows.expect = stay  # type: ignore[method-assign]
    world._next = lambda resumed: 0  # type: ignore[method-assign]
    run(world, drawn(0))
    assert world.hits < max(world.hits_of) - world.price


def test_control_one_that_evicts_what_the_shadow_holds_breaks_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "lowest", Headwater.lowest)
    worlds = [run(World(), drawn(seed)) for seed in range(4)]
    assert all(world.lost for world in worlds)
    assert any(world.hits < max(world.hits_of) - world.price for world in worlds)


@given(
    st.integers(1, 4).flatmap(
        lambda policies: st.lists(st.lists(st.integers(0, 50), min_size=policies, max_size=policies), min_size=1)
    ),
    st.floats(1.0, 100.0),
)
def test_hits_of_the_followed_shadow_are_at_least_those_of_any(rows: list[list[int]], window: float) -> None:
    """The lemma: one that is chosen with the request's own hits counted loses nothing, whatever the window is."""
    shadows = Shadows(lambda *given: None, [""] * len(rows[0]), LAYOUT, window)  # type: ignore[arg-type, return-value]
    followed = 0
    for row in rows:
        shadows.count(row)
        followed += row[shadows.best]
    assert followed >= max(map(sum, zip(*rows, strict=True)))


def test_with_one_policy_it_is_that_policy() -> None:
    alone, guarded = Toy(SMALL, "headwater"), Toy(SMALL, "guard('headwater')")
    for tokens in drawn(3):
        found = [toy.serve((*tokens, 0)).checkpoint_tokens for toy in (alone, guarded)]
        assert found[0] == found[1]
    assert dump(alone.cache) == dump(guarded.cache)


def test_a_request_of_several_legs_is_one_hit_in_the_shadows() -> None:
    toy = Toy(replace(SMALL, n_pages=100), GUARD)
    toy.serve(words(1, 8))
    tokens = (*words(1, 8), *words(2, 16))
    request = toy.draft(tokens, 0).request
    for start, end in ((8, 16), (16, 24)):
        draft = toy.draft(tokens, start, request=request, end=end, publish=end, checkpoints=(end,))
        toy.commit(toy.reserve(draft), draft)
    toy.release(request)
    assert toy.cache._shadows is not None
    for cache in (toy.cache, *(shadow.cache for shadow in toy.cache._shadows._all)):
        assert isinstance(cache, PrefixCache)
        assert [node.hits for node in sorted(cache._index, key=attrgetter("end"))] == [1, 0, 0]


def test_the_end_of_a_conversation_reaches_the_shadows() -> None:
    world = World()
    world.request(words(1, 8))
    world.cache.end_conversation("", key_of(words(1, 8)))
    for shadow in world.shadows._all:
        assert [node.speculative for node in shadow.cache._index if node.checkpoint is not None] == [True]


def test_bits_of_holders_are_those_of_the_shadows() -> None:
    world = run(World(), drawn(1))
    assert len(world.policy._nodes) == world.cache.stats().checkpoints
    for row, node in enumerate(world.policy._kept.nodes):
        prefix = prefix_ids(world.cache._index.key_of(node), LAYOUT.unit_bytes, hash(""))[-1]
        assert world.policy._kept.prefix[row] == prefix
        held = [
            prefix in map(id_of, filter(attrgetter("checkpoint"), shadow.cache._index)) for shadow in world.shadows._all
        ]
        assert [bool(world.policy._holders[row] >> bit & 1) for bit in range(len(held))] == held


def test_policies_are_joined_by_commas_outside_of_brackets() -> None:
    assert split("lru, flop_aware(2.0, parent='immediate'),gdsf") == (
        "lru",
        "flop_aware(2.0, parent='immediate')",
        "gdsf",
    )


@pytest.mark.parametrize("spelling", ["guard(window=0.5)", "guard('guard')", "guard('clairvoyant')", "guard('lfuu')"])
def test_what_cannot_be_followed_is_an_error(spelling: str) -> None:
    with pytest.raises(ConfigError):
        PrefixCache(LAYOUT, spelling)


def test_a_model_without_states_has_no_shadows() -> None:
    assert PrefixCache(replace(SMALL, checkpoint_pages=0, resumable="every_page"), "guard")._shadows is None
