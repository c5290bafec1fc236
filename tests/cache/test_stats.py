"""Statistics and the history of a cache, and the spelling of policies."""

from dataclasses import replace

import pytest

from headwater.cache.eviction import make_eviction
from headwater.cache.history import History
from headwater.cache.node import Node, Root
from headwater.cache.placement import make_placement
from headwater.errors import ConfigError
from headwater.traces.loads import make_load
from tests.cache.toy import LAYOUT, PAGE, Toy, words


def test_kv_is_dead_once_no_checkpoint_stands_at_it_or_below() -> None:
    toy = Toy()
    toy.serve(words(1, 16))  # KV to 16, a checkpoint there
    assert toy.cache.stats().dead_kv_tokens == 0
    toy.serve(words(1, 8) + words(2, 8), checkpoints=())  # a branch without one
    assert toy.cache.stats().dead_kv_tokens == 8
    index = toy.cache.index
    kept = next(node for node in index if node.checkpoint is not None)
    toy.cache.pool.states.give(index.drop(kept))
    assert toy.cache.stats().dead_kv_tokens == 24
    toy.serve(words(1, 8) + words(2, 8))
    assert toy.cache.stats().dead_kv_tokens == 8
    toy.cache.check()


def test_without_recurrent_layers_nothing_is_dead() -> None:
    toy = Toy(replace(LAYOUT, checkpoint_pages=0, slot_pages=0, resumable="every_page"))
    toy.serve(words(1, 16))
    assert toy.cache.stats().dead_kv_tokens == 0


def test_checkpoints_are_counted_as_stored_resumed_and_evicted_by_kind() -> None:
    toy = Toy(replace(LAYOUT, n_pages=14))
    toy.serve(words(1, 16), speculative=(8,))
    stats = toy.cache.stats()
    assert (stats.saved_checkpoints, stats.saved_speculative, stats.checkpoints) == (2, 1, 2)
    toy.serve(words(1, 16) + words(2, 4))
    stats = toy.cache.stats()
    assert (stats.resumes, stats.resumed_tokens) == (1, 16)
    toy.serve(words(3, 40))  # needs all but two pages
    stats = toy.cache.stats()
    assert stats.evicted_speculative == 1
    assert stats.evicted_checkpoints == 3
    assert stats.evicted_unused == 2  # a request resumed at one of them
    assert stats.evicted_kv_pages == 3
    assert stats.pages_kv + stats.pages_checkpoint + stats.pages_free == stats.pages_total == 14


def test_pages_of_open_plans_and_slots_are_counted_apart() -> None:
    toy = Toy()
    draft = toy.draft(words(1, 18), 0, checkpoints=(16,), slot=True)
    plan = toy.reserve(draft)
    stats = toy.cache.stats()
    assert (stats.pages_private, stats.pages_slot) == (5 + 2, 2)
    toy.commit(plan, draft)
    stats = toy.cache.stats()
    assert (stats.pages_private, stats.pages_kv, stats.pages_checkpoint) == (1, 16 // PAGE, 2)


@pytest.mark.parametrize("wrong", ["dead_pages", "kv_pages", "checkpoints"])
def test_check_notices_a_counter_that_is_off(wrong: str) -> None:
    toy = Toy()
    toy.serve(words(1, 16))
    setattr(toy.cache.index, wrong, 17)
    with pytest.raises(AssertionError, match="17 counted"):
        toy.cache.check()


def leaf(edges: list[bytes]) -> Node:
    node: Node = Root("", 0)
    for edge in edges:
        child = Node(node, edge, node.pages, node.end + len(edge), 0)
        node.adopt(edge[:1], child)
        node = child
    return node


def test_prompt_finds_its_branch_point_on_an_evicted_path() -> None:
    history = History(1, 100)
    history.note("", leaf([b"ab", b"cd"]))
    history.note("", leaf([b"abx"]))
    assert [history.depth("", key, 9) for key in (b"abcde", b"abcx", b"abxy", b"q")] == [4, 3, 3, 0]
    assert history.depth("other", b"abcd", 9) == 0
    assert history.depth("", b"abcd", 2) == 2


def test_old_paths_are_forgotten() -> None:
    history = History(1, 10)
    history.note("", leaf([b"first"]))
    for i in range(50):
        history.note("", leaf([bytes([i]) * 4]))
    assert history.depth("", b"first", 5) == 0
    assert history.depth("", bytes([49]) * 4, 4) == 4


def test_a_shared_prefix_is_found_after_its_kv_was_evicted() -> None:
    for policy, branch in (("lru", 0), ("seglen", 40), ("headwater", 40)):
        toy = Toy(replace(LAYOUT, n_pages=24, slot_pages=0), policy)
        shared = words(1, 40)
        toy.serve(shared + words(2, 20))
        for other in range(5, 8):
            toy.serve(words(other, 60))
        match = toy.match(shared + words(3, 20))
        assert match.kv_tokens == 0
        assert match.branch_tokens == branch


@pytest.mark.parametrize(
    ("spelling", "what"),
    [
        ("seglen(w='a')", "w is 'a', must be a number"),
        ("seglen(0.5, single_child=1)", "single_child is 1, must be True or False"),
        ("flop_aware(alpha='a')", "alpha is 'a', must be a number"),
        ("flop_aware(1e999)", "alpha is inf, must be a number"),
        ("last_n(1.5)", "n is 1.5, must be a whole number"),
        ("path_cap(k=True)", "k is True, must be a whole number"),
        ("marconi(multiplier=2.5)", "multiplier is 2.5, must be a whole number"),
        ("lru(x=1)", "unexpected keyword argument 'x'"),
        ("last_n", r"it needs n, a whole number; type 'last_n\(n=8\)'"),
    ],
)
def test_option_of_the_wrong_type_is_refused_by_name(spelling: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make_eviction(spelling, LAYOUT)


def test_float_option_accepts_whole_numbers() -> None:
    assert make_eviction("seglen(w=1)", LAYOUT).weight == 1  # type: ignore[attr-defined]


def test_options_of_placements_and_loads_are_checked() -> None:
    with pytest.raises(ConfigError, match="k is 'x', must be a whole number"):
        make_placement("optimal(k='x')")
    with pytest.raises(ConfigError, match=r"it needs k, a whole number; type 'optimal\(beta=0.9, k=8\)'"):
        make_placement("optimal(beta=0.9)")
    with pytest.raises(ConfigError, match=r"clients is 1\.5, must be a whole number"):
        make_load("closed(clients=1.5)")
    with pytest.raises(ConfigError, match="rate is 'x', must be a number"):
        make_load("poisson(rate='x')")
