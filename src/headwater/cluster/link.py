"""Link of a router to one worker: socket, heartbeats, picture of the cache, and open requests."""

from __future__ import annotations

import logging
import threading
import time

import zmq

from headwater.cluster.cost import NOTHING, Candidate, Found, Known, OpenRequests, Prompt
from headwater.cluster.follower import Follower
from headwater.cluster.routed import Routed
from headwater.cluster.sockets import Client, Contact, has_message, opened, queued
from headwater.cluster.wire import (
    Batch,
    Heartbeat,
    Members,
    OfRequests,
    Peer,
    Ping,
    StatsMessage,
    ToWorker,
    WireError,
    WorkerInfo,
    encode,
    from_worker,
)
from headwater.engine.meter import Backlog, EngineStats

FOLLOW_SECONDS = 0.2  # between checks whether a follower must end
NO_BACKLOG = Backlog(0, 0, 0, None, 0.0)

log = logging.getLogger("headwater.cluster")


class Link:
    """Link to one worker. All methods are for the router's thread."""

    def __init__(self, name: str, contact: Contact, identity: bytes, client: Client) -> None:
        self.name, self.contact = name, contact
        self._connect = client.to(contact.key)
        self.socket = opened(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self._breaks = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._is_broken = False  # messages may be lost, until the worker has answered a first ping again
        self._connect(self.socket, contact.address)
        self.heard = time.monotonic()
        self.incarnation: bytes | None = None
        self.info: WorkerInfo | None = None
        self._known: Known | None = None  # with its info
        self.backlog = NO_BACKLOG
        self.stats: EngineStats | None = None
        self.open: dict[int, Routed] = {}
        self.outstanding = OpenRequests()  # of them, as they were routed
        self.draining = False
        self.members: tuple[Peer, ...] = ()  # of its pool, as last sent
        self.follower: Follower | None = None
        self._following = threading.Event()

    # -- messages

    def send(self, message: ToWorker) -> None:
        """Send a message; without a connection it is dropped, and the worker is lost after its timeout."""
        queued(self.socket, encode(message))

    def receive(self) -> list[OfRequests]:
        """Return the received messages of the known incarnation.

        When a connection breaks, ZeroMQ makes another one, and messages in between are lost. So the worker is asked
        to cancel this router's requests; messages count again from its answer, its info, on.
        """
        payloads: list[bytes] = []
        while has_message(self.socket):
            payloads.append(self.socket.recv(zmq.NOBLOCK))
        if has_message(self._breaks):  # checked after the reads, so that no break before a message is missed
            while has_message(self._breaks):
                self._breaks.recv_multipart(zmq.NOBLOCK)
            payloads.clear()
            self._is_broken = True
            self.send(Ping(is_first=True))
        found: list[OfRequests] = []
        for payload in payloads:
            try:
                found += self._of(from_worker(payload))
            except WireError as error:
                log.warning("a message of worker %s is ignored: %s", self.name, error)
        return found

    def _of(self, sent: Batch) -> list[OfRequests]:
        if self.incarnation is None:
            self.incarnation = sent.incarnation
        if sent.incarnation != self.incarnation:
            return []
        self.heard = time.monotonic()
        others: list[OfRequests] = []
        for message in sent.messages:
            self._is_broken = self._is_broken and not isinstance(message, WorkerInfo)
            if isinstance(message, Heartbeat):
                self.backlog = message.backlog
                if self._known is not None:
                    self._known.backlog = message.backlog
            elif isinstance(message, StatsMessage):
                self.stats = message.stats
            elif isinstance(message, WorkerInfo) and self.info is None:
                self.info = message
                given = message.max_running, self.backlog, self.outstanding, message.fingerprint, message.role
                self._known = Known(self.name, *given)
                self._follow(message)
            elif not self._is_broken:  # also a second info: the worker has forgotten this router
                others.append(message)
        return others

    # -- its cache

    def _follow(self, info: WorkerInfo) -> None:
        """Start a thread that keeps a picture of the worker's cache: a snapshot may take long."""
        if self.follower is None and info.live:
            self.follower = Follower(info.live, info.replay, connect=self._connect)
            threading.Thread(target=self._run, args=(self.follower,), name="headwater-follower", daemon=True).start()

    def _run(self, follower: Follower) -> None:
        with follower:
            while not self._following.is_set():
                follower.follow(FOLLOW_SECONDS)

    def find(self, prompt: Prompt) -> Found:
        """Return the leading tokens of a prompt in this worker's picture."""
        return NOTHING if self.follower is None else self.follower.picture.look_up(prompt)

    @property
    def unit_bytes(self) -> int:
        """Bytes of the unit of the index key that a digest covers."""
        return 0 if self.info is None else self.info.unit_bytes

    def has_segment(self, digest: int) -> bool:
        """Return whether this worker's picture has a segment in memory."""
        return self.follower is not None and self.follower.picture.has_segment(digest)

    def stores_of(self, digest: int) -> list[str]:
        """Return the media of this worker's own stores that have a segment in its picture."""
        return [] if self.follower is None else self.follower.picture.stores_of(digest)

    # -- its work

    def candidate(self, prompt: Prompt) -> Candidate:
        """Return the worker as a candidate for a prompt."""
        assert self._known is not None
        return self._known.candidate(prompt, self.find(prompt))

    # -- its pool

    @property
    def as_peer(self) -> Peer | None:
        """The worker as a peer of its pool; None if others cannot read its memory."""
        if self.info is None or self.incarnation is None or not self.info.parts.address:
            return None
        return Peer(self.incarnation, self.info.parts)

    def tell(self, members: tuple[Peer, ...]) -> None:
        """Send the worker the members of its pool, if they have changed."""
        if members != self.members:
            self.members = members
            self.send(Members(members))

    def close(self) -> None:
        self._following.set()
        self.socket.disable_monitor()
        self._breaks.close()
        self.socket.close()
