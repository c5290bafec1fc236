"""Assignment of requests to workers: one is chosen for each request, or the request waits until a worker accepts it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from headwater.cluster.cost import (
    Candidate,
    Choice,
    LeastCost,
    Outstanding,
    Prompt,
    holders,
    note_widespread,
    price_reads,
)
from headwater.cluster.disaggregation import decoder_after, decoders, keeper, may_be_apart, note_prefilled, prefiller
from headwater.cluster.links import Link, Links
from headwater.cluster.messages import Digests
from headwater.cluster.preparing import Preparing, may_be_prepared, needed_by
from headwater.cluster.routed import Convolving, Holder, Routed
from headwater.cluster.wire import Cancel, FollowMessage
from headwater.errors import EngineStopped
from headwater.events import FinishedEvent
from headwater.spec import ModelSpec

MAX_WAIT_SECONDS = 10.0  # of a request for a worker
MAX_ATTEMPTS = 4  # workers that a request is sent to, one after another


class Selectable(Holder, Protocol):
    """Worker that a selection chooses from."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of the unit of the index key that a digest covers."""

    def candidate(self, prompt: Prompt) -> Candidate:
        """Return the worker as a candidate for a prompt."""


Worker = TypeVar("Worker", bound=Selectable)


class Selected(NamedTuple, Generic[Worker]):
    """Worker of a request, and other workers that take part. Tokens."""

    link: Worker
    outstanding: Outstanding
    predicted: int  # leading tokens that the worker is expected to have
    holders: tuple[Worker, ...]  # from which it pulls
    is_loaded: bool  # whether it loads a part of the prompt, or segments, from its own store
    decoder: Worker | None  # that continues, if the worker only prefills


class Selection:
    """Selection of workers by a rule. All methods are for the router's thread."""

    def __init__(
        self, key: bytes, choice: Choice, model: Convolving, preparing: Preparing, counts: Counter[str]
    ) -> None:
        """`key`: secret key of digests. `counts`: of requests, by outcome."""
        self.choice = choice
        self._key, self._model, self._preparing, self._counts = key, model, preparing, counts

    def select(self, request: Routed, prompt: Prompt, links: Sequence[Worker]) -> Selected[Worker] | None:
        """Return the worker for a request; None: the request waits for its segments, which workers prepare."""
        candidates = [link.candidate(prompt) for link in links]
        if request.prefilled is not None and len(request.sent) == 1:  # it is handed over now
            note_prefilled(prompt, request.prefilled.name, candidates)
        price_reads(candidates)
        note_widespread(candidates)
        at = self._with_segments(request, prompt, links, candidates)
        if at is None:
            return None
        chosen = candidates[at]
        decoder = links[decoder_after(prompt, chosen, candidates)] if request.prefills else None
        outstanding = Outstanding(prompt, chosen.uncached(prompt), bool(request.sent))
        pulled_from = tuple(links[i] for i in holders(at, candidates))
        is_loaded = chosen.is_loaded or request.loads_segments
        return Selected(links[at], outstanding, chosen.reusable, pulled_from, is_loaded, decoder)

    def _with_segments(
        self, request: Routed, prompt: Prompt, links: Sequence[Worker], candidates: Sequence[Candidate]
    ) -> int | None:
        """Return the worker for a request; None: the request waits for its segments, which workers prepare."""
        if request.combiner in links:
            at = next(at for at, link in enumerate(links) if link is request.combiner)
            candidates[at].compose(prompt, request.composed)
            return at
        request.loads_segments = False
        chosen = self._chosen(request, prompt, candidates)
        if not may_be_prepared(request) or len(links) < 2 or not links[chosen].unit_bytes:
            return chosen
        digests = Digests(self._key, links[chosen].unit_bytes)
        needed = needed_by(request, digests, self._model.conv_taps)
        if not needed:
            return chosen
        combiners = decoders(candidates) if isinstance(self.choice, LeastCost) else [chosen]
        return self._preparing.combine(request, needed, prompt, links, candidates, combiners)

    def _chosen(self, request: Routed, prompt: Prompt, candidates: Sequence[Candidate]) -> int:
        """Return the worker for a request, and note in the request whether that worker only prefills."""
        if request.prefilled is not None and request.follower is not None:
            names = [one.name for one in candidates]
            if request.follower.name in names:
                request.prefills = False
                return names.index(request.follower.name)  # it has read the prefix
        alone = None if request.sent or not may_be_apart(request.generation) else prefiller(prompt, candidates)
        request.prefills = alone is not None
        if alone is not None:
            self._counts["prefilled_apart"] += 1
            return alone
        serving = decoders(candidates)
        return serving[self.choice.choose(prompt, [candidates[i] for i in serving])]

    def keeper(self, request: Routed, answer: Prompt, decoded: str, links: Sequence[Worker]) -> Worker | None:
        """Return the worker to prefill a finished answer that was handed over; None: neither accepts requests.

        `decoded`: the name of the worker that has decoded it.
        """
        assert request.prefilled is not None, "others cache their answers themselves"
        both = [link for link in links if link.name in (request.prefilled.name, decoded)]
        at = keeper(answer, [link.candidate(answer) for link in both], decoded)
        if at is None:
            return None
        self._counts["answers_apart"] += both[at].name != decoded
        return both[at]

    # -- notes to the rule

    def begun(self, request: Routed) -> None:
        """Note that a request's worker has sent its first token."""
        if request.link is not None and request.outstanding is not None:
            request.link.outstanding.begin(request.outstanding)
            if not request.prefills:  # else the rule has not chosen it
                self.choice.begun(request.outstanding.prompt, request.link.name)

    def forget(self, request: Routed) -> None:
        """Note that a request has left its worker."""
        if request.link is not None and request.outstanding is not None:
            request.link.outstanding.remove(request.outstanding)
            if not request.prefills:
                self.choice.ended(request.outstanding.prompt, request.link.name)
        request.outstanding = None


class NoWorker(EngineStopped):
    """No worker can accept a request, or continue it."""


class Assigning:
    """Requests on their way to workers. Methods are for the router's thread, except `is_needed`."""

    def __init__(
        self,
        key: bytes,
        model: ModelSpec,
        links: Links,
        choice: Choice,
        ids: Iterator[int],
        counts: Counter[str],
        refuse: Callable[[Routed, NoWorker], None],
    ) -> None:
        """`key`: secret key of digests. `ids`: of requests and orders. `refuse`: called with requests without a worker.

        `counts`: of requests, by outcome.
        """
        self._key, self._model, self._links, self._counts, self._refuse = key, model, links, counts, refuse
        self.patience = MAX_WAIT_SECONDS
        self._waiting: dict[int, Routed] = {}  # requests that no worker accepts now, by id
        self.preparing = Preparing(ids, lambda request: self.assign(request, None), counts)
        self.selection = Selection(key, choice, model, self.preparing, counts)

    @property
    def has_waiting(self) -> bool:
        """True if a request waits for a worker."""
        return bool(self._waiting)

    def is_needed(self, fingerprint: str) -> bool:
        """Return whether only a worker of this fingerprint can continue a request that waits. For any thread."""
        return any(request.fingerprint == fingerprint for request in tuple(self._waiting.values()))

    def assign(self, request: Routed, fingerprint: str | None) -> None:
        """Send a request to a worker: one of this fingerprint, if any of its answer was computed."""
        needed = fingerprint if request.sent or request.scored else None
        links = self._links.taking(needed)
        request.link = None
        lost = request.attempt - (request.prefilled is not None)
        if lost >= MAX_ATTEMPTS:
            self._refuse(request, NoWorker(f"{lost} workers were lost with the request, {MAX_ATTEMPTS} is the limit"))
            return
        if not links:
            self.wait(request, needed)
            return
        prompt = request.prompt(self._key, links[0].unit_bytes, self._model)
        selected = self.selection.select(request, prompt, links)
        if selected is None:  # its segments are prepared first
            return
        link, request.outstanding = selected.link, selected.outstanding
        link.outstanding.add(selected.outstanding)
        request.peers = tuple(one.incarnation or b"" for one in selected.holders)
        request.loads = selected.is_loaded
        self._unfollow(request, link if request.prefilled is not None else None)
        self.send(request, link, selected.predicted)
        decoder, peer, namespace = selected.decoder, link.as_peer, request.generation.namespace
        if decoder is not None and peer is not None:
            request.follower = decoder
            decoder.send(FollowMessage(request.id, request.attempt, namespace, request.key, peer.incarnation))

    def send(self, request: Routed, link: Link, reusable: int) -> None:
        """Send a request to a worker that is expected to have its first `reusable` tokens."""
        request.attempt += 1
        request.link, request.predicted, request.unassigned_since = link, reusable, None
        request.again = request.sent[-1] if request.sent else None
        link.open[request.id] = request
        self._counts["told_of_peers"] += bool(request.peers)
        self._counts["expected_loads"] += request.loads
        link.send(request.submission(time.monotonic()))

    def wait(self, request: Routed, fingerprint: str | None) -> None:
        """Keep a request until a worker of this fingerprint accepts it, or any worker if it is None."""
        request.unassigned_since = request.unassigned_since or time.monotonic()
        request.fingerprint = fingerprint
        self._waiting[request.id] = request

    def assign_waiting(self) -> None:
        """Assign the requests that wait; refuse those that have waited too long."""
        waiting, self._waiting = self._waiting, {}
        now = time.monotonic()
        for request in waiting.values():
            waited = now - (request.unassigned_since or now)
            if waited <= self.patience:
                self.assign(request, request.fingerprint)
            else:
                sent, which = len(request.sent), "with the same fingerprint " if request.sent else ""
                error = NoWorker(f"no worker {which}was there for {waited:.1f} s; {sent:,} tokens were sent")
                self._refuse(request, error)

    def move(self, link: Link) -> None:
        """Assign all requests of a worker again."""
        requests, link.open = link.open, {}
        self.preparing.lost(link)
        for request in requests.values():
            self.selection.forget(request)
        for request in requests.values():
            self._counts["resumed" if request.sent else "moved"] += 1
            self.assign(request, link.info.fingerprint if link.info else None)

    def forget(self, request: Routed) -> None:
        """Free what a request that ends holds at workers."""
        self._waiting.pop(request.id, None)
        self._unfollow(request)
        self.selection.forget(request)
        if request.link is not None:
            request.link.open.pop(request.id, None)

    def _unfollow(self, request: Routed, goes_to: Link | None = None) -> None:
        """Cancel the read of a request's prefix from the worker that prefills it, unless its reader has the request."""
        follower, request.follower = request.follower, None
        link = None if follower is None else self._links.get(follower.name)
        if link is not None and link is follower and link is not goes_to:
            link.send(Cancel(request.id, request.attempt))

    def keep_answer(self, request: Routed, link: Link, event: FinishedEvent) -> None:
        """Order the prefill of a handed-over answer where it costs least: its worker has decoded and not cached it."""
        kept = request.kept(request.prompt(self._key, link.unit_bytes, self._model), event)
        if kept is None or link.info is None:
            return
        answer, order = kept
        keeper = self.selection.keeper(request, answer, link.name, self._links.taking(link.info.fingerprint))
        if keeper is not None:
            keeper.send(order)
