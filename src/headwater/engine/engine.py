"""The engine: a thread that schedules, runs, samples and tells, step after step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from headwater import machine
from headwater.cache.placement import make_placement
from headwater.cache.prefix_cache import NoCache, PrefixCache
from headwater.cache.view import CacheView
from headwater.config import ServeConfig
from headwater.engine.constraint import ConstraintCompiler
from headwater.engine.deadlines import Deadlines
from headwater.engine.detokenizer import TextStream
from headwater.engine.live import Live, NoObserver, Observer, OnEvent
from headwater.engine.meter import Meter
from headwater.engine.prompt_scores import PromptScores
from headwater.engine.runner import Runner
from headwater.engine.sampler import Choice, Sampling, sample
from headwater.engine.selfcheck import SelfCheck, self_check
from headwater.engine.stats import EngineStats
from headwater.engine.warming import Outcome, Warming
from headwater.errors import (
    ConstraintError,
    DeadlineExceeded,
    EngineStopped,
    HeadwaterError,
    InvalidLogits,
    OutOfPages,
    QueueFull,
)
from headwater.events import Event, FailedEvent, FinishedEvent, TokenEvent
from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.mixers import numerics
from headwater.mixers.linear import product_dtype, weight_layout
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.models.embedded import embedded
from headwater.models.load import LoadedModel, load_model, read_spec
from headwater.request import Generation, Healing, SegmentEviction
from headwater.schedule.kinds.segment import Composer
from headwater.schedule.limits import EXTRA_SLOTS, Limits
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import Phase, Sequence
from headwater.schedule.step import Step

# Checkpoints saved in the middle of a leg are staged in rows of their own: at most so many, and so many bytes.
MAX_SAVES = 16
SAVE_BYTES = 256 * 2**20

log = logging.getLogger("headwater.engine")

LogitsTap = Callable[[int, torch.Tensor], None]


class Engine:
    """Takes requests from any thread and runs them on its own.

    `submit` and `cancel` may be called from anywhere; `on_event` is called on the engine's thread and must not block.
    """

    def __init__(self, loaded: LoadedModel, scheduler: Scheduler, runner: Runner, check: SelfCheck) -> None:
        self.loaded, self.scheduler, self.runner, self.check = loaded, scheduler, runner, check
        self.threads = torch.get_num_threads()
        self.tokenizer = loaded.tokenizer
        self.chat_template = loaded.chat_template
        self.special_tokens = loaded.special_tokens
        self.generation_defaults = loaded.generation
        self.model_name = loaded.name
        self.max_model_len = scheduler.limits.max_model_len
        self.spec = loaded.spec
        self.constraints = ConstraintCompiler(loaded.tokenizer, loaded.spec.vocab_size, loaded.eos_token_ids)
        self.logits_tap: LogitsTap | None = None  # for tests: sees (request id, logits [V]) of each sampled row
        self._live: dict[int, Live] = {}
        self._changed = threading.Condition()
        self._cancelled: set[int] = set()
        self._deadlines = Deadlines()
        self._refusing = False  # running requests end, new ones are refused
        self._stopping = False
        self._broken: Exception | None = None  # what ended the thread before its time
        self._thread: threading.Thread | None = None
        self._meter = Meter()
        self.observer: Observer = NoObserver()

    @classmethod
    def load(cls, config: ServeConfig) -> Engine:
        """Load the checkpoint, lay out the memory and prove that the kernels do what exactness needs.

        Raises CheckpointError or ConfigError; the engine is not started.
        """
        prepare_process(config.threads)
        path = config.model or embedded()
        spec = read_spec(path, config.dtype, config.device, config.page_size)
        check = self_check(spec, config.device, config.reproducible)
        numerics.use(Numerics(check.mode))
        dtype = getattr(torch, spec.dtype_name)
        if product_dtype(dtype, config.device) != dtype:
            log.warning(
                "this processor has no %s products (%s): they are computed with float32 copies of the weights, "
                "which take twice the memory and are no faster than --dtype float32 (what --dtype auto chooses here)",
                spec.dtype_name,
                machine.cpu().name,
            )
        return cls.over(load_model(path, spec.dtype_name, config.device, config.page_size), check, config)

    @classmethod
    def over(cls, loaded: LoadedModel, check: SelfCheck, config: ServeConfig) -> Engine:
        """An engine with memory of its own over a model that is there already."""
        spec = loaded.spec
        layout = spec.layout(config.memory, config.state_fraction)
        row_bytes = layout.checkpoint_pages * spec.page_bytes
        n_saves = max(1, min(MAX_SAVES, SAVE_BYTES // max(1, row_bytes)))
        slots = config.max_running + EXTRA_SLOTS
        states = StateMemory(spec.state, 2 * slots + n_saves, row_bytes, config.device)
        arena = Arena(spec, layout.n_pages, config.device)
        longest = spec.max_length
        if layout.kv_pages_per_unit:
            longest = min(longest, (layout.n_pages - layout.slot_pages) * layout.page_size)
        limits = Limits(config.max_running, config.max_tokens_per_step, n_saves, longest, config.max_waiting)
        segments = config.segment_share, SegmentEviction(config.segment_eviction)
        cache = PrefixCache(layout, config.eviction, None, *segments) if config.cache else NoCache(layout)
        scheduler = Scheduler(
            cache=cache,
            placement=make_placement(config.placement if config.cache else "none"),
            limits=limits,
            decode_reuse=config.decode_reuse if config.cache else "none",
            composer=Composer(cache, spec.conv_taps) if config.cache else None,
            healing=Healing(config.healing),
        )
        return cls(loaded, scheduler, Runner(loaded.model, arena, states, slots), check)

    # -- from any thread -------------------------------------------------------

    def start(self) -> None:
        """Begin to serve. A stopped engine cannot be started again."""
        self._thread = threading.Thread(target=self._loop, name="headwater-engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step in progress; requests still open fail with EngineStopped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.observer.close()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do, finished answers and healing included; False if `timeout` was too short."""
        with self._changed:
            self._changed.wait_for(lambda: self.scheduler.idle or self._stopping or self._broken is not None, timeout)
            return self.scheduler.idle

    def refuse_new(self) -> None:
        """From now on `submit` raises EngineStopped; what waits or runs goes on to its end, and nothing is healed."""
        with self._changed:
            self._refusing = True
            self.scheduler.stop_healing()

    def submit(self, generation: Generation, on_event: OnEvent) -> int:
        """Queue a request; returns its id. Raises RequestTooLarge, ConstraintError, QueueFull or EngineStopped at once.

        A full queue makes way for a namespace that waits less than others: the last of the one that waits most gets
        QueueFull in its place. If `on_event` raises, the request is given up.
        """
        # first of all: nobody makes way for what cannot be served
        self.scheduler.check_fits(len(generation.prompt) + generation.params.max_tokens)
        text = TextStream(self.loaded.tokenizer, generation.prompt[-8:], generation.params)
        constraint = generation.params.constraint
        machine = None if constraint is None else self.constraints.machine(constraint, generation.namespace)
        sampling = Sampling(generation.params, generation.prompt, machine)
        now = time.monotonic()
        with self._changed:
            self._check_admission(generation.namespace)
            seq = self.scheduler.submit(generation)
            scores = PromptScores.wanted(generation.prompt, generation.params)
            self._live[seq.id] = Live(seq, on_event, text, sampling, now, scores=scores)
            if generation.deadline is not None:
                self._deadlines.add(now + generation.deadline, seq.id)
                if len(self._deadlines) > 2 * len(self._live) + 1000:
                    self._deadlines.forget_all_but(self._live)
            self._changed.notify_all()
        return seq.id

    def _check_admission(self, namespace: str) -> None:
        if self._refusing or self._stopping or self._broken is not None:
            why = "is stopping" if self._broken is None else f"failed: {self._broken}"
            raise EngineStopped(f"the engine {why} and takes no more requests")
        waiting, limits = self.scheduler.waiting, self.scheduler.limits
        if len(waiting) < limits.max_waiting:
            return
        self._meter.refused += 1
        retry_after = self._meter.retry_after(len(waiting), limits.max_running)
        error = QueueFull(len(waiting), limits.max_waiting, retry_after)
        displaced = waiting.displaced_by(namespace)
        if displaced is None:
            raise error
        self.scheduler.give_up(displaced, error)

    def warm_segments(self, segments: Iterable[tuple[int, ...]], namespace: str) -> list[Outcome]:
        """Store segments of these token ids; what became of each, in their order. Blocks until all are done.

        Raises ConfigError where no segments are stored, EngineStopped.
        """
        with self._changed:
            self._check_admission(namespace)
            return Warming(self.scheduler, self._changed, self._is_ending).warm(segments, namespace)

    def _is_ending(self) -> bool:
        return self._stopping or self._broken is not None

    def cancel(self, request_id: int) -> None:
        """Give up a request; its memory is free within one step. Unknown and finished ids are ignored."""
        with self._changed:
            self._cancelled.add(request_id)
            self._changed.notify_all()

    def health(self) -> dict[str, object]:
        """Return the content of /health."""
        status = "stopping" if self._stopping else "draining" if self._refusing else "ok"
        return {
            "status": status if self._broken is None else f"failed: {self._broken}",
            "model": self.loaded.name,
            "deterministic": "yes" if self.check.deterministic else self.check.broken_by,
            "numerics": self.check.mode,
            "layout": weight_layout(self.check.mode, self.runner.model.dtype, self.runner.arena.pages.device),
            "memory_pages": self.scheduler.layout.n_pages,
            "running": self.scheduler.computing,
            "waiting": len(self.scheduler.waiting),
            "preemptions": self.scheduler.preemptions,
        }

    def stats(self) -> EngineStats:
        """Return counts of held memory and completed work; wait at most for the planning of a step."""
        with self._changed:
            return self._meter.stats(self.scheduler)

    def view(self) -> CacheView:
        """Return a view of the cache's tree; wait at most for the planning of a step."""
        with self._changed:
            return self.scheduler.cache.view()

    # -- on the engine's thread ------------------------------------------------

    def _loop(self) -> None:
        prepare_process(self.threads)  # denormals are a setting of each thread
        try:
            while self._turn():
                pass
            error: Exception = EngineStopped("the engine was stopped before the answer was complete")
        except Exception as unforeseen:  # nobody would answer any more: say so to all who wait
            log.exception("the engine failed")
            error = unforeseen
            with self._changed:
                self._broken = unforeseen
                self._changed.notify_all()
        for live in tuple(self._live.values()):
            self._told(live, FailedEvent(error))
        self._live.clear()

    def _turn(self) -> bool:
        """Wait for work and do one step of it. False when the engine is to stop."""
        with self._changed:
            while self.scheduler.idle and not (self._cancelled or self._stopping or self.scheduler.failures):
                self._changed.notify_all()  # whoever drains
                self._changed.wait()
            if self._stopping:
                return False
            self._take_cancelled()
            self._take_expired()
            step = self.scheduler.plan_step()
            self.runner.release(self.scheduler.slots.take_left())
        self._tell_failures()
        if step:
            self._run(step)
        return True

    def _take_cancelled(self) -> None:
        for request_id in self._cancelled:
            live = self._live.pop(request_id, None)
            if live is not None:
                self.scheduler.cancel(live.seq)
                self.runner.forget(request_id)
        self._cancelled.clear()

    def _take_expired(self) -> None:
        now = time.monotonic()
        for request_id in self._deadlines.take_passed(now):
            live = self._live.get(request_id)
            if live is not None:
                self._meter.expired += 1
                self.scheduler.give_up(live.seq, DeadlineExceeded(now - live.submitted, live.seq.n_output))

    def _tell_failures(self) -> None:
        with self._changed:
            failures, self.scheduler.failures = self.scheduler.failures, []
        for seq, error in failures:
            if not isinstance(error, OutOfPages | QueueFull | DeadlineExceeded):
                log.error("request %d failed", seq.id, exc_info=error)
                error = HeadwaterError(f"the step failed: {error}")
            live = self._live.get(seq.id)
            if live is not None:
                self._close(live, FailedEvent(error))

    def _run(self, step: Step) -> None:
        """A step that fails, or its sampling, takes its own requests with it and nothing else."""
        started = time.perf_counter()
        self._note_started(step)
        try:
            logits_RV = self.runner.run(step)
        except Exception as error:
            self._meter.failed_steps += 1
            with self._changed:
                failed = self.scheduler.abandon_step(step)
            self._fail(failed, error)
            return
        finally:
            self._meter.steps += 1
            self._meter.step_seconds += time.perf_counter() - started
        wanting = [item.seq for item in step.items if item.wants_token]
        with self._changed:
            finished = self.scheduler.finish_step(step)
        self._tell_failures()
        logits_RV, prompt_RV = logits_RV[: len(wanting)], logits_RV[len(wanting) :]
        self._score_prompts(step, prompt_RV)
        finished = [seq for seq in finished if seq.id in self._live]
        if len(finished) < len(wanting):
            logits_RV = logits_RV[[i for i, seq in enumerate(wanting) if seq in finished]]
        sampled = [self._live[seq.id] for seq in finished]
        try:
            choices = self._sample(logits_RV, sampled)
        except Exception as error:
            with self._changed:
                for live in sampled:
                    self.scheduler.cancel(live.seq)
            self._fail([live.seq for live in sampled], error)
            return
        for live, choice in zip(sampled, choices, strict=True):
            if isinstance(choice, Choice):
                self._take(live, choice)
            else:
                self._fail_alone(live, choice)

    def _score_prompts(self, step: Step, prompt_RV: torch.Tensor) -> None:
        first = 0
        for leg in step.legs:
            live, end = self._live.get(leg.seq.id), first + leg.n_scored
            try:
                if live is not None and live.scores is not None and end > first:
                    live.scores.take(leg.plan.start, prompt_RV[first:end])
            except Exception as error:  # of this prompt's logits: nobody else's
                self._fail_alone(live, error)
            first = end

    def _sample(self, logits_RV: torch.Tensor, sampled: list[Live]) -> list[Choice | InvalidLogits | ConstraintError]:
        if not sampled:
            return []
        if self.logits_tap is not None:
            for live, logits_V in zip(sampled, logits_RV, strict=True):
                self.logits_tap(live.seq.id, logits_V)
        return sample(logits_RV, [live.sampling for live in sampled])

    def _fail(self, seqs: list[Sequence], error: Exception) -> None:
        log.error("a step failed", exc_info=error)
        for seq in seqs:
            if seq.id in self._live:
                self._close(self._live[seq.id], FailedEvent(HeadwaterError(f"the step failed: {error}")))

    def _fail_alone(self, live: Live, error: Exception) -> None:
        log.error("request %d failed: %s: %s", live.seq.id, type(error).__name__, error)
        with self._changed:
            self.scheduler.cancel(live.seq)
        self._close(live, FailedEvent(error))

    def _take(self, live: Live, choice: Choice) -> None:
        """Append the token, tell the client, and end the request where it is to end."""
        seq, params = live.seq, live.params
        if live.scores is not None and not self._tell_scores(live):
            return
        if params.max_tokens == 0:
            self._finish(live, "length", None)
            return
        ends = params.stop_token_ids if params.ignore_eos else (*self.loaded.eos_token_ids, *params.stop_token_ids)
        ended = choice.token in ends
        try:
            live.sampling.take(choice.token)
            text, stop = ("", None) if ended else live.text.push(choice.token)
        except Exception as error:  # of its constraint, or its decoder: nobody else's
            self._fail_alone(live, error)
            return
        seq.tokens.append(choice.token)
        if ended:
            self._finish(live, "stop", choice.token)
        elif not self._told(live, TokenEvent(choice.token, text, choice.logprob, choice.top)):
            self._give_up(live)
        elif stop is not None:
            self._finish(live, "stop", stop)
        elif live.sampling.finished:
            self._finish(live, "stop", None)
        elif seq.n_output >= params.max_tokens:
            self._finish(live, "length", None)

    def _tell_scores(self, live: Live) -> bool:
        """False: nobody listens any more, and the request was given up."""
        assert live.scores is not None, "a prompt's scores are told once"
        event, live.scores = live.scores.event(), None
        told = self._told(live, event)
        if not told:
            self._give_up(live)
        return told

    def _give_up(self, live: Live) -> None:
        with self._changed:
            self.scheduler.cancel(live.seq)
        self._forget(live)

    def _finish(self, live: Live, reason: str, stop: str | int | None) -> None:
        seq = live.seq
        with self._changed:
            self.scheduler.finish(seq)
            self.observer.completed(seq)
        assert seq.account is not None
        account = replace(seq.account, preemptions=seq.preemptions)
        held_back = "" if isinstance(stop, str) else live.text.flush()
        queued = None if live.started is None else live.started - live.submitted
        self._close(live, FinishedEvent(reason, held_back, account, seq.n_output, stop, queued))

    def _note_started(self, step: Step) -> None:
        now = time.monotonic()
        for leg in step.legs:
            live = self._live.get(leg.seq.id)  # finished answers have nobody who waits
            if live is not None and live.started is None:
                live.started = now

    def _close(self, live: Live, event: Event) -> None:
        self._told(live, event)
        self._forget(live)

    def _told(self, live: Live, event: Event) -> bool:
        """False if the one who is to be told raised: a broken listener costs its own request alone."""
        try:
            live.on_event(event)
        except Exception as error:
            log.error("request %d could not be told of its answer", live.seq.id, exc_info=error)
            return False
        return True

    def _forget(self, live: Live) -> None:
        del self._live[live.seq.id]
        self.runner.forget(live.seq.id)
        self._meter.ended(time.monotonic() - live.submitted)
        assert live.seq.phase is Phase.DONE
