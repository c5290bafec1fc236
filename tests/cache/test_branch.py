"""Branches, the cached data along one key: dropping one frees what no other request reads or shares, and no more."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.cache.segments.compose import Widths
from headwater.cache.segments.store import SegmentKey
from headwater.plan import CacheLayout, Place
from tests.cache.toy import LAYOUT, PAGE, Toy, floor, key_of, publish_segment, reserve_segment, reserving, words

A, B, C = words(1, 40), words(2, 40), words(3, 40)
MIXER_ONLY = replace(LAYOUT, kv_pages_per_unit=0)
ATTENTION_ONLY = replace(LAYOUT, resumable="every_page", checkpoint_pages=0, slot_pages=0)
SPLIT = replace(LAYOUT, state_fraction=0.5)


class Path(Toy):
    """Keys are cut to whole units, as `Branches` takes them."""

    def drop(self, tokens: tuple[int, ...], above: int, namespace: str = "") -> None:
        self.cache.branches.drop(key_of(tokens[: floor(len(tokens))]), above, namespace)
        self.cache.check()

    def make_room_below(self, kv: int, states: int, branch: Place, resume: Place) -> bool:
        with reserving(self.cache):
            return self.cache.branches.make_room_below(kv, states, branch, resume)

    def checkpoints(self, tokens: tuple[int, ...], namespace: str = "") -> tuple[int, ...]:
        return self.cache.branches.checkpoints(key_of(tokens[: floor(len(tokens))]), namespace)


@pytest.mark.parametrize("layout", [LAYOUT, MIXER_ONLY, ATTENTION_ONLY, SPLIT])
def test_dropped_branch_leaves_the_prefix_before_it(layout: CacheLayout) -> None:
    toy = Path(layout)
    toy.serve(A)
    before = toy.cache.stats()
    toy.serve(A[:20] + B, checkpoints=(20, 32, 60))
    toy.drop(A[:20] + B, 20)
    assert toy.match(A + C).checkpoint_tokens == 40
    assert toy.match(A[:20] + B).checkpoint_tokens <= 20
    after = toy.cache.stats()
    assert after.pages_kv == before.pages_kv
    assert after.checkpoints <= before.checkpoints + 1, "the one at 20 is not beyond it"


def test_dropping_the_only_key_empties_its_namespace() -> None:
    toy = Path()
    toy.serve(A, checkpoints=(12, 40), namespace="x")
    toy.drop(A, 0, "x")
    stats = toy.cache.stats()
    assert (stats.namespaces, stats.nodes, stats.pages_free) == (0, 0, stats.pages_total)


def test_dropping_cuts_an_edge_at_the_position() -> None:
    toy = Path()
    toy.serve(A)
    toy.drop(A, 18)
    assert toy.match(A + B).kv_tokens == 16


def test_dropping_keeps_kv_that_another_branch_shares() -> None:
    toy = Path()
    toy.serve(A + B)
    toy.serve(A + C)
    toy.drop(A + B, 8)
    assert toy.match(A + B).kv_tokens == 40
    assert toy.match(A + C + B).checkpoint_tokens == 80


def test_dropping_keeps_continuations_of_the_key() -> None:
    toy = Path()
    toy.serve(A + B)
    toy.drop(A, 8)
    assert toy.match(A + B + C).checkpoint_tokens == 80


def test_dropping_keeps_pinned_kv() -> None:
    toy = Path()
    toy.serve(A)
    draft = toy.draft(A + B, 40)
    plan = toy.reserve(draft)
    toy.drop(A, 8)
    toy.commit(plan, draft)
    toy.release(draft.request)
    assert toy.match(A + C).checkpoint_tokens == 40


def test_dropping_an_unknown_key_changes_nothing() -> None:
    toy = Path()
    toy.serve(A)
    toy.drop(B, 0)
    toy.drop(A, 0, "another")
    toy.drop((), 0)
    assert toy.match(A + B).checkpoint_tokens == 40
    assert toy.checkpoints(B) == toy.checkpoints(A, "another") == ()


def test_dropped_content_is_not_counted_as_evicted() -> None:
    toy = Path()
    toy.serve(A)
    toy.drop(A, 0)
    stats = toy.cache.stats()
    assert stats.evicted_kv_pages == stats.evicted_checkpoints == 0
    assert str(toy.match(A).reason) == "cold"


def test_checkpoints_of_key_exclude_speculative_and_deeper_ones() -> None:
    toy = Path()
    toy.serve(A + B, checkpoints=(12, 40, 80), speculative=(20, 52))
    assert toy.checkpoints(A) == (12, 40)
    assert toy.checkpoints(A[:36]) == (12,)
    assert toy.checkpoints(A + B + C) == (12, 40, 80)


def test_model_without_states_has_checkpoint_at_key_end() -> None:
    toy = Path(ATTENTION_ONLY)
    toy.serve(A)
    assert toy.checkpoints(A[:20]) == (20,)
    assert toy.checkpoints(B) == ()


SMALL = replace(LAYOUT, n_pages=2 * (40 // PAGE + LAYOUT.checkpoint_pages) + LAYOUT.slot_pages)
NOWHERE = Place("", b"", 0)


def test_making_room_stops_before_the_spared_branch() -> None:
    for asked, kept, other in ((A, A, B), (B, B, A)):
        toy = Path(SMALL)
        toy.serve(A)
        toy.serve(B)
        free = toy.cache.stats().pages_free
        assert toy.make_room_below(free, 0, Place("", key_of(asked), 0), NOWHERE)
        assert toy.cache.stats().pages_free == free
        assert toy.make_room_below(free + 1, 0, Place("", key_of(asked), 0), NOWHERE) == (asked == B), "A is older"
        assert (toy.match((*other, -1)).checkpoint_tokens == 40) == (asked == A)
        assert toy.match((*kept, -1)).checkpoint_tokens == 40
        toy.cache.check()


def test_only_content_beyond_the_place_is_spared() -> None:
    toy = Path(SMALL)
    toy.serve(A)
    toy.serve(B)
    free = toy.cache.stats().pages_free
    assert toy.make_room_below(free + 1, 0, Place("", key_of(A), 40), NOWHERE)
    assert toy.match((*A, -1)).checkpoint_tokens == 0


def test_making_room_keeps_the_resume_position() -> None:
    toy = Path(SMALL)
    toy.serve(A, checkpoints=(20, 40))
    toy.serve(B)
    pages = toy.cache.stats().pages_free + 2 + LAYOUT.checkpoint_pages
    assert toy.make_room_below(pages, 0, Place("", key_of(B), 0), Place("", key_of(A), 20))
    assert toy.match(A).checkpoint_tokens == 20
    assert toy.match((*B, -1)).checkpoint_tokens == 40
    toy.cache.check()


@pytest.mark.parametrize("elastic", [0, 4])
def test_room_is_made_in_each_region_apart(elastic: int) -> None:
    toy = Path(replace(LAYOUT, n_pages=40, state_fraction=0.25, elastic_pages=elastic))
    for tokens in (A, B, C[:12]):
        toy.serve(tokens)
    pool, branch = toy.cache.pool, Place("", key_of(B), 0)
    kv, states = pool.kv.free + 1, pool.states.free
    assert toy.make_room_below(kv, states, branch, NOWHERE)
    assert (pool.kv.free >= kv, pool.states.free >= states) == (True, True)
    toy.cache.check()
    assert toy.match((*B, -1)).checkpoint_tokens == 40
    assert not toy.make_room_below(0, 40, branch, NOWHERE)
    assert toy.match((*B, -1)).checkpoint_tokens == 40


def test_segments_beyond_their_share_are_evicted_before_prefixes() -> None:
    toy = Path(replace(LAYOUT, n_pages=60, transition_pages=1))
    toy.serve(A)
    toy.serve(B)
    made = SegmentKey("", key_of(C), Widths(2, 2))
    publish_segment(toy.cache, reserve_segment(toy.cache, made))
    toy.cache.segments.budget = 0.1
    free = toy.cache.stats().pages_free
    assert toy.make_room_below(free + 1, 0, Place("", key_of(A), 0), NOWHERE)
    assert toy.cache.segments.find(made) is None
    assert toy.match((*A, -1)).checkpoint_tokens == toy.match((*B, -1)).checkpoint_tokens == 40


@given(data=st.data(), tokens=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=8))
def test_dropping_any_branch_changes_no_other_match(data: st.DataObject, tokens: list) -> None:
    toy = Path()
    prompts = [tuple(word for _ in range(4 * pages) for word in (first,)) for first, pages in tokens]
    prompts = [a + b for a, b in zip(prompts, prompts[::-1], strict=True)]
    for prompt in prompts:
        toy.serve(prompt)
    gone = data.draw(st.sampled_from(prompts))
    above = data.draw(st.integers(0, len(gone)))
    others = [p for p in prompts if p[: floor(above) + PAGE] != gone[: floor(above) + PAGE]]
    before = [toy.match((*p, -1)) for p in others]
    toy.drop(gone, above)
    after = [toy.match((*p, -1)) for p in others]
    assert [m.checkpoint_tokens for m in after] == [m.checkpoint_tokens for m in before]
    assert [m.kv_tokens for m in after] == [m.kv_tokens for m in before]
