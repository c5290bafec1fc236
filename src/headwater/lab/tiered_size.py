"""Memory and disk that recorded traffic needs: each size of memory above each tier, replayed in full under a clock.

Samples do not help here: a load's time, and the queue, depend on the whole traffic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from headwater.journal import Journal
from headwater.lab.replay import NewArrivals, run_grid
from headwater.lab.row import Row
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.lab.size import LEVELS, spelled
from headwater.lab.tiers import TierLaw
from headwater.setting import OFF
from headwater.traces.request import Trace


@dataclass(frozen=True, slots=True)
class TieredSize:
    """Outcome of one size of memory above one tier."""

    memory: int  # bytes
    tier: str  # as given
    hit_rate: float
    loaded: float  # share of prompt tokens that were read from the tier; part of the hits
    disk: int  # bytes that the tier held at most
    ttft_p50: float  # seconds, as the next
    ttft_p95: float

    @classmethod
    def of(cls, row: Row) -> TieredSize:
        """Return the outcome in a row of a replay."""
        assert row.ttft_ms is not None, "the replay was under a clock"
        p50, p95 = row.ttft_ms.p50 / 1e3, row.ttft_ms.p95 / 1e3
        loaded = row.loaded_tokens / max(1, row.prompt_tokens)
        return cls(row.memory, row.tier, row.token_hit_rate, loaded, row.tier_peak_bytes, p50, p95)


@dataclass(frozen=True, slots=True)
class TierGrid:
    """Grid of replays: each memory (bytes) above each tier; None: without a tier."""

    trace: Trace
    setup: Setup
    engine: Engine
    memories: tuple[int, ...]
    tiers: tuple[TierLaw | None, ...]

    @property
    def setups(self) -> list[Setup]:
        """Setups of the replays."""
        return [replace(self.setup, memory=memory, tier=tier) for memory in self.memories for tier in self.tiers]

    def replayed(self, load: NewArrivals, journal: Journal, jobs: int = 0) -> Iterator[TieredSize]:
        """Replay, and yield outcomes as they come. `journal` keeps them for a later run."""
        names = {f"{setup.memory} {setup.tier or OFF}": setup for setup in self.setups}
        yield from (TieredSize(**journal[name]) for name in names if name in journal)
        todo = {name: setup for name, setup in names.items() if name not in journal}
        for number, result in run_grid(self.trace, list(todo.values()), load, self.engine, jobs):
            one = TieredSize.of(result.row)
            journal.add(list(todo)[number], asdict(one))
            yield one


def tiered_advice(sizes: Sequence[TieredSize], ideal: float) -> list[str]:
    """Return sentences: for each level of hits, the least memory that reaches it, without and, if less, with a tier."""
    levels: dict[str, float] = {}  # by what reaches them, the highest
    for level in LEVELS:
        least: dict[str, TieredSize] = {}
        for one in sorted(sizes, key=lambda one: one.memory):
            if one.hit_rate >= level * ideal:
                least.setdefault(one.tier, one)
        alone = least.get(OFF)
        texts = [_text(one) for one in least.values() if alone in (None, one) or one.memory < alone.memory]
        if texts:
            levels[", or ".join(texts)] = level
    lines = [f"{level:.0%} of infinite memory's hits: {text}." for text, level in levels.items()]
    return lines or ["No tried size reaches half of infinite memory's hits."]


def _text(one: TieredSize) -> str:
    if one.tier == OFF:
        return f"{spelled(one.memory)} of memory"
    return f"{spelled(one.memory)} and {spelled(one.disk)} in a tier of {one.tier}"
