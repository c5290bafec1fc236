"""Answering: one step's run, its sampling, and the events that requests get of it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from headwater.engine.live import Live, NoObserver, Observer
from headwater.engine.meter import Meter
from headwater.engine.runner import Runner
from headwater.engine.sampler import Choice
from headwater.engine.step_logits import StepLogits
from headwater.errors import ConstraintError, DeadlineExceeded, HeadwaterError, InvalidLogits, OutOfPages, QueueFull
from headwater.events import Event, FailedEvent, FinishedEvent, TokenEvent
from headwater.models.load import LoadedModel
from headwater.request import Generation
from headwater.schedule.kinds.request import Request
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import Phase, Sequence
from headwater.schedule.step import Decode, Step
from headwater.schedule.tail import FirstToken

log = logging.getLogger("headwater.engine")

LogitsTap = Callable[[int, torch.Tensor], None]


@dataclass(eq=False)
class Judged:
    """Rows of one request in a step: its next token's, then one after each draft."""

    live: Live
    first: int  # its first row among those with logits
    drafts: tuple[int, ...]
    right: int = 0  # leading drafts that were sampled
    is_right: bool = False  # whether the last token that was sampled is a draft

    def draft(self, number: int) -> int | None:
        """Return the draft after row `number`, or None after the last one."""
        return self.drafts[number] if number < len(self.drafts) else None


class Answering:
    """Requests with a client, on the engine's thread. `_changed` guards the scheduler, which other threads call."""

    def __init__(self, loaded: LoadedModel, scheduler: Scheduler, runner: Runner) -> None:
        self.loaded, self.scheduler, self.runner = loaded, scheduler, runner
        self.logits_tap: LogitsTap | None = None  # for tests: gets (request id, logits [V]) of each sampled row
        self.observer: Observer = NoObserver()
        self.stepped: Callable[[], None] = lambda: None  # called when the cache has changed, with `_changed` held
        self._live: dict[int, Live] = {}
        self._changed = threading.Condition()
        self._meter = Meter(scheduler.layout.flops)

    def keep_answer(self, asked: Generation) -> None:
        """Prefill an answer that another worker of a cluster has decoded, so that its next turn resumes here.

        `asked`: the request, with prompt and answer as its prompt, up to a page boundary. Any thread may call this.
        """
        with self._changed:
            self.scheduler.keep_answer(asked)
            self._changed.notify_all()

    def _report_failures(self) -> None:
        with self._changed:
            failures = self.scheduler.failures[:]
            self.scheduler.failures.clear()
        for seq, error in failures:
            if not isinstance(error, OutOfPages | QueueFull | DeadlineExceeded):
                log.error("request %d failed", seq.id, exc_info=error)
                error = HeadwaterError(f"the step failed: {error}")
            live = self._live.get(seq.id)
            if live is not None:
                self._close(live, FailedEvent(error))

    def _run(self, step: Step, planning: float) -> None:
        """Run a step, whose planning took so many seconds. If it, or its sampling, fails, only its own requests do."""
        started = time.perf_counter()
        self._note_started(step)
        drafts = sum(len(decode.drafts) for decode in step.decodes)
        try:
            logits_RV = self.runner.run(step)
        except Exception as error:
            self._meter.failed_steps += 1
            with self._changed:
                failed = self.scheduler.abandon_step(step)
            self._fail(failed, error)
            return
        finally:
            seconds = time.perf_counter() - started
            self._meter.steps += 1
            self._meter.step_seconds += seconds
        wanting = [item for item in step.items if item.wants_token]
        with self._changed:
            finished = self.scheduler.finish_step(step)
        self._report_failures()
        self._score_prompts(step, logits_RV[len(wanting) + drafts :])
        self._say_copied(step)
        finished = [seq for seq in finished if seq.id in self._live]
        first, judged = 0, []
        for item in wanting:
            guesses = item.drafts if isinstance(item, Decode) else ()
            if item.seq in finished:
                live = self._live[item.seq.id]
                live.drafted += len(guesses)
                judged.append(Judged(live, first, guesses))
            first += 1 + len(guesses)
        self._judge(logits_RV[:first], judged)
        if step.legs:
            self._meter.prefilled(step, seconds)
            self.scheduler.tiers.prefilled(sum(leg.plan.computed_tokens for leg in step.legs), seconds)
        speculation, seconds = self.scheduler.speculation, planning + time.perf_counter() - started
        speculation.asking.earn_share(seconds)
        if not (step.legs or self.runner.was_new):
            rows, right = sum(decode.rows for decode in step.decodes), sum(one.right for one in judged)
            speculation.note_step(rows, drafts, right, seconds)

    def _judge(self, logits_RV: torch.Tensor, judged: list[Judged]) -> None:
        """Sample each request's rows one after the other: the next row if the token is the draft that it stands after.

        So every token is the one that plain decoding samples. Sampling that fails ends its requests alone.
        """
        number, reached = 0, judged
        logits: StepLogits | None = None
        while reached:
            try:
                logits = logits or StepLogits.of(logits_RV)
                choices = self._sample(logits, [one.first + number for one in reached], reached)
            except Exception as error:
                for one in reached:
                    self._cancel(one.live.seq)
                self._fail([one.live.seq for one in reached], error)
                break
            for one, choice in zip(reached, choices, strict=True):
                if isinstance(choice, Choice):
                    one.is_right = choice.token == one.draft(number)
                    one.right += one.is_right
                    one.live.accepted += one.is_right
                    self._take(one.live, choice)
                else:
                    one.is_right = False
                    self._fail_alone(one.live, choice)
            reached = [one for one in reached if one.is_right and one.live.seq.phase is Phase.DECODE]
            number += 1
        with self._changed:
            for one in judged:
                if one.drafts and one.live.seq.phase is Phase.DECODE:
                    self.scheduler.accept(one.live.seq, len(one.drafts), one.right)

    def _score_prompts(self, step: Step, prompt_RV: torch.Tensor) -> None:
        end = 0
        for leg in step.legs:
            first, end = end, end + leg.n_scored
            live = self._live.get(leg.seq.id)
            if live is None or live.scores is None or end == first:
                continue
            try:
                live.scores.take(leg.plan.start, prompt_RV[first:end].cpu())
            except Exception as error:  # of this prompt's logits alone
                self._fail_alone(live, error)

    def _sample(
        self, logits: StepLogits, rows: list[int], judged: list[Judged]
    ) -> list[Choice | InvalidLogits | ConstraintError]:
        if self.logits_tap is not None:
            for one, logits_V in zip(judged, logits.rows(rows), strict=True):
                self.logits_tap(one.live.seq.id, logits_V)
        return logits.sample(rows, [one.live.sampling for one in judged])

    def _fail(self, seqs: list[Sequence], error: Exception) -> None:
        log.error("a step failed", exc_info=error)
        for seq in seqs:
            if seq.id in self._live:
                self._close(self._live[seq.id], FailedEvent(HeadwaterError(f"the step failed: {error}")))

    def _fail_alone(self, live: Live, error: Exception) -> None:
        log.error("request %d failed: %s: %s", live.seq.id, type(error).__name__, error)
        self._cancel(live.seq)
        self._close(live, FailedEvent(error))

    def _take(self, live: Live, choice: Choice) -> None:
        """Append the token, send it to the client, and finish the request if this is its end."""
        seq, params = live.seq, live.params
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
        except Exception as error:  # of its constraint or its decoder alone
            self._fail_alone(live, error)
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
            self._keep_tail(live, choice)
            self._finish(live, "length", None)

    def _keep_tail(self, live: Live, choice: Choice) -> None:
        """Keep the tail of a prompt for the worker that goes on after its first token."""
        place = live.seq.tail_place
        if place is not None and not place.peer and live.seq.computed == live.seq.n_prompt:
            self.runner.write_entries()  # some are of its last page
            first = FirstToken(choice.token, choice.logprob, choice.top, live.params.seed)
            with self._changed:
                self.scheduler.tiers.keep_tail(live.seq, first)

    def _say_copied(self, step: Step) -> None:
        """Send the first tokens of answers whose prompts' tails were copied."""
        for leg in step.legs:
            live, tail = self._live.get(leg.seq.id), leg.seq.tail if isinstance(leg.seq, Request) else None
            if leg.plan.copied is not None and live is not None and tail is not None and tail.first is not None:
                self._take(live, Choice(tail.first.token, tail.first.logprob, tail.first.top))

    def _give_up(self, live: Live) -> None:
        self._cancel(live.seq)
        self._forget(live)

    def _cancel(self, seq: Sequence) -> None:
        self.runner.write_entries()  # its pages are its own until it is cancelled
        with self._changed:
            self.scheduler.cancel(seq)

    def _finish(self, live: Live, reason: str, stop: str | int | None) -> None:
        seq = live.seq
        self.runner.write_entries()  # its pages are its own until it is finished
        with self._changed:
            self.scheduler.finish(seq)
            self.observer.completed(seq)
            self.stepped()  # before the client may send its next turn: readers know what it can resume from
        assert seq.account is not None
        account = replace(seq.account, preemptions=seq.preemptions)
        held_back = "" if isinstance(stop, str) else live.text.flush()
        queued = None if live.started is None else live.started - live.submitted
        drafts = live.accepted, live.drafted - live.accepted
        self._close(live, FinishedEvent(reason, held_back, account, seq.n_output, stop, queued, *drafts, live.cached))

    def _note_started(self, step: Step) -> None:
        now = time.monotonic()
        for leg in step.legs:
            live = self._live.get(leg.seq.id)  # None for sequences without a client
            if live is not None and live.started is None:
                live.started = now

    def _close(self, live: Live, event: Event) -> None:
        self._send(live, event)
        self._forget(live)

    def _send(self, live: Live, event: Event) -> bool:
        """Send an event. False: the listener raised, which ends its own request alone."""
        try:
            live.on_event(event)
        except Exception as error:
            log.error("request %d: its listener failed", live.seq.id, exc_info=error)
            return False
        return True

    def _forget(self, live: Live) -> None:
        del self._live[live.seq.id]
        self._drop(live.seq.id)
        self._meter.ended(time.monotonic() - live.submitted)
        assert live.seq.phase is Phase.DONE

    def _drop(self, request: int) -> None:
        """Give back what runner and drafters keep of a request that has ended."""
        self.runner.forget(request)
        self.scheduler.speculation.forget(request)
