"""Numbers, replays, snapshots, and content that no message has."""

from array import array

import msgspec
import pytest

from headwater.cache.segments.compose import MAX_TOKEN_ID, marked
from headwater.cluster import ledger as ledgers
from headwater.cluster.ledger import MAX_EVENT_BLOCKS
from headwater.cluster.messages import KV, BlockStored, Message, decode
from headwater.cluster.picture import Picture
from headwater.request import Fidelity
from tests.cache.toy import LAYOUT, PAGE, Tokens, Toy, floor, words
from tests.cluster.rig import TIGHT, begun, held, logged, stepped, stream_of


def history(toy: Toy, prompts: list[Tokens], with_tokens: bool = False) -> list[Message]:
    """Serve prompts, and return all messages, a snapshot's at the end."""
    stream = stream_of(toy, with_tokens=with_tokens)
    sent = [begun(toy, stream)]
    for prompt in prompts:
        toy.serve(prompt)
        sent += stepped(toy, stream)
    return [*sent, *stream.snapshot()]


def test_numbers_are_dense_and_a_replay_begins_where_it_is_asked_to() -> None:
    toy = logged()
    stream = stream_of(toy)
    sent = [begun(toy, stream), stream.heartbeat()]
    toy.serve(words(1, 9))
    sent += [*stepped(toy, stream), stream.heartbeat()]
    assert [message.number for message in sent] == [0, 1, 2, 3]
    for number in range(5):
        assert list(stream.replay(number)) == sent[number:]


def test_only_the_last_messages_are_kept_by_number_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "MAX_REPLAY_MESSAGES", 3)
    stream = stream_of(logged())
    sent = [stream.heartbeat() for _ in range(5)]
    assert list(stream.replay(0)) == list(stream.replay(2)) == sent[2:]
    assert list(stream.replay(4)) == sent[4:]
    monkeypatch.setattr(ledgers, "MAX_REPLAY_BYTES", 2 * len(sent[0].payload))
    sent.append(stream.heartbeat())
    assert list(stream.replay(0)) == sent[-2:]


def test_a_snapshot_is_a_beginning_and_stores_with_parents_first() -> None:
    toy = logged()
    stem = words(1, 4 * PAGE)
    *_, snapshot = history(toy, [stem + words(2, 2 * PAGE), stem + words(3, PAGE), stem[:PAGE] + words(4, PAGE)])
    known, chains = {None}, 0
    for event in decode(snapshot.payload)[1:]:
        assert isinstance(event, BlockStored)
        if event.group_idx == KV:
            assert event.parent_block_hash in known
            known.update(event.block_hashes)
            chains += 1
    assert chains == 3, "one event a branch"
    assert known - {None} == held(toy.cache)[KV]


def test_a_large_snapshot_is_of_several_messages_that_give_the_same_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "MAX_SNAPSHOT_BLOCKS", 5)
    monkeypatch.setattr("headwater.cluster.ledger.MAX_EVENT_BLOCKS", 3)
    assert MAX_EVENT_BLOCKS > 3
    toy = logged()
    stream = stream_of(toy)
    begun(toy, stream)
    for seed in range(4):
        toy.serve(words(seed, 7 * PAGE))
        stepped(toy, stream)
    messages, picture = list(stream.snapshot()), Picture()
    assert len(messages) > 3
    assert {message.number for message in messages} == {stream.next}
    assert picture.load(messages)
    assert {group: found for group, found in held(toy.cache).items() if found} == picture.held


SAID = words(7, 6 * PAGE)


def numbers_in(value: object) -> set[int]:
    """Return all integers in a decoded message."""
    if isinstance(value, dict):
        return numbers_in(list(value.values()))
    if isinstance(value, list):
        return set().union(*map(numbers_in, value))
    return {value} if isinstance(value, int) else set()


def said_in(messages: list[Message], tokens: Tokens) -> bool:
    """Return whether a token id stands in a message, as a number of msgpack or as the index key has it."""
    assert min(tokens) > 1000  # more than sizes and positions
    found = set().union(*(numbers_in(msgspec.msgpack.decode(message.payload)) for message in messages))
    raw = [array("i", tokens[at : at + 1]).tobytes() for at in range(len(tokens))]
    found |= {number & MAX_TOKEN_ID for number in found}  # without the marks of approximate prefixes
    return bool(found & set(tokens)) or any(one in message.payload for message in messages for one in raw)


def test_no_message_holds_a_token_unless_asked_to() -> None:
    assert not said_in(history(logged(TIGHT), [SAID, words(8, 5 * PAGE), SAID]), SAID)
    assert said_in(history(logged(), [SAID], with_tokens=True), SAID), "the control should find them"


def test_tokens_are_those_of_exact_prompts_without_a_namespace() -> None:
    toy = logged()
    stream = stream_of(toy, with_tokens=True)
    begun(toy, stream)
    salted, composed = words(5, 3 * PAGE), words(6, 4 * PAGE)
    toy.serve(SAID)
    toy.serve(SAID[: 2 * PAGE] + words(9, PAGE))
    toy.serve(salted, namespace="somebody")
    key = marked(array("i", composed).tobytes(), 2 * PAGE, Fidelity.BALANCED)
    draft = toy.draft(composed, 0, key=key, publish=floor(len(composed)))
    toy.commit(toy.reserve(draft), draft)
    (message,) = stepped(toy, stream)
    snapshot = list(stream.snapshot())
    for messages in ([message], snapshot):
        assert said_in(messages, SAID)
        assert not said_in(messages, salted)
        assert not said_in(messages, composed[2 * PAGE :])
        for event in (event for one in messages for event in decode(one.payload)):
            if isinstance(event, BlockStored) and event.token_ids:
                assert len(event.token_ids) == PAGE * len(event.block_hashes)
                assert event.group_idx == KV
    assert not any(b"somebody" in one.payload for one in (message, *snapshot))
    assert all(getattr(event, "extra_keys", None) is None for one in snapshot for event in decode(one.payload))


def test_removed_pages_forget_their_tokens() -> None:
    toy = logged(TIGHT)
    assert LAYOUT.n_pages > TIGHT.n_pages
    stream = stream_of(toy, with_tokens=True)
    begun(toy, stream)
    toy.serve(SAID)
    stepped(toy, stream)
    for seed in range(8):  # in a namespace: no tokens are kept for the pages that they take over
        toy.serve(words(20 + seed, 2 * PAGE), namespace="somebody")
        (message,) = stepped(toy, stream)
        assert not said_in([message], SAID)
    assert not toy.match(SAID).kv_tokens
    assert not said_in(list(stream.snapshot()), SAID)
