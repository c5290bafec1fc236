"""Segments that a router has prepared before a request is composed of them: computed by several workers, and pulled.

A request waits here until the worker that combines has all of its segments, or cannot get one: it computes that itself,
as it does all segments that it lacks. So no worker that is lost meanwhile loses a request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headwater.cache.segments.compose import METHODS, usable, whole_segments
from headwater.cache.segments.store import SegmentKey
from headwater.cluster.choice import Candidate, OpenRequests, Outstanding, Prompt
from headwater.cluster.digests import TOKEN_BYTES, Digests
from headwater.cluster.link import Routed
from headwater.cluster.segment_dispatch import Dispatch, Segment, dispatch
from headwater.cluster.wire import Cancel, Prepare, PreparedMessage

LATE = 4.0  # times the expected seconds, and LATE_SECONDS, for which a request waits for its segments
LATE_SECONDS = 2.0


class Holder(Protocol):
    """Worker, as preparations see it."""

    @property
    def name(self) -> str: ...

    @property
    def incarnation(self) -> bytes | None: ...

    @property
    def outstanding(self) -> OpenRequests: ...

    def has_segment(self, digest: int) -> bool:
        """Return whether a segment is stored there."""

    def send(self, message: Prepare | Cancel) -> None:
        """Give an order, or take it back; `Preparing.prepared` is called later with its end."""


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
    """Return the segments that a prompt is composed of, each once, as its worker chooses them without a prefix."""
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
    """A segment that a worker is to have in memory, and who waits for it."""

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


class Preparing:
    """Preparations of a router. All methods are for the router's thread."""

    def __init__(self, numbers: Iterator[int], ready: Callable[[Routed], None], counts: Counter[str]) -> None:
        """`numbers`: of requests and orders. `ready`: called with each request that its combining worker can take."""
        self._numbers, self._ready, self._counts = numbers, ready, counts
        self._orders: dict[int, Order] = {}
        self._preparations: dict[int, Preparation] = {}  # by request

    def combine(
        self,
        request: Routed,
        needed: Sequence[Needed],
        prompt: Prompt,
        links: Sequence[Holder],
        candidates: Sequence[Candidate],
        combiners: Sequence[int],
    ) -> int | None:
        """Return the cheapest of some workers to combine a prompt's segments, if the request can go there now.

        None: its segments are prepared, and `ready` follows.
        """
        underway = {(order.link.name, order.needed.digest) for order in self._orders.values()}

        def holders(one: Needed) -> list[int]:
            places = ((at, link.name, link.has_segment(one.digest)) for at, link in enumerate(links))
            return [at for at, name, has in places if has or (name, one.digest) in underway]

        segments = [Segment(one.start, one.tokens, one.interior, holders(one)) for one in needed]
        found = dispatch(prompt, segments, candidates, combiners)
        one = candidates[found.combiner]
        one.composed = found.interiors
        if found.is_alone:
            return found.combiner
        self._begin(request, Assignment(found, needed, links), Outstanding(prompt, one.uncached(prompt)))
        return None

    # -- one request

    def _begin(self, request: Routed, assigned: Assignment, outstanding: Outstanding) -> None:
        """Have a request's segments prepared. `outstanding`: its prompt at the worker that combines."""
        chosen, combiner = assigned.dispatch, assigned.links[assigned.dispatch.combiner]
        found = [*chosen.builders, *chosen.pulled]
        combiner.outstanding.add(outstanding)
        until = time.monotonic() + LATE * chosen.seconds + LATE_SECONDS
        left = {assigned.needed[i].digest for i in found}
        self._preparations[request.id] = one = Preparation(request, combiner, outstanding, until, left)
        request.built |= {assigned.needed[i].digest: assigned.needed[i].interior for i in chosen.builders}
        apart = {assigned.needed[i].digest for i, at in chosen.builders.items() if assigned.links[at] is not combiner}
        request.built_apart |= apart
        self._counts["combined"] += 1
        self._counts["segments_apart"] += len(apart)
        for i, at in [*chosen.builders.items(), *chosen.pulled.items()]:
            self._have(one, assigned.needed[i], assigned.links[at])

    def _have(self, one: Preparation, needed: Needed, link: Holder) -> None:
        """Have a worker build a segment, or take it that it has it, and then the one that combines pull it."""
        if link is one.combiner:
            self._order(one, needed, link, (), lambda _: self._is_there(one, needed))
        else:
            self._order(one, needed, link, (), lambda stored: self._pull(one, needed, link, stored))

    def _pull(self, one: Preparation, needed: Needed, link: Holder, stored: bool) -> None:
        """Have the combining worker pull a segment from another one, or build it if that does not have it."""
        if self._preparations.get(one.request.id) is not one:
            return
        peers = (link.incarnation,) if stored and link.incarnation is not None else ()
        self._order(one, needed, one.combiner, peers, lambda _: self._is_there(one, needed))

    def _is_there(self, one: Preparation, needed: Needed) -> None:
        one.left.discard(needed.digest)
        if not one.left and self._preparations.get(one.request.id) is one:
            self._end(one)
            self._ready(one.request)

    def _end(self, one: Preparation) -> None:
        del self._preparations[one.request.id]
        one.combiner.outstanding.remove(one.outstanding)
        one.request.combiner = one.combiner

    def _order(
        self, one: Preparation, needed: Needed, link: Holder, peers: tuple[bytes, ...], then: Callable[[bool], None]
    ) -> None:
        """Have a worker prepare a segment, unless it does so already, and call `then`."""
        for order in self._orders.values():
            if order.link is link and order.needed.digest == needed.digest:
                order.waiting[one.request.id] = then
                return
        number = next(self._numbers)
        uncached = 0 if peers or link.has_segment(needed.digest) else needed.tokens
        order = Order(link, needed, Outstanding(Prompt(needed.tokens), uncached), {one.request.id: then})
        link.outstanding.add(order.outstanding)
        self._orders[number] = order
        link.send(Prepare(number, 0, needed.key.encoded, peers))

    # -- what becomes of them

    def prepared(self, message: PreparedMessage) -> None:
        """Take a worker's word that it has a segment, or cannot have it."""
        order = self._orders.pop(message.request, None)
        if order is not None:
            self._close(order, message.stored)

    def _close(self, order: Order, stored: bool) -> None:
        order.link.outstanding.remove(order.outstanding)
        for then in order.waiting.values():
            then(stored)

    def lost(self, link: Holder) -> None:
        """Let requests go on without a worker: another one combines, or the one that does builds what it lacks."""
        lost = [self._orders.pop(n) for n in [n for n, order in self._orders.items() if order.link is link]]
        for one in [one for one in self._preparations.values() if one.combiner is link]:
            self._end(one)
            self._ready(one.request)
        for order in lost:
            self._close(order, False)

    def cancel(self, request: Routed) -> None:
        """Give up a request, and the segments that no other one waits for."""
        one = self._preparations.get(request.id)
        if one is None:
            return
        self._end(one)
        for number, order in list(self._orders.items()):
            if order.waiting.pop(request.id, None) is not None and not order.waiting:
                del self._orders[number]
                order.link.outstanding.remove(order.outstanding)
                order.link.send(Cancel(number, 0))

    def take_late(self, now: float) -> None:
        """Let requests go on that have waited too long, or whose time is over."""
        for one in list(self._preparations.values()):
            deadline = one.request.generation.deadline
            if now > one.until or (deadline is not None and now > one.request.began + deadline):
                self._counts["segments_late"] += 1
                self.cancel(one.request)
                self._ready(one.request)
