"""Memory of other workers as a read-only store of prefixes and segments.

A peer that fails, or does not answer in time, is asked nothing for a while; the others are.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from headwater.cluster.peer_channel import (
    Answer,
    Channel,
    Find,
    Follow,
    Found,
    Get,
    GetSegment,
    Missing,
    PeerFailed,
    Progress,
    Ready,
    Sent,
)
from headwater.cluster.shared_buffers import SharedBuffer, SharedBuffers
from headwater.cluster.sockets import Client
from headwater.cluster.wire import Peer
from headwater.tiers.catalog import Catalog
from headwater.tiers.part import Buffer, key_bytes_of
from headwater.tiers.store import PEER, Usage, spread

FIND_SECONDS = 0.5  # for the answer to a question
PART_SECONDS = 5.0  # for a part
MAX_PROMPTS = 256  # with known parts: as many found, and as many followed
MAX_SEGMENTS = 1024  # known ones; the engine expects as many
MAX_RESENDS = 4  # of a prompt for a part: other prompts may displace it at the peer

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
        """Return the tokens with KV at the peer, and the length if the state is there, else 0; None if it fails.

        The question waits behind parts that the peer is sending, so that a late answer is not a failed peer.
        """
        for _ in range(1 + MAX_RESENDS):
            one = self._offered
            try:
                found, _ = one.channel.ask(Ready(one.asked.incarnation, one.ticket), PART_SECONDS)
            except PeerFailed as error:
                log.info(
                    "worker at %s %s; its prefill is not followed any more", one.channel.peer.contact.address, error
                )
                return None
            if isinstance(found, Progress):
                return found.kv_tokens, found.state_at
            again = self._find(one.channel, one.asked) if isinstance(found, Missing) and found.is_forgotten else None
            if again is None:
                return None
            self._offered = again
        return None


@dataclass(frozen=True, slots=True)
class OfferedPart:
    """Segment that a router has named a peer for."""

    channel: Channel
    asked: GetSegment
    key: bytes  # encoded, with its namespace
    parts: Sequence[str]  # the name of its one part

    @property
    def prompt(self) -> tuple[str, bytes]:
        return "", self.key

    def get(self, name: str, buffer: SharedBuffer | None) -> tuple[Answer, list[Buffer]]:
        """Ask for it, into a buffer if there is one. Raises PeerFailed."""
        asked = self.asked if buffer is None else msgspec.structs.replace(self.asked, into=buffer.place)
        return self.channel.ask(asked, PART_SECONDS)


class KnownParts:
    """Parts of peers, by name; the parts of the oldest prompts are forgotten."""

    def __init__(self, most: int) -> None:
        """`most`: prompts, or segments."""
        self._most = most
        self._offered: dict[str, Offered | OfferedPart] = {}
        self._prompts: dict[tuple[str, bytes], list[str]] = {}  # names, by namespace and key, the oldest first

    def __len__(self) -> int:
        return len(self._offered)

    def note(self, offered: Offered | OfferedPart) -> None:
        """Replace the known parts of a prompt."""
        self._forget_prompt(offered.prompt)
        self._prompts[offered.prompt] = list(offered.parts)
        self._offered |= dict.fromkeys(offered.parts, offered)
        while len(self._prompts) > self._most:
            self._forget_prompt(next(iter(self._prompts)))

    def find(self, name: str) -> Offered | OfferedPart | None:
        """Return the offer of a part; None if it is unknown, or its peer is paused."""
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
        self.channels: dict[bytes, Channel] = {}
        self._found, self._segments = KnownParts(MAX_PROMPTS), KnownParts(MAX_SEGMENTS)
        self._followed = KnownParts(MAX_PROMPTS)  # parts that may not be computed yet
        self._buffers = SharedBuffers()
        self._bytes = [0, 0]  # of payloads: over the network, and through shared memory
        self._closed = False
        self._lock = threading.Lock()  # of all of these

    def know(self, peers: Iterable[Peer]) -> None:
        """Set the workers of the pool; others have left. Does nothing once closed."""
        wanted = {peer.incarnation: peer for peer in peers if peer.incarnation != self._own}
        with self._lock:
            if not self._closed:
                self._take(wanted)

    def _take(self, wanted: dict[bytes, Peer]) -> None:
        for incarnation in [known for known in self.channels if known not in wanted]:
            self.channels.pop(incarnation).close()
        for incarnation, peer in wanted.items():
            if incarnation not in self.channels:
                self.channels[incarnation] = Channel(peer, self._client)

    # -- as a store

    @property
    def bytes_by_way(self) -> tuple[int, int]:
        networked, shared = self._bytes
        return shared, networked

    @property
    def reachable(self) -> bool:
        with self._lock:
            return any(channel.usable for channel in self.channels.values())

    def ask(self, peers: Sequence[bytes], namespace: str, key: bytes, tokens: int) -> None:
        """Ask peers in the given order, the one with most tokens first, until one has a part of the prompt."""
        for incarnation in peers:
            channel = self.channels.get(incarnation)
            if channel is None or not channel.usable:
                continue
            offered = self._find(channel, Find(incarnation, namespace, key, tokens))
            if offered is not None:
                return

    def follow(self, peer: bytes, namespace: str, key: bytes, at: int) -> FollowedPrefix | None:
        channel = self.channels.get(peer)
        if channel is None or not channel.usable:
            return None
        offered = self._find(channel, Follow(peer, namespace, key, at))
        return None if offered is None else FollowedPrefix(offered, self._find)

    def _find(self, channel: Channel, asked: Find | Follow) -> Offered | None:
        """Return a peer's offer for a prompt, and note it; None if the peer has nothing, or fails."""
        is_found = isinstance(asked, Find)
        try:
            found, _ = channel.ask(asked, FIND_SECONDS if is_found else PART_SECONDS)
            if not isinstance(found, Found):
                raise PeerFailed("answers wrongly")
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
        """Note the first usable peer as the holder of a segment; a router has named it."""
        channels = (self.channels.get(incarnation) for incarnation in peers)
        channel = next((one for one in channels if one is not None and one.usable), None)
        if channel is not None:
            with self._lock:
                self._segments.note(OfferedPart(channel, GetSegment(channel.peer.incarnation, key), key, [name]))

    def has(self, names: Sequence[str]) -> list[bool]:
        return [(self._found.find(name) or self._segments.find(name)) is not None for name in names]

    def _of(self, name: str) -> Offered | OfferedPart | None:
        found = self._found.find(name) or self._segments.find(name)
        return found or self._followed.find(name)

    def get(self, name: str) -> Buffer | None:
        with self._read(name, None) as pieces:
            return None if pieces is None else b"".join(pieces)

    def read_into(self, name: str, pieces: Sequence[memoryview]) -> bool:
        with self._read(name, sum(map(len, pieces))) as found:
            return found is not None and spread(found, pieces)

    @contextmanager
    def _read(self, name: str, size: int | None) -> Iterator[list[Buffer] | None]:
        """Yield the bytes of a part; None if the peer has lost it, or fails.

        `size`: of a shared buffer that the part fits into; None: it comes over the network.
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

    def _pieces(self, one: Offered | OfferedPart, name: str, buffer: SharedBuffer | None) -> list[Buffer] | None:
        """Return the bytes of a part, or None if the peer has lost it; a forgotten prompt is sent again.

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
        one.channel.note_transport(found)
        if found.shared is not None and buffer is not None:
            payload = [buffer.read(found.shared)]
        size = sum(map(len, payload))
        with self._lock:
            self._bytes[found.shared is not None] += size
        return [found.header, one.key[: key_bytes_of(found.header)], *payload, found.seal]

    def _forget(self, names: Iterable[str]) -> None:
        with self._lock:
            for name in names:
                for known in (self._found, self._segments, self._followed):
                    known.forget(name)

    def put(self, name: str, pieces: Sequence[Buffer], keep: Set[str] = frozenset()) -> None:
        """Do nothing: a peer holds only parts that it has computed or pulled itself."""

    def touch(self, names: Sequence[str]) -> None:
        """Do nothing: a pull does not count as a use of the holder's copy. Uses of the puller's copy count there."""

    def delete(self, names: Sequence[str]) -> None:
        """Pause the peers that sent these parts, which are damaged."""
        for name in names:
            one = self._of(name)
            if one is not None:
                one.channel.fail("sent a damaged part")
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
