"""Promises of every eviction policy. A policy is tested once it is in the table."""

import random
from dataclasses import replace

import pytest

from headwater.cache.eviction import EVICTION, make_eviction
from headwater.cache.eviction.base.policy import Eviction, Kind, Room
from headwater.cache.eviction.clairvoyant import Clairvoyant
from headwater.cache.eviction.clairvoyant.future import Asked, Future
from headwater.errors import ConfigError
from tests.cache.toy import LAYOUT, PAGE, Tokens, Toy, dump, evict, example, floor, key_of, words
from tests.support import FULL

# Options that the table of hits below wants to be others than by default, or than 1
OPTIONS = {"last_n": "last_n(3)", "flop_aware": "flop_aware(2.0)"}
VARIANTS = ["lru(prefer_dead=False)", "seglen(w=0.2, single_child=False)", "path_cap(4)"]
SPELLINGS = [*(OPTIONS.get(name, example(name, EVICTION[name])) for name in sorted(EVICTION)), *VARIANTS]
policies = pytest.mark.parametrize("policy", SPELLINGS)
fractions = pytest.mark.parametrize("fraction", [None, 0.4])


def filled(policy: str, fraction: float | None, pages: int = 60) -> Toy:
    """A cache after many requests with shared prefixes."""
    toy, rng = Toy(replace(LAYOUT, n_pages=pages, state_fraction=fraction), policy), random.Random(0)
    for round_ in range(150 if FULL else 60):
        prefix = words(rng.randint(1, 4), 4 * rng.randint(1, 4))
        toy.serve(prefix + words(100 + round_, rng.randint(1, 12)), checkpoints=(floor(len(prefix)),))
    return toy


def largest_victim(toy: Toy) -> int:
    """Pages that the last victim may have, where each before it left at least one to be found."""
    leaves = [node for node in toy.cache.index if not node.children]
    whole = max((len(node.pages) + len(node.checkpoint or ()) for node in leaves), default=0)
    victim = toy.cache.policy.victim(Room.ANY, toy.cache.now)
    return whole if victim is not None and victim[1] is Kind.NODE else 1


@policies
def test_eviction_policy_is_made_from_its_name(policy: str) -> None:
    made: Eviction = make_eviction(policy, LAYOUT)
    assert made.victim(Room.ANY, 1) is None


def test_an_unknown_one_is_a_config_error_that_names_those_there_are() -> None:
    with pytest.raises(ConfigError, match="eviction 'belady' is unknown; there are clairvoyant, flop_aware, gdsf, "):
        make_eviction("belady", LAYOUT)


@pytest.mark.pairs
@policies
@fractions
@pytest.mark.parametrize("room", list(Room))
def test_everything_unpinned_can_be_evicted_and_nothing_else(policy: str, fraction: float | None, room: Room) -> None:
    toy = filled(policy, fraction)
    kept = words(50, 12)
    draft = toy.draft(kept, 0, checkpoints=(12,))
    toy.commit(toy.reserve(draft), draft)
    cache = toy.cache
    while (victim := cache.policy.victim(room, cache.now)) is not None:
        node, kind = victim
        assert not node.holds
        assert kind is Kind.CHECKPOINT or not (node.pins or node.children)
        assert kind is not Kind.TAIL or node.checkpoint is None
        evict(cache, room)
        cache.check()
    stats = cache.stats()
    assert toy.match((*kept, 0)).checkpoint_tokens == 12
    if room is not Room.STATE:
        assert stats.pages_kv == 3
    if room is not Room.KV:
        assert stats.checkpoints == 1


@policies
@fractions
def test_no_more_is_evicted_than_needed(policy: str, fraction: float | None) -> None:
    toy = filled(policy, fraction)
    for first in range(200, 220):
        before = toy.cache.stats()
        last = largest_victim(toy)
        draft = toy.draft(words(first, 3 * PAGE), 0)
        toy.cache.abandon(toy.reserve(draft))
        toy.release(draft.request)
        after = toy.cache.stats()
        assert after.evicted_kv_pages - before.evicted_kv_pages <= 2 + last
        if fraction is None:
            assert after.pages_free <= max(before.pages_free, 2 + max(LAYOUT.checkpoint_pages, last))


@policies
def test_asking_for_a_victim_changes_nothing(policy: str) -> None:
    toy = filled(policy, None)
    cache = toy.cache
    first = cache.policy.victim(Room.ANY, cache.now)
    assert first is not None
    assert cache.policy.victim(Room.ANY, cache.now) == first


@policies
def test_unused_victim_request_leaves_the_policy_unchanged(policy: str) -> None:
    asked, other = filled(policy, None), filled(policy, None)
    victim = asked.cache.policy.victim(Room.ANY, asked.cache.now)
    assert victim is not None
    key = b"".join(node.edge for node in asked.cache.index.path(victim[0]))
    for toy in (asked, other):
        toy.cache.branches.drop(key, 0, "")
        for first in range(400, 440):
            toy.serve(words(first, 12))
    assert dump(asked.cache) == dump(other.cache)


@policies
def test_speculative_checkpoints_go_before_other_checkpoints(policy: str) -> None:
    toy = Toy(replace(LAYOUT, n_pages=60, state_fraction=0.5), policy)
    toy.serve(words(1, 12))
    toy.serve(words(2, 12), checkpoints=(), speculative=(8,))
    evict(toy.cache, Room.STATE)
    assert toy.match(words(2, 12)).checkpoint_tokens == 0
    assert toy.match((*words(1, 12), 0)).checkpoint_tokens == 12


@policies
@fractions
def test_prompt_that_fits_in_the_arena_is_served(policy: str, fraction: float | None) -> None:
    toy = filled(policy, fraction, pages=30)
    for first in range(200, 240):
        draft = toy.draft(words(first, 18 * PAGE), 0, slot=True)
        plan = toy.reserve(draft)  # nothing is too much for it: no OutOfPages
        assert len(set(plan.table)) == 18
        toy.commit(plan, draft)
        toy.release(draft.request)


@policies
@fractions
def test_pages_of_an_open_plan_are_not_evicted(policy: str, fraction: float | None) -> None:
    toy = filled(policy, fraction)
    A = words(60, 16)
    toy.serve(A, checkpoints=(8, 16))
    draft = toy.draft((*A[:12], *words(61, 4)), 8)
    plan = toy.reserve(draft)
    while toy.cache.policy.victim(Room.ANY, toy.cache.now) is not None:
        evict(toy.cache, Room.ANY)
    toy.commit(plan, draft)  # the toy's executor compares what the pages hold
    assert toy.cache.stats().pages_kv == 4


@policies
@fractions
def test_the_same_history_has_the_same_victims(policy: str, fraction: float | None) -> None:
    assert dump(filled(policy, fraction).cache) == dump(filled(policy, fraction).cache)


# ---- exact hits on two small traces
#
# s, t and u are a session's turns: 8, 16 and 24 tokens that begin alike; p, q and r are 8 tokens each. Each request is
# one of them and one token more, and leaves a checkpoint at its last full page (of 4 tokens). A checkpoint is a page, a
# FLOP a token. The arena has 13 pages: a request on nothing of which anything is cached wants one page of KV more than
# is cached of it afterwards, and gives that back. s@8 is the checkpoint of s at token 8, 5+ the end of request 5.

SESSION = words(1, 24)
TEXTS = {"s": SESSION[:8], "t": SESSION[:16], "u": SESSION}
TEXTS |= {name: words(number, 8) for number, name in enumerate("pqr", 2)}

# Requests 1 to 6 fit: r 3 pages, t 5, s@8 1, u 3. So far all have hits 0 0 0 16 8 8 (s finds KV without a checkpoint,
# then u resumes at t@16). Last uses: t@16 4, u@24 4+, s@8 5, r@8 6. p wants 4 pages, 1 is free: 3 have to go. Then u.
FIRST = "rtsusrpu"
FIRST_HITS = {
    "lru": [0, 0, 0, 16, 8, 8, 0, 8],  # t@16, u@24, and a page of what is dead then; s@8 is left
    "lru_path": [0, 0, 0, 16, 8, 8, 0, 16],  # the leaf u, whole; t@16 is left
    "lfu": [0, 0, 0, 16, 8, 8, 0, 16],  # only u@24 was not hit: it and 2 pages below it
    "gdsf": [0, 0, 0, 16, 8, 8, 0, 16],  # r 2*8/3, s 2*8/1, t 2*8/1, u 1*8/3: u@24 and 2 pages
    # L is 8 everywhere, so t@16 (oldest); then L(u) 16 and R(r, s, u) = 1/2, 1/4, 1/5, U = 1, .17, .85: s@8; then
    # L(u) 24, U(r) 1, U(u) .85: u@24. Nothing is left of the session but KV
    "seglen": [0, 0, 0, 16, 8, 8, 0, 0],
    # 8/3 everywhere, so t@16 (oldest); then u (24-8)/5 and S(r, s, u) = 1, .17, 2: s@8; then u 24/7, S(r) 1, S(u) 2: r
    "flop_aware(2.0)": [0, 0, 0, 16, 8, 8, 0, 24],
    # alpha is 0 when the first one goes: t@16, then the leaf u, whole; s@8 is left
    "marconi": [0, 0, 0, 16, 8, 8, 0, 8],
    # u drops s@8 at its commit (t@16 is the one that is kept), so that s does not hit and takes it again; then as lru
    "path_cap(1)": [0, 0, 0, 16, 0, 8, 0, 8],
    # entries are u, s, r when p comes; room is made as by lru, and p's commit ends u's entry: what s@8 has not, goes
    "last_n(3)": [0, 0, 0, 16, 8, 8, 0, 8],
    # worth x index of t, s, u, r: 8 * 2/8/56, 8 * 2/8/40, (24-8)/5 * 1/40, 8/3 * 2/20: t@16, s, u
    "headwater": [0, 0, 0, 16, 8, 8, 0, 0],
    "clairvoyant": [0, 0, 0, 16, 8, 8, 0, 24],  # only u@24 is used again: t@16, s@8, r@8 go
}

# u takes 7 pages, s@8 1, q 3; then p wants 4 and 2 are free. Hits before: 0 24 0 8 0.
SECOND = "uussqppqup"
SECOND_HITS = {
    # u@24 (used at 2) and a page below it. p and q hit, u resumes at s@8 and wants 3 pages, 1 is free: p@8 and a page
    "lru": [0, 24, 0, 8, 0, 0, 8, 8, 8, 0],
    # q@8 (not hit) and a page; p hits; q does not and wants 3, 1 is free: u@24, s@8, p@8 were hit once, u@24 at 2: it
    # and a page; u resumes at s@8 and wants 3: q@8, not hit since it was taken again, and a page; p hits
    "lfu": [0, 24, 0, 8, 0, 0, 8, 0, 8, 8],
    # u (24-8)/5*2 = 6.4, s 8*2 = 16, q 8/3: q@8, L = 8/3. p is 8/3 + 2*8/3 = 8 when it hits. q does not: u@24 goes,
    # L = 6.4; q is 6.4 + 8/3 now. u resumes at s@8 and wants 3: p (8) goes, and does not hit
    "gdsf": [0, 24, 0, 8, 0, 0, 8, 0, 8, 0],
    # s@8 has no next use: it goes; u@24 24/7/(9-6) < q@8 8/3/(8-6): it goes. p and q hit, u finds only KV, p hits
    "clairvoyant": [0, 24, 0, 8, 0, 0, 8, 8, 0, 8],
}


def hits(policy: str, trace: str) -> list[int]:
    layout = replace(LAYOUT, n_pages=13, checkpoint_pages=1, slot_pages=0)
    toy = Toy(layout, policy)
    requests: list[Tokens] = [(*TEXTS[name], 0) for name in trace]
    oracle = toy.cache.policy
    if isinstance(oracle, Clairvoyant):
        asked = (Asked("", key_of(tokens), (len(tokens) - 1) // PAGE) for tokens in reversed(requests))
        oracle.foresee(Future(layout.unit_bytes, asked))
    resumed = []
    for number, tokens in enumerate(requests):
        if isinstance(oracle, Clairvoyant):
            oracle.now_at(number)
        resumed.append(toy.serve(tokens).checkpoint_tokens)
    return resumed


@pytest.mark.parametrize("policy", sorted(FIRST_HITS))
def test_hits_on_a_small_trace_are_those_worked_out_by_hand(policy: str) -> None:
    assert hits(policy, FIRST) == FIRST_HITS[policy]


@pytest.mark.parametrize("policy", sorted(SECOND_HITS))
def test_hits_on_another_small_trace_are_those_worked_out_by_hand(policy: str) -> None:
    assert hits(policy, SECOND) == SECOND_HITS[policy]
