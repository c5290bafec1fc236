"""Memory of other workers as a store that is only read: prefixes that they said they have when they were asked.

A peer that fails, or does not answer in time, is left alone for a while; the others are not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

import zmq

from headwater.cluster.part_messages import (
    FAILED,
    Answer,
    Find,
    Follow,
    Found,
    Get,
    GetSegment,
    Missing,
    Progress,
    Question,
    Ready,
    Sent,
    answer,
    encode,
)
from headwater.cluster.shared_buffers import SharedBuffer, SharedBuffers, this_host
from headwater.cluster.sockets import Client, opened
from headwater.cluster.wire import Peer, WireError
from headwater.tiers.catalog import Catalog
from headwater.tiers.part import Buffer, key_bytes_of
from headwater.tiers.store import PEER, Usage, spread

FIND_TIME = 0.5  # seconds for the answer to a question
PART_TIME = 5.0  # seconds for a part
LOOKED = 50  # milliseconds between looks at whether a peer is still there
BREAK = 10.0  # seconds for which a peer that failed is left alone
MOST_PROMPTS = 256  # whose parts are known
TOLD_AGAIN = 4  # times that a prompt is sent again for a part: others' prompts may push it out meanwhile

log = logging.getLogger("headwater.cluster")


class PeerFailed(Exception):
    """A peer did not answer in time, not as it should, or has left."""


class Channel:
    """Sockets to one peer: a thread takes one, or opens another, and puts it back after its answer."""

    def __init__(self, peer: Peer, client: Client) -> None:
        self.peer = peer
        self._connect = client.to(peer.contact.key)
        self._idle: list[zmq.Socket[bytes]] = []
        self._closed = False
        self.failed_until = 0.0
        self.shares = bool(this_host())  # it is thought to be able to write to this worker's buffers

    @property
    def usable(self) -> bool:
        return not self._closed and time.monotonic() >= self.failed_until

    def ask(self, message: Question, seconds: float) -> tuple[Answer, list[Buffer]]:
        """Return an answer, and the payload that follows it. Raises PeerFailed."""
        with self._socket() as socket:
            socket.send(encode(message))
            until = time.monotonic() + seconds
            while not socket.poll(LOOKED):
                if self._closed:
                    raise PeerFailed("has left")
                if time.monotonic() > until:
                    raise PeerFailed(f"has not answered for {seconds:g} s")
            frames = socket.recv_multipart(copy=False)
        if len(frames) == 1 and frames[0].bytes == FAILED:
            raise PeerFailed("cannot answer")
        try:
            return answer(frames[0].bytes), [frame.buffer for frame in frames[1:]]
        except WireError as error:
            raise PeerFailed(f"does not answer as it should: {error}") from error

    @contextmanager
    def _socket(self) -> Iterator[zmq.Socket[bytes]]:
        """Yield a socket for one question; it is closed unless the answer came."""
        try:
            socket = self._idle.pop()
        except IndexError:
            socket = opened(zmq.DEALER)
            self._connect(socket, self.peer.contact.address)
        try:
            yield socket
        except BaseException:
            socket.close()
            raise
        self._idle.append(socket)
        if self._closed:
            self.close()

    def note_way(self, sent: Sent) -> None:
        """Name the peer no more buffers if it cannot write to them."""
        if self.shares and sent.why_not:
            self.shares = False
            where = self.peer.contact.address
            log.info(
                "parts of the worker at %s come over the network: it says of this worker that %s", where, sent.why_not
            )

    def fail(self, why: object) -> None:
        """Leave the peer alone for a while."""
        if self.usable:
            log.warning("worker at %s %s; nothing is pulled from it for %g s", self.peer.contact.address, why, BREAK)
        self.failed_until = time.monotonic() + BREAK

    def close(self) -> None:
        """Close idle sockets now, and others after their answers."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()


@dataclass(frozen=True, slots=True)
class Offered:
    """Prefix that a peer has, or computes, and its ticket there."""

    channel: Channel
    asked: Find | Follow
    ticket: bytes
    parts: Mapping[str, int]  # numbers by names

    @property
    def key(self) -> bytes:
        return self.asked.key

    @property
    def prompt(self) -> tuple[str, bytes]:
        return self.asked.namespace, self.asked.key

    def progress(self) -> tuple[int, int] | None:
        """Return how many tokens have KV there, and the length if the state is there, else 0; None if it fails."""
        try:
            found, _ = self.channel.ask(Ready(self.asked.incarnation, self.ticket), FIND_TIME)
        except PeerFailed as error:
            self.channel.fail(error)
            return None
        return (found.kv_tokens, found.state_at) if isinstance(found, Progress) else None

    def get(self, name: str, buffer: SharedBuffer | None) -> tuple[Answer, list[Buffer]]:
        """Ask for a part, into a buffer if there is one. Raises PeerFailed."""
        into = None if buffer is None else buffer.place
        return self.channel.ask(Get(self.asked.incarnation, self.ticket, self.parts[name], into), PART_TIME)


@dataclass(frozen=True, slots=True)
class OfferedSegment:
    """Segment that a peer has, as a router says."""

    channel: Channel
    key: bytes  # encoded; it has the namespace
    parts: Sequence[str]  # the name of its one part

    @property
    def prompt(self) -> tuple[str, bytes]:
        return "", self.key

    def get(self, name: str, buffer: SharedBuffer | None) -> tuple[Answer, list[Buffer]]:
        """Ask for the segment, into a buffer if there is one. Raises PeerFailed."""
        into = None if buffer is None else buffer.place
        return self.channel.ask(GetSegment(self.channel.peer.incarnation, self.key, into), PART_TIME)


class PeerMemory:
    """Parts of cached prefixes in other workers' memory."""

    kind, shown = PEER, "memory of other workers"
    limit: int | None = None

    def __init__(self, own: bytes, client: Client) -> None:
        """`own`: incarnation of this worker, which asks all others. `client`: security of its sockets."""
        self._own, self._client = own, client
        self._channels: dict[bytes, Channel] = {}
        self._offered: dict[str, Offered | OfferedSegment] = {}  # by name of the part
        self._prompts: dict[tuple[str, bytes], list[str]] = {}  # names, by namespace and key, in order of questions
        self._buffers = SharedBuffers()
        self._bytes = [0, 0]  # of payloads: over the network, and through shared memory
        self._closed = False
        self._lock = threading.Lock()  # of all of these

    def know(self, peers: Iterable[Peer]) -> None:
        """Take these workers for the pool; others have left. Once closed, there are none."""
        wanted = {peer.incarnation: peer for peer in peers if peer.incarnation != self._own}
        with self._lock:
            if not self._closed:
                self._take(wanted)

    def _take(self, wanted: dict[bytes, Peer]) -> None:
        for incarnation in [known for known in self._channels if known not in wanted]:
            self._channels.pop(incarnation).close()
        for incarnation, peer in wanted.items():
            if incarnation not in self._channels:
                self._channels[incarnation] = Channel(peer, self._client)

    # -- as a store

    @property
    def bytes_by_way(self) -> tuple[int, int]:
        networked, shared = self._bytes
        return shared, networked

    @property
    def reachable(self) -> bool:
        with self._lock:
            return any(channel.usable for channel in self._channels.values())

    def ask(self, peers: Sequence[bytes], namespace: str, key: bytes, tokens: int) -> None:
        """Ask peers, the one that has most first, until one has a part of the prompt."""
        for incarnation in peers:
            channel = self._channels.get(incarnation)
            if channel is None or not channel.usable:
                continue
            offered = self._find(channel, Find(incarnation, namespace, key, tokens))
            if offered is not None:
                self._note(offered)
                return

    def follow(self, peer: bytes, namespace: str, key: bytes, at: int) -> Offered | None:
        channel = self._channels.get(peer)
        if channel is None or not channel.usable:
            return None
        offered = self._find(channel, Follow(peer, namespace, key, at))
        if offered is not None:
            self._note(offered)
        return offered

    def _find(self, channel: Channel, asked: Find | Follow) -> Offered | None:
        """Return what a peer has of a prompt; None if it has nothing, or fails."""
        try:
            found, _ = channel.ask(asked, FIND_TIME)
            if not isinstance(found, Found):
                raise PeerFailed("does not answer as it should")
        except PeerFailed as error:
            channel.fail(error)
            return None
        numbers = {name: number for number, name in enumerate(found.names)}
        return Offered(channel, asked, found.ticket, numbers) if numbers else None

    def expect(self, peers: Sequence[bytes], key: bytes, name: str) -> None:
        """Note who has a segment, without a question: a router said so."""
        channels = (self._channels.get(incarnation) for incarnation in peers)
        channel = next((one for one in channels if one is not None and one.usable), None)
        if channel is not None:
            self._note(OfferedSegment(channel, key, [name]))

    def _note(self, offered: Offered | OfferedSegment) -> None:
        """Note parts; those of the oldest prompts are forgotten."""
        prompt = offered.prompt
        with self._lock:
            self._forget_prompt(prompt)
            self._prompts[prompt] = list(offered.parts)
            self._offered |= dict.fromkeys(offered.parts, offered)
            while len(self._prompts) > MOST_PROMPTS:
                self._forget_prompt(next(iter(self._prompts)))

    def _forget_prompt(self, prompt: tuple[str, bytes]) -> None:
        for name in self._prompts.pop(prompt, ()):
            one = self._offered.get(name)
            if one is not None and one.prompt == prompt:
                del self._offered[name]

    def has(self, names: Sequence[str]) -> list[bool]:
        return [self._of(name) is not None for name in names]

    def _of(self, name: str) -> Offered | OfferedSegment | None:
        one = self._offered.get(name)
        return one if one is not None and one.channel.usable else None

    def get(self, name: str) -> Buffer | None:
        with self._read(name, None) as pieces:
            return None if pieces is None else b"".join(pieces)

    def read_into(self, name: str, pieces: Sequence[memoryview]) -> bool:
        with self._read(name, sum(map(len, pieces))) as found:
            return found is not None and spread(found, pieces)

    @contextmanager
    def _read(self, name: str, size: int | None) -> Iterator[list[Buffer] | None]:
        """Yield the bytes of a part; None if the peer does not have it any more, or fails.

        `size`: of a shared buffer that the part fits into; None: it is to come over the network.
        """
        one = self._of(name)
        buffer = None if one is None or size is None or not one.channel.shares else self._buffers.take(size)
        pieces = None
        try:
            if one is not None:
                pieces = self._pieces(one, name, buffer)
        except PeerFailed as error:
            assert one is not None
            one.channel.fail(error)
            if buffer is not None:
                buffer.close()  # the peer may write to it later
                buffer = None
        try:
            yield pieces
        finally:
            if buffer is not None:
                self._buffers.give(buffer)

    def _pieces(self, one: Offered | OfferedSegment, name: str, buffer: SharedBuffer | None) -> list[Buffer] | None:
        """Return the bytes of a part, or None if it is not there; a peer that forgot the prompt is asked again.

        Raises PeerFailed.
        """
        found, payload = one.get(name, buffer)
        for _ in range(TOLD_AGAIN):
            if not (isinstance(found, Missing) and found.is_forgotten and isinstance(one, Offered)):
                break
            again = self._find(one.channel, one.asked)
            if again is None or name not in again.parts:
                break
            self._note(again)
            found, payload = again.get(name, buffer)
        if not isinstance(found, Sent):
            self._forget([name])
            return None
        one.channel.note_way(found)
        if found.shared is not None and buffer is not None:
            payload = [buffer.read(found.shared)]
        size = sum(map(len, payload))
        with self._lock:
            self._bytes[found.shared is not None] += size
        return [found.header, one.key[: key_bytes_of(found.header)], *payload, found.seal]

    def _forget(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                self._offered.pop(name, None)

    def put(self, name: str, pieces: Sequence[Buffer], keep: Set[str] = frozenset()) -> None:
        """Do nothing: what a peer has is what it computed or pulled itself."""

    def touch(self, names: Sequence[str]) -> None:
        """Do nothing: a pull does not count as a use of the holder's copy. Uses of the puller's copy count there."""

    def delete(self, names: Sequence[str]) -> None:
        """Leave the peers alone that sent these parts: they are not what they should be."""
        for name in names:
            one = self._of(name)
            if one is not None:
                one.channel.fail("sent a part that is not what it should be")
        self._forget(names)

    def usage(self) -> Usage:
        return Usage(0, 0, None)

    def catalog(self) -> Catalog:
        return Catalog()

    def close(self) -> None:
        """Leave all peers."""
        with self._lock:
            self._closed = True
            self._take({})
        self._buffers.close()
