"""Assembly of an engine: its models with their proof of exactness, and its memory for pages, slots and drafts."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from headwater.cache.changes import IGNORED, ChangeLog
from headwater.cache.placement import make_placement
from headwater.cache.prefix_cache import NoCache, PrefixCache
from headwater.config import ServeConfig
from headwater.draft.drafter import MOST_DRAFTS
from headwater.engine.draft_model import SHARE, DraftModel, check_fits
from headwater.engine.mtp import MtpRunner
from headwater.engine.proof.selfcheck import Progress, SelfCheck
from headwater.engine.proof.start_checks import (
    check_memory,
    check_memory_tiers,
    exact_speculation,
    no_mtp,
    warn_if_slow,
)
from headwater.engine.proof.verdict import verdict
from headwater.engine.runner import Runner
from headwater.engine.tiers.tier import open_stores, tier_key
from headwater.memory.arena import Arena
from headwater.memory.slots import StateMemory
from headwater.mixers import numerics
from headwater.mixers.numerics import Numerics, prepare_process
from headwater.mixers.weight_memory import share
from headwater.models.hub import folder_of
from headwater.models.load import LoadedModel, load_model, open_weights, read_spec, read_texts
from headwater.plan import CacheLayout
from headwater.request import Healing, SegmentEviction
from headwater.schedule.kinds.segment import Composer
from headwater.schedule.limits import EXTRA_SLOTS, Limits
from headwater.schedule.planner import DecodeReuse
from headwater.schedule.scheduler import Scheduler
from headwater.schedule.speculation import AUTO, MTP, OFF, Speculation, speculation_of
from headwater.setting import SettingError, show_bytes
from headwater.spec import ModelSpec
from headwater.tiers.store import Store

# Checkpoints saved in the middle of a leg are staged in rows of their own, whose number and bytes are limited. A step
# of 256 tokens saves MIN_SAVES of them with pages of 64, for which there are more bytes.
MAX_SAVES, STAGED_BYTES = 16, 64 * 2**20
MIN_SAVES, MIN_SAVES_BYTES = 4, 256 * 2**20

MAX_POSITIONS = 2**24  # tokens of a sequence: up to here a position is exact in float32

log = logging.getLogger("headwater.engine")


@dataclass(frozen=True)
class Opened:
    """Models and stores of an engine, and the proof of exactness of its kernels."""

    path: Path
    loaded: LoadedModel
    check: SelfCheck
    draft: LoadedModel | None  # a smaller model that drafts
    stores: list[Store]
    key: bytes  # of the stores


def opened(config: ServeConfig, progress: Progress, share_weights: bool) -> Opened:
    """Check the settings, prove the kernels exact and load the models. Raises CheckpointError or ConfigError."""
    prepare_process(config.threads)
    path = folder_of(config.model)
    spec = read_spec(path, config.dtype, config.device, config.page_size, config.weights, config.rope_scaling)
    check_memory(config)
    texts = read_texts(path)
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
    held = (spec.dtype_name, config.device, config.page_size, config.weights)
    loaded = load_model(path, *held, mtp, texts, config.rope_scaling, config.keep_weights)
    loaded = replace(loaded, name=config.model_name or loaded.name)
    draft = None
    if config.draft_model is not None and check.deterministic:
        draft = load_model(config.draft_model, *held, keep=config.keep_weights)
        check_fits(draft, loaded)
    return Opened(path, loaded, check, draft, stores, key)


def draft_bytes(spec: ModelSpec, slots: int, speculation: Speculation) -> int:
    """Return the bytes of a step's drafts: the most that each slot may have."""
    return slots * MOST_DRAFTS * spec.draft_bytes if speculation else 0


def assembled(
    loaded: LoadedModel, check: SelfCheck, config: ServeConfig, draft: LoadedModel | None
) -> tuple[Scheduler, Runner]:
    """Return a scheduler and a runner, with memory of their own, over a loaded model. Raises SettingError."""
    spec = loaded.spec
    slots, speculation = config.max_running + EXTRA_SLOTS, exact_speculation(config, check)
    speculation.clock = time.perf_counter
    draft = draft if speculation else None
    draft_model_bytes = 0 if draft is None else config.memory // SHARE
    bytes_of_drafts = draft_bytes(spec, slots, speculation) + draft_model_bytes
    head = loaded.mtp if speculation.kind in (AUTO, MTP) and draft is None else None
    page_bytes = spec.page_bytes + (0 if head is None else spec.mtp_page_bytes)
    if bytes_of_drafts and config.memory < bytes_of_drafts + page_bytes:
        must = f"drafts take {bytes_of_drafts:,} bytes and one page {page_bytes:,}: give more, or --speculation off"
        raise SettingError("memory", repr(show_bytes(config.memory)), must)
    layout = spec.layout((max(config.memory, config.max_memory) - bytes_of_drafts) * spec.page_bytes // page_bytes)
    if config.resume_grid > 1:  # on a card a prefill of one row takes about as long as one of a page
        layout = replace(layout, tail_pages=())
    row_bytes, area = spec.state_place
    rows, min_rows = (size // max(1, row_bytes) for size in (STAGED_BYTES, MIN_SAVES_BYTES))
    n_saves = max(1, min(MAX_SAVES, rows), min(MIN_SAVES, min_rows))
    if spec.states_in_pages:  # of a step every page, and of each leg the one in which it begins
        n_saves = config.max_tokens_per_step // spec.page_size + 2 * slots
    states = StateMemory(spec.state, 2 * slots + n_saves, row_bytes, config.device, area)
    arena = Arena(spec, layout.n_pages, config.device)
    scheduler = _scheduler(config, layout, spec, n_saves, speculation)
    if config.max_memory:
        scheduler.cache.evictor.lend(layout.n_pages - spec.layout(config.memory).n_pages, 0)
    longest = scheduler.limits.max_model_len
    if longest > spec.max_length:
        served = f"{spec.max_length:,} tokens; requests of up to {longest:,} fit and are served"
        log.info("the model is made for %s", served)
    mtp = None if head is None else MtpRunner(head, layout.n_pages, slots, config.device)
    speculation.head = mtp
    if draft is not None:
        speculation.head = DraftModel(draft, spec.vocab_size, draft_model_bytes, config.max_running, config.device)
    return scheduler, Runner(loaded.model, arena, states, slots, mtp)


def with_empty_cache(scheduler: Scheduler, config: ServeConfig, spec: ModelSpec) -> Scheduler:
    """Return a scheduler of the same layout of memory, with an empty cache and without drafts."""
    saves = scheduler.limits.saves_per_step
    return _scheduler(config, scheduler.layout, spec, saves, speculation_of(OFF))


def min_pages(config: ServeConfig, layout: CacheLayout, spec: ModelSpec) -> int:
    """Return the pages that a model always keeps: half of its share of several models' memory."""
    return config.memory // 2 // spec.page_bytes if config.max_memory else layout.n_pages


def _scheduler(
    config: ServeConfig, layout: CacheLayout, spec: ModelSpec, n_saves: int, speculation: Speculation
) -> Scheduler:
    longest, kept = MAX_POSITIONS, min_pages(config, layout, spec)
    if config.max_memory and kept <= layout.slot_pages:
        needs = (
            f"a model keeps {kept:,} pages of {spec.page_bytes:,} bytes, and a request takes {layout.slot_pages + 1:,}"
        )
        raise SettingError("memory", repr(show_bytes(config.memory)), f"of which {needs}")
    if layout.kv_pages_per_unit:
        longest = min(longest, (kept - layout.slot_pages) * layout.page_size)
    limits = Limits(config.max_running, config.max_tokens_per_step, n_saves, longest, config.max_waiting)
    if not config.cache:
        off = make_placement("none")
        healing = Healing(config.healing)
        return Scheduler(NoCache(layout), off, limits, "none", healing=healing, speculation=speculation)
    segments = config.segment_share, SegmentEviction(config.segment_eviction)
    changes = ChangeLog() if config.kv_events else IGNORED
    cache = PrefixCache(layout, config.eviction, None, *segments, changes, time.monotonic)
    return Scheduler(
        cache=cache,
        placement=make_placement(config.placement),
        limits=limits,
        decode_reuse=cast(DecodeReuse, config.decode_reuse),
        composer=Composer(cache, spec.conv_taps),
        healing=Healing(config.healing),
        speculation=speculation,
    )
