"""What SegLen's tables have in common: Qwen3.5-9B on one H100, two pools, and three policies."""

from __future__ import annotations

from dataclasses import replace

from headwater.lab.cost import StepCost
from headwater.lab.devices import load_device
from headwater.lab.row import Row
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.traces.arrivals import Poisson
from headwater.traces.request import Trace
from papers.figure import Found, Line, Shape
from papers.lab import Lab

GIB = 2**30
POOLS = 43 * GIB  # 20.39 GiB of states and 22.61 GiB of KV, which is what a fraction of 0.77 leaves beside the weights
FULL = 0.77
STATE_FRACTION = 0.474  # of the pools: states to KV as 0.9 to 1
POLICIES = {"lru": "lru_path", "seglen": "seglen", "marconi": "flop_aware(1.0)"}
Paper = dict[str, tuple[float, float, float]]  # by policy: mean TTFT in ms, mean queue depth, mean hit rate


def rows(lab: Lab, trace: Trace, load: Poisson, fraction: float = FULL) -> dict[str, Row]:
    """A row a policy. SGLang keeps the state after the last token that it decoded, as `raw` does."""
    profile = load_profile("qwen3.5-9b")
    weights = profile.weight_bytes
    memory = round(fraction / FULL * (POOLS + weights) - weights)
    base = Setup(profile, memory, placement="branch", pool="split", state_fraction=STATE_FRACTION, decode_reuse="raw")
    setups = [replace(base, eviction=eviction) for eviction in POLICIES.values()]
    engine = Engine(StepCost(profile, load_device("h100")))
    results = lab.run(trace, setups, load, engine)
    return {name: result.row for name, result in zip(POLICIES, results, strict=True)}


def lines(found: dict[str, Row], paper: Paper, label: str = "") -> list[Line]:
    """Three lines a policy."""
    made = []
    for name, row in found.items():
        ttft = None if row.ttft_ms is None else row.ttft_ms.mean
        ours = (ttft, row.queue_depth, row.token_hit_rate)
        for what, theirs, own, unit in zip(
            ("mean TTFT", "queue depth", "hit rate"), paper[name], ours, ("ms", "requests", ""), strict=True
        ):
            made.append(Line(f"{label}{name}: {what}", theirs, own, unit))
    return made


def ttft(row: Row) -> float:
    assert row.ttft_ms is not None, "it ran under a clock"
    return row.ttft_ms.mean


def table(lab: Lab, trace: Trace, load: Poisson, paper: Paper) -> Found:
    """One of the article's tables by policy, and what it shows."""
    found = rows(lab, trace, load)
    shapes = [
        Shape("SegLen's mean TTFT is below LRU's", ttft(found["seglen"]) < ttft(found["lru"])),
        Shape("SegLen's hit rate is above LRU's", found["seglen"].token_hit_rate > found["lru"].token_hit_rate),
        Shape("SegLen's mean TTFT is at most Marconi's", ttft(found["seglen"]) <= ttft(found["marconi"])),
    ]
    return Found(tuple(lines(found, paper)), tuple(shapes))
