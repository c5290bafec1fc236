"""The server's scheduler under a virtual clock: queues, chunked prefill and batching, steps that only cost time."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace

from headwater.cache import PrefixCache
from headwater.cache.changes import IGNORED, Changes
from headwater.cache.eviction.base.policy import Eviction
from headwater.cache.eviction.clairvoyant import Clairvoyant
from headwater.cache.eviction.marconi import Marconi
from headwater.cache.placement.base import Placement
from headwater.errors import ConfigError, OutOfPages, RequestTooLarge
from headwater.lab.cost import Load, StepCost, load_of
from headwater.lab.setup import Setup, as_reused
from headwater.lab.tally import Ideal, Resent, SegmentWork, Tally
from headwater.lab.tiers import LabLoads
from headwater.schedule.kinds.request import Request as Answered
from headwater.schedule.limits import Limits
from headwater.schedule.replayed import Counted, Replayed
from headwater.schedule.step import Step
from headwater.schedule.tuner import Tuner
from headwater.traces.arrivals import Arrivals
from headwater.traces.request import Request, Trace

MAX_SAVES_PER_STEP = 1 << 20  # all that are placed


@dataclass(frozen=True, slots=True)
class Engine:
    """Cost model and limits of the simulated engine."""

    cost: StepCost
    max_running: int = 128
    tokens_per_step: int = 8192
    seed: int = 0  # of the drafts that are right


@dataclass(frozen=True, slots=True)
class Lost:
    """Part of a request that a worker had computed before it failed."""

    request: Request
    sent: Resent
    output: int  # tokens of the answer that were sent


class TraceTuning:
    """Marconi's tuner in a replay, if the policy has one; the same request always adopts its result.

    keeps_answers: whether answers are cached, and so replayed. workers: processes that replay; 0: none.
    """

    def __init__(
        self, trace: Trace, cache: PrefixCache, placement: Placement, keeps_answers: bool, workers: int = 0
    ) -> None:
        self._keeps_answers = keeps_answers
        tuned = isinstance(cache.policy, Marconi)
        self._tuner = Tuner(cache, placement, workers=workers, trace=trace) if tuned else None

    def completed(self, request: Request) -> None:
        if self._tuner is not None and not self._tuner.done:
            known = request.known_tokens if self._keeps_answers else request.prompt_tokens
            self._tuner.observe(replace(request, known_tokens=known, segments=()))

    def close(self) -> None:
        if self._tuner is not None:
            self._tuner.close()


@dataclass(slots=True)
class _Visit:
    request: Request
    number: int  # in the order in which requests came
    came: float
    sent: Resent
    first_token: float | None = None


@dataclass(frozen=True, slots=True)
class OneStep:
    """Step in progress."""

    step: Step
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Steps in progress that have the same decode rows and nothing else."""

    rows: list[Answered]
    load: Load  # of the first one
    steps: int
    seconds: float


@dataclass
class Serving:
    """One run under the virtual clock; `run` returns when the last request is answered.

    `begin` starts work at `now`, and `end` completes it at `ends`.
    """

    trace: Trace
    setup: Setup
    engine: Engine
    workers: int = 0  # processes of Marconi's tuner
    changes: Changes = IGNORED  # of the cache
    now: float = 0.0
    waited: float = 0.0  # seconds times requests that waited
    steps: int = 0
    work: OneStep | DecodeSteps | None = None  # in progress
    _visits: dict[int, _Visit] = field(default_factory=dict)
    _came: int = 0  # requests
    _resumed: dict[int, Lost] = field(default_factory=dict)  # requests that are to arrive, by their identity

    def __post_init__(self) -> None:
        self.layout = self.setup.layout(self.trace)
        self.cache = self.setup.cache(self.layout, self.changes, lambda: self.now)
        check_clock(self.setup, self.cache.policy)
        self.ideal = Ideal(self.trace, self.layout.unit_tokens)
        limits = Limits(
            max_running=self.engine.max_running,
            tokens_per_step=self.engine.tokens_per_step,
            saves_per_step=MAX_SAVES_PER_STEP,
            max_model_len=1 << 60,
            max_waiting=1 << 60,
            shared_step=self.engine.tokens_per_step,
        )
        self.scheduler = self.setup.scheduler(self.cache, limits)
        placement = self.scheduler.placement
        self.tuning = TraceTuning(self.trace, self.cache, placement, self.setup.keeps_answers, self.workers)
        self.segment_work = SegmentWork(self.layout.flops)
        self.tiers: LabLoads | None = None
        if self.setup.tier is not None:
            law, page_bytes = self.setup.tier, self.page_bytes
            self.use(LabLoads(self.scheduler, page_bytes, self.prefill_seconds, lambda: self.now, law))

    @property
    def page_bytes(self) -> int:
        return self.setup.memory // self.layout.n_pages

    def use(self, tiers: LabLoads) -> None:
        """Load what these tiers offer."""
        self.tiers = self.scheduler.tiers = tiers

    def prefill_seconds(self, tokens: int) -> float:
        load = Load(prefill_tokens=tokens, prefill_squares=tokens * tokens, legs=1, states=2, logits=1)
        return self.engine.cost.seconds(load) if tokens else 0.0

    @property
    def ends(self) -> float:
        """Time at which the work in progress ends."""
        assert self.work is not None, "no work is in progress"
        return self.now + self.work.seconds

    def run(self, arrivals: Arrivals) -> Tally:
        tally = Tally(self.layout.flops, len(arrivals), self.segment_work)
        while True:
            if self.begin(arrivals, tally):
                self.end(arrivals, tally)
            elif (due := self._next_event(arrivals)) is not None:
                self.now = max(self.now, due)
            elif self.scheduler.idle:
                self.tuning.close()
                return tally

    def begin(self, arrivals: Arrivals, tally: Tally) -> bool:
        """Queue arrived requests, and begin the next work. False if there is none."""
        self._take_arrivals(arrivals, tally)
        if self.tiers is not None:
            self.tiers.take_read()
        self.work = self._decode_steps(arrivals.due())
        if self.work is None:
            step = self.scheduler.plan_step()
            self._count_failures(arrivals, tally)
            if step:
                self.work = OneStep(step, self.engine.cost.seconds(load_of(step)))
        return self.work is not None

    def end(self, arrivals: Arrivals, tally: Tally) -> None:
        """Complete the work in progress."""
        work, self.work = self.work, None
        assert work is not None, "no work is in progress"
        self._pass(work.seconds, len(self.scheduler.waiting))
        if isinstance(work, OneStep):
            self._finish(work, arrivals, tally)
            return
        self.scheduler.decode_ahead(work.steps)
        for seq in work.rows:
            assert isinstance(seq.tokens, Counted), "the lab's requests count their tokens"
            seq.tokens.grow(work.steps)

    def fail(self) -> list[Lost]:
        """End all work at once; return the requests that had arrived and have no complete answer."""
        self.work = None
        scheduler = self.scheduler
        output = {seq.id: seq.n_output for seq in scheduler.running.values() if isinstance(seq, Answered)}
        output |= {seq.id: seq.n_output for seq in scheduler.waiting}  # preempted ones have tokens
        return [Lost(visit.request, visit.sent, output[id]) for id, visit in self._visits.items()]

    def resume(self, request: Request, lost: Lost) -> None:
        """Let a request that will arrive continue after the tokens that another worker has sent."""
        self._resumed[id(request)] = lost

    def shorten(self, due: float) -> None:
        """End decode steps in progress with the one in which a request arrives, at `due`."""
        if isinstance(self.work, DecodeSteps):
            self.work = self._until(due, self.work.rows, self.work.load, self.work.steps)

    def _next_event(self, arrivals: Arrivals) -> float | None:
        """Return the time of the next request or the end of the next load."""
        dues = (arrivals.due(), None if self.tiers is None else self.tiers.due())
        return min((due for due in dues if due is not None), default=None)

    def _take_arrivals(self, arrivals: Arrivals, tally: Tally) -> None:
        """Queue all requests that have arrived by now."""
        while len(arrivals) and (due := arrivals.due()) is not None and due <= self.now:
            request = arrivals.take()
            seq = Replayed(self.scheduler.new_id(), self.trace, as_reused(request, self.setup.reuse))
            lost = self._resumed.pop(id(request), None)
            sent = self.ideal.hit(request) if lost is None else lost.sent
            visit = _Visit(request, self._came, due, sent)
            self._came += 1
            if lost is not None:
                assert isinstance(seq.tokens, Counted), "the lab's requests count their tokens"
                seq.tokens.grow(lost.output)  # computed by decode rows, as after a preemption
            try:
                self.scheduler.enqueue(seq)
            except RequestTooLarge:
                tally.add(request, None, visit.sent, due)
                arrivals.answered(request, self.now)
                continue
            self._visits[seq.id] = visit
            self.scheduler.tiers.arrived(seq)

    def _finish(self, work: OneStep, arrivals: Arrivals, tally: Tally) -> None:
        step = work.step
        self.segment_work.note(step)
        drafts = {decode.seq.id: len(decode.drafts) for decode in step.decodes if decode.drafts}
        rows, speculation = sum(decode.rows for decode in step.decodes), self.scheduler.speculation
        accepted = speculation.accepted
        for seq in self.scheduler.finish_step(step):
            self._tokens(seq, drafts.get(seq.id, 0), arrivals, tally)
        if not step.legs:
            speculation.note_step(rows, sum(drafts.values()), speculation.accepted - accepted, work.seconds)
        self._count_failures(arrivals, tally)

    def _pass(self, seconds: float, waiting: int) -> None:
        self.now += seconds
        self.waited += seconds * waiting
        self.steps += 1

    def _tokens(self, seq: Answered, drafted: int, arrivals: Arrivals, tally: Tally) -> None:
        """Count the tokens of an answer in a step: one, and right drafts; the last one ends the request."""
        visit = self._visits[seq.id]
        if visit.first_token is None:
            visit.first_token = self.now
            times = visit.came, self.now - visit.came
            tally.add(visit.request, seq.account, visit.sent, *times, saved=self.segment_work.of(seq.id))
            tally.sample(self.cache)
        assert isinstance(seq.tokens, Counted), "the lab's requests count their tokens"
        law, right = self.setup.speculation, 0
        if drafted and law is not None:
            right = law.right(self.engine.seed, visit.number, seq.n_output, drafted)
            self.scheduler.accept(seq, drafted, right)
        seq.tokens.grow(1 + right)
        if seq.n_output >= max(1, visit.request.output_tokens):
            tally.answered(seq.n_output, self.now - visit.first_token)
            self.scheduler.finish(seq)
            del self._visits[seq.id]
            self.tuning.completed(visit.request)
            arrivals.answered(visit.request, self.now)

    def _count_failures(self, arrivals: Arrivals, tally: Tally) -> None:
        """Count requests that failed because they are larger than the whole memory."""
        for seq, error in self.scheduler.failures:
            if not isinstance(error, OutOfPages):
                raise error
            visit = self._visits.pop(seq.id, None)
            if visit is None:  # the prefill of an answer and not a request
                continue
            if visit.first_token is None:
                tally.add(visit.request, None, visit.sent, visit.came)
            arrivals.answered(visit.request, self.now)
        self.scheduler.failures.clear()

    # -- steps with decode rows only --------------------------------------------

    def _decode_steps(self, due: float | None) -> DecodeSteps | None:
        """Return all next steps that have only decode rows, up to an arrival at `due`, with their pages reserved.

        None: the next step must be planned.
        """
        rows = [seq for seq in self.scheduler.running.values() if isinstance(seq, Answered)]
        if not rows or len(rows) < len(self.scheduler.running):
            return None
        left = min(max(1, self._visits[seq.id].request.output_tokens) - seq.n_output for seq in rows)
        steps = self.scheduler.free_steps(left - 1)
        if steps < 2:
            return None
        load = Load(rows=len(rows), kv_tokens=sum(seq.computed for seq in rows), logits=len(rows), states=len(rows))
        work = self._until(due, rows, load, steps)
        return work if work.steps >= 2 and self.scheduler.extend_ahead(work.steps) else None

    def _until(self, due: float | None, rows: list[Answered], load: Load, steps: int) -> DecodeSteps:
        steps = self._before(due, load, steps)
        return DecodeSteps(rows, load, steps, self.engine.cost.seconds(load, steps))

    def _before(self, due: float | None, load: Load, steps: int) -> int:
        """Return at most `steps`: the steps up to and including the one in which the next request arrives."""
        if due is None or self.now + self.engine.cost.seconds(load, steps) <= due:
            return steps
        return 1 + bisect_left(range(1, steps), due, key=lambda n: self.now + self.engine.cost.seconds(load, n))


def check_clock(setup: Setup, policy: Eviction) -> None:
    """Raise ConfigError for policies that need requests one by one."""
    if isinstance(policy, Clairvoyant):
        raise ConfigError("eviction 'clairvoyant' knows the order of requests only one by one, not under a clock")
    if setup.decode_reuse == "raw" and setup.page_size == 1:
        raise ConfigError("decode-reuse raw publishes pages as they fill up: a page has 1 token, must have at least 2")
