"""The step loop of an engine, on a thread of its own: plan, run, publish, sample, one step after the other."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from heapq import heapify, heappop, heappush

import torch

from headwater.engine.answering import Answering
from headwater.engine.idle_weights import Weights
from headwater.engine.meter import Meter
from headwater.engine.runner import Runner
from headwater.engine.verification import Verification
from headwater.errors import DeadlineExceeded, EngineStopped
from headwater.mixers.numerics import prepare_process
from headwater.schedule.kinds.request import Request
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.step import Decode, Leg, Step

LATE_LOOK_SECONDS = 0.05  # between looks at requests that wait for tiers

log = logging.getLogger("headwater.engine")


@dataclass(frozen=True, slots=True)
class Planned:
    """A step, and the seconds that its planning took."""

    step: Step
    seconds: float


class Deadlines:
    """Deadlines of requests, in seconds of a monotonic clock: a heap, from which ended requests are dropped late."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, at: float, request: int) -> None:
        """Add a request that must end by `at`."""
        heappush(self._heap, (at, request))

    def forget_all_but(self, open_requests: Container[int]) -> None:
        """Drop the entries of requests that have ended."""
        self._heap = [entry for entry in self._heap if entry[1] in open_requests]
        heapify(self._heap)

    def take_passed(self, now: float) -> list[int]:
        """Return the requests whose deadline has passed, each once."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            passed.append(heappop(self._heap)[1])
        return passed


class StepLoop:
    """Thread that steps while there is work. Other threads hold the engine's lock to read or change its fields."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        answering: Answering,
        verification: Verification,
        meter: Meter,
        changed: threading.Condition,
    ) -> None:
        """`changed`: the engine's lock."""
        self._scheduler, self._runner, self._meter = scheduler, runner, meter
        self._answering, self._verification, self._changed = answering, verification, changed
        self.cancelled: set[int] = set()  # requests
        self.deadlines = Deadlines()
        # runs a step; several engines compute in turns
        self.in_turn: Callable[[Callable[[], None]], None] = lambda step: step()
        self.weights = Weights()
        self.idle_since = time.monotonic()
        self.take_late: Callable[[], None] = lambda: None  # ends waits for tiers that are too long; with `changed` held
        self.stopping = False
        self.broken: Exception | None = None  # the error that ended the thread
        self._turn_began: float | None = None  # monotonic; None while the thread waits for work
        self.thread = threading.Thread(target=self._work, name="headwater-engine", daemon=True)
        self.compute_threads = torch.get_num_threads()

    @property
    def is_ending(self) -> bool:
        """True if no more steps will run."""
        return self.stopping or self.broken is not None

    @property
    def turn_seconds(self) -> float:
        """Seconds since the thread began its current step; 0 while it waits, infinite if an error ended it."""
        began = self._turn_began
        return math.inf if self.broken is not None else 0.0 if began is None else time.monotonic() - began

    @property
    def unloads_at(self) -> str | None:
        """Time in UTC at which the weights leave memory if no work comes; None: never, or they have."""
        after = self.weights.unload_after
        if after is None or not self.weights.loaded:
            return None
        return (datetime.now(UTC) + timedelta(seconds=after - self.idle_seconds)).isoformat(timespec="seconds")

    @property
    def idle_seconds(self) -> float:
        """Seconds for which there was no work."""
        return 0.0 if self._turn_began is not None else time.monotonic() - self.idle_since

    def stop(self) -> None:
        """End the thread after the step in progress; requests still open fail with EngineStopped."""
        with self._changed:
            self.stopping = True
            self._changed.notify_all()
        if self.thread.ident is not None:
            self.thread.join()

    def _work(self) -> None:
        prepare_process(self.compute_threads)  # denormals are a setting of each thread
        try:
            while self._turn():
                pass
            error: Exception = EngineStopped("the engine was stopped before the answer was complete")
        except Exception as unforeseen:  # open requests would wait forever: fail them
            log.exception("the engine failed")
            error = unforeseen
            with self._changed:
                self.broken = unforeseen
                self._changed.notify_all()
        self._answering.fail_all(error)

    def _turn(self) -> bool:
        """Do one step, or unload the weights. False when the engine is to stop."""
        if self._idles_too_long():
            self.weights.release()
            return True
        planned = self._plan()
        if planned is None:
            return False
        self._answering.report_failures()
        if planned.step and self._has_weights(planned.step):
            self.in_turn(partial(self.execute, planned))
        with self._changed:
            self._answering.stepped()
            pages = self._pages_ahead()
        for page in pages:
            if not self._scheduler.idle:
                break
            self._runner.arena.provide(page)
        return True

    def _pages_ahead(self) -> Sequence[int]:
        """Return the pages that a next turn takes first, for which nothing waits now: two tails and two checkpoints."""
        if not self._scheduler.idle:
            return ()
        layout, pool = self._scheduler.layout, self._scheduler.cache.pool
        count = 2 * (1 + layout.checkpoint_pages + max(layout.tail_pages, default=0))
        return (*pool.kv.upcoming(count), *pool.states.upcoming(count if pool.split else 0))

    def execute(self, planned: Planned) -> None:
        """Run a step, publish what it computed, and sample from its logits. If that fails, only its requests do."""
        started, step = time.perf_counter(), planned.step
        self._answering.note_started(step)
        try:
            sampled, logits_RV = step.sampled(), self._run(step, started)
            if logits_RV is not None:
                wanting = self._publish(step)
                right = self._sample(step, sampled, wanting, logits_RV)
                self._note_speculation(step, right, planned.seconds + time.perf_counter() - started)
        finally:  # threads may wait for them
            self._end_step(step)

    def _end_step(self, step: Step) -> None:
        """Do the work that the step's tokens did not wait for. If that fails, only its requests do."""
        try:
            self._runner.end_step()
        except Exception as error:
            self._fail(step, error)

    def _fail(self, step: Step, error: Exception) -> None:
        """End the requests of a step with an error."""
        self._meter.failed_steps += 1
        with self._changed:
            failed = self._scheduler.abandon_step(step)
        self._answering.fail_step(failed, error)

    def _idles_too_long(self) -> bool:
        """Wait for work; return whether there was none for so long that the weights leave memory."""
        self.idle_since = time.monotonic()
        with self._changed:
            while self._scheduler.idle and not (self.cancelled or self.stopping or self._scheduler.failures):
                self._changed.notify_all()  # a call of `drain`
                self._turn_began = left = None
                if self.weights.loaded and self.weights.unload_after is not None:
                    left = self.idle_since + self.weights.unload_after - time.monotonic()
                    if left <= 0:
                        return True
                self._changed.wait(left)
        return False

    def _has_weights(self, step: Step) -> bool:
        """Load the weights if they have left memory; if that fails, so do the step's requests."""
        if self.weights.loaded:
            return True
        self._turn_began = None  # a load may take minutes
        try:
            self.weights.load(self.in_turn)
        except Exception as error:
            log.warning("%s", error)
            self._fail(step, error)
        self._turn_began = time.monotonic()
        return self.weights.loaded

    def _plan(self) -> Planned | None:
        """Plan a step of the work there is, which may be none. None if the engine is to stop."""
        with self._changed:
            self._turn_began = time.monotonic()
            if self.stopping:
                return None
            self._end_cancelled()
            self._end_expired()
            self.take_late()
            begun = time.perf_counter()
            planned = Planned(self._scheduler.plan_step(), time.perf_counter() - begun)
            self._answering.stepped()  # readers know of what is evicted for the step before it runs
            self._runner.release(self._scheduler.slots.take_left())
            if not planned.step and self._scheduler.tiers.busy:
                self._changed.wait(LATE_LOOK_SECONDS)
        return planned

    def _run(self, step: Step, started: float) -> torch.Tensor | None:
        """Return the logits of a step; None if it failed, and its requests with it."""
        try:
            logits_RV = self._runner.run(step)
        except Exception as error:
            self._fail(step, error)
            return None
        finally:
            seconds = time.perf_counter() - started
            self._meter.steps += 1
            self._meter.step_seconds += seconds
        if step.legs:
            self._meter.prefilled(step, seconds)
        return logits_RV

    def _publish(self, step: Step) -> list[Request]:
        """Let later requests match what a step computed; return the requests whose next token is to be sampled."""
        with self._changed:
            wanting = self._scheduler.finish_step(step)
        self._answering.report_failures()
        return wanting

    def _sample(self, step: Step, sampled: list[Leg | Decode], wanting: list[Request], logits_RV: torch.Tensor) -> int:
        """Score prompts, and give requests their next tokens; return how many drafts were right."""
        rows = sum(1 + len(item.drafts) for item in sampled)  # those of scored prompts follow
        self._answering.score_prompts(step, logits_RV[rows:])
        return self._verification.sample(sampled, wanting, logits_RV[:rows])

    def _note_speculation(self, step: Step, right: int, seconds: float) -> None:
        """Note the seconds of a step, planning and sampling included, from which the worth of drafts is learned."""
        speculation = self._scheduler.speculation
        speculation.asking.earn_share(seconds)
        if not (step.legs or self._runner.was_new):
            rows = sum(decode.rows for decode in step.decodes)
            drafts = sum(len(decode.drafts) for decode in step.decodes)
            speculation.note_step(rows, drafts, right, seconds)

    def _end_cancelled(self) -> None:
        for request in self.cancelled:
            self._answering.cancel(request)
        self.cancelled.clear()

    def _end_expired(self) -> None:
        for request in self.deadlines.take_passed(time.monotonic()):
            live = self._answering.live.get(request)
            if live is not None:
                self._meter.expired += 1
                asked = live.seq.generation
                error = DeadlineExceeded(asked.deadline or 0.0, live.seq.n_output, asked.deadline_of)
                self._scheduler.leave(live.seq, error)
