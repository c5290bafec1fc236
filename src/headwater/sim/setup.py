"""One row of the lab: which model, how much memory, and which policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headwater.cache import NoCache, PrefixCache
from headwater.cache.placement import make_placement
from headwater.errors import ConfigError
from headwater.models.profiles import Profile
from headwater.schedule.planner import Planner
from headwater.schedule.scheduler import DecodeReuse
from headwater.traces.request import Trace
from headwater.types import CacheLayout

PoolKind = Literal["unified", "split", "elastic"]


@dataclass(frozen=True, slots=True)
class System:
    """Policies that belong together."""

    placement: str
    eviction: str
    page_size: int | None = None  # None: as the user says


# The baselines as Marconi's authors built them (section 5.1), their system, SegLen's, and ours.
SYSTEMS = {
    "vanilla": System("none", "none"),
    "vllm+": System("every_block(1)", "lru_path", 32),
    "sglang+": System("branch", "lru_path"),
    "marconi": System("branch", "marconi"),
    "seglen": System("branch", "seglen"),
    "headwater": System("structural", "headwater"),
}
OFF = "none"  # in the place of an eviction policy: no cache at all


@dataclass(frozen=True, slots=True)
class Setup:
    """What one row runs with. Bytes, tokens."""

    profile: Profile
    memory: int
    placement: str = "structural"
    eviction: str = "lru"
    pool: PoolKind = "unified"
    state_fraction: float = 0.5  # of a split or elastic pool
    page_size: int = 64
    slots: int = 1  # states that a running request takes
    decode_reuse: DecodeReuse = "canonical"

    def layout(self, trace: Trace) -> CacheLayout:
        """What the memory holds; raises ConfigError where it is too little, or page and block do not go together."""
        return self.profile.layout(
            self.memory,
            self.page_size,
            block_tokens=trace.block_tokens,
            state_fraction=None if self.pool == "unified" else self.state_fraction,
            elastic=self.pool == "elastic",
            slots=self.slots,
        )

    def cache(self, layout: CacheLayout) -> PrefixCache:
        return NoCache(layout) if self.eviction == OFF else PrefixCache(layout, self.eviction)

    def planner(self, cache: PrefixCache, layout: CacheLayout) -> Planner:
        placement = make_placement("none" if self.eviction == OFF else self.placement)
        return Planner(cache, placement, layout, self.keeps_answers)

    @property
    def keeps_answers(self) -> bool:
        return self.decode_reuse != "none" and self.eviction != OFF


def system(name: str) -> System:
    """The system of that name; raises ConfigError where there is none."""
    if name not in SYSTEMS:
        raise ConfigError(f"system {name!r} is unknown; there are {', '.join(SYSTEMS)}")
    return SYSTEMS[name]
