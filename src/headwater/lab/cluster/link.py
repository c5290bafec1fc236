"""Simulated requests and workers with the interface of the router's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from headwater.cache.segments.compose import composed_key
from headwater.cache.segments.store import SegmentKey
from headwater.cluster.cost import Candidate, OpenRequests, Prompt
from headwater.cluster.digests import Digests
from headwater.cluster.routed import Routed
from headwater.cluster.wire import Cancel, Prepare, PreparedMessage
from headwater.lab.cluster.pulls import SimulatedPulls
from headwater.lab.cluster.worker import SimulatedWorker
from headwater.lab.serving import Lost
from headwater.lab.setup import Setup, as_reused
from headwater.request import Generation, SamplingParams, Span
from headwater.schedule.sequence import tokens_of
from headwater.traces.request import Request, Trace


@dataclass(eq=False)
class Visit:
    """Request of the trace, and its state in the router."""

    request: Request
    key: bytes  # of the index
    composed: bytes | None  # likewise, if it is composed of its segments
    prompt: Prompt
    routed: Routed
    followed: int | None = None  # number of its prefill, if it is followed
    first_token: float | None = None  # seconds: when a worker computed it
    lost: Lost | None = None  # the part that a failed worker had computed
    failures: int = 0  # number of its workers that failed

    @property
    def sent(self) -> Request:
        """The request for its worker: without its answer, if that worker only prefills, or must not cache it."""
        one = self.request
        if self.routed.prefills:
            return replace(one, output_tokens=1, known_tokens=one.prompt_tokens, ended=False)
        return one if self.routed.prefilled is None else replace(one, known_tokens=one.prompt_tokens)

    def unfollow(self) -> None:
        """Cancel the read of its prefix from the worker that prefills it."""
        follower, self.routed.follower = self.routed.follower, None
        if self.followed is not None and isinstance(follower, SimulatedLink) and follower.pulls is not None:
            follower.pulls.unfollow(self.followed)
        self.followed = None


def visit_of(
    request: Request, trace: Trace, setup: Setup, digests: Digests, number: int, now: float, has_turns: bool
) -> Visit:
    """Return a request of the trace as a router knows it, which arrives `now`.

    `number`: the router's. `has_turns`: whether its session has other requests.
    """
    reused = as_reused(request, setup.reuse)
    key = trace.key(reused, reused.prompt_tokens)
    blocks = digests.prefix(reused.namespace, key)
    session = request.session if has_turns else ""
    segments, composed = request.segments if setup.composes else (), None
    ids = trace.ids(request, Span(0, request.prompt_tokens)) if segments else b""
    if segments:
        composed = composed_key(ids, segments, request.fidelity, setup.profile.state.conv_taps)
    of_composed = [] if composed is None else digests.prefix(reused.namespace, composed)
    unit_tokens = digests.unit_bytes // trace.element_bytes * trace.block_tokens
    prompt = Prompt(request.prompt_tokens, blocks, unit_tokens, session, of_composed)
    params = SamplingParams(max_tokens=request.output_tokens)
    generation = Generation(tokens_of(ids), params, request.namespace, segments=segments, fidelity=request.fidelity)
    return Visit(request, key, composed, prompt, Routed(number, generation, ignore, now, ids))


def ignore(event: object) -> None:
    """Ignore an event: the simulation answers itself."""


@dataclass(eq=False)
class SimulatedLink:
    """Link to one worker. The router learns of its caches by events, and of all else at once."""

    worker: SimulatedWorker
    pulls: SimulatedPulls | None
    clock: Callable[[], float]
    wake: Callable[[], None]  # called when the worker has an order
    named: dict[bytes, SimulatedPulls]  # memories of all workers, by their names
    orders: dict[int, SegmentKey] = field(default_factory=dict)  # open ones

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def incarnation(self) -> bytes:
        return self.worker.name.encode()

    @property
    def outstanding(self) -> OpenRequests:
        return self.worker.outstanding

    @property
    def unit_bytes(self) -> int:
        return self.worker.layout.unit_bytes

    def candidate(self, prompt: Prompt) -> Candidate:
        return self.worker.candidate(prompt, self.clock())

    def has_segment(self, digest: int) -> bool:
        return self.worker.picture.has_segment(digest)

    def stores_of(self, digest: int) -> list[str]:
        return self.worker.picture.stores_of(digest)

    def send(self, message: Prepare | Cancel) -> None:
        """Handle an order; orders are never cancelled."""
        assert isinstance(message, Prepare), "clients never leave, and requests have no deadlines"
        key, scheduler = SegmentKey.decoded(message.segment), self.worker.serving.scheduler
        self.orders[message.request] = key
        if self.pulls is not None and message.peers:
            self.pulls.expect(key, self.named[message.peers[0]])
        if key not in scheduler.wanted and scheduler.composer.find(key) is None:
            scheduler.wanted.append(key)
        self.wake()

    def take_ended(self) -> list[PreparedMessage]:
        """Return the ends of orders since the last time."""
        scheduler, ended = self.worker.serving.scheduler, []
        for number, key in list(self.orders.items()):
            stored = scheduler.composer.find(key)
            if stored.ready if stored is not None else key not in scheduler.wanted:
                del self.orders[number]
                ended.append(PreparedMessage(number, 0, stored is not None))
        return ended
