"""A reader's picture equals the index itself: after any history, lost messages, restarts, and late joins."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from headwater.cache.segments.compose import Widths
from headwater.cache.segments.store import SegmentKey
from headwater.cluster.cost import Found, Prompt
from headwater.cluster.messages import KINDS, KV, SEGMENTS, STATES, Message
from headwater.cluster.picture import Picture
from headwater.plan import CacheLayout
from tests.cache.test_cache_machine import LAYOUTS, PROMPTS, TAILS, CacheMachine
from tests.cache.toy import PAGE, Tokens, Toy, floor, key_of, publish_segment, reserve_segment, words
from tests.cluster.rig import DIGESTS, TIGHT, begun, held, logged, stepped, stream_of
from tests.support import examples


def predicted(picture: Picture, tokens: Tokens, salt: str = "") -> int:
    return picture.resumable(DIGESTS.prompt(tokens, salt), len(tokens))


def existing(groups: dict[int, set[int]]) -> dict[int, set[int]]:
    """Return the groups that have blocks."""
    return {group: digests for group, digests in groups.items() if digests}


def known(picture: Picture) -> dict[int, set[int]]:
    return existing(picture.held)


class EventMachine(CacheMachine):
    """The random requests of CacheMachine, and a reader of the cache's messages."""

    def new_toy(self, layout: CacheLayout, eviction: str) -> Toy:
        toy = logged(layout, eviction)
        self.lifetimes = 0
        self.stream, self.picture = stream_of(toy), Picture()
        self.losing = self.is_behind = False
        self.deliver(begun(toy, self.stream))
        return toy

    def deliver(self, message: Message) -> None:
        self.losing, self.is_behind = False, self.losing
        if not self.is_behind and not self.picture.apply(message):
            assert not self.picture.is_whole
            assert self.picture.load(self.stream.snapshot())

    @rule()
    def lose_the_next_message(self) -> None:
        self.losing = True

    @rule()
    def beat(self) -> None:
        self.deliver(self.stream.heartbeat())

    @rule()
    def replay_what_was_lost(self) -> None:
        is_of_now = self.picture.lifetime in (None, self.stream._lifetime)
        for message in self.stream.replay(self.picture.next or 0):
            if not self.picture.apply(message):
                assert not is_of_now
                assert self.picture.load(self.stream.snapshot())
                break
        self.is_behind = not self.is_current

    @rule()
    def restart_the_publisher(self) -> None:
        self.lifetimes += 1
        self.stream = stream_of(self.toy, bytes([self.lifetimes]) * 16)
        self.deliver(begun(self.toy, self.stream))

    @rule()
    def join_late(self) -> None:
        self.picture, self.is_behind = Picture(), False
        assert self.picture.load(self.stream.snapshot())

    @rule(pages=PROMPTS, tail=TAILS, salt=st.sampled_from(["", "b"]))
    def predict(self, pages: list[Tokens], tail: list[int], salt: str) -> None:
        tokens = tuple(token for page in pages for token in page) + tuple(tail)
        if self.is_current:
            match = self.toy.match(tokens, salt)  # events do not tell which pages lack states
            resumed = match.kv_tokens if self.toy.layout.states_in_pages else match.checkpoint_tokens
            assert predicted(self.picture, tokens, salt) == resumed

    @property
    def is_current(self) -> bool:
        return self.picture.lifetime == self.stream._lifetime and self.picture.next == self.stream.next

    @invariant()
    def the_picture_is_the_index(self) -> None:
        for message in stepped(self.toy, self.stream):
            self.deliver(message)
        assert self.is_current is not self.is_behind
        if self.is_current:
            assert known(self.picture) == existing(held(self.toy.cache))


TestEventMachine = EventMachine.TestCase
TestEventMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)


def traffic(draw: random.Random, count: int) -> Iterator[tuple[Tokens, str]]:
    """Yield prompts of up to 8 pages that share prefixes, and namespaces."""
    for _ in range(count):
        pages = [draw.randrange(2) for _ in range(draw.randint(1, 7))]
        tail = tuple(draw.randrange(2, 4) for _ in range(draw.randrange(4)))
        yield tuple(page for page in pages for _ in range(PAGE)) + tail, draw.choice(["", "", "b"])


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
@pytest.mark.parametrize("eviction", ["lru", "headwater", "path_cap(2)"])
def test_random_traffic_that_evicts_leaves_the_picture_equal_to_the_index(kind: str, eviction: str) -> None:
    draw = random.Random(f"{kind} {eviction}")
    toy = logged(LAYOUTS[kind], eviction)
    stream, picture = stream_of(toy), Picture()
    lost = resumed = 0
    picture.apply(begun(toy, stream))
    for at, (prompt, salt) in enumerate(traffic(draw, 150)):
        if picture.next == stream.next:
            expected = toy.match(prompt, salt).checkpoint_tokens
            assert predicted(picture, prompt, salt) == expected
            resumed += expected > 0
        grid = range(PAGE, floor(len(prompt)) + 1, PAGE)
        toy.serve(prompt, tuple(draw.sample(grid, min(2, len(grid)))), salt)
        if toy.layout.transition_pages and not at % 5:
            key = SegmentKey(salt, key_of((at % 25,) * 9), Widths(2, 2))
            if toy.cache.segments.find(key) is None:
                publish_segment(toy.cache, reserve_segment(toy.cache, key))
        for message in stepped(toy, stream):
            if draw.random() < 0.1:
                lost += 1
            elif not picture.apply(message):
                assert picture.load(stream.snapshot())
        if picture.next == stream.next:
            assert known(picture) == existing(held(toy.cache))
    stats = toy.cache.stats()
    assert lost > 3
    assert resumed > 20
    assert stats.segments > 0 or not toy.layout.transition_pages
    if kind not in ("ample", "ample tails"):
        assert stats.evicted_checkpoints > 10 or toy.layout.every_page
        assert stats.evicted_kv_pages > 10 or not toy.layout.kv_pages_per_unit
        assert stats.evicted_segments > 3 or not toy.layout.transition_pages


class Trusting(Picture):
    """A picture that does not look at numbers."""

    def apply(self, message: Message) -> bool:
        number, self.next = message.number, message.number
        return super().apply(Message(number, message.payload))


def test_without_gap_detection_a_lost_message_gives_a_wrong_picture() -> None:
    toy = logged(TIGHT)
    stream, picture, trusting = stream_of(toy), Picture(), Trusting()
    prompt, other = words(1, 4 * PAGE + 1), words(2, 6 * PAGE + 1)
    messages = [begun(toy, stream)]
    toy.serve(prompt)
    messages += stepped(toy, stream)
    for message in messages:
        assert picture.apply(message)
        assert trusting.apply(message)
    assert predicted(trusting, prompt) == predicted(picture, prompt) == 4 * PAGE
    toy.serve(other)
    stepped(toy, stream)  # lost: the first prompt was evicted
    assert toy.match(prompt).checkpoint_tokens == 0
    assert not picture.apply(stream.heartbeat())
    assert trusting.apply(stream.heartbeat())
    assert predicted(picture, prompt) == 0
    assert predicted(trusting, prompt) == 4 * PAGE, "the control should be wrong"
    assert picture.load(stream.snapshot())
    assert predicted(picture, prompt) == 0
    assert predicted(picture, other) == toy.match(other).checkpoint_tokens == 6 * PAGE


def test_an_empty_picture_predicts_nothing_and_takes_nothing_but_a_beginning() -> None:
    toy = logged()
    stream, picture = stream_of(toy), Picture()
    first = begun(toy, stream)
    prompt = words(1, 4 * PAGE + 1)
    toy.serve(prompt)
    (second,) = stepped(toy, stream)
    assert predicted(picture, prompt) == 0
    assert not picture.apply(second)
    assert predicted(picture, prompt) == 0
    assert picture.apply(first)
    assert picture.apply(second)
    assert picture.apply(second), "a message that was applied before changes nothing"
    assert picture.apply(first)
    assert predicted(picture, prompt) == 4 * PAGE
    assert picture.groups == KINDS


def test_new_lifetime_with_continuing_numbers_is_noticed() -> None:
    toy = logged()
    streams = [stream_of(toy, name * 16) for name in (b"A", b"B")]
    picture = Picture()
    assert picture.apply(begun(toy, streams[0]))
    begun(toy, streams[1])
    assert not picture.apply(streams[1].heartbeat())
    assert not picture.is_whole


def test_a_snapshot_with_a_part_missing_is_refused() -> None:
    toy = logged()
    stream, picture = stream_of(toy), Picture()
    toy.serve(words(1, 4 * PAGE + 1))
    begun(toy, stream)
    snapshot = list(stream.snapshot())
    assert picture.load(snapshot)
    assert not picture.load([])
    assert not picture.load(snapshot * 2)
    later = [Message(snapshot[0].number + 1, stream.heartbeat().payload)]
    assert not picture.load([*snapshot, *later])
    assert not picture.is_whole


def test_a_composed_prefix_is_found_where_it_is_deeper() -> None:
    """No other worker can pull its tokens beyond the exact prefix."""
    picture = Picture()
    picture.next, picture.block_size, picture.groups = 1, PAGE, {KV: "full_attention", STATES: "mamba"}
    picture.held[KV].update({11, 12, 22, 23})
    picture.held[STATES].update({11, 23})
    exact = Prompt(100, [11, 12, 13], PAGE)
    composed = replace(exact, composed=[11, 22, 23])
    assert picture.look_up(exact) == Found(2 * PAGE, PAGE)
    assert picture.look_up(composed) == Found(2 * PAGE, 3 * PAGE, 2 * PAGE)
    picture.held[KV].add(13)
    picture.held[STATES].add(13)
    assert picture.look_up(composed) == Found(3 * PAGE, 3 * PAGE), "of two of equal depth, the exact one"


def test_every_group_of_states_needs_a_state() -> None:
    picture = Picture()
    picture.next, picture.block_size, picture.groups = 1, PAGE, {KV: "full_attention", STATES: "mamba", 3: "mamba"}
    blocks = [11, 12, 13, 14]
    picture.held[KV].update(blocks[:3])
    picture.held[STATES].update({12, 13, 14})
    assert picture.resumable(blocks, 100) == 0
    picture.held[3].update({11, 12, 14})
    assert picture.resumable(blocks, 100) == 2 * PAGE, "KV ends before 14, and group 3 has no 13"
    assert picture.resumable(blocks, 2 * PAGE) == 0, "a token must be left to compute"
    assert picture.resumable(blocks, 2 * PAGE + 1) == 2 * PAGE
    picture.held[KV].remove(11)
    assert picture.resumable(blocks, 100) == 0
    picture.held[SEGMENTS].add(5)
    assert picture.has_segment(5)
    assert not picture.has_segment(6)
    assert Picture().resumable(blocks, 100) == 0


@pytest.mark.parametrize("salt", ["", "b"])
def test_digests_are_of_namespace_and_whole_prefix(salt: str) -> None:
    prompt = words(1, 3 * PAGE)
    blocks = DIGESTS.prompt(prompt, salt)
    assert len(blocks) == 3
    other = DIGESTS.prompt((9, *prompt[1:]), salt)
    assert not set(blocks) & set(other)
    assert not set(blocks) & set(DIGESTS.prompt(prompt, salt + "x"))
    assert DIGESTS.prompt(prompt + words(2, PAGE), salt)[:3] == blocks
    assert blocks[1:] == DIGESTS.after(blocks[0], b"".join(token.to_bytes(4, "little") for token in prompt[PAGE:]))


class Growing(set[int]):
    """A set of digests that adds a group to its picture when it is read, as a follower's thread may."""

    def __init__(self, digests: set[int], picture: Picture) -> None:
        super().__init__(digests)
        self._picture = picture

    def __contains__(self, digest: object) -> bool:
        self._picture.groups.setdefault(len(self._picture.groups), KINDS[STATES])
        self._picture.block_size = 1
        return super().__contains__(digest)


def test_a_picture_may_change_while_it_is_read() -> None:
    toy = logged()
    picture, stream = Picture(), stream_of(toy)
    picture.apply(begun(toy, stream))
    toy.serve(words(1, 3 * PAGE))
    for message in stepped(toy, stream):
        picture.apply(message)
    blocks, tokens = DIGESTS.prompt(words(1, 3 * PAGE), ""), 3 * PAGE
    expected = picture.find(blocks, tokens)
    assert expected.cached
    picture.held[KV] = Growing(picture.held[KV], picture)
    assert picture.find(blocks, tokens) == expected


class Late(set[int]):
    """A set of digests to which the missing ones are added once it was asked whether it has all."""

    def issuperset(self, digests: Iterable[object]) -> bool:
        digests = list(digests)
        found = super().issuperset(digests)
        self.update(digests)
        return found


def test_a_missing_block_may_come_while_it_is_looked_for() -> None:
    """A follower's thread adds it between two looks: it counts, and nothing is raised."""
    picture = Picture()
    picture.next, picture.block_size, picture.groups = 1, PAGE, {KV: "full_attention"}
    picture.held[KV] = Late({11})
    assert picture.find([11, 12, 13], 3 * PAGE + 1) == Found(3 * PAGE, 3 * PAGE)
