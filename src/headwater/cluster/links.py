"""Links of a router to its workers: sockets, heartbeats, pictures of their caches, and the sums of their reports."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import zmq

from headwater.cache.stats import CacheStats
from headwater.cluster.cost import NOTHING, Candidate, Found, Known, OpenRequests, Prompt
from headwater.cluster.picture import Follower
from headwater.cluster.routed import Routed
from headwater.cluster.sockets import Client, Contact, Waker, has_message, opened, queued
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
from headwater.schedule.tier_load import TierStats
from headwater.threads import run_again
from headwater.tiers.store import PEER

FOLLOW_SECONDS = 0.2  # between checks whether a follower must end
JOIN_SECONDS = 5.0  # in which a new worker must have answered
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
        self.answered = 0  # requests that it ended
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
        def follow() -> None:
            while not self._following.is_set():
                follower.follow(FOLLOW_SECONDS)

        with follower:
            run_again(follow, self._following.is_set)

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


class Links(Mapping[str, Link]):
    """Links by their workers' names. Any thread may read facts and sums; all else is for the router's thread."""

    def __init__(self, identity: bytes, client: Client, heartbeat_timeout: float, waker: Waker) -> None:
        """`identity`: the router's. `heartbeat_timeout`: seconds of a worker's silence. `waker`: ends a poll."""
        self._identity, self._client, self.heartbeat_timeout = identity, client, heartbeat_timeout
        self._links: dict[str, Link] = {}
        self._by_socket: dict[zmq.Socket[bytes], Link] = {}
        self._waker, self._poller = waker, zmq.Poller()
        self._poller.register(waker, zmq.POLLIN)

    def __getitem__(self, name: str) -> Link:
        return self._links[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._links)

    def __len__(self) -> int:
        return len(self._links)

    # -- membership

    def add(self, name: str, contact: Contact) -> None:
        """Add a worker, and ask it for its info."""
        self._links[name] = link = Link(name, contact, self._identity, self._client)
        self._by_socket[link.socket] = link
        self._poller.register(link.socket, zmq.POLLIN)
        link.send(Ping(is_first=True))

    def remove(self, name: str) -> Link | None:
        """Remove a worker, and close its socket; return its link, or None if it is unknown."""
        link = self._links.pop(name, None)
        if link is not None:
            del self._by_socket[link.socket]
            self._poller.unregister(link.socket)
            link.close()
        return link

    def drain(self, name: str) -> None:
        """Exclude a worker from new requests."""
        if name in self._links:
            self._links[name].draining = True

    def ping(self, now: float) -> list[tuple[Link, float]]:
        """Send heartbeats; return the workers that were silent too long, with the seconds, and send them none."""
        silent = []
        for link in self._links.values():
            silence = now - link.heard
            if silence > (self.heartbeat_timeout if link.info else JOIN_SECONDS):
                silent.append((link, silence))
            else:
                link.send(Ping())
        return silent

    def tell_members(self) -> None:
        """Send workers the members of their pools that have changed."""
        pools: defaultdict[str, list[Peer]] = defaultdict(list)
        for link in self._links.values():
            if link.info is not None and (peer := link.as_peer) is not None:
                pools[link.info.fingerprint].append(peer)
        for link in self._links.values():
            if link.info is not None:
                link.tell(tuple(pools[link.info.fingerprint]))

    def taking(self, fingerprint: str | None) -> list[Link]:
        """Return the workers that accept a request: draining ones only if no other has the needed fingerprint."""
        known = [
            link
            for link in self._links.values()
            if link.info is not None and fingerprint in (None, link.info.fingerprint)
        ]
        return [link for link in known if not link.draining] or (known if fingerprint is not None else [])

    # -- messages

    def poll(self, milliseconds: int) -> list[Link]:
        """Wait for messages or the waker; return the workers that have sent messages."""
        found = [self._by_socket[socket] for socket, _ in self._poller.poll(milliseconds) if socket in self._by_socket]
        self._waker.clear()
        return found

    # -- from any thread

    @property
    def infos(self) -> list[WorkerInfo]:
        """Facts about the workers that have shown them."""
        return [link.info for link in tuple(self._links.values()) if link.info is not None]

    def wait_for(self, workers: int, seconds: float, interval: float) -> bool:
        """Wait until at least `workers` workers are known; False if they are not within `seconds`."""
        end = time.monotonic() + seconds
        while len(self.infos) < workers:
            if time.monotonic() > end:
                return False
            time.sleep(interval)
        return True

    def state(self) -> list[dict[str, Any]]:
        """Return the workers for /health."""
        return [
            {
                "name": link.name,
                "fingerprint": link.info.fingerprint[:12] if link.info else None,
                "process": link.info.process if link.info else None,
                "role": link.info.role.value if link.info else None,
                "state": "draining" if link.draining else "up" if link.info else "joining",
                "open": len(link.open),
                "answered": link.answered,
                "running": link.backlog.running,
                "waiting": link.backlog.waiting,
                "pulled_bytes": pulled_bytes(link.stats),
            }
            for link in tuple(self._links.values())
        ]

    def stats(self) -> EngineStats:
        """Return the sums of all workers' gauges and counters."""
        found = [link.stats for link in tuple(self._links.values()) if link.stats is not None]
        if not found:
            return zero(EngineStats, cache=zero(CacheStats), tiers=())
        return replace(summed(found), tiers=pulls_of(found))


# -- sums of workers' gauges and counters

PULL_COUNTERS = ("read", "bytes_read", "corrupt", "errors", "sent", "bytes_shared", "bytes_networked")

Summed = TypeVar("Summed")


def summed(found: Sequence[Summed]) -> Summed:
    """Return the sum of dataclasses of one type, number by number; tuples are omitted."""
    first = found[0]
    sums: dict[str, Any] = {}
    for one in fields(first):  # type: ignore[arg-type]
        values = [getattr(each, one.name) for each in found]
        sums[one.name] = (
            () if isinstance(values[0], tuple) else summed(values) if is_dataclass(values[0]) else sum(values)
        )
    return type(first)(**sums)


def pulls_of(found: Iterable[EngineStats]) -> tuple[TierStats, ...]:
    """Return the sums of workers' pulls, as one tier; none without any.

    Other tiers are omitted: workers may share them.
    """
    peers = [tier for stats in found for tier in stats.tiers if tier.kind == PEER]
    if not peers:
        return ()
    work = {name: sum(getattr(one, name) for one in peers) for name in PULL_COUNTERS}
    return (replace(peers[0], **work, usable=any(one.usable for one in peers)),)


def pulled_bytes(stats: EngineStats | None) -> dict[str, int]:
    """Return the bytes that a worker has pulled, by transport; none if it pulls nothing."""
    ways = (tier.pulled_by_way() for tier in (stats.tiers if stats is not None else ()))
    return next(filter(None, ways), {})


def zero(kind: type[Summed], **others: Any) -> Summed:
    """Return a dataclass of numbers, all of them 0 but `others`."""
    numbers = {one.name: 0 for one in fields(kind)}  # type: ignore[arg-type]
    return kind(**{**numbers, **others})
