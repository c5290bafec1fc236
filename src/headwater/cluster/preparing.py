"""Preparation of a request's segments by several workers, before one of them composes the prompt.

A request waits here until the worker that combines has all of its segments. That worker computes those that it cannot
get itself, so that a lost worker loses no request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from headwater.cache.segments.compose import METHODS, usable, whole_segments
from headwater.cache.segments.store import SegmentKey
from headwater.cluster.cost import Candidate, Outstanding, Prompt
from headwater.cluster.messages import TOKEN_BYTES, Digests
from headwater.cluster.routed import Holder, Routed
from headwater.cluster.segment_dispatch import Dispatch, Segment, dispatch
from headwater.cluster.wire import Cancel, Prepare, PreparedMessage

# a request waits for its segments for WAIT_FACTOR times the expected seconds, and WAIT_SECONDS
WAIT_FACTOR = 4.0
WAIT_SECONDS = 2.0
MAX_SEGMENTS = 256  # of a request at other workers: each is a message, and work for the router's thread
MAX_OPEN_ORDERS = 1024  # of all requests


@dataclass(frozen=True, slots=True)
class Needed:
    """A segment that a prompt is composed of."""

    start: int  # in the prompt
    key: SegmentKey
    digest: int

    @property
    def tokens(self) -> int:
        """Tokens to compute, if it is built."""
        return self.key.tokens - self.key.widths.tail

    @property
    def interior(self) -> int:
        return self.key.widths.interior(self.key.tokens)


def needed_by(request: Routed, digests: Digests, conv_taps: int) -> list[Needed]:
    """Return the segments that a prompt without a cached prefix is composed of, each once."""
    generation = request.generation
    widths = METHODS[generation.fidelity].widths(conv_taps)
    whole = whole_segments(request.key, generation.segments, generation.fidelity)
    reused = (span for span in generation.segments if span not in whole)
    found: dict[SegmentKey, Needed] = {}
    for span in usable(reused, widths, 0, len(generation.prompt) - 1):
        ids = request.key[TOKEN_BYTES * span.start : TOKEN_BYTES * span.end]
        key = SegmentKey(generation.namespace, ids, widths)
        if key not in found:
            found[key] = Needed(span.start, key, digests.segment(key.as_change))
    return list(found.values())


def may_be_prepared(request: Routed) -> bool:
    """Return whether other workers may compute a request's segments: those of a namespace stay where they are used."""
    generation = request.generation
    is_composed = bool(generation.segments) and generation.params.prompt_logprobs is None
    return is_composed and not generation.namespace and not request.sent


@dataclass(frozen=True, slots=True)
class Assignment:
    """Dispatch of a request's segments, and the workers that its numbers stand for."""

    dispatch: Dispatch
    needed: Sequence[Needed]
    links: Sequence[Holder]


@dataclass(eq=False, slots=True)
class Order:
    """Order to a worker to have a segment in memory, and the requests that wait for it."""

    link: Holder
    needed: Needed
    outstanding: Outstanding
    waiting: dict[int, Callable[[bool], None]] = field(default_factory=dict)  # by request


@dataclass(eq=False, slots=True)
class Preparation:
    """A request whose segments are prepared."""

    request: Routed
    combiner: Holder
    outstanding: Outstanding  # of its prompt, at the worker that combines
    until: float  # seconds of a monotonic clock
    left: set[int]  # digests of the segments that are not there yet
    orders: list[int] = field(default_factory=list)  # numbers of those that it waits for, or has waited for


class Preparing:
    """Preparations of a router. All methods are for the router's thread."""

    def __init__(self, numbers: Iterator[int], ready: Callable[[Routed], None], counts: Counter[str]) -> None:
        """`numbers`: of requests and orders. `ready`: called with each request that its combining worker can take."""
        self._numbers, self._ready, self._counts = numbers, ready, counts
        self.orders: dict[int, Order] = {}
        self._by_segment: dict[tuple[str, int], int] = {}  # numbers of orders, by their workers' names and digests
        self.preparations: dict[int, Preparation] = {}  # by request

    def combine(
        self,
        request: Routed,
        needed: Sequence[Needed],
        prompt: Prompt,
        links: Sequence[Holder],
        candidates: Sequence[Candidate],
        combiners: Sequence[int],
    ) -> int | None:
        """Return the cheapest of some workers to combine a prompt's segments, if the request can be sent there now.

        None: its segments are prepared first, and `ready` is called later. Beyond `MAX_SEGMENTS` and `MAX_OPEN_ORDERS`
        one worker computes all segments that it lacks.
        """
        may_pull = len(needed) <= MAX_SEGMENTS and len(self.orders) + len(needed) <= MAX_OPEN_ORDERS
        priced = candidates if may_pull else [replace(one, pull=None) for one in candidates]
        segments = [
            Segment(one.start, one.tokens, one.interior, self._holders(one.digest, links), _stores(one.digest, links))
            for one in needed
        ]
        found = dispatch(prompt, segments, priced, combiners)
        one = candidates[found.combiner]
        one.compose(prompt, found.interiors)
        request.loads_segments = bool(found.loaded)
        if found.is_alone:
            return found.combiner
        self._begin(request, Assignment(found, needed, links), Outstanding(prompt, one.uncached(prompt)))
        return None

    def _holders(self, digest: int, links: Sequence[Holder]) -> list[int]:
        """Return the workers that have a segment, or are about to."""
        ordered = self._by_segment
        return [at for at, link in enumerate(links) if link.has_segment(digest) or (link.name, digest) in ordered]

    # -- one request

    def _begin(self, request: Routed, assigned: Assignment, outstanding: Outstanding) -> None:
        """Have a request's segments prepared. `outstanding`: its prompt at the worker that combines."""
        chosen, combiner = assigned.dispatch, assigned.links[assigned.dispatch.combiner]
        found = [*chosen.builders, *chosen.pulled]
        combiner.outstanding.add(outstanding)
        until = time.monotonic() + WAIT_FACTOR * chosen.seconds + WAIT_SECONDS
        left = {assigned.needed[i].digest for i in found}
        self.preparations[request.id] = one = Preparation(request, combiner, outstanding, until, left)
        request.composed = chosen.interiors
        request.built |= {assigned.needed[i].digest: assigned.needed[i].interior for i in chosen.builders}
        apart = {assigned.needed[i].digest for i, at in chosen.builders.items() if assigned.links[at] is not combiner}
        request.built_apart |= apart
        self._counts["combined"] += 1
        self._counts["segments_apart"] += len(apart)
        for i, at in [*chosen.builders.items(), *chosen.pulled.items()]:
            self._have(one, assigned.needed[i], assigned.links[at])

    def _have(self, one: Preparation, needed: Needed, link: Holder) -> None:
        """Have a worker build a segment unless it has it, and then the combining worker pull it."""
        if link is one.combiner:
            self._order(one, needed, link, (), lambda _: self._is_there(one, needed))
        else:
            self._order(one, needed, link, (), lambda stored: self._pull(one, needed, link, stored))

    def _pull(self, one: Preparation, needed: Needed, link: Holder, stored: bool) -> None:
        """Have the combining worker pull a segment from another one, or build it if that does not have it."""
        if self.preparations.get(one.request.id) is not one:
            return
        peers = (link.incarnation,) if stored and link.incarnation is not None else ()
        self._order(one, needed, one.combiner, peers, lambda _: self._is_there(one, needed))

    def _is_there(self, one: Preparation, needed: Needed) -> None:
        one.left.discard(needed.digest)
        if not one.left and self.preparations.get(one.request.id) is one:
            self._end(one)
            self._ready(one.request)

    def _end(self, one: Preparation) -> None:
        del self.preparations[one.request.id]
        one.combiner.outstanding.remove(one.outstanding)
        one.request.combiner = one.combiner

    def _order(
        self, one: Preparation, needed: Needed, link: Holder, peers: tuple[bytes, ...], then: Callable[[bool], None]
    ) -> None:
        """Have a worker prepare a segment, unless it does so already, and call `then`."""
        number = self._by_segment.get((link.name, needed.digest))
        if number is not None:
            one.orders.append(number)
            self.orders[number].waiting[one.request.id] = then
            return
        number = next(self._numbers)
        one.orders.append(number)
        uncached = 0 if peers or link.has_segment(needed.digest) else needed.tokens
        order = Order(link, needed, Outstanding(Prompt(needed.tokens), uncached), {one.request.id: then})
        link.outstanding.add(order.outstanding)
        self.orders[number] = order
        self._by_segment[link.name, needed.digest] = number
        link.send(Prepare(number, 0, needed.key.encoded, peers))

    # -- ends of orders

    def prepared(self, message: PreparedMessage) -> None:
        """Handle a worker's report that it has a segment, or cannot have it."""
        order = self._take(message.request)
        if order is not None:
            for then in order.waiting.values():
                then(message.stored)

    def _take(self, number: int) -> Order | None:
        """Close an open order and return it; None if it is closed."""
        order = self.orders.pop(number, None)
        if order is not None:
            del self._by_segment[order.link.name, order.needed.digest]
            order.link.outstanding.remove(order.outstanding)
        return order

    def lost(self, link: Holder) -> None:
        """Continue requests without a lost worker: another one combines, or the combining one builds the segments."""
        taken = (self._take(n) for n in [n for n, order in self.orders.items() if order.link is link])
        lost = [order for order in taken if order is not None]
        for one in [one for one in self.preparations.values() if one.combiner is link]:
            self._end(one)
            self._ready(one.request)
        for order in lost:
            for then in order.waiting.values():
                then(False)

    def cancel(self, request: Routed) -> None:
        """Cancel a request, and the orders that no other request waits for."""
        one = self.preparations.get(request.id)
        if one is None:
            return
        self._end(one)
        for number in one.orders:
            order = self.orders.get(number)
            if order is not None and order.waiting.pop(request.id, None) is not None and not order.waiting:
                self._take(number)
                order.link.send(Cancel(number, 0))

    def take_late(self, now: float) -> None:
        """Continue requests that have waited too long, or are past their deadlines."""
        for one in list(self.preparations.values()):
            deadline = one.request.generation.deadline
            if now > one.until or (deadline is not None and now > one.request.began + deadline):
                self._counts["segments_late"] += 1
                self.cancel(one.request)
                self._ready(one.request)


def _stores(digest: int, links: Sequence[Holder]) -> dict[int, Sequence[str]]:
    """Return the media of the stores that have a segment, by worker."""
    return {at: media for at, link in enumerate(links) if (media := link.stores_of(digest))}
