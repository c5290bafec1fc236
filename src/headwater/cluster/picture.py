"""Picture of a worker's cache and stores from its messages, and the tokens of a prompt that could resume there.

A picture is complete or empty. A message whose number is not the next one, or of another lifetime, empties it.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType

import msgspec
import zmq

from headwater.cluster.cost import NOTHING, Found, Prompt, Stored
from headwater.cluster.messages import (
    END,
    KINDS,
    KV,
    KV_KINDS,
    MEDIUM,
    NUMBER_BYTES,
    SEGMENTS,
    SNAPSHOT,
    STATES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    Message,
    MessageError,
    decode,
    numbers_of,
)
from headwater.cluster.sockets import Connect, connect_plain, opened, queued

ANSWER_SECONDS = 5.0  # until the next message of a worker's answer

log = logging.getLogger("headwater.cluster")


class Picture:
    """Content of one worker's cache, by digest."""

    def __init__(self) -> None:
        self.lifetime: bytes | None = None
        self.next: int | None = None  # number of the next message; None: the picture is empty
        self.block_size = 0  # tokens
        self.groups: dict[int, str] = {}  # kinds of the groups, also of those without blocks
        self.held: defaultdict[int, set[int]] = defaultdict(set)  # digests in memory, by group
        self.stored: dict[str, defaultdict[int, set[int]]] = {}  # likewise, of stores below memory, by medium

    @property
    def is_whole(self) -> bool:
        """True if nothing that was published before message `next` is missing."""
        return self.next is not None

    # -- messages

    def apply(self, message: Message) -> bool:
        """Apply a live message. False: the picture is empty now, and needs a snapshot. Raises MessageError.

        A message that was applied before changes nothing. Message 0 needs no snapshot before it.
        """
        events = decode(message.payload)
        lifetime = lifetime_of(events)
        is_known = lifetime is not None and lifetime == self.lifetime
        if is_known and self.next is not None and message.number < self.next:
            return True
        if message.number == 0 or self.next is None or self.lifetime != lifetime:
            self.drop()
            if message.number:
                return False
            self.lifetime = lifetime
        elif message.number != self.next:
            self.drop()
            return False
        self._take(events)
        self.next = message.number + 1
        return True

    def load(self, snapshot: Iterable[Message]) -> bool:
        """Replace everything by a snapshot. False: it was not one, and the picture is empty. Raises MessageError."""
        self.drop()
        number: int | None = None
        for message in snapshot:
            events = decode(message.payload)
            begins = number is None
            if begins is not any(isinstance(event, AllBlocksCleared) for event in events[:1]):
                break
            if begins:
                number, self.lifetime = message.number, lifetime_of(events)
            elif (message.number, lifetime_of(events)) != (number, self.lifetime):
                break
            self._take(events)
        else:
            self.next = number
            return number is not None
        self.drop()
        return False

    def drop(self) -> None:
        """Forget everything."""
        self.lifetime, self.next = None, None
        self.groups.clear()
        self.held.clear()
        self.stored = {}

    def _take(self, events: Iterable[Event]) -> None:
        for event in events:
            if not isinstance(event, AllBlocksCleared) and event.medium not in (MEDIUM, None, msgspec.UNSET):
                self._take_stored(str(event.medium), event)
            elif isinstance(event, BlockStored):
                group = event.group_idx or KV
                self.groups.setdefault(group, event.kv_cache_spec_kind or KINDS[KV])
                self.held[group].update(numbers_of(event.block_hashes))
                if self.groups[group] in KV_KINDS:
                    if event.block_size < 1:
                        raise MessageError(f"a block has {event.block_size} tokens")
                    self.block_size = event.block_size
            elif isinstance(event, BlockRemoved):
                self.held[event.group_idx or KV].difference_update(numbers_of(event.block_hashes))
            else:
                self.held.clear()
                self.stored = {}
                self.groups = dict(event.groups or {})
                self.block_size = event.block_size or self.block_size

    def _take_stored(self, medium: str, event: BlockStored | BlockRemoved) -> None:
        """Apply a change of a store, which changes nothing in memory."""
        held = self.stored.setdefault(medium, defaultdict(set))[event.group_idx or KV]
        blocks = numbers_of(event.block_hashes)
        if isinstance(event, BlockStored):
            held.update(blocks)
        else:
            held.difference_update(blocks)

    # -- matches of a prompt

    def find(self, blocks: Sequence[int], tokens: int) -> Found:
        """Return the leading tokens of a prompt that are cached, and those that need not be computed.

        blocks: digests of the prompt's full blocks; tokens: its length. Work can resume at the deepest position at
        which every group of states has one, and up to which each group of KV has all blocks. At least one token is
        computed. An empty picture has nothing.
        """
        block_size, groups = self.block_size, tuple(self.groups.items())  # a follower's thread may change them
        if not self.is_whole or not groups:
            return NOTHING
        end = min(len(blocks), max(0, tokens - 1) // block_size)
        states = []
        for group, kind in groups:
            held = self.held[group]
            if kind in KV_KINDS:
                if end and blocks[0] not in held:
                    end = 0
                elif not held.issuperset(blocks[:end]):
                    end = next((at for at, block in enumerate(blocks[:end]) if block not in held), end)
            elif group != SEGMENTS:
                states.append(held)
        if not end:
            return NOTHING
        deepest = (at for at in range(end, 0, -1) if all(blocks[at - 1] in held for held in states))
        return Found(end * block_size, next(deepest, 0) * block_size)

    def find_stored(self, blocks: Sequence[int], tokens: int, found: Found) -> tuple[Stored, ...]:
        """Return the leading tokens of a prompt after a load from each store that has more than memory.

        A load needs a state in the store, and the KV before it that memory lacks. `found`: in memory.
        """
        size = self.block_size
        if not self.is_whole or not size:
            return ()
        last, stores = min(len(blocks), max(0, tokens - 1) // size), []
        has_kv = any(kind in KV_KINDS for kind in tuple(self.groups.values()))
        for medium, held in tuple(self.stored.items()):
            kv, states, end = held[KV], held[STATES], found.cached // size if has_kv else last
            while end < last and blocks[end] in kv:
                end += 1
            deepest = next((at for at in range(end, found.resumable // size, -1) if blocks[at - 1] in states), 0)
            if deepest:
                stores.append(Stored(medium, deepest * size))
        return tuple(stores)

    def look_up(self, prompt: Prompt) -> Found:
        """Return the match of a prompt: its exact prefix, or one composed of its segments if that is deeper."""
        exact = self.find(prompt.blocks, prompt.tokens)
        if self.stored:
            exact = exact._replace(stored=self.find_stored(prompt.blocks, prompt.tokens, exact))
        if not prompt.composed:
            return exact
        composed = self.find(prompt.composed, prompt.tokens)
        if composed.resumable <= exact.resumable:
            return exact
        return Found(exact.cached, composed.resumable, composed.resumable - exact.resumable, exact.stored)

    def resumable(self, blocks: Sequence[int], tokens: int) -> int:
        """Return the leading tokens of a prompt that need not be computed, as in `find`."""
        return self.find(blocks, tokens).resumable

    def has_segment(self, digest: int) -> bool:
        """Return whether a segment is stored here."""
        return digest in self.held[SEGMENTS]

    def stores_of(self, digest: int) -> list[str]:
        """Return the media of the stores that have a segment."""
        return [medium for medium, held in tuple(self.stored.items()) if digest in held[SEGMENTS]]


def lifetime_of(events: Sequence[Event]) -> bytes | None:
    """Return the lifetime that a message names; None if it names none."""
    return events[0].lifetime if events else None


class Follower:
    """Picture of one worker's cache, as of its last message. All methods are for one thread."""

    def __init__(
        self,
        live: str,
        replay: str,
        topic: str = "",
        answer_time: float = ANSWER_SECONDS,
        connect: Connect = connect_plain,
    ) -> None:
        """Connect to a worker's addresses."""
        self.picture = Picture()
        self.heard = time.monotonic()  # time of the last message: a worker that is idle sends one a second
        self.snapshots = self.replays = 0
        self._replay_address, self._answer_time, self._connect = replay, answer_time, connect
        self._live = opened(zmq.SUB)  # its queue has no limit: the worker drops messages for slow readers
        self._live.subscribe(topic)
        connect(self._live, live)

    def follow(self, seconds: float) -> None:
        """Apply messages for `seconds`."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if self._live.poll(int(left * 1000) + 1):
                self._receive()

    def close(self) -> None:
        self._live.close()

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- one message

    def _receive(self) -> None:
        frames = self._live.recv_multipart()
        self.heard = time.monotonic()
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            return
        message = Message(int.from_bytes(frames[1], "big"), frames[2])
        try:
            self._close_gap(message.number)
            if self.picture.apply(message):
                return
        except Exception as error:
            self._drop(error)
        self._resync()

    def _close_gap(self, number: int) -> None:
        """Apply the messages before `number` that are missing, if the worker still has them."""
        expected = self.picture.next
        if expected is not None and number > expected:
            self.replays += 1
            for message in self._asked(expected.to_bytes(NUMBER_BYTES, "big")):
                if not self.picture.apply(message):
                    return

    def _resync(self) -> None:
        """Take a snapshot, and the messages since; the picture stays empty if the worker does not answer."""
        self.snapshots += 1
        try:
            self.picture.load(self._asked(SNAPSHOT))
        except Exception as error:
            self._drop(error)

    def _drop(self, error: Exception) -> None:
        """Empty the picture: whatever a worker sends ends no thread that follows it."""
        self.picture.drop()
        if not isinstance(error, TimeoutError):
            log.warning("the picture of a worker's cache is dropped after a message: %r", error)

    def _asked(self, request: bytes) -> Iterator[Message]:
        """Yield the messages of an answer. Raises TimeoutError."""
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(
            zmq.DEALER
        )  # one a request: no late answer is taken for another
        try:
            socket.linger = 0
            socket.rcvhwm = 0
            self._connect(socket, self._replay_address)
            if not queued(socket, b"", request):
                raise TimeoutError(f"no connection to {self._replay_address}")
            while True:
                if not socket.poll(int(self._answer_time * 1000)):
                    raise TimeoutError(f"no answer from {self._replay_address} within {self._answer_time:g} s")
                frames = socket.recv_multipart()
                if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
                    raise MessageError(f"an answer has {len(frames)} frames")
                if frames[1] == END:
                    return
                yield Message(int.from_bytes(frames[1], "big"), frames[2])
        finally:
            socket.close()
