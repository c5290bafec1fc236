"""Limits of running and waiting sequences, and of a step."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.errors import RequestTooLarge
from headwater.plan import CacheLayout

MAX_ANSWER_PREFILLS = 4  # running prefills of finished answers, each of which has a slot of its own
MAX_BUILDS = 4  # running builds of segments, each of which has a slot of its own
MAX_BUILD_TOKENS = 1024  # of builds that run together for no request; a longer segment is built with no other
RESERVED_SLOTS = 1  # beyond `max_running`, for a namespace without a running request while others fill all slots
EXTRA_SLOTS = MAX_ANSWER_PREFILLS + RESERVED_SLOTS + MAX_BUILDS
MAX_CANDIDATES = 256  # waiting requests of a namespace that may begin in one step
MAX_BRANCHING = 64  # waiting requests that are compared with one that begins, whose prefill saves where they leave it
MAX_PREFETCHED = 2  # waiting requests without a slot whose prefixes are loaded from tiers
MAX_REPLAYED_ROWS = 32  # of a step: as many as decode's products compute in one pass
SCORED_LEG_TOKENS = 256  # all rows of such a leg have logits: 150 MB of them for a vocabulary of 150,000
SHARED_STEP_TOKENS = 256  # of a step for which more than one request waits: a long one would delay all of them


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
    shared_step: int = SHARED_STEP_TOKENS

    def check_fits(self, tokens: int, layout: CacheLayout) -> None:
        """Raise RequestTooLarge if a prompt and its output, `tokens` together, could never be served."""
        if tokens > self.max_model_len:
            limit = self.max_model_len
            raise RequestTooLarge(f"prompt and max_tokens together are {tokens:,} tokens, the server takes {limit:,}")
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
