"""The default placement: what the next request of a chat, or of another user, will resume at."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.account import Reason
from headwater.cache.placement.base import Placed, PlacementQuery
from headwater.cache.placement.structural import Structural
from headwater.plan import Match, Retention
from headwater.request import Boundaries
from tests.cache.toy import LAYOUT, Toy, words


def place(
    length: int, boundaries: Boundaries | None = None, kv: int = 0, checkpoint: int = 0, **options: int
) -> Placed:
    match = Match(kv, checkpoint, kv, Reason.DIVERGED)
    return Structural(**options).place(PlacementQuery(length, match, boundaries or Boundaries(), 64))


CHAT = Boundaries(system_end=1010, query_start=3000, query_end=3400)


def test_known_parts_are_floored_to_pages_without_speculation() -> None:
    assert place(4001, CHAT) == Placed((960, 2944, 3392, 3968))


def test_the_last_page_leaves_a_token_to_compute() -> None:
    assert place(4097, CHAT).checkpoints[-1] == 4096
    assert place(4096, CHAT).checkpoints[-1] == 4032


def test_only_four_fixed_positions_stand_within_the_gap() -> None:
    close = Boundaries(system_end=3200, query_start=3300, query_end=3500, extra=(3400,))
    assert place(3700, close, kv=3136).checkpoints == (3136, 3200, 3456, 3648)


def test_a_document_with_a_short_question_gets_a_checkpoint_at_its_end() -> None:
    document, question = 3000, 100
    parts = Boundaries(query_start=0, query_end=document + question)
    assert place(document + question + 5, parts, kv=2944).checkpoints == (2944, 3072)


def test_positions_at_the_gap_are_both_kept() -> None:
    assert place(3700, Boundaries(system_end=64, query_start=3200, query_end=3456)).checkpoints == (
        64,
        3200,
        3456,
        3648,
    )
    parts = Boundaries(system_end=64, query_start=3264, query_end=3456)
    assert place(3700, parts, kv=3200, checkpoint=3200).checkpoints == (3456, 3648)


def test_start_of_question_is_kept_a_gap_beyond_others() -> None:
    document, question = 3000, 100
    parts = Boundaries(query_start=document, query_end=document + question)
    assert place(document + question + 5, parts).checkpoints == (2944, 3072)
    assert place(document + question + 5, parts, kv=2688, checkpoint=2688).checkpoints == (2944, 3072)
    assert place(document + question + 5, parts, kv=2752, checkpoint=2752).checkpoints == (3072,)
    parts = Boundaries(system_end=document - 100, query_start=document, query_end=document + question)
    assert place(document + question + 5, parts).checkpoints == (2880, 3072)


def test_a_branch_point_gets_a_checkpoint() -> None:
    assert place(4001, CHAT, kv=2048).checkpoints == (960, 2048, 2944, 3392, 3968)


def test_nothing_is_placed_at_or_below_the_match() -> None:
    assert place(4001, CHAT, kv=3000, checkpoint=2944).checkpoints == (3392, 3968)


def test_clients_positions_are_dropped_first_beyond_eight() -> None:
    asked = Boundaries(system_end=64, query_start=9000, query_end=9500, extra=tuple(range(1000, 8000, 500)))
    placed = place(10_001, asked, kv=8000).checkpoints
    assert len(placed) == 8
    assert {64, 9472, 9984, 8000, 8960} < set(placed)


def test_a_prompt_without_a_full_page_gets_none() -> None:
    assert place(64) == Placed()
    assert place(0) == Placed()


def test_unknown_parts_get_a_branch_point_the_last_page_and_eight_guesses() -> None:
    placed = place(9001, kv=2048)
    assert placed.checkpoints == (2048, 8960)
    assert placed.speculative == (960, 1984, 2944, 3968, 4992, 5952, 6976, 8000)


def test_guesses_are_at_most_one_a_page() -> None:
    assert place(300) == Placed((256,), (64, 128, 192))


@given(first=st.integers(65, 9000), second=st.integers(65, 9000), shared=st.integers(0, 9000))
def test_shared_prefix_hits_on_second_request_within_an_eighth(first: int, second: int, shared: int) -> None:
    shared = min(shared, first, second - 1)
    placed = place(first)
    hit = max((at for at in (*placed.checkpoints, *placed.speculative) if at <= shared), default=0)
    assert hit >= shared - first / 8 - 64


@pytest.mark.parametrize("n", [7, 33, 60, 90])
def test_shared_prefix_hits_on_second_request_in_the_cache(n: int) -> None:
    toy, prompt = Toy(), words(1, 100)
    match = toy.match(prompt)
    placed = Structural().place(PlacementQuery(100, match, Boundaries(), LAYOUT.page_size))
    toy.serve(prompt, checkpoints=placed.checkpoints, speculative=placed.speculative)
    assert toy.match(prompt[:n] + words(2, 30)).checkpoint_tokens >= n - 100 / 8 - LAYOUT.page_size


@given(
    length=st.integers(0, 20_000),
    parts=st.lists(st.none() | st.integers(0, 20_000), min_size=3, max_size=3),
    extra=st.lists(st.integers(0, 20_000), max_size=20),
    kv=st.integers(0, 300),
    retained=st.lists(st.integers(0, 20_000), max_size=4),
)
def test_fixed_positions_are_kept_and_others_keep_the_gap(
    length: int, parts: list[int | None], extra: list[int], kv: int, retained: list[int]
) -> None:
    last = max(0, length - 1) // 64 * 64
    boundaries = Boundaries(*parts, extra=tuple(extra), retained=tuple(Retention(at, 300) for at in retained))
    placed = place(length, boundaries, kv=min(kv * 64, last)).checkpoints
    fixed = {at // 64 * 64 for at in (parts[0], parts[2], last, min(kv * 64, last), *retained) if at is not None}
    start = None if parts[1] is None else parts[1] // 64 * 64
    fixed = {at for at in fixed if 0 < at <= last}
    assert fixed <= set(placed)
    assert len(placed) <= 8
    for before, low, high in zip((0, *placed), placed, placed[1:], strict=False):
        assert low in fixed or high - low >= 256 or (low == start and low - before >= 256)


def test_query_start_displaces_no_fixed_position() -> None:
    retained = tuple(Retention(at, 300) for at in (2000, 3000, 4000, 5000))
    boundaries = Boundaries(system_end=1000, query_start=8000, query_end=8100, retained=retained)
    placed = place(9000, boundaries, kv=1500).checkpoints
    assert placed == (960, 1472, 1984, 2944, 3968, 4992, 8064, 8960)
    assert 8000 in place(9000, Boundaries(system_end=1000, query_start=8000, query_end=8100), kv=1500).checkpoints


def test_raw_prompt_keeps_branch_point_close_to_its_end() -> None:
    query = PlacementQuery(1226, Match(1024, 960, 1024, Reason.NO_CHECKPOINT), Boundaries(), 64)
    assert Structural().place(query).checkpoints == (1024, 1216)
