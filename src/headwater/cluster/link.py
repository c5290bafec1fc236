"""Link of a router to one worker: its socket, heartbeats, the picture of its cache, and its open requests."""

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

FOLLOWED = 0.2  # seconds between looks at whether a follower is to end
NO_BACKLOG = Backlog(0, 0, 0, None, 0.0)

log = logging.getLogger("headwater.cluster")


class Link:
    """One worker, as a router knows it. All methods are for the router's thread."""

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
        self.members: tuple[Peer, ...] = ()  # of its pool, as it was told
        self._follower: Follower | None = None
        self._following = threading.Event()

    # -- messages

    def send(self, message: ToWorker) -> None:
        """Send a message; without a connection it is dropped, and the worker is lost once it was silent too long."""
        queued(self.socket, encode(message))

    def receive(self) -> list[OfRequests]:
        """Return the messages that are there, without those of another incarnation than the one that is known.

        When a connection breaks, ZeroMQ makes another one, and messages between are lost. So the worker is asked to
        cancel what it has of this router, and its info, in answer, is the first message that counts.
        """
        payloads: list[bytes] = []
        while has_message(self.socket):
            payloads.append(self.socket.recv(zmq.NOBLOCK))
        if has_message(self._breaks):  # asked after they were read: a break before any of them is seen
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
                log.warning("a message of worker %s is left out: %s", self.name, error)
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
            elif not self._is_broken:  # a second info, too: it says that the worker has forgotten this router
                others.append(message)
        return others

    # -- its cache

    def _follow(self, info: WorkerInfo) -> None:
        """Keep a picture of its cache, on a thread: a snapshot may take long."""
        if self._follower is None and info.live:
            self._follower = Follower(info.live, info.replay, connect=self._connect)
            threading.Thread(target=self._run, args=(self._follower,), name="headwater-follower", daemon=True).start()

    def _run(self, follower: Follower) -> None:
        with follower:
            while not self._following.is_set():
                follower.follow(FOLLOWED)

    def find(self, prompt: Prompt) -> Found:
        """Return how many leading tokens of a prompt this worker has, as far as its picture says."""
        return NOTHING if self._follower is None else self._follower.picture.look_up(prompt)

    @property
    def unit_bytes(self) -> int:
        """Bytes of the index key's unit, which a digest stands for."""
        return 0 if self.info is None else self.info.unit_bytes

    def has_segment(self, digest: int) -> bool:
        """Return whether a segment is stored here, as far as this worker's picture says."""
        return self._follower is not None and self._follower.picture.has_segment(digest)

    def stores_of(self, digest: int) -> list[str]:
        """Return the media of this worker's own stores that have a segment, likewise."""
        return [] if self._follower is None else self._follower.picture.stores_of(digest)

    # -- what it has to do

    def candidate(self, prompt: Prompt) -> Candidate:
        """Return the worker as a choice for a prompt sees it."""
        assert self._known is not None
        return self._known.candidate(prompt, self.find(prompt))

    # -- its pool

    @property
    def as_peer(self) -> Peer | None:
        """The worker, as others of its pool see it; None: they cannot read its memory."""
        if self.info is None or self.incarnation is None or not self.info.parts.address:
            return None
        return Peer(self.incarnation, self.info.parts)

    def tell(self, members: tuple[Peer, ...]) -> None:
        """Tell the worker who its pool is, if it was told otherwise."""
        if members != self.members:
            self.members = members
            self.send(Members(members))

    def close(self) -> None:
        self._following.set()
        self.socket.disable_monitor()
        self._breaks.close()
        self.socket.close()
