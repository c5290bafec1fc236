"""The next user of each depth, against a search through all later requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headwater.cache.eviction.clairvoyant.future import Asked, Future

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
