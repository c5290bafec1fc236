"""Ends of conversations: which checkpoints are evicted first after them, and which are not."""

from dataclasses import replace

import pytest

from headwater.cache.eviction import EVICTION
from headwater.cache.eviction.base.policy import Room
from tests.cache.toy import LAYOUT, Tokens, Toy, dump, evict, example, key_of, words

SPLIT = replace(LAYOUT, n_pages=100, checkpoint_pages=1, slot_pages=0, state_fraction=0.1)
TURNS = (8, 16)  # checkpoints of a conversation


def toy(eviction: str) -> Toy:
    return Toy(SPLIT, eviction)


def serve(cache: Toy, tokens: Tokens, namespace: str = "") -> None:
    cache.serve(tokens, checkpoints=TURNS, namespace=namespace)


def end(cache: Toy, tokens: Tokens, namespace: str = "", after: int = 0) -> None:
    cache.cache.end_conversation(namespace, key_of(tokens), after)
    cache.cache.check()


def doubted(cache: Toy, tokens: Tokens, namespace: str = "") -> list[int]:
    """Positions on the path of these tokens whose checkpoint is speculative."""
    path, _ = cache.cache.index.find(namespace, key_of(tokens))
    return [4 * node.end for node in path if node.speculative]


@pytest.mark.parametrize("name", sorted(set(EVICTION) - {"last_n"}))  # LRU of only the last checkpoint
def test_checkpoints_of_ended_conversation_are_evicted_first(name: str) -> None:
    cache = toy(example(name, EVICTION[name]))
    for first in (1, 2, 3):
        serve(cache, words(first, 16))
    end(cache, words(3, 16))  # the last one that was used
    for _ in TURNS:
        evict(cache.cache, Room.STATE)
    found = [cache.match((*words(first, 16), 0)).checkpoint_tokens for first in (1, 2, 3)]
    assert found == [16, 16, 0]


def test_resuming_an_ended_conversation_undoes_its_end() -> None:
    cache = toy("headwater")
    serve(cache, words(1, 16))
    end(cache, words(1, 16))
    assert doubted(cache, words(1, 16)) == [8, 16]
    assert cache.serve((*words(1, 16), 0), checkpoints=()).checkpoint_tokens == 16
    assert doubted(cache, words(1, 16)) == [8]


def test_shared_checkpoints_keep_their_eviction_order() -> None:
    cache = toy("headwater")
    ours, others = (*words(1, 8), *words(2, 8)), (*words(1, 8), *words(3, 8))
    serve(cache, ours)
    serve(cache, others)
    end(cache, ours)
    assert (doubted(cache, ours), doubted(cache, others)) == ([16], [])


def test_ending_a_prefix_of_another_prompt_changes_nothing() -> None:
    cache = toy("headwater")
    serve(cache, words(1, 24))
    end(cache, words(1, 16))
    end(cache, words(1, 12))
    assert doubted(cache, words(1, 24)) == []


def test_checkpoints_shared_with_an_evicted_prompt_keep_their_order() -> None:
    cache = toy("headwater")
    ours, others = (*words(1, 8), *words(2, 8)), (*words(1, 8), *words(3, 8))
    serve(cache, others)
    evict(cache.cache, Room.STATE)
    evict(cache.cache, Room.STATE)
    for _ in range(4):
        evict(cache.cache, Room.KV)
    serve(cache, ours)
    assert cache.match(others).kv_tokens <= 8
    end(cache, ours)
    assert doubted(cache, ours) == [16]


def test_checkpoints_before_the_first_question_keep_their_order() -> None:
    cache = toy("headwater")
    serve(cache, words(1, 16))
    end(cache, words(1, 16), after=11)
    assert doubted(cache, words(1, 16)) == [16]


def test_ended_conversation_changes_no_other_namespace() -> None:
    cache = toy("headwater")
    for namespace in ("a", "b"):
        serve(cache, words(1, 16), namespace)
    end(cache, words(1, 16), "a")
    assert (doubted(cache, words(1, 16), "a"), doubted(cache, words(1, 16), "b")) == ([8, 16], [])


def test_ending_an_uncached_conversation_changes_nothing() -> None:
    cache = toy("headwater")
    serve(cache, words(1, 16))
    before = dump(cache.cache)
    end(cache, words(2, 16))
    end(cache, words(1, 16), "another")
    assert dump(cache.cache) == before
