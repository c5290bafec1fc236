"""`balanced`, `sqrt`, `logarithmic`: positions worked out by hand; and where a state can be had."""

from itertools import pairwise

import pytest

from headwater.account import Reason
from headwater.cache.placement import make_placement
from headwater.cache.placement.base import Placed, PlacementQuery
from headwater.cache.placement.branch import StateAt
from headwater.errors import ConfigError
from headwater.plan import Match
from headwater.request import Boundaries


def place(
    spelling: str, length: int, page: int = 1, checkpoint: int = 0, answered: bool = False, branch: int | None = None
) -> tuple[int, ...]:
    match = Match(checkpoint, checkpoint, checkpoint if branch is None else branch, Reason.DIVERGED)
    placed = make_placement(spelling).place(PlacementQuery(length, match, Boundaries(), page, answered))
    assert placed == Placed(placed.checkpoints)
    return placed.checkpoints


def test_balanced_divides_possible_overlaps_evenly() -> None:
    assert place("balanced(3, end=False)", 12) == (3, 6, 9)
    assert place("balanced(3, end=False)", 1001, page=64) == (192, 448, 704)


def test_sqrt_has_as_many_positions_as_tokens_between_them() -> None:
    assert place("sqrt(end=False)", 17) == (4, 8, 12, 16)
    assert place("sqrt(end=False)", 18) == (5, 10, 15)
    assert place("sqrt(end=False)", 2) == (1,)
    assert place("sqrt(end=False)", 10_001, page=64) == tuple(sorted({at // 64 * 64 for at in range(100, 10_001, 100)}))


def test_logarithmic_gaps_double_from_the_start() -> None:
    assert place("logarithmic(3, end=False)", 15) == (1, 3, 7)
    assert place("logarithmic(2, base=3, end=False)", 26) == (2, 8)
    placed = (0, *place("logarithmic(6, end=False)", 12_700))
    gaps = [after - before for before, after in pairwise(placed)]
    assert gaps == [100, 200, 400, 800, 1600, 3200]


def test_logarithmic_positions_on_one_page_count_as_one() -> None:
    assert place("logarithmic(64, end=False)", 4097, page=512) == (512, 1024, 2048)


@pytest.mark.parametrize("policy", ["balanced(3)", "sqrt", "logarithmic(3)", "optimal(3)"])
def test_the_last_page_is_kept_unless_the_answers_end_is(policy: str) -> None:
    assert place(policy, 18)[-1] == 17
    assert place(policy, 18, answered=True)[-1] < 17


@pytest.mark.parametrize("policy", ["balanced(3)", "sqrt", "logarithmic(3)", "optimal(3)"])
def test_chat_without_cached_answers_resumes_at_the_last_turn(policy: str) -> None:
    resumed = 0
    for length in range(1001, 9001, 1000):
        resumed = place(policy, length, page=64, checkpoint=resumed)[-1]
        assert resumed == (length - 1) // 64 * 64


def test_positions_in_the_matched_part_are_not_replaced() -> None:
    assert place("balanced(3, end=False)", 12, checkpoint=6) == (9,)
    assert place("balanced(3, end=False)", 12, checkpoint=9) == ()


def test_short_prompts_get_no_checkpoint() -> None:
    for policy in ("balanced(3)", "sqrt", "logarithmic(3)", "optimal(3)"):
        assert place(policy, 0, page=64) == place(policy, 64, page=64) == ()


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("balanced(0)", "0 checkpoints cannot be placed; at least 1 can"),
        ("logarithmic(0)", "0 checkpoints cannot be placed; at least 1 can"),
        ("logarithmic(3, base=1)", "gaps grow by a factor of 1; it needs to be more than 1"),
        ("optimal(0)", "0 checkpoints cannot be placed; at least 1 can"),
        ("optimal(3, beta=1.5)", "weights decay by 1.5; it needs to be more than 0, and 1 at most"),
        ("optimal(3, every=0)", "every 0 requests and 32768 edges; at least 1 of each"),
        ("branch(cut='half')", "cut 'half' is unknown; there are exact, chunk"),
        ("branch(cut='chunk', chunk=0)", "a chunk has 0 tokens; it needs at least 1"),
    ],
)
def test_options_out_of_range_are_refused(spelling: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_placement(spelling)
    assert message in str(caught.value)


def test_chunk_of_32_has_state_for_80_at_64_exact_at_80() -> None:
    assert StateAt("chunk", 32).floor(80, page=1) == 64
    assert StateAt("exact").floor(80, page=1) == 80
    assert place("branch(cut='chunk', chunk=32)", 100, branch=80, answered=True) == (64,)
    assert place("branch", 100, branch=80, answered=True) == (80,)


def test_a_state_at_a_chunks_end_stands_on_the_page_grid_too() -> None:
    assert StateAt("chunk", 256).floor(1000, page=64) == 768
    assert StateAt("chunk", 32).floor(1000, page=64) == 960
    assert StateAt("chunk", 96).floor(1000, page=64) == 960
    assert StateAt("exact").floor(1000, page=64) == 960
    assert place("branch(cut='chunk', chunk=256)", 1001, page=64, branch=320) == (256, 768)
