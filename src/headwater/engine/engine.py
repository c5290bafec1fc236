"""The engine: requests and questions from any thread to the scheduler, the model and the step loop."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch

from headwater.cache.view import CacheView
from headwater.config import ServeConfig
from headwater.engine.answering import Answering, Live, OnEvent
from headwater.engine.assembly import assembled, draft_bytes, opened, with_empty_cache
from headwater.engine.constraint import ConstraintCompiler
from headwater.engine.detokenizer import TextStream
from headwater.engine.draft_model import DraftModel
from headwater.engine.idle_weights import IdleWeights
from headwater.engine.loop import StepLoop
from headwater.engine.meter import Backlog, EngineStats, Meter
from headwater.engine.preparations import Outcome, Preparations, Warming
from headwater.engine.proof.fingerprint import Probe, fingerprint, probe
from headwater.engine.proof.selfcheck import Progress, SelfCheck, no_progress
from headwater.engine.proof.start_checks import too_much_memory
from headwater.engine.runner import Runner
from headwater.engine.sampler import PromptScores, Sampling
from headwater.engine.tiers.io import TierIO
from headwater.engine.tiers.own_parts import OwnParts
from headwater.engine.tiers.tier import Tier
from headwater.engine.verification import Verification
from headwater.errors import EngineStopped, OutOfPages, QueueFull
from headwater.mixers.linear import weight_layout
from headwater.mixers.numerics import end_workers
from headwater.models.hybrid import HybridModel
from headwater.models.load import LoadedModel
from headwater.request import Generation
from headwater.schedule.handover import NO_HANDOVER, Handover
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import TOKEN_BYTES
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.store import PeerStore, Store

log = logging.getLogger("headwater.engine")


class Engine:
    """Takes requests from any thread, and answers them on a thread of its own.

    `submit` and `cancel` may be called from anywhere; `on_event` is called on the engine's thread and must not block.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        check: SelfCheck,
        scheduler: Scheduler,
        runner: Runner,
        constraint_seconds: float = math.inf,
    ) -> None:
        """`constraint_seconds`: limit of the computing time of one answer's constraint."""
        self.loaded, self.check, self.scheduler, self.runner = loaded, check, scheduler, runner
        self.tokenizer, self.spec, self.model_name = loaded.tokenizer, loaded.spec, loaded.name
        self.chat_template, self.special_tokens = loaded.chat_template, loaded.special_tokens
        self.generation_defaults = loaded.generation
        self.max_model_len = scheduler.limits.max_model_len
        head = scheduler.speculation.head
        self.draft_bytes = draft_bytes(loaded.spec, runner.slots, scheduler.speculation)
        self.draft_bytes += head.bytes if isinstance(head, DraftModel) else 0
        self.mtp_bytes = 0 if runner.mtp is None else scheduler.layout.n_pages * loaded.spec.mtp_page_bytes
        ends, seconds = loaded.eos_token_ids, constraint_seconds
        self.constraints = ConstraintCompiler(loaded.tokenizer, loaded.spec.vocab_size, ends, seconds)
        self.changed = threading.Condition()  # guards the scheduler, which other threads call
        self.meter = Meter(scheduler.layout.flops)
        self.answering = Answering(scheduler, runner, self.meter, self.changed)
        self.verification = Verification(self.answering, scheduler, self.changed)
        self.loop = StepLoop(scheduler, runner, self.answering, self.verification, self.meter, self.changed)
        self.tiers: TierIO | None = None
        self._refusing = False  # running requests end, new ones are refused

    @classmethod
    def load(cls, config: ServeConfig, progress: Progress = no_progress, share_weights: bool = False) -> Engine:
        """Load the checkpoint, lay out the memory and make sure that the kernels are as exact as answers need.

        `progress` is called if the kernels are checked now. `share_weights`: with other processes of this host that do
        so. Raises CheckpointError or ConfigError; the engine is not started.
        """
        found = opened(config, progress, share_weights)
        probed = probe(found.loaded) if found.stores else None
        end_workers()  # the engine computes on a thread of its own
        try:
            engine = cls.over(found.loaded, found.check, config, found.draft)
        except (MemoryError, OSError, torch.OutOfMemoryError) as error:
            raise too_much_memory(config) from error
        if probed is not None:
            own = fingerprint(found.loaded, found.path, found.check.mode, probed)
            engine.use_tiers(found.stores, found.key, own, config)
            engine.note_probe(probed)
            shown = ", ".join(store.shown for store in found.stores)
            log.info("checkpoints are kept in %s, too (%s)", shown, config.tier_store)
        if config.unload_after is not None:
            engine.loop.weights = IdleWeights(found.loaded, engine.runner, config, found.check.mode)
            engine.loaded = replace(found.loaded, model=cast(HybridModel, None))  # only the runner has it
        return engine

    @classmethod
    def over(
        cls, loaded: LoadedModel, check: SelfCheck, config: ServeConfig, draft: LoadedModel | None = None
    ) -> Engine:
        """Return an engine, with memory of its own, over a loaded model, for which `draft` drafts if it is given."""
        scheduler, runner = assembled(loaded, check, config, draft)
        return cls(loaded, check, scheduler, runner, config.constraint_time)

    def rehearsal(self, config: ServeConfig) -> Engine:
        """Return an engine with a cache of its own in this one's memory, to be stopped before this one starts."""
        scheduler = with_empty_cache(self.scheduler, config, self.spec)
        return Engine(self.loaded, self.check, scheduler, self.runner, config.constraint_time)

    # -- tiers, before it is started

    def use_tiers(self, stores: list[Store], key: bytes, fingerprint: Fingerprint, config: ServeConfig) -> None:
        """Keep states and KV in these stores, too."""
        parts = self.scheduler, self.runner, self.changed, config, self.meter.by_tokens
        self.tiers = self.scheduler.tiers = TierIO(stores, key, fingerprint, *parts)
        self.loop.take_late = self.tiers.take_late

    @property
    def own_tiers(self) -> Mapping[str, Tier]:
        """Tiers that may be private to this server, by the medium that they have in KV events."""
        return {} if self.tiers is None else self.tiers.own

    def note_probe(self, probed: Probe) -> None:
        """Use the probe's prefill as the first one that was measured."""
        self.meter.probed(probed.seconds)

    def join_peers(self, store: PeerStore, key: bytes, fingerprint: Fingerprint, config: ServeConfig) -> OwnParts:
        """Pull prefixes from other workers; return what those may read here."""
        if self.tiers is None:
            self.use_tiers([], key, fingerprint, config)
        assert self.tiers is not None, "its tiers were just made"
        return self.tiers.join_peers(store, key, fingerprint)

    @property
    def stepped(self) -> Callable[[], None]:
        """Function that is called when the cache has changed, with `changed` held."""
        return self.answering.stepped

    @stepped.setter
    def stepped(self, stepped: Callable[[], None]) -> None:
        self.answering.stepped = stepped

    # -- from any thread -------------------------------------------------------

    def start(self) -> None:
        """Start serving. A stopped engine cannot be started again."""
        self.loop.thread.start()

    def stop(self, left: Callable[[], float] = lambda: 0.0) -> None:
        """End the thread after the step in progress; requests still open fail with EngineStopped.

        Then tiers copy what is cached while `left()` seconds are left.
        """
        self.loop.stop()
        if self.tiers is not None:
            self.tiers.close(left)
        self.answering.observer.close()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do, finished answers and healing included; False if `timeout` was too short."""
        with self.changed:
            self.changed.wait_for(lambda: self.scheduler.idle or self.loop.is_ending, timeout)
            return self.scheduler.idle

    def refuse_new(self) -> None:
        """Refuse requests from now on with EngineStopped; earlier ones run to their ends, and nothing is healed."""
        with self.changed:
            self._refusing = True
            self.scheduler.healer.stop()

    def submit(self, generation: Generation, on_event: OnEvent, handover: Handover = NO_HANDOVER) -> int:
        """Queue a request; returns its id. Raises RequestTooLarge, ConstraintError, QueueFull or EngineStopped at once.

        An answer that another engine began continues after `handover.output`, and only what follows has events. If the
        queue is full, the last request of the namespace with most waiting ones may be displaced, and gets QueueFull;
        one whose answer has begun, here or elsewhere, is neither refused nor displaced. If `on_event` raises, the
        request is given up.
        """
        # first, so that no request is displaced by one that cannot be served
        length = len(generation.prompt) + generation.params.max_tokens
        self.scheduler.check_fits(length)
        if length > self.spec.max_length:
            log.warning("a request has %s tokens, the model is made for %s", f"{length:,}", f"{self.spec.max_length:,}")
        text, sampling = self._prepared(generation, handover.output)
        now = time.monotonic()
        with self.changed:
            self._check_running()
            if not handover.begun:
                self._check_queue(generation.key or generation.namespace)
            seq = self.scheduler.submit(generation, sampling.machine)
            seq.tokens += handover.output  # computed by decode rows, as after a preemption
            seq.handover = handover
            scores = PromptScores.wanted(generation.prompt, generation.params)
            self.scheduler.tiers.arrived(seq)
            live = self.answering.live[seq.id] = Live(seq, on_event, text, sampling, now, scores=scores)
            try:
                live.cached = self.scheduler.cached_of(seq)
            except Exception as error:  # an error of only this prompt
                self.scheduler.give_up(seq, error)
            if generation.deadline is not None:
                self.loop.deadlines.add(now + generation.deadline, seq.id)
                if len(self.loop.deadlines) > 2 * len(self.answering.live) + 1000:
                    self.loop.deadlines.forget_all_but(self.answering.live)
            self.changed.notify_all()
        return seq.id

    def _prepared(self, generation: Generation, output: Sequence[int]) -> tuple[TextStream, Sampling]:
        """Return the text and the sampling of an answer after its first tokens. Raises ConstraintError."""
        params, machine = generation.params, None
        text = TextStream(self.tokenizer, generation.prompt[-8:], params)
        if params.constraint is not None:
            machine = self.constraints.machine(params.constraint, generation.namespace)
        ends = params.stop_token_ids if params.ignore_eos else (*self.loaded.eos_token_ids, *params.stop_token_ids)
        sampling = Sampling(params, generation.prompt, machine, ends)
        for token in output:
            sampling.take(token)
            text.push(token)
        return text, sampling

    def keep_answer(self, asked: Generation) -> None:
        """Prefill an answer that another worker of a cluster has decoded, so that its next turn resumes here.

        `asked`: the request, with prompt and answer as its prompt.
        """
        with self.changed:
            self.scheduler.keep_answer(asked)
            self.changed.notify_all()

    def follow(self, peer: bytes, namespace: str, key: bytes) -> int:
        """Read a prompt's prefix from another worker of a cluster while that one computes it; return a number.

        `key`: the prompt's, of the index. It ends when a request is submitted with this number and not refused, or with
        `unfollow`.
        """
        with self.changed:
            return self.scheduler.tiers.peers.follow(peer, namespace, key, len(key) // TOKEN_BYTES)

    def unfollow(self, number: int) -> None:
        """Give up to follow a prefill. Unknown numbers are ignored."""
        with self.changed:
            self.scheduler.tiers.peers.unfollow(number)

    def _check_running(self) -> None:
        if self._refusing or self.loop.is_ending:
            broken = self.loop.broken
            why = "is stopping" if broken is None else f"failed: {broken}"
            raise EngineStopped(f"the engine {why} and takes no more requests")

    def _check_queue(self, tenant: str) -> None:
        waiting, limits = self.scheduler.waiting, self.scheduler.limits
        if len(waiting) < limits.max_waiting:
            return
        self.meter.refused += 1
        retry_after = self.meter.retry_after(len(waiting), limits.max_running)
        error = QueueFull(len(waiting), limits.max_waiting, retry_after)
        displaced = waiting.displaced_by(tenant)
        if displaced is None:
            raise error
        self.scheduler.give_up(displaced, error)

    def warm_segments(self, segments: Iterable[tuple[int, ...]], namespace: str) -> list[Outcome]:
        """Store segments of these token ids; return the outcome of each. Blocks until all are done.

        Raises ConfigError where no segments are stored, EngineStopped.
        """
        with self.changed:
            self._check_running()
            self._check_queue(namespace)
            return Warming(self.scheduler, self.changed, lambda: self.loop.is_ending).warm(segments, namespace)

    def preparations(self) -> Preparations:
        """Return segments that others want in memory; its `after` is to be called by `stepped`."""
        return Preparations(self.scheduler, self.changed, self.spec.vocab_size)

    def lend(self, size: int, min_pages: int, evicts: bool) -> int:
        """Give up at most `size` bytes of the cache's memory, and return how many; evict nothing unless `evicts`.

        At least `min_pages` pages stay.
        """
        page_bytes, cache = self.spec.page_bytes, self.scheduler.cache
        with self.changed:
            spare = cache.pool.size - min_pages
            pages = min(size // page_bytes, spare if evicts else min(spare, cache.pool.free))
            try:
                given = cache.evictor.lend(max(0, pages), cache.now)
            except OutOfPages:  # running requests hold them
                return 0
        self.runner.arena.discard(given)
        return len(given) * page_bytes

    def borrow(self, size: int) -> int:
        """Add at most `size` bytes to the cache's memory, up to its greatest size, and return how many."""
        with self.changed:
            pool = self.scheduler.cache.pool
            pages = min(size // self.spec.page_bytes, pool.n_lent)
            pool.get_back(pages)
        return pages * self.spec.page_bytes

    def cancel(self, request_id: int) -> None:
        """Give up a request; its memory is free within two steps. Unknown and finished ids are ignored."""
        with self.changed:
            self.loop.cancelled.add(request_id)
            self.changed.notify_all()

    def prefilled(self, request_id: int) -> tuple[int, int] | None:
        """Return how many tokens of an open request's prompt are computed or cached, and all of them. Takes no lock."""
        live = self.answering.live.get(request_id)
        return None if live is None else (min(live.seq.computed, live.seq.n_prompt), live.seq.n_prompt)

    def turn_seconds(self) -> float:
        """Return the seconds since the current step began; 0 between steps, infinite for a failed engine."""
        return self.loop.turn_seconds

    def health(self) -> dict[str, object]:
        """Return the content of /health."""
        status, broken = "stopping" if self.loop.stopping else "draining" if self._refusing else "ok", self.loop.broken
        return {
            "status": status if broken is None else f"failed: {broken}",
            "model": self.loaded.name,
            "loaded": self.loop.weights.loaded,
            "unloads_at": self.loop.unloads_at,
            "deterministic": "yes" if self.check.deterministic else self.check.broken_by,
            "proven": None if self.check.proven is None else self.check.proven.isoformat(),
            "numerics": self.check.mode,
            "dtype": self.spec.dtype_name,
            "weights": self.spec.weights_held,
            "layout": weight_layout(self.check.mode, self.runner.arena.pages.device),
            "memory_pages": self.scheduler.cache.pool.size,
            "speculation": self.scheduler.speculation.shown,
            "running": self.scheduler.computing,
            "waiting": len(self.scheduler.waiting),
            "preemptions": self.scheduler.preemptions,
        }

    def stats(self) -> EngineStats:
        """Return counts of held memory and completed work; wait at most for the planning of a step."""
        with self.changed:
            return self.meter.stats(self.scheduler)

    def backlog(self) -> Backlog:
        """Return the requests that wait."""
        with self.changed:
            return self.meter.backlog(self.scheduler)

    def view(self) -> CacheView:
        """Return a view of the cache's tree; wait at most for the planning of a step."""
        with self.changed:
            return self.scheduler.cache.view()
