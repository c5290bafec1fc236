"""Answering: the open requests of an engine, the tokens that they are given, and their events."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from headwater.engine.detokenizer import TextStream
from headwater.engine.meter import Meter
from headwater.engine.runner import Runner
from headwater.engine.sampler import Choice, PromptScores, Sampling
from headwater.errors import DeadlineExceeded, HeadwaterError, ModelUnavailable, OutOfPages, QueueFull, for_log
from headwater.events import Event, FailedEvent, FinishedEvent, TokenEvent
from headwater.request import SamplingParams
from headwater.schedule.kinds.request import Request
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import Phase, Sequence
from headwater.schedule.step import Step

log = logging.getLogger("headwater.engine")

OnEvent = Callable[[Event], None]


@dataclass(eq=False)
class Live:
    """State that the engine keeps of a request, in addition to the scheduler's sequence."""

    seq: Request
    on_event: OnEvent
    text: TextStream
    sampling: Sampling
    submitted: float  # seconds of a monotonic clock
    started: float | None = None  # when its first leg ran
    cached: int | None = None  # leading tokens of the prompt that were cached then; None: segments, or scored
    scores: PromptScores | None = None  # until they are sent
    drafted: int = 0  # tokens of the drafts that steps verified
    accepted: int = 0

    @property
    def params(self) -> SamplingParams:
        return self.seq.generation.params


class Observer(Protocol):
    """Listener to complete answers, called on the engine's thread; `close` follows when the engine stops."""

    def completed(self, seq: Request) -> None: ...

    def close(self) -> None: ...


class NoObserver:
    """Observer that does nothing."""

    def completed(self, seq: Request) -> None:
        """Ignore the answer."""

    def close(self) -> None:
        """Nothing is open."""


class Answering:
    """Requests with a client, by id. All but `live` is for the engine's thread."""

    def __init__(self, scheduler: Scheduler, runner: Runner, meter: Meter, changed: threading.Condition) -> None:
        """`changed`: the engine's lock, for the scheduler."""
        self._scheduler, self._runner, self._meter = scheduler, runner, meter
        self._changed = changed
        self.stepped: Callable[[], None] = lambda: None  # called when the cache has changed, with `changed` held
        self.live: dict[int, Live] = {}
        self.observer: Observer = NoObserver()

    # -- a step

    def note_started(self, step: Step) -> None:
        """Note when the first legs of requests run."""
        now = time.monotonic()
        for leg in step.legs:
            live = self.live.get(leg.seq.id)  # None for sequences without a client
            if live is not None and live.started is None:
                live.started = now

    def score_prompts(self, step: Step, prompt_RV: torch.Tensor) -> None:
        """Add the log probabilities of prompts, from the rows of their tokens."""
        end = 0
        for leg in step.legs:
            first, end = end, end + leg.n_scored
            live = self.live.get(leg.seq.id)
            if live is None or live.scores is None or end == first:
                continue
            try:
                live.scores.take(leg.plan.start, prompt_RV[first:end].cpu())
            except Exception as error:  # an error of only this prompt's logits
                self.fail_alone(live, error)

    def take(self, live: Live, choice: Choice) -> None:
        """Append the token, send it to the client, and finish the request if this is its end."""
        seq, params = live.seq, live.seq.generation.params
        if live.scores is not None:
            scores, live.scores = live.scores.event(), None
            if not self._send(live, scores):
                self._give_up(live)
                return
        if params.max_tokens == 0:
            self._finish(live, "length", None)
            return
        ended = choice.token in live.sampling.ends
        try:
            live.sampling.take(choice.token)
            text, stop = ("", None) if ended else live.text.push(choice.token)
        except Exception as error:  # an error of only its constraint or its decoder
            self.fail_alone(live, error)
            return
        seq.tokens.append(choice.token)
        if ended:
            self._finish(live, "stop", choice.token)
        elif not self._send(live, TokenEvent(choice.token, text, choice.logprob, choice.top)):
            self._give_up(live)
        elif stop is not None:
            self._finish(live, "stop", stop)
        elif live.sampling.finished:
            self._finish(live, "stop", None)
        elif seq.n_output >= params.max_tokens:
            self._finish(live, "length", None)

    # -- ends

    def _finish(self, live: Live, reason: str, stop: str | int | None) -> None:
        seq = live.seq
        self._runner.write_entries()  # its pages are its own until it is finished
        with self._changed:
            self._scheduler.finish(seq)
            self.observer.completed(seq)
            self.stepped()  # before the client may send its next turn: readers know what it can resume from
        assert seq.account is not None
        account = replace(seq.account, preemptions=seq.preemptions)
        held_back = "" if isinstance(stop, str) else live.text.flush()
        queued = None if live.started is None else live.started - live.submitted
        drafts = live.accepted, live.drafted - live.accepted
        self._close(live, FinishedEvent(reason, held_back, account, seq.n_output, stop, queued, *drafts, live.cached))

    def _give_up(self, live: Live) -> None:
        self._cancel(live.seq)
        self._forget(live)

    def _cancel(self, seq: Sequence) -> None:
        self._runner.write_entries()  # its pages are its own until it is cancelled
        with self._changed:
            self._scheduler.cancel(seq)

    def cancel(self, request: int) -> None:
        """End a request whose client is gone, with the engine's lock held; no event is sent."""
        live = self.live.pop(request, None)
        if live is not None:
            self._scheduler.leave(live.seq)
            self._drop(request)

    def report_failures(self) -> None:
        """Send the errors of sequences that the scheduler has given up."""
        with self._changed:
            failures = self._scheduler.failures[:]
            self._scheduler.failures.clear()
        for seq, error in failures:
            if not isinstance(error, OutOfPages | QueueFull | DeadlineExceeded):
                log.error("request %d failed", seq.id, exc_info=error)
                error = HeadwaterError(f"the step failed: {error}")
            live = self.live.get(seq.id)
            if live is not None:
                self._close(live, FailedEvent(error))

    def fail_step(self, seqs: list[Sequence], error: Exception) -> None:
        """Report the error of a step to all its requests, which have ended."""
        if not isinstance(error, ModelUnavailable):
            log.error("a step failed", exc_info=error)
            error = HeadwaterError(f"the step failed: {error}")
        for seq in seqs:
            if seq.id in self.live:
                self._close(self.live[seq.id], FailedEvent(error))

    def fail_sampling(self, sampled: list[Live], error: Exception) -> None:
        """End requests that were sampled together, and report the error."""
        for live in sampled:
            self._cancel(live.seq)
        self.fail_step([live.seq for live in sampled], error)

    def fail_alone(self, live: Live, error: Exception) -> None:
        """End one request with an error of its own."""
        log.error("request %d failed: %s: %s", live.seq.id, type(error).__name__, for_log(error))
        self._cancel(live.seq)
        self._close(live, FailedEvent(error))

    def fail_all(self, error: Exception) -> None:
        """Report to all open requests that the engine has ended."""
        for live in tuple(self.live.values()):
            self._send(live, FailedEvent(error))
        self.live.clear()

    # -- events

    def _close(self, live: Live, event: Event) -> None:
        self._send(live, event)
        self._forget(live)

    def _send(self, live: Live, event: Event) -> bool:
        """Send an event. False: the listener raised, which ends only its own request."""
        try:
            live.on_event(event)
        except Exception as error:
            log.error("request %d: its listener failed", live.seq.id, exc_info=error)
            return False
        return True

    def _forget(self, live: Live) -> None:
        del self.live[live.seq.id]
        self._drop(live.seq.id)
        self._meter.ended(time.monotonic() - live.submitted)
        assert live.seq.phase is Phase.DONE

    def _drop(self, request: int) -> None:
        """Give back what runner and drafters keep of a request that has ended."""
        self._runner.forget(request)
        self._scheduler.speculation.forget(request)
