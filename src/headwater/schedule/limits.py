"""How much may run at once, and how many may wait for it."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.errors import RequestTooLarge
from headwater.plan import CacheLayout

ANSWERS_AT_ONCE = 4  # finished answers that are prefilled side by side; each has a slot of its own
GUESTS = 1  # requests beyond `max_running`, each of a namespace that has nothing running while others fill all places
MADE_AT_ONCE = 4  # segments that are prefilled side by side; each has a slot of its own
EXTRA_SLOTS = ANSWERS_AT_ONCE + GUESTS + MADE_AT_ONCE
LOOKED_AT = 256  # requests of a namespace that wait and may be begun in one step
OTHERS = 64  # requests that wait and are compared with one that begins: where they leave it, it takes a checkpoint
SCORED_LEG = 256  # tokens of a leg whose rows all have logits: 150 MB of them for a vocabulary of 150,000
SHARED_STEP = 256  # tokens of a step on which more than one request waits: a long one would cost all of them its time


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a scheduler: requests, tokens, and checkpoints that a step may take."""

    max_running: int
    tokens_per_step: int
    saves_per_step: int
    max_model_len: int
    max_waiting: int = 256
    shared_step: int = SHARED_STEP

    def check_fits(self, tokens: int, layout: CacheLayout) -> None:
        """Raises RequestTooLarge where a prompt and its output could never be served."""
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
