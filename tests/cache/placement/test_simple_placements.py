"""`branch`, `every_block` and `none`, and how they are spelled."""

import pytest

from headwater.account import Reason
from headwater.cache.placement import make_placement
from headwater.cache.placement.base import Placed, PlacementQuery
from headwater.errors import ConfigError
from headwater.plan import Match
from headwater.request import Boundaries


def place(spelling: str, length: int, kv: int = 0, checkpoint: int = 0) -> Placed:
    match = Match(kv, checkpoint, kv, Reason.DIVERGED)
    return make_placement(spelling).place(PlacementQuery(length, match, Boundaries(), 64))


def test_branch_places_branch_point_and_last_page() -> None:
    assert place("branch", 1001, kv=320) == Placed((320, 960))
    assert place("branch", 1001) == Placed((960,))
    assert place("branch", 1001, kv=320, checkpoint=320) == Placed((960,))


def test_every_block_counts_in_pages() -> None:
    assert place("every_block(4)", 1001) == Placed((256, 512, 768))
    assert place("every_block(4)", 1025, checkpoint=320) == Placed((512, 768, 1024))
    assert place("every_block(1)", 129) == Placed((64, 128))


def test_none_places_no_checkpoint() -> None:
    assert place("none", 1001, kv=320) == Placed()


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("best", "placement 'best' is unknown; there are balanced, branch, every_block, "),
        ("every_block", "cannot be made"),
        ("every_block(0)", "a block has 0 pages; it needs at least 1"),
        ("every_block(4", "cannot be made"),
        ("every_block(4)(5)", "cannot be made"),
        ("structural(gap=3)", "cannot be made"),
    ],
)
def test_a_wrong_spelling_is_a_config_error(spelling: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_placement(spelling)
    assert message in str(caught.value)


def test_options_are_spelled_by_name() -> None:
    match = Match(0, 0, 0, Reason.COLD)
    query = PlacementQuery(9001, match, Boundaries(), 64)
    assert len(make_placement("structural(max_speculative=2)").place(query).speculative) == 2
