"""The engine: a thread that schedules, runs, samples and reports, step after step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import cast

import torch

from headwater.cache.changes import IGNORED, ChangeLog
from headwater.cache.placement import make_placement
from headwater.cache.prefix_cache import NoCache, PrefixCache
from headwater.cache.view import CacheView
from headwater.config import ServeConfig
from headwater.draft.drafter import MOST_DRAFTS
from headwater.engine.answering import Answering
from headwater.engine.constraint import ConstraintCompiler
from headwater.engine.detokenizer import TextStream
from headwater.engine.draft_model import SHARE, DraftModel, check_fits
from headwater.engine.live import Deadlines, Live, OnEvent, Outcome, Warming
from headwater.engine.meter import PROBED, Backlog, EngineStats
from headwater.engine.mtp import MtpRunner
from headwater.engine.preparations import Preparations
from headwater.engine.proof.fingerprint import Probe, fingerprint, probe
from headwater.engine.proof.selfcheck import Progress, SelfCheck, no_progress
from headwater.engine.proof.start_checks import (
    check_memory,
    check_memory_tiers,
    exact_speculation,
    no_mtp,
    too_much_memory,
    warn_if_slow,
)
from headwater.engine.proof.verdict import verdict
from headwater.engine.runner import Runner
from headwater.engine.sampler import PromptScores, Sampling
from headwater.engine.tiers.io import TierIO
from headwater.engine.tiers.own_parts import OwnParts
from headwater.engine.tiers.tier import Tier, open_stores, tier_key
from headwater.errors import DeadlineExceeded, EngineStopped, QueueFull
from headwater.events import FailedEvent
from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.mixers import numerics
from headwater.mixers.linear import weight_layout
from headwater.mixers.numerics import Numerics, end_workers, prepare_process
from headwater.mixers.weight_memory import share
from headwater.models.hub import folder_of
from headwater.models.load import LoadedModel, load_model, open_weights, read_spec
from headwater.request import Generation, Healing, SegmentEviction
from headwater.schedule.kinds.segment import Composer
from headwater.schedule.limits import EXTRA_SLOTS, Limits
from headwater.schedule.planner import DecodeReuse
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.sequence import TOKEN_BYTES
from headwater.schedule.speculation import AUTO, MTP, Speculation
from headwater.schedule.tail import TailPlace
from headwater.setting import SettingError, show_bytes
from headwater.spec import ModelSpec
from headwater.tiers.fingerprint import Fingerprint
from headwater.tiers.store import PeerStore, Store

# Checkpoints saved in the middle of a leg are staged in rows of their own: at most so many, and so many bytes. The few,
# for which there are more bytes, are what a step of 256 tokens saves with pages of 64.
MAX_SAVES, STAGED_BYTES = 16, 64 * 2**20
FEW_SAVES, BYTES_OF_FEW = 4, 256 * 2**20
TIERS_ARE_LATE = 0.05  # seconds between looks at requests that wait for tiers

log = logging.getLogger("headwater.engine")


def draft_bytes(spec: ModelSpec, slots: int, speculation: Speculation) -> int:
    """Return the bytes that are set aside for what is kept of drafts: the most that a step takes, of each slot."""
    return slots * MOST_DRAFTS * spec.draft_bytes if speculation else 0


class Engine(Answering):
    """Runs requests from any thread on a thread of its own.

    `submit` and `cancel` may be called from anywhere; `on_event` is called on the engine's thread and must not block.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        scheduler: Scheduler,
        runner: Runner,
        check: SelfCheck,
        constraints: ConstraintCompiler,
    ) -> None:
        super().__init__(loaded, scheduler, runner)
        self.check = check
        self.threads = torch.get_num_threads()
        self.tokenizer = loaded.tokenizer
        self.chat_template = loaded.chat_template
        self.special_tokens = loaded.special_tokens
        self.generation_defaults = loaded.generation
        self.model_name = loaded.name
        self.max_model_len = scheduler.limits.max_model_len
        self.spec = loaded.spec
        self.constraints = constraints
        head = scheduler.speculation.head
        self.draft_bytes = draft_bytes(loaded.spec, runner.slots, scheduler.speculation)
        self.draft_bytes += head.bytes if isinstance(head, DraftModel) else 0
        self.mtp_bytes = 0 if runner.mtp is None else scheduler.layout.n_pages * loaded.spec.mtp_page_bytes
        self._cancelled: set[int] = set()
        self._deadlines = Deadlines()
        self._refusing = False  # running requests end, new ones are refused
        self._stopping = False
        self._broken: Exception | None = None  # the error that ended the thread
        self._thread: threading.Thread | None = None

    @classmethod
    def load(cls, config: ServeConfig, progress: Progress = no_progress, share_weights: bool = False) -> Engine:
        """Load the checkpoint, lay out the memory and make sure that the kernels are as exact as answers need.

        `progress` is called if the kernels are checked now. `share_weights`: with other processes of this host that do
        so. Raises CheckpointError or ConfigError; the engine is not started.
        """
        prepare_process(config.threads)
        path = folder_of(config.model)
        spec = read_spec(path, config.dtype, config.device, config.page_size, config.weights)
        check_memory(config)
        tensors = open_weights(path, spec.dtype_name, config.device)  # a broken file is an error before the proof
        has_head = config.device == "cpu" and spec.mtp is not None and spec.mtp.product in tensors
        if config.speculation == MTP and not has_head:
            raise no_mtp(spec, config)
        stores, key = (open_stores(config), tier_key(config)) if config.tier else ([], b"")
        check_memory_tiers(config, stores)
        check = verdict(spec, config.device, config.reproducible, config.recheck, progress)
        if check.proven is not None:
            log.info("hits are exact: proven %s UTC for %s, %s", f"{check.proven:%F %R}", spec.dtype_name, check.mode)
        numerics.use(Numerics(check.mode))
        warn_if_slow(spec, config.device, check.mode)
        mtp = has_head and config.speculation in (AUTO, MTP) and check.deterministic
        if share_weights:
            share()
        loaded = load_model(path, spec.dtype_name, config.device, config.page_size, config.weights, mtp)
        loaded = replace(loaded, name=config.model_name or loaded.name)
        draft = None
        if config.draft_model is not None and check.deterministic:
            dtype = spec.dtype_name
            draft = load_model(config.draft_model, dtype, config.device, config.page_size, config.weights)
            check_fits(draft, loaded)
        probed = probe(loaded) if stores else None
        end_workers()  # the engine computes on a thread of its own
        try:
            engine = cls.over(loaded, check, config, draft)
        except (MemoryError, OSError, torch.OutOfMemoryError) as error:
            raise too_much_memory(config) from error
        if probed is not None:
            own = fingerprint(loaded, path, check.mode, probed)
            engine.use_tiers(stores, key, own, config)
            engine.note_probe(probed)
            log.info(
                "checkpoints are kept in %s, too (%s)", ", ".join(store.shown for store in stores), config.tier_store
            )
        return engine

    def use_tiers(self, stores: list[Store], key: bytes, fingerprint: Fingerprint, config: ServeConfig) -> None:
        """Keep states and KV in these stores, too. The engine is not started yet."""
        self.scheduler.tiers = TierIO(stores, key, fingerprint, self.scheduler, self.runner, self._changed, config)

    @property
    def own_tiers(self) -> Mapping[str, Tier]:
        """Tiers that may be this server's alone, by the medium that they have in KV events."""
        tiers = self.scheduler.tiers
        return tiers.own if isinstance(tiers, TierIO) else {}

    def note_probe(self, probed: Probe) -> None:
        """Take the probe's prefill for the first one that was measured. The engine is not started yet."""
        self._meter.probed(probed.seconds)
        self.scheduler.tiers.prefilled(PROBED, probed.seconds)

    def join_peers(self, store: PeerStore, key: bytes, fingerprint: Fingerprint, config: ServeConfig) -> OwnParts:
        """Pull prefixes from other workers; return what those may read here. The engine is not started yet."""
        if not isinstance(self.scheduler.tiers, TierIO):
            self.use_tiers([], key, fingerprint, config)
        assert isinstance(self.scheduler.tiers, TierIO), "its tiers were just made"
        return self.scheduler.tiers.join_peers(store, key, fingerprint)

    @classmethod
    def over(
        cls, loaded: LoadedModel, check: SelfCheck, config: ServeConfig, draft: LoadedModel | None = None
    ) -> Engine:
        """Return an engine, with memory of its own, over a loaded model, for which `draft` drafts if it is given."""
        spec = loaded.spec
        slots, speculation = config.max_running + EXTRA_SLOTS, exact_speculation(config, check)
        speculation.clock = time.perf_counter
        draft = draft if speculation else None
        of_draft_model = 0 if draft is None else config.memory // SHARE
        of_drafts = draft_bytes(spec, slots, speculation) + of_draft_model
        head = loaded.mtp if speculation.kind in (AUTO, MTP) and draft is None else None
        of_page = spec.page_bytes + (0 if head is None else spec.mtp_page_bytes)
        if of_drafts and config.memory < of_drafts + of_page:
            must = f"drafts take {of_drafts:,} bytes and one page {of_page:,}: give more, or --speculation off"
            raise SettingError("memory", repr(show_bytes(config.memory)), must)
        layout = spec.layout((config.memory - of_drafts) * spec.page_bytes // of_page)
        row_bytes = layout.checkpoint_pages * spec.page_bytes
        many, few = (size // max(1, row_bytes) for size in (STAGED_BYTES, BYTES_OF_FEW))
        n_saves = max(1, min(MAX_SAVES, many), min(FEW_SAVES, few))
        states = StateMemory(spec.state, 2 * slots + n_saves, row_bytes, config.device)
        arena = Arena(spec, layout.n_pages, config.device)
        longest = spec.max_length
        if layout.kv_pages_per_unit:
            longest = min(longest, (layout.n_pages - layout.slot_pages) * layout.page_size)
        limits = Limits(config.max_running, config.max_tokens_per_step, n_saves, longest, config.max_waiting)
        segments = config.segment_share, SegmentEviction(config.segment_eviction)
        changes = ChangeLog() if config.kv_events else IGNORED
        if config.cache:
            cache = PrefixCache(layout, config.eviction, None, *segments, changes, time.monotonic)
        else:
            cache = NoCache(layout)
        scheduler = Scheduler(
            cache=cache,
            placement=make_placement(config.placement if config.cache else "none"),
            limits=limits,
            decode_reuse=cast(DecodeReuse, config.decode_reuse) if config.cache else "none",
            composer=Composer(cache, spec.conv_taps) if config.cache else None,
            healing=Healing(config.healing),
            speculation=speculation,
        )
        ends, seconds = loaded.eos_token_ids, config.constraint_time
        constraints = ConstraintCompiler(loaded.tokenizer, spec.vocab_size, ends, seconds)
        mtp = None if head is None else MtpRunner(head, layout.n_pages, slots, config.device)
        speculation.head = mtp
        if draft is not None:
            speculation.head = DraftModel(draft, spec.vocab_size, of_draft_model, config.max_running, config.device)
        return cls(loaded, scheduler, Runner(loaded.model, arena, states, slots, mtp), check, constraints)

    # -- from any thread -------------------------------------------------------

    def start(self) -> None:
        """Start serving. A stopped engine cannot be started again."""
        self._thread = threading.Thread(target=self._loop, name="headwater-engine", daemon=True)
        self._thread.start()

    def stop(self, left: Callable[[], float] = lambda: 0.0) -> None:
        """End the thread after the step in progress; requests still open fail with EngineStopped.

        Then tiers copy what is cached while `left()` seconds are left.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.scheduler.tiers.close(left)
        self.observer.close()

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to do, finished answers and healing included; False if `timeout` was too short."""
        with self._changed:
            self._changed.wait_for(lambda: self.scheduler.idle or self._stopping or self._broken is not None, timeout)
            return self.scheduler.idle

    def refuse_new(self) -> None:
        """Refuse requests from now on with EngineStopped; earlier ones run to their ends, and nothing is healed."""
        with self._changed:
            self._refusing = True
            self.scheduler.healer.stop()

    def submit(
        self,
        generation: Generation,
        on_event: OnEvent,
        output: Iterable[int] = (),
        peers: Iterable[bytes] = (),
        follows: int | None = None,
        tail: TailPlace | None = None,
        begun: bool = False,
    ) -> int:
        """Queue a request; returns its id. Raises RequestTooLarge, ConstraintError, QueueFull or EngineStopped at once.

        `output` is what another engine has answered so far: the answer goes on after it, with the same bits. Only what
        follows has events. `peers` are workers of a cluster that have more of the prompt. `follows`: the number that
        `follow` returned for the prompt's prefill. `tail`: of the prompt, to be kept for another worker, or read. If
        the queue is full, the last request of the namespace with most waiting ones may be displaced, and gets
        QueueFull; one whose answer has begun, here or elsewhere (`begun`), is neither refused nor displaced. If
        `on_event` raises, the request is given up.
        """
        # first, so that no request is displaced by one that cannot be served
        self.scheduler.check_fits(len(generation.prompt) + generation.params.max_tokens)
        params = generation.params
        text = TextStream(self.loaded.tokenizer, generation.prompt[-8:], params)
        machine = None
        if params.constraint is not None:
            machine = self.constraints.machine(params.constraint, generation.namespace)
        ends = params.stop_token_ids if params.ignore_eos else (*self.loaded.eos_token_ids, *params.stop_token_ids)
        sampling = Sampling(params, generation.prompt, machine, ends)
        known = list(output)
        for token in known:
            sampling.take(token)
            text.push(token)
        now = time.monotonic()
        with self._changed:
            self._check_running()
            if not begun:
                self._check_queue(generation.namespace)
            seq = self.scheduler.submit(generation, machine)
            seq.begun_elsewhere = begun
            seq.tokens += known  # computed by decode rows, as after a preemption
            seq.peers, seq.follows, seq.tail_place = tuple(peers), follows, tail
            scores = PromptScores.wanted(generation.prompt, params)
            self.scheduler.tiers.arrived(seq)
            live = self._live[seq.id] = Live(seq, on_event, text, sampling, now, scores=scores)
            try:
                live.cached = self.scheduler.cached_of(seq)
            except Exception as error:  # of this prompt alone
                self.scheduler.give_up(seq, error)
            if generation.deadline is not None:
                self._deadlines.add(now + generation.deadline, seq.id)
                if len(self._deadlines) > 2 * len(self._live) + 1000:
                    self._deadlines.forget_all_but(self._live)
            self._changed.notify_all()
        return seq.id

    def follow(self, peer: bytes, namespace: str, key: bytes) -> int:
        """Read a prompt's prefix from another worker of a cluster while that one computes it; return a number.

        `key`: the prompt's, of the index. It ends when a request is submitted with this number and not refused, or with
        `unfollow`.
        """
        with self._changed:
            return self.scheduler.tiers.follow(peer, namespace, key, len(key) // TOKEN_BYTES)

    def unfollow(self, number: int) -> None:
        """Give up to follow a prefill. Unknown numbers are ignored."""
        with self._changed:
            self.scheduler.tiers.unfollow(number)

    def _check_running(self) -> None:
        if self._refusing or self._stopping or self._broken is not None:
            why = "is stopping" if self._broken is None else f"failed: {self._broken}"
            raise EngineStopped(f"the engine {why} and takes no more requests")

    def _check_queue(self, namespace: str) -> None:
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
        """Store segments of these token ids; return the outcome of each. Blocks until all are done.

        Raises ConfigError where no segments are stored, EngineStopped.
        """
        with self._changed:
            self._check_running()
            self._check_queue(namespace)
            return Warming(self.scheduler, self._changed, self._is_ending).warm(segments, namespace)

    def preparations(self) -> Preparations:
        """Return segments that others want in memory; its `after` is to be called by `stepped`."""
        return Preparations(self.scheduler, self._changed, self.spec.vocab_size)

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
            "proven": None if self.check.proven is None else self.check.proven.isoformat(),
            "numerics": self.check.mode,
            "dtype": self.spec.dtype_name,
            "weights": self.spec.weights_held,
            "layout": weight_layout(self.check.mode, self.runner.arena.pages.device),
            "memory_pages": self.scheduler.layout.n_pages,
            "speculation": self.scheduler.speculation.shown,
            "running": self.scheduler.computing,
            "waiting": len(self.scheduler.waiting),
            "preemptions": self.scheduler.preemptions,
        }

    def stats(self) -> EngineStats:
        """Return counts of held memory and completed work; wait at most for the planning of a step."""
        with self._changed:
            return self._meter.stats(self.scheduler)

    def backlog(self) -> Backlog:
        """Return the requests that wait."""
        with self._changed:
            return self._meter.backlog(self.scheduler)

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
        except Exception as unforeseen:  # open requests would wait forever: fail them
            log.exception("the engine failed")
            error = unforeseen
            with self._changed:
                self._broken = unforeseen
                self._changed.notify_all()
        for live in tuple(self._live.values()):
            self._send(live, FailedEvent(error))
        self._live.clear()

    def _turn(self) -> bool:
        """Wait for work and do one step of it. False when the engine is to stop."""
        with self._changed:
            while self.scheduler.idle and not (self._cancelled or self._stopping or self.scheduler.failures):
                self._changed.notify_all()  # a call of `drain`
                self._changed.wait()
            if self._stopping:
                return False
            self._take_cancelled()
            self._take_expired()
            self.scheduler.tiers.take_late()
            begun = time.perf_counter()
            step = self.scheduler.plan_step()
            planning = time.perf_counter() - begun
            self.stepped()  # readers know of what is evicted for the step before it runs
            self.runner.release(self.scheduler.slots.take_left())
            if not step and self.scheduler.tiers.busy:
                self._changed.wait(TIERS_ARE_LATE)
        self._report_failures()
        if step:
            try:
                self._run(step, planning)
            finally:  # threads may wait for them
                self.runner.write_entries()
        with self._changed:
            self.stepped()
        return True

    def _take_cancelled(self) -> None:
        for request_id in self._cancelled:
            live = self._live.pop(request_id, None)
            if live is not None:
                self.scheduler.cancel(live.seq)
                self._drop(request_id)
        self._cancelled.clear()

    def _take_expired(self) -> None:
        now = time.monotonic()
        for request_id in self._deadlines.take_passed(now):
            live = self._live.get(request_id)
            if live is not None:
                self._meter.expired += 1
                asked = live.seq.generation
                error = DeadlineExceeded(asked.deadline or 0.0, live.seq.n_output, asked.deadline_of)
                self.scheduler.give_up(live.seq, error)
