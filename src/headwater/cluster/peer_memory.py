"""Memory of other workers as a store that is only read: prefixes that they said they have when they were asked.

A peer that fails, or does not answer in time, is left alone for a while; the others are not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

import zmq

from headwater.cluster.part_messages import FAILED, Find, Get, encode, found
from headwater.cluster.sockets import Client, opened
from headwater.cluster.wire import Peer, WireError
from headwater.tiers.catalog import Catalog
from headwater.tiers.part import Buffer
from headwater.tiers.store import PEER, Usage, spread

FIND_TIME = 0.5  # seconds for the answer to a question
PART_TIME = 5.0  # seconds for a part
LOOKED = 50  # milliseconds between looks at whether a peer is still there
BREAK = 10.0  # seconds for which a peer that failed is left alone
MOST_PROMPTS = 256  # whose parts are known

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

    @property
    def usable(self) -> bool:
        return not self._closed and time.monotonic() >= self.failed_until

    def ask(self, message: Find | Get, seconds: float) -> list[zmq.Frame]:
        """Return the frames of an answer. Raises PeerFailed."""
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
        return frames

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
    """Prefix that a peer has."""

    channel: Channel
    namespace: str
    key: bytes
    at: int  # tokens


class PeerMemory:
    """Parts of cached prefixes in other workers' memory."""

    kind, shown = PEER, "memory of other workers"
    limit: int | None = None

    def __init__(self, own: bytes, client: Client) -> None:
        """`own`: incarnation of this worker, which asks all others. `client`: security of its sockets."""
        self._own, self._client = own, client
        self._channels: dict[bytes, Channel] = {}
        self._offered: dict[str, Offered] = {}  # by name of the part
        self._prompts: dict[tuple[str, bytes], list[str]] = {}  # names, by namespace and key, in order of questions
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
    def reachable(self) -> bool:
        with self._lock:
            return any(channel.usable for channel in self._channels.values())

    def ask(self, peers: Sequence[bytes], namespace: str, key: bytes, tokens: int) -> None:
        """Ask peers, the one that has most first, until one has a part of the prompt."""
        for incarnation in peers:
            channel = self._channels.get(incarnation)
            if channel is None or not channel.usable:
                continue
            try:
                frames = channel.ask(Find(incarnation, namespace, key, tokens), FIND_TIME)
                has = found(frames[0].bytes)
            except (PeerFailed, WireError) as error:
                channel.fail(error)
                continue
            if has.names:
                self._note(Offered(channel, namespace, key, has.at), has.names)
                return

    def _note(self, offered: Offered, names: list[str]) -> None:
        """Note parts; those of the oldest prompts are forgotten."""
        prompt = offered.namespace, offered.key
        with self._lock:
            self._forget_prompt(prompt)
            self._prompts[prompt] = names
            self._offered |= dict.fromkeys(names, offered)
            while len(self._prompts) > MOST_PROMPTS:
                self._forget_prompt(next(iter(self._prompts)))

    def _forget_prompt(self, prompt: tuple[str, bytes]) -> None:
        for name in self._prompts.pop(prompt, ()):
            one = self._offered.get(name)
            if one is not None and (one.namespace, one.key) == prompt:
                del self._offered[name]

    def has(self, names: Sequence[str]) -> list[bool]:
        return [self._of(name) is not None for name in names]

    def _of(self, name: str) -> Offered | None:
        one = self._offered.get(name)
        return one if one is not None and one.channel.usable else None

    def get(self, name: str) -> Buffer | None:
        frames = self._frames(name)
        return None if frames is None else b"".join(frame.buffer for frame in frames)

    def read_into(self, name: str, pieces: Sequence[memoryview]) -> bool:
        frames = self._frames(name)
        return frames is not None and spread([frame.buffer for frame in frames], pieces)

    def _frames(self, name: str) -> list[zmq.Frame] | None:
        """Return the bytes of a part; None if the peer does not have it any more, or fails."""
        one = self._of(name)
        if one is None:
            return None
        asked = Get(one.channel.peer.incarnation, one.namespace, one.key, one.at, name)
        try:
            frames = one.channel.ask(asked, PART_TIME)
        except PeerFailed as error:
            one.channel.fail(error)
            return None
        if any(len(frame.buffer) for frame in frames):
            return frames
        self._forget([name])
        return None

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
