"""Memory of other workers as a store that is only read: prefixes that they said they have when they were asked.

A peer that fails, or does not answer in time, is left alone for a while; the others are not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from headwater.cluster.part_messages import (
    Answer,
    Find,
    Follow,
    Found,
    Get,
    GetSegment,
    GetTail,
    Missing,
    Progress,
    Ready,
    Sent,
)
from headwater.cluster.peer_channel import Channel, PeerFailed
from headwater.cluster.shared_buffers import SharedBuffer, SharedBuffers
from headwater.cluster.sockets import Client
from headwater.cluster.wire import Peer
from headwater.tiers.catalog import Catalog
from headwater.tiers.part import Buffer, key_bytes_of
from headwater.tiers.store import PEER, Usage, spread

FIND_SECONDS = 0.5  # seconds for the answer to a question
PART_SECONDS = 5.0  # seconds for a part
MAX_PROMPTS = 256  # whose parts are known, of those that were found and of those that are followed
MAX_SEGMENTS = 1024  # that are known; the engine expects as many
MAX_TAILS = 16  # likewise; each is read once
MAX_RESENDS = 4  # times that a prompt is sent again for a part: others' prompts may push it out meanwhile

log = logging.getLogger("headwater.cluster")


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

    def get(self, name: str, buffer: SharedBuffer | None) -> tuple[Answer, list[Buffer]]:
        """Ask for a part, into a buffer if there is one. Raises PeerFailed."""
        into = None if buffer is None else buffer.place
        return self.channel.ask(Get(self.asked.incarnation, self.ticket, self.parts[name], into), PART_SECONDS)


@dataclass(slots=True)
class FollowedPrefix:
    """Prefix that a peer computes."""

    _offered: Offered
    _find: Callable[[Channel, Find | Follow], Offered | None]

    def progress(self) -> tuple[int, int] | None:
        """Return how many tokens have KV there, and the length if the state is there, else 0; None if it fails.

        The question waits behind parts that the peer is sending: an answer that is late says nothing of the peer.
        """
        for _ in range(1 + MAX_RESENDS):
            one = self._offered
            try:
                found, _ = one.channel.ask(Ready(one.asked.incarnation, one.ticket), PART_SECONDS)
            except PeerFailed as error:
                log.info("worker at %s %s; a prefill is followed no more", one.channel.peer.contact.address, error)
                return None
            if isinstance(found, Progress):
                return found.kv_tokens, found.state_at
            again = self._find(one.channel, one.asked) if isinstance(found, Missing) and found.is_forgotten else None
            if again is None:
                return None
            self._offered = again
        return None


@dataclass(frozen=True, slots=True)
class OfferedAlone:
    """Segment, or tail of a prompt, that a peer has, as a router says."""

    channel: Channel
    asked: GetSegment | GetTail
    key: bytes  # of a segment, encoded, with its namespace; of the tail's prompt
    parts: Sequence[str]  # the name of its one part

    @property
    def prompt(self) -> tuple[str, bytes]:
        return "", self.asked.id if isinstance(self.asked, GetTail) else self.key

    def get(self, name: str, buffer: SharedBuffer | None) -> tuple[Answer, list[Buffer]]:
        """Ask for it, into a buffer if there is one. Raises PeerFailed."""
        asked = self.asked if buffer is None else msgspec.structs.replace(self.asked, into=buffer.place)
        return self.channel.ask(asked, PART_SECONDS)


class KnownParts:
    """Parts that peers are said to have, by their names; those of the oldest prompts are forgotten."""

    def __init__(self, most: int) -> None:
        """`most`: prompts, or segments."""
        self._most = most
        self._offered: dict[str, Offered | OfferedAlone] = {}
        self._prompts: dict[tuple[str, bytes], list[str]] = {}  # names, by namespace and key, the oldest first

    def __len__(self) -> int:
        return len(self._offered)

    def note(self, offered: Offered | OfferedAlone) -> None:
        """Note parts in place of those of their prompt that were known."""
        self._forget_prompt(offered.prompt)
        self._prompts[offered.prompt] = list(offered.parts)
        self._offered |= dict.fromkeys(offered.parts, offered)
        while len(self._prompts) > self._most:
            self._forget_prompt(next(iter(self._prompts)))

    def find(self, name: str) -> Offered | OfferedAlone | None:
        """Return who has a part; None if it is not known, or the peer is left alone now."""
        one = self._offered.get(name)
        return one if one is not None and one.channel.usable else None

    def forget(self, name: str) -> None:
        self._offered.pop(name, None)

    def _forget_prompt(self, prompt: tuple[str, bytes]) -> None:
        for name in self._prompts.pop(prompt, ()):
            one = self._offered.get(name)
            if one is not None and one.prompt == prompt:
                del self._offered[name]


class PeerMemory:
    """Parts of cached prefixes in other workers' memory."""

    kind, shown = PEER, "memory of other workers"
    limit: int | None = None

    def __init__(self, own: bytes, client: Client) -> None:
        """`own`: incarnation of this worker, which asks all others. `client`: security of its sockets."""
        self._own, self._client = own, client
        self._channels: dict[bytes, Channel] = {}
        self._found, self._segments = KnownParts(MAX_PROMPTS), KnownParts(MAX_SEGMENTS)
        self._followed = KnownParts(MAX_PROMPTS)  # parts that may not be computed yet
        self._tails = KnownParts(MAX_TAILS)
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
                return

    def follow(self, peer: bytes, namespace: str, key: bytes, at: int) -> FollowedPrefix | None:
        channel = self._channels.get(peer)
        if channel is None or not channel.usable:
            return None
        offered = self._find(channel, Follow(peer, namespace, key, at))
        return None if offered is None else FollowedPrefix(offered, self._find)

    def _find(self, channel: Channel, asked: Find | Follow) -> Offered | None:
        """Return what a peer has of a prompt, and note it; None if it has nothing, or fails."""
        is_found = isinstance(asked, Find)
        try:
            found, _ = channel.ask(asked, FIND_SECONDS if is_found else PART_SECONDS)
            if not isinstance(found, Found):
                raise PeerFailed("does not answer as it should")
        except PeerFailed as error:
            channel.fail(error)
            return None
        numbers = {name: number for number, name in enumerate(found.names)}
        if not numbers:
            return None
        offered = Offered(channel, asked, found.ticket, numbers)
        with self._lock:
            (self._found if is_found else self._followed).note(offered)
        return offered

    def expect(self, peers: Sequence[bytes], key: bytes, name: str) -> None:
        """Note who has a segment, without a question: a router said so."""
        channels = (self._channels.get(incarnation) for incarnation in peers)
        channel = next((one for one in channels if one is not None and one.usable), None)
        if channel is not None:
            with self._lock:
                self._segments.note(OfferedAlone(channel, GetSegment(channel.peer.incarnation, key), key, [name]))

    def expect_tail(self, peer: bytes, id: bytes, entries: int, key: bytes, name: str) -> None:
        channel = self._channels.get(peer)
        if channel is not None and channel.usable:
            with self._lock:
                self._tails.note(OfferedAlone(channel, GetTail(peer, id, entries), key, [name]))

    def has(self, names: Sequence[str]) -> list[bool]:
        return [(self._found.find(name) or self._segments.find(name)) is not None for name in names]

    def _of(self, name: str) -> Offered | OfferedAlone | None:
        found = self._found.find(name) or self._segments.find(name)
        return found or self._followed.find(name) or self._tails.find(name)

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
        if one is None:
            yield None
            return
        buffer = None if size is None or not one.channel.shares else self._buffers.take(size)
        pieces, is_answered = None, False
        try:
            try:
                pieces = self._pieces(one, name, buffer)
                is_answered = True
            except PeerFailed as error:
                one.channel.fail(error)
            yield pieces
        finally:
            if buffer is not None and is_answered:
                self._buffers.give(buffer)
            elif buffer is not None:
                buffer.close()  # the peer may write to it later

    def _pieces(self, one: Offered | OfferedAlone, name: str, buffer: SharedBuffer | None) -> list[Buffer] | None:
        """Return the bytes of a part, or None if it is not there; a peer that forgot the prompt is asked again.

        Raises PeerFailed.
        """
        found, payload = one.get(name, buffer)
        for _ in range(MAX_RESENDS):
            if not (isinstance(found, Missing) and found.is_forgotten and isinstance(one, Offered)):
                break
            again = self._find(one.channel, one.asked)
            if again is None or name not in again.parts:
                break
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
                for known in (self._found, self._segments, self._followed, self._tails):
                    known.forget(name)

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
