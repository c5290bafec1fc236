"""Rules of routers at workers made by hand: each decides as its source does."""

from dataclasses import replace
from typing import Any

import pytest

from headwater.cluster.cost import (
    Candidate,
    Choice,
    Found,
    Known,
    LeastCost,
    OpenRequests,
    Outstanding,
    Prompt,
    Stored,
    expected_seconds,
    holders,
    note_widespread,
    preferred,
    price_reads,
)
from headwater.engine.meter import Backlog
from headwater.errors import ConfigError
from headwater.lab.cluster.rivals import (
    Aibrix,
    ApproximateTree,
    ConsecutiveBlocks,
    DynamoCost,
    Sent,
    SessionAffinity,
    make_choice,
)
from headwater.schedule.prefill_seconds import PrefillSeconds, PrefillSpeed
from headwater.schedule.tier_load import ReadSpeed

BLOCK = 64
SPEED = PrefillSpeed(0.0, 1e-4)


def worker(name: str = "a", running: int = 0, waiting: int = 0, **others: Any) -> Candidate:
    told: dict[str, object] = {"queued_tokens": 0, "prefill": SPEED, "request_seconds": 1.0, "max_running": 8}
    return Candidate(running, waiting, name=name, **(told | {"reusable": 0} | others))  # type: ignore[arg-type]


def prompt(*blocks: int, session: str = "") -> Prompt:
    return Prompt(len(blocks) * BLOCK + 1, blocks, BLOCK, session)


def chosen(rule: Choice, what: Prompt, *workers: Candidate) -> str:
    return workers[rule.choose(what, workers)].name


# -- least cost


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"reusable": 5 * BLOCK}, {"reusable": 2 * BLOCK}),
        ({"underway": 5 * BLOCK}, {"reusable": 2 * BLOCK}),
        ({"memory_held": 0.2}, {"memory_held": 0.6}),
        ({"cached": 5 * BLOCK}, {"cached": 2 * BLOCK}),
        ({"prefill": None}, {"queued_tokens": 500}),
        ({"prefill": PrefillSpeed(0.0, 1.9e-4)}, {"queued_tokens": 200}),
        ({"queued_tokens": 500}, {"prefill": PrefillSpeed(0.0, 2.1e-4)}),
    ],
    ids=["reuse", "computed by an earlier request", "memory", "KV", "not measured", "nearly equal speeds", "slow"],
)
def test_the_least_cost_is_chosen(better: dict[str, Any], worse: dict[str, Any]) -> None:
    for order in (("a", "b"), ("b", "a")):
        workers = {"a": worker("a", **better), "b": worker("b", **worse)}
        assert chosen(LeastCost(), prompt(1, 2, 3, 4, 5, 6), *(workers[name] for name in order)) == "a"


def test_measured_speed_of_tiny_prompts_does_not_slow_a_long_one() -> None:
    """By all of its steps' seconds a token, the one with tiny prompts would look as slow as if 40,000 tokens waited."""
    tiny, long = PrefillSeconds(), PrefillSeconds()
    for measured, tokens in ((tiny, 30), (long, 1024)):
        for n in (192, *[tokens] * 50):
            measured.note(n, 0.03 + 1.6e-4 * n)
    workers = worker("a", prefill=tiny.speed), worker("b", prefill=long.speed, queued_tokens=2000)
    for order in (workers, workers[::-1]):
        assert chosen(LeastCost(), prompt(*range(128)), *order) == "a"


def test_costs_are_seconds() -> None:
    one = worker(queued_tokens=100, memory_held=0.5)
    assert expected_seconds(Prompt(50), one, SPEED) == pytest.approx((100 + 50 + 0.5 * 50 / 0.5) * 1e-4)
    full = worker(running=8, waiting=1, memory_held=0.0)
    assert expected_seconds(Prompt(50), full, SPEED) == pytest.approx(2 * 1.0 / 8 + (50 + 25) * 1e-4)
    there, curved = worker(reusable=40, cached=40, queued_tokens=100), PrefillSpeed(0.01, 1e-4, 1e-6, 100)
    seconds = 0.01 * 0.9 + (100 + 10 + 0.5 * 10) * 1e-4 + (50**2 - 40**2) * 1e-6
    assert expected_seconds(Prompt(50), there, curved) == pytest.approx(seconds)


def test_widespread_prefix_does_not_exclude_a_worker_without_it() -> None:
    """An idle worker without a system prompt of 40 blocks, next to others with a short queue."""
    what = prompt(*range(60))
    for n, widespread in ((3, 0), (4, 40 * BLOCK), (6, 40 * BLOCK)):  # of seven others
        having = [worker(str(i), reusable=40 * BLOCK, cached=40 * BLOCK, queued_tokens=500) for i in range(n)]
        workers = [*having, *(worker(str(i), queued_tokens=10_000) for i in range(n, 7)), worker("idle")]
        note_widespread(workers)
        assert {one.widespread for one in workers} == {widespread}
        assert (chosen(LeastCost(), what, *workers) == "idle") == bool(widespread)
        cost = expected_seconds(what, workers[-1], SPEED)
        assert cost == pytest.approx(1.5 * (what.tokens - widespread) * 1e-4)
        assert workers[-1].uncached(what) == what.tokens, "it computes all of it"
    many = [worker(str(i), reusable=n * BLOCK) for i, n in enumerate([40] * 3 + [20] * 3 + [0] * 10)]
    note_widespread(many)
    assert {one.widespread for one in many} == {20 * BLOCK}, "a quarter of 16 have so many"
    few = [worker(name, reusable=BLOCK) for name in "abcd"]
    note_widespread(few)
    assert {one.widespread for one in few} == {0}, "four workers of four"


def test_unknown_prefix_has_one_preferred_worker() -> None:
    rule, names = LeastCost(), "abcd"
    workers = [worker(name) for name in names]
    homes = {first: chosen(rule, prompt(first, 100 + first), *workers) for first in range(40)}
    assert homes == {first: chosen(rule, prompt(first, 200 + first), *workers) for first in range(40)}
    assert set(homes.values()) == set(names)
    fewer = {first: chosen(rule, prompt(first), *workers[:3]) for first in range(40)}
    assert all(fewer[first] == home for first, home in homes.items() if home != "d")


def test_router_counts_sent_requests() -> None:
    earlier, later = prompt(1, 2, 3), prompt(1, 2, 4)
    sent, first = OpenRequests(), Outstanding(earlier, earlier.tokens)
    for one in (first, Outstanding(prompt(1, 2, 4, 5), 99, has_begun=True)):
        sent.add(one)
    backlog = Backlog(1, 0, 10, None, 1.0, held_tokens=7, memory_tokens=1000)
    found = Known("a", 1, backlog, sent).candidate(later, Found(BLOCK, 0))
    assert (found.running, found.waiting, found.queued_tokens) == (1, 1, earlier.tokens)
    assert (found.cached, found.reusable, found.underway) == (BLOCK, 0, 2 * BLOCK)
    assert found.memory_held == (193 + 257) / 1000
    assert found.uncached(later) == later.tokens - 2 * BLOCK
    sent.begin(first)
    found = Known("a", 1, backlog, sent).candidate(later, Found(BLOCK, 0))
    assert (found.waiting, found.queued_tokens, found.underway) == (1, 10, 0)


def test_open_requests_are_counted_until_their_ends() -> None:
    sent = OpenRequests()
    some = [Outstanding(prompt(1, *rest), 10 * at, at == 3) for at, rest in enumerate([(), (2,), (2, 3), (4,)])]
    for one in some:
        sent.add(one)
    assert (sent.number, sent.uncached_tokens, sent.blocks) == (4, 30, {1: 3, 2: 2, 3: 1})
    for _ in range(2):  # each token of an answer says so
        sent.begin(some[2])
    assert (sent.number, sent.uncached_tokens, sent.blocks) == (4, 10, {1: 2, 2: 1})
    for one in some:
        sent.remove(one)
    assert (sent.number, sent.prompt_tokens, sent.uncached_tokens, sent.blocks) == (0, 0, 0, {})


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [((1, 2, 3), (1, 2, 3, 4), 3), ((1, 2, 3), (1, 2, 9), 2), ((1,), (2,), 0), ((), (1,), 0), ((1, 2), (1, 2), 2)],
)
def test_shared_blocks(one: tuple[int, ...], other: tuple[int, ...], shared: int) -> None:
    assert prompt(*one).shared(other) == shared * BLOCK
    assert Prompt(len(one) * BLOCK, one, BLOCK).shared(other) <= max(0, len(one) - 1) * BLOCK


# -- pulls

FAST, SLOW = ReadSpeed(0.001, 1e-6), ReadSpeed(0.001, 1e-3)
LONG = prompt(*range(100))


def pulling(name: str, pull: ReadSpeed | None = FAST, pool: str = "one", **others: float) -> Candidate:
    return replace(worker(name, **others), pull=pull, pool=pool)


def with_pulls(given: list[Candidate]) -> list[Candidate]:
    """Return copies with what each would pull."""
    workers = [replace(one) for one in given]
    price_reads(workers)
    return workers


def test_a_busy_holders_prefix_is_pulled_by_another_worker() -> None:
    holder = pulling("a", reusable=90 * BLOCK, cached=90 * BLOCK, queued_tokens=20_000)
    workers = with_pulls([holder, pulling("b")])
    assert workers[0] == holder
    assert (workers[1].read, workers[1].read_seconds) == (90 * BLOCK, 0.001 + 90 * BLOCK * 1e-6)
    assert workers[1].uncached(LONG) == LONG.tokens - 90 * BLOCK
    assert expected_seconds(LONG, workers[1], SPEED) == pytest.approx(
        workers[1].read_seconds + (LONG.tokens - 90 * BLOCK + 0.5 * LONG.tokens) * 1e-4
    )
    assert LeastCost().choose(LONG, workers) == 1
    assert holders(1, workers) == [0]
    assert holders(0, workers) == []
    idle = with_pulls([replace(holder, queued_tokens=0), pulling("b")])
    assert LeastCost().choose(LONG, idle) == 0, "its own worker has nothing to pull"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (pulling("b", SLOW), "computing is faster"),
        (pulling("b", None), "it pulls nothing"),
        (pulling("b", pool="two"), "its bits differ"),
        (pulling("b", underway=90 * BLOCK), "it is computing the prefix"),
        (pulling("b", reusable=95 * BLOCK), "it has more"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_prefix_is_not_pulled_where(other: Candidate, why: str) -> None:
    workers = with_pulls([pulling("a", None, reusable=90 * BLOCK, cached=90 * BLOCK), other])
    assert workers[1] == other, why
    assert holders(1, workers) == []


def test_a_composed_prefix_is_not_pulled() -> None:
    """Another worker pulls the 10 blocks that stand before 50 composed ones."""
    workers = [worker("a", running=9, reusable=60 * BLOCK, unsent=50 * BLOCK), worker("b", pull=ReadSpeed(0.0, 1e-9))]
    price_reads(workers)
    assert (workers[0].read, workers[1].read) == (0, 10 * BLOCK)
    assert holders(1, workers) == [0]
    workers = [worker("a", reusable=60 * BLOCK, unsent=60 * BLOCK), worker("b", pull=ReadSpeed(0.0, 1e-9))]
    price_reads(workers)
    assert workers[1].read == 0


def test_only_missing_kv_is_pulled_from_the_deepest_holders() -> None:
    some = [pulling(name, reusable=n * BLOCK, running=n % 7) for name, n in (("a", 80), ("b", 90), ("c", 50), ("d", 0))]
    some[3] = replace(some[3], cached=60 * BLOCK)
    workers = with_pulls([*some, pulling("e", reusable=90 * BLOCK)])
    assert workers[3].read_seconds == FAST.seconds(30 * BLOCK)
    assert holders(3, workers) == [4, 1], "the fewest requests first"


# -- loads


def storing(name: str, end: int, speed: ReadSpeed = FAST, **others: float) -> Candidate:
    """Return a worker that has the first `end` blocks in a store of that speed."""
    return replace(worker(name, **others), stored=(Stored("STORAGE", end * BLOCK),), loads={"STORAGE": speed})


def test_stored_parts_are_loaded_and_cost_their_seconds() -> None:
    workers = with_pulls([worker("a"), storing("b", 90, queued_tokens=500)])
    assert (workers[1].read, workers[1].is_loaded) == (90 * BLOCK, True)
    assert workers[1].uncached(LONG) == LONG.tokens - 90 * BLOCK
    assert workers[1].read_seconds == FAST.seconds(90 * BLOCK)
    assert LeastCost().choose(LONG, workers) == 1
    assert holders(1, workers) == [], "it asks no other worker"
    assert LeastCost().choose(LONG, with_pulls([worker("a"), worker("b", queued_tokens=500)])) == 0


def test_only_kv_that_memory_lacks_is_loaded() -> None:
    (one,) = with_pulls([storing("a", 90, cached=50 * BLOCK)])
    assert one.read_seconds == FAST.seconds(40 * BLOCK)


@pytest.mark.parametrize(
    "given",
    [
        storing("a", 90, SLOW),
        storing("a", 90, underway=90 * BLOCK),
        replace(storing("a", 90), loads={}),  # the store has failed a short time ago
        replace(storing("a", 90), loads={"CPU": FAST}),
    ],
    ids=["computing is faster", "it is computing them", "not read now", "another store"],
)
def test_a_prefix_is_not_loaded_where(given: Candidate) -> None:
    (one,) = with_pulls([given])
    assert (one.read, one.is_loaded) == (0, False)


def test_store_or_peer_that_saves_most_is_read() -> None:
    holder = pulling("a", reusable=95 * BLOCK)
    loads = {"CPU": FAST, "STORAGE": ReadSpeed(0.001, 2e-6)}
    stored = Stored("CPU", 60 * BLOCK), Stored("STORAGE", 90 * BLOCK)
    both = replace(worker("b"), stored=stored, loads=loads, pool="one")
    assert with_pulls([holder, both])[1].read == 90 * BLOCK, "it pulls nothing"
    pulls = replace(both, pull=FAST)
    pulled = with_pulls([holder, pulls])[1]
    assert (pulled.read, pulled.is_loaded) == (95 * BLOCK, False)
    loaded = with_pulls([replace(holder, reusable=50 * BLOCK), pulls])[1]
    assert (loaded.read, loaded.is_loaded) == (90 * BLOCK, True)


# -- others


def test_sessions_stay_and_without_one_first_blocks_do() -> None:
    rule, workers = SessionAffinity(), [worker(name) for name in "abc"]
    assert len({chosen(rule, prompt(n, session="s"), *workers) for n in range(9)}) == 1
    assert len({chosen(rule, prompt(7, n), *workers) for n in range(9)}) == 1
    assert {chosen(rule, prompt(n), *workers) for n in range(30)} == set("abc")
    assert chosen(rule, Prompt(5), *workers) == preferred("abc", 5)


def test_the_tree_sends_where_it_sent_more_than_the_threshold() -> None:
    rule = ApproximateTree()
    assert chosen(rule, prompt(1, 2), worker("a"), worker("b")) == "a", "both trees are empty"
    assert chosen(rule, prompt(8, 9), worker("a"), worker("b")) == "b", "its tree is the smallest"
    assert chosen(rule, prompt(1, 3), worker("a", running=60), worker("b")) == "a", "half is more than 0.3"
    assert chosen(rule, prompt(8, 3, 4, 5), worker("a"), worker("b")) == "b", "a quarter is not, but b's is smaller"


def test_the_tree_balances_beyond_both_thresholds() -> None:
    for loads, balances in (((65, 0), True), ((64, 0), False), ((200, 130), True), ((200, 134), False)):
        rule = ApproximateTree()
        assert chosen(rule, prompt(1, 2), worker("a"), worker("b")) == "a"
        busy, free = (worker(name, running=load) for name, load in zip("ab", loads, strict=True))
        assert (chosen(rule, prompt(1, 2), busy, free) == "b") is balances


def test_tree_forgets_old_requests() -> None:
    sent = Sent(3)
    sent.add("a", (1, 2))
    sent.add("a", (1, 5, 6))
    assert (sent.matched("a", (1, 2)), sent.matched("a", (1, 5, 6)), sent.size("a")) == (1, 3, 3)


def test_consecutive_blocks_are_weighed_with_memory_and_queues() -> None:
    what = prompt(1, 2, 3, 4)
    long, short, none = (worker(name, cached=cached * BLOCK) for name, cached in (("a", 4), ("b", 2), ("c", 0)))
    assert chosen(ConsecutiveBlocks(), what, none, short, long) == "a"
    queues = worker("a", waiting=3, cached=4 * BLOCK, memory_held=0.9), worker("b", cached=3 * BLOCK)
    assert chosen(ConsecutiveBlocks(), what, *queues) == "a", "2 + 0.1 + 0 against 0 + 1 + 1"
    assert chosen(ConsecutiveBlocks(prefix=1.5), what, *queues) == "b"
    assert chosen(ConsecutiveBlocks(), what, worker("a", waiting=1), worker("b", memory_held=0.9)) == "b"


def test_dynamo_adds_blocks_to_prefill_and_active_blocks() -> None:
    rule = DynamoCost()
    what = prompt(1, 2, 3, 4)
    assert chosen(rule, what, worker("a", cached=3 * BLOCK), worker("b", cached=2 * BLOCK)) == "a"
    later = prompt(1, 2, 3, 5)  # a: prefill (65 + 65) / 64, active 4 + 1; b: (257 - 128) / 64, 0 + 4
    two = worker("a", cached=3 * BLOCK), worker("b", cached=2 * BLOCK)
    assert [rule._cost(later, one) for one in two] == [130 / 64 + 5, 129 / 64 + 4]
    rule.begun(what, "a")
    assert rule._cost(later, two[0]) == 65 / 64 + 5
    rule.ended(what, "a")
    assert rule._cost(later, two[0]) == 65 / 64 + 4
    assert DynamoCost(2.0)._cost(later, two[0]) == 2 * 65 / 64 + 4


def test_aibrix_takes_the_longest_match_without_too_many_requests() -> None:
    rule = Aibrix()
    idle = [worker("a"), worker("b", running=1), worker("c", running=1)]
    assert chosen(rule, prompt(1, 2), *idle) == "a", "no match: the fewest requests"
    even = [worker(name, running=2) for name in "abc"]
    assert chosen(rule, prompt(1, 3), *even) == "a", "half of it matches"
    skewed = [worker(name, running=load) for name, load in zip("abc", (7, 1, 2), strict=True)]
    assert chosen(rule, prompt(1, 3), *skewed) == "b", "7 requests are more than 3.33 + 3.21"
    assert chosen(Aibrix(stddev_factor=2.0), prompt(1, 3), *idle) == "a"


def test_aibrix_keeps_a_match_below_one_per_cent() -> None:
    rule = Aibrix(stddev_factor=9.0)
    long = range(200)
    assert chosen(rule, prompt(*long), worker("a"), worker("b", running=1)) == "a"
    other = prompt(0, *range(1000, 1199))
    assert chosen(rule, other, worker("a", running=2), worker("b", running=1)) == "a", "1 of 200 blocks matches"


@pytest.mark.parametrize("rule", [ApproximateTree(), DynamoCost(), Aibrix()], ids=lambda rule: type(rule).__name__)
def test_a_worker_that_has_left_is_forgotten(rule: Choice) -> None:
    what = prompt(1, 2)
    assert chosen(rule, what, worker("a"), worker("b")) == "a"
    rule.ended(what, "a")
    rule.left("a")
    known = rule._active if isinstance(rule, DynamoCost) else rule._sent._blocks
    assert "a" not in known


@pytest.mark.parametrize(("most", "home"), [(5, "a"), (10, "b")])
def test_aibrix_matches_the_least_loaded_only_where_one_has_far_too_many(most: int, home: str) -> None:
    """Means decide: of 5, 0 and 1 it is 2, and 5 is below 2 * 3; of 10, 0 and 1 it is 3.7, and 10 is above 2 * 4.7."""
    rule = Aibrix(stddev_factor=9.0)
    assert chosen(rule, prompt(1, 2), worker("a"), worker("b", running=1), worker("c", running=1)) == "a"
    assert chosen(rule, prompt(1, 2), worker("a", running=most), worker("b"), worker("c", running=1)) == home


def test_options_are_spelled() -> None:
    assert isinstance(make_choice("approximate_tree(cache_threshold=0.5, balance_abs_threshold=8)"), ApproximateTree)
    for wrong in ("tree", "approximate_tree(threshold=1)", "dynamo_cost('a')"):
        with pytest.raises(ConfigError, match="router"):
            make_choice(wrong)
