"""Limits of what runs at once, what waits, and what a step may hold."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.errors import RequestTooLarge
from headwater.plan import CacheLayout

ANSWERS_AT_ONCE = 4  # finished answers that are prefilled side by side; each has a slot of its own
RESERVED = 1  # slots beyond `max_running`, for a namespace that has nothing running while others fill all slots
BUILDS_AT_ONCE = 4  # segments that are built side by side; each has a slot of its own
BUILT_TOGETHER = 1024  # tokens of segments that no request waits for which are built side by side; a longer one alone
EXTRA_SLOTS = ANSWERS_AT_ONCE + RESERVED + BUILDS_AT_ONCE
LOOKED_AT = 256  # waiting requests of a namespace that may be begun in one step
OTHERS = 64  # waiting requests that are compared with one that begins: where they leave it, it takes a checkpoint
SCORED_LEG = 256  # tokens of a leg whose rows all have logits: 150 MB of them for a vocabulary of 150,000
PREFETCHED = 2  # waiting requests without a slot whose prefixes are loaded from tiers
REPLAYED = 32  # rows of an answer that is replayed, in a step: as many as decode's products take in one pass
SHARED_STEP = 256  # tokens of a step on which more than one request waits: a long one would delay all of them


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens and checkpoints that a step has left for prefill."""

    tokens: int
    saves: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a scheduler: requests, tokens, and checkpoints that a step may take."""

    max_running: int
    tokens_per_step: int
    saves_per_step: int
    max_model_len: int
    max_waiting: int = 256
    shared_step: int = SHARED_STEP

    def check_fits(self, tokens: int, layout: CacheLayout) -> None:
        """Raise RequestTooLarge if a prompt and its output, `tokens` together, could never be served."""
        if tokens > self.max_model_len:
            limit = self.max_model_len
            raise RequestTooLarge(f"prompt and max_tokens together are {tokens:,} tokens, the model takes {limit:,}")
        kv = -(-tokens // layout.page_size) * layout.kv_pages_per_unit
        states = layout.slot_pages
        if layout.state_fraction is None or layout.elastic_pages:
            need, have = kv + states, layout.n_pages
        else:
            state_pages = round(layout.n_pages * layout.state_fraction)  # as the pool is split
            need, have = kv, layout.n_pages - state_pages
            if states > state_pages:
                need, have = states, state_pages
        if need > have:
            raise RequestTooLarge(f"{tokens:,} tokens need {need:,} pages of memory, there are {have:,}")
