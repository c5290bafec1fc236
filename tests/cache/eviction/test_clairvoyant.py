"""Clairvoyant eviction, and the future that it knows."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cache.eviction.clairvoyant import Clairvoyant
from headwater.cache.eviction.clairvoyant.future import Asked, Future
from tests.cache.toy import LAYOUT, PAGE, Tokens, Toy, key_of, words

SMALL = replace(LAYOUT, checkpoint_pages=1, slot_pages=0)
A, B, C, D = ((*words(number, 8), 0) for number in range(1, 5))


def play(requests: list[Tokens], policy: str, n_pages: int, check: bool = True) -> list[int]:
    """Tokens at which each request resumed."""
    toy = Toy(replace(SMALL, n_pages=n_pages), policy)
    oracle = toy.cache.policy
    if isinstance(oracle, Clairvoyant):
        asked = (Asked("", key_of(tokens), (len(tokens) - 1) // PAGE) for tokens in reversed(requests))
        oracle.foresee(Future(SMALL.unit_bytes, asked))
    resumed = []
    for number, tokens in enumerate(requests):
        if isinstance(oracle, Clairvoyant):
            oracle.now_at(number)
        resumed.append(toy.serve(tokens).checkpoint_tokens)
        if check and isinstance(oracle, Clairvoyant):
            check_users(toy, oracle, requests, number)
    return resumed


def check_users(toy: Toy, oracle: Clairvoyant, requests: list[Tokens], now: int) -> None:
    """No checkpoint claims a request that passes it not, or that finds a deeper one that claims it, too."""
    served: dict[int, list[int]] = {}
    for node in toy.cache.index:
        user = oracle._users.of(node)
        if node.checkpoint is None:
            assert user is None
        elif user is not None:
            assert user > now
            key, path = key_of(requests[user]), b"".join(part.edge for part in toy.cache.index.path(node))
            assert key.startswith(path)
            served.setdefault(user, []).append(node.end)
    assert all(len(ends) == 1 for ends in served.values())


def test_checkpoint_with_the_last_next_use_is_evicted() -> None:
    assert play([A, B, C, B, A], "clairvoyant", 8) == [0, 0, 0, 8, 0]
    assert play([A, B, C, A, B], "clairvoyant", 8) == [0, 0, 0, 8, 0]


def test_checkpoint_without_next_use_is_evicted_before_any_other() -> None:
    long = (*words(9, 20), 0)
    assert play([A, long, C, A], "clairvoyant", 10) == [0, 0, 0, 8]


def test_checkpoint_that_saves_more_a_page_outlives_an_earlier_use() -> None:
    long = (*words(9, 24), 0)  # 24 tokens on 7 pages, A is 8 on 3: worth 3.4 and 2.7
    assert play([long, A, C, A, long], "clairvoyant", 11) == [0, 0, 0, 8, 0]  # 2.7 / 1 against 3.4 / 2
    assert play([long, A, C, C, C, C, A, long], "clairvoyant", 11) == [0, 0, 0, 8, 8, 8, 0, 24]  # 2.7 / 4, 3.4 / 5


def test_checkpoint_above_the_one_of_its_next_user_is_unused() -> None:
    session = words(9, 24)
    turns = [(*session[:8], 0), (*session[:16], 0), (*session[:16], 0)]
    # When B comes, the request after it passes both checkpoints of the session and resumes at the second one.
    assert play([*turns[:2], A, B, turns[2]], "clairvoyant", 9)[-1] == 16


@pytest.mark.parametrize("seed", range(6))
def test_clairvoyant_is_above_lru_on_sessions_that_share_a_beginning(seed: int) -> None:
    rng = random.Random(seed)
    systems = [words(number, 8) for number in (1, 2)]
    sessions = [systems[number % 2] + words(10 + number, 40) for number in range(12)]
    turns = [2] * 12
    requests = []
    for _ in range(60):
        number = rng.randrange(12)
        turns[number] = min(12, turns[number] + rng.randint(1, 2))
        requests.append((*sessions[number][: 4 * turns[number]], 0))
    best = sum(play(requests, "clairvoyant", 40))
    assert best > sum(play(requests, "lru", 40, check=False))
    assert best > sum(play(requests, "gdsf", 40, check=False))


def test_clairvoyant_without_a_future_evicts_the_oldest_use() -> None:
    toy = Toy(replace(SMALL, n_pages=10), "clairvoyant")
    for tokens in (A, B, C, A, D):
        toy.serve(tokens)
    assert toy.match(B).checkpoint_tokens == 0
    assert toy.match(A).checkpoint_tokens == 8


KEYS = st.lists(st.sampled_from([b"a", b"b"]), min_size=1, max_size=6).map(b"".join)
REQUESTS = st.lists(st.tuples(st.sampled_from(["", "x"]), KEYS, st.integers(0, 6)), max_size=12)


@given(REQUESTS)
def test_a_profile_names_the_first_later_request_that_shares_a_depth(requests: list[tuple[str, bytes, int]]) -> None:
    asked = [Asked(namespace, key, min(lookup, len(key))) for namespace, key, lookup in requests]
    profiles = Future(1, reversed(asked)).profiles
    assert len(profiles) == len(asked)
    for number, request in enumerate(asked):
        for depth in range(1, len(request.key) + 1):
            later = (
                after
                for after in range(number + 1, len(asked))
                if asked[after].namespace == request.namespace
                and asked[after].lookup >= depth
                and asked[after].key[:depth] == request.key[:depth]
            )
            assert profiles[number].next(depth) == next(later, None)


def test_half_a_unit_at_the_end_of_a_key_does_not_count() -> None:
    future = Future(4, [Asked("", b"aaaabbbb", 2), Asked("", b"aaaabbbbcc", 2)])
    assert future.profiles[0].next(2) == 1
    assert future.profiles[0].next(3) is None
