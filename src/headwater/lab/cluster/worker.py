"""Simulated requests and workers with the router's interface: the lab's server, and its picture from KV events."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from headwater.cache.changes import ChangeLog
from headwater.cache.segments.compose import composed_key
from headwater.cache.segments.store import SegmentKey
from headwater.cluster.cost import Candidate, Known, OpenRequests, Outstanding, Prompt, Role
from headwater.cluster.ledger import EventStream, Ledger, Tokens
from headwater.cluster.messages import Digests, Message
from headwater.cluster.picture import Picture
from headwater.cluster.routed import Routed
from headwater.cluster.store_ledger import StoreLedger
from headwater.cluster.wire import Cancel, Prepare, PreparedMessage
from headwater.engine.meter import PROBED, Meter
from headwater.errors import ConfigError
from headwater.lab.cluster.pulls import SimulatedPulls
from headwater.lab.row import Share
from headwater.lab.serving import Engine, Lost, OneStep, Serving
from headwater.lab.setup import Cluster, Setup, as_reused
from headwater.lab.tally import Ideal, Outcome, Tally
from headwater.lab.tiers import LabStore
from headwater.request import Generation, SamplingParams, Span
from headwater.schedule.replayed import ReplayedAnswer
from headwater.schedule.sequence import tokens_of
from headwater.tiers.changes import StoreLog
from headwater.traces.request import Request, Trace


@dataclass(frozen=True, slots=True)
class Sent:
    """A request at its worker. Seconds, tokens."""

    outstanding: Outstanding
    at: float
    predicted: int  # cached at its worker by the router's picture
    matched: int  # cached there when the request arrived


@dataclass
class Inbox:
    """Arrivals of a worker: the requests that were sent to it. `next_due`: time of the router's next request."""

    next_due: Callable[[], float | None]
    answered: Callable[[Request, float], None]
    _sent: deque[tuple[float, Request]] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._sent)

    def put(self, at: float, request: Request) -> None:
        self._sent.append((at, request))

    def due(self) -> float | None:
        """Return the earliest time of the next request: one that was sent, or the router's next one."""
        return self._sent[0][0] if self._sent else self.next_due()

    def take(self) -> Request:
        return self._sent.popleft()[1]


def roles(cluster: Cluster) -> list[Role]:
    """Return the roles of a cluster's workers. Raises ConfigError if no worker can prefill for another."""
    if not cluster.prefill:
        return [Role.BOTH] * cluster.workers
    if cluster.prefill >= cluster.workers or cluster.network is None:
        shown = "off" if cluster.network is None else str(cluster.network)
        raise ConfigError(
            f"prefill is {cluster.prefill} of {cluster.workers} workers with pulls {shown}: "
            "others must decode, and pull from them"
        )
    return [Role.PREFILL] * cluster.prefill + [Role.DECODE] * (cluster.workers - cluster.prefill)


class SimulatedWorker:
    """One worker of a simulated cluster."""

    def __init__(
        self,
        number: int,
        role: Role,
        trace: Trace,
        setup: Setup,
        engine: Engine,
        digests: Digests,
        clock: Callable[[], float],
        ordered: Callable[[int], None],
    ) -> None:
        """`clock`: of the cluster. `ordered`: called with the number of a worker that has an order."""
        assert setup.cluster is not None
        self.number, self.name, self.role = number, f"w{number}", role
        self._trace, self._setup, self._clock, self._ordered = trace, setup, clock, ordered
        self._delay = setup.cluster.event_delay  # seconds until a change of the cache is known to the router
        self.pulls: SimulatedPulls | None = None
        self.named: dict[bytes, SimulatedPulls] = {}  # memories of all workers, by their names
        self.orders: dict[int, SegmentKey] = {}  # open ones
        self._log = ChangeLog()
        self.serving = Serving(trace, setup, engine, changes=self._log)
        self.layout, self._max_running = self.serving.layout, engine.max_running
        ledger, self._stored = Ledger(self.layout, digests, Tokens()), StoreLog()
        self._store = StoreLedger(LabStore.medium, digests, self.layout.unit_tokens)
        self._stream = EventStream(ledger, self.incarnation, lambda: self.serving.now, [self._store])
        self._on_the_way: deque[tuple[float, Message]] = deque()  # and when each is known
        self.picture, self._meter = Picture(), Meter(self.layout.flops)
        self._meter.probed(self.serving.prefill_seconds(PROBED))
        self.picture.apply(self._stream.begin([]))
        self.open: dict[int, Sent] = {}  # by the request's identity
        self.outstanding = OpenRequests()
        self.outcomes: list[Outcome] = []
        self.wakes: float | None = None  # time at which it looks for its next work
        self.has_failed = False

    def watch(self, inbox: Inbox, tally: Tally, ideal: Ideal) -> None:
        """Serve the requests of `inbox`, and count them in `tally`."""
        self.inbox, self.tally = inbox, tally
        self.serving.ideal = ideal

    def publish_store(self) -> None:
        """Publish the content of its store, too, if it has one."""
        tiers = self.serving.tiers
        if tiers is not None and tiers.store is not None:
            tiers.store.changes = self._stored
            self._stored.open()

    # -- for the router

    @property
    def incarnation(self) -> bytes:
        return self.name.encode()

    @property
    def unit_bytes(self) -> int:
        return self.layout.unit_bytes

    def candidate(self, prompt: Prompt) -> Candidate:
        while self._on_the_way and self._on_the_way[0][0] <= self._clock():
            self.picture.apply(self._on_the_way.popleft()[1])
        backlog = self._meter.backlog(self.serving.scheduler)
        known = Known(self.name, self._max_running, backlog, self.outstanding, role=self.role)
        return known.candidate(prompt, self.picture.look_up(prompt))

    def has_segment(self, digest: int) -> bool:
        return self.picture.has_segment(digest)

    def stores_of(self, digest: int) -> list[str]:
        return self.picture.stores_of(digest)

    def send(self, message: Prepare | Cancel) -> None:
        """Handle an order; orders are never cancelled."""
        assert isinstance(message, Prepare), "clients never leave, and requests have no deadlines"
        key, scheduler = SegmentKey.decoded(message.segment), self.serving.scheduler
        self.orders[message.request] = key
        if self.pulls is not None and message.peers:
            self.pulls.expect(key, self.named[message.peers[0]])
        if key not in scheduler.wanted and scheduler.composer.find(key) is None:
            scheduler.wanted.append(key)
        self._ordered(self.number)

    def take_ended(self) -> list[PreparedMessage]:
        """Return the ends of orders since the last time."""
        scheduler, ended = self.serving.scheduler, []
        for number, key in list(self.orders.items()):
            stored = scheduler.composer.find(key)
            if stored.ready if stored is not None else key not in scheduler.wanted:
                del self.orders[number]
                ended.append(PreparedMessage(number, 0, stored is not None))
        return ended

    def match(self, request: Request, composed: bytes | None) -> int:
        """Return the leading tokens of a prompt that need not be computed here now.

        `composed`: its key, if it is composed of its segments.
        """
        reused = as_reused(request, self._setup.reuse)
        keys = [self._trace.key(reused, reused.prompt_tokens)] + ([] if composed is None else [composed])
        cache, tokens = self.serving.cache, reused.prompt_tokens
        return max(cache.match(key, tokens, reused.namespace).checkpoint_tokens for key in keys)

    # -- work

    def fail(self) -> dict[int, Lost]:
        """Fail now; return the computed parts of requests, by their identity."""
        self.has_failed, self.wakes = True, None
        return {id(lost.request): lost for lost in self.serving.fail()}

    def receive(self, request: Request, sent: Sent, now: float) -> None:
        """Queue a request, which arrived at the router at `sent.at`."""
        self.open[id(request)] = sent
        self.outstanding.add(sent.outstanding)
        self.inbox.put(sent.at, request)
        self.serving.shorten(now)

    def keep_answer(self, request: Request, end: int) -> None:
        """Queue the prefill of the first `end` tokens of a request and its answer."""
        scheduler = self.serving.scheduler
        if scheduler.decode_reuse == "canonical":
            answer = ReplayedAnswer(scheduler.new_id(), self._trace, request, end, ())
            scheduler.answers.add(answer, scheduler.limits.max_running)

    def begin(self, now: float) -> float | None:
        """Begin the next work, and publish its evictions; return its end, or None without work."""
        self.serving.now = now
        has_work = self.serving.begin(self.inbox, self.tally)
        self._publish()
        return self.serving.ends if has_work else None

    def end(self) -> None:
        """Complete the work in progress, and publish its changes."""
        work = self.serving.work
        self.serving.end(self.inbox, self.tally)
        if isinstance(work, OneStep):
            self._meter.prefilled(work.step, work.seconds)
        self._publish()

    def _publish(self) -> None:
        """Send the changes of the cache since the last call."""
        changes, known_at = self._log.take(), self.serving.now + self._delay
        if changes:
            self._on_the_way.append((known_at, self._stream.step(changes)))
        stored = self._stream.stored(self._store, self._stored.take())
        if stored is not None:
            self._on_the_way.append((known_at, stored))

    def first_token(self, request: Request) -> Sent:
        """Note that a prompt was computed, or refused; return its request."""
        self.outcomes.append(self.tally.outcomes[-1])
        sent = self.open[id(request)]
        self.outstanding.begin(sent.outstanding)
        return sent

    def answered(self, request: Request, now: float) -> Sent:
        """Note the end of a request, and return it."""
        sent = self.open.pop(id(request))
        self.outstanding.remove(sent.outstanding)
        self._meter.ended(now - sent.at)
        return sent

    @property
    def share(self) -> Share:
        """Its requests, and their hits less the tokens of segments that it built, for others too: at least 0."""
        prompts = sum(one.prompt_tokens for one in self.outcomes)
        hits = sum(one.hit_tokens for one in self.outcomes) - self.serving.segment_work.made_tokens
        return Share(len(self.outcomes), round(max(0, hits) / max(1, prompts), 6))


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
        if self.followed is not None and isinstance(follower, SimulatedWorker) and follower.pulls is not None:
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
