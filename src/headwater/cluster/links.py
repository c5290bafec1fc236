"""Links of a router to all its workers: membership, heartbeats, and the sums of their reports."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import zmq

from headwater.cache.stats import CacheStats
from headwater.cluster.link import Link
from headwater.cluster.sockets import Client, Contact, Waker
from headwater.cluster.wire import Peer, Ping, WorkerInfo
from headwater.engine.meter import EngineStats
from headwater.schedule.tier_load import TierStats
from headwater.tiers.store import PEER

JOIN_SECONDS = 5.0  # in which a new worker must have answered


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
                "requests": len(link.open),
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
