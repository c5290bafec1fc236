"""SegLen's tables ("Rethinking Prefix Caching for Hybrid LLMs"): Qwen3.5-9B on one H100, two pools, three policies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from headwater.lab.row import Row
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.traces.arrivals import Load, Open, Poisson
from headwater.traces.request import Trace
from papers.figure import Found, Line, Shape
from papers.lab import InOrder, Lab, mean_ttft, roofline

GIB = 2**30
POOLS = 43 * GIB  # 20.39 GiB of states and 22.61 GiB of KV, which is what a fraction of 0.77 leaves beside the weights
FULL = 0.77
STATE_FRACTION = 0.474  # of the pools: states to KV as 0.9 to 1
POLICIES = {"lru": "lru_path", "seglen": "seglen", "marconi": "flop_aware(1.0)"}
Paper = dict[str, tuple[float, float, float]]  # by policy: mean TTFT in ms, mean queue depth, mean hit rate


def rows(lab: Lab, trace: Trace, load: Load, fraction: float = FULL, **options: Any) -> dict[str, Row]:
    """Return a row for each policy. `options` of its Setup.

    Without them, the state after the last decoded token is kept, as SGLang does (`raw`).
    """
    profile = load_profile("qwen3.5-9b")
    weights = profile.weight_bytes
    memory = round(fraction / FULL * (POOLS + weights) - weights)
    known = {"placement": "branch", "pool": "split", "state_fraction": STATE_FRACTION, "decode_reuse": "raw"}
    base = Setup(profile, memory, tails=False, **{**known, **options})
    setups = {name: replace(base, eviction=eviction) for name, eviction in POLICIES.items()}
    return lab.rows(trace, setups, load, roofline("qwen3.5-9b", "h100"))


def lines(found: dict[str, Row], paper: Paper, label: str = "") -> Iterator[Line]:
    """Yield three lines for each policy."""
    for name, row in found.items():
        ttft, depth, rate = paper[name]
        yield Line(f"{label}{name}: mean TTFT", ttft, mean_ttft(row), "ms")
        yield Line(f"{label}{name}: queue depth", depth, row.queue_depth, "requests")
        yield Line(f"{label}{name}: hit rate", rate, row.token_hit_rate)


def table(found: dict[str, Row], paper: Paper) -> Found:
    """Return one of the article's tables by policy, and its shapes."""
    lru, seglen, marconi = (found[name] for name in ("lru", "seglen", "marconi"))
    return Found(
        lines(found, paper),
        Shape("SegLen's mean TTFT is below LRU's", mean_ttft(seglen) < mean_ttft(lru)),
        Shape("SegLen's hit rate is above LRU's", seglen.token_hit_rate > lru.token_hit_rate),
        Shape("SegLen's mean TTFT is at most Marconi's", mean_ttft(seglen) <= mean_ttft(marconi)),
    )


PAPER_SWE: dict[float, Paper] = {  # by seconds between turns
    5.0: {"lru": (2107.68, 10.3686, 0.3261), "seglen": (1027.35, 4.8386, 0.4179), "marconi": (1178.64, 5.6679, 0.4065)},
    10.0: {"lru": (2273.05, 11.2514, 0.2994), "seglen": (1101.67, 5.9165, 0.4353), "marconi": (1335.84, 7.262, 0.4242)},
}
PAPER_CHAT = {"lru": (72.48, 0.0004, 0.0022), "seglen": (72.39, 0.0, 0.0049), "marconi": (75.29, 0.0004, 0.0049)}


HISTORIES = "collapsed('mini_swe_agent', last=5, turns=12)"  # as SWE-agent's history processor prompts
RATE = 8.0  # requests a second


def swebench(lab: Lab, think: float) -> Found:
    """Replay 100 sessions, 10 begun a second, in an open loop; no answer is cached.

    The article's own trace is used if it is below the data. In ours think times vary as those of Marconi's published
    generator of traces, after which the article's are named: they are Poisson counts of seconds.
    """
    trace, load = _published(lab, think) or (
        lab.drawn(HISTORIES, sessions=100),
        Open(RATE, sessions=10.0, think=think, cv=think**-0.5),
    )
    found = rows(lab, trace, load, page_size=1, decode_reuse="none")
    return table(found, PAPER_SWE[think])


def _published(lab: Lab, think: float) -> tuple[Trace, Load] | None:
    """Return the article's own trace, in its order at our rate."""
    trace = lab.published(f"swebench_sps=10_art={think:g}_nums=100.jsonl")
    return None if trace is None else (trace, InOrder(RATE))


def chat(lab: Lab) -> Found:
    return table(rows(lab, lab.trace("mtbench101"), Poisson(10.0, 5.0)), PAPER_CHAT)


PAPER_MEMORY: dict[float, Paper] = {
    0.77: {"lru": (1697.04, 8.4729, 0.3317), "seglen": (934.93, 4.6355, 0.4226), "marconi": (1110.74, 5.4124, 0.4088)},
    0.7: {"lru": (2809.16, 14.3618, 0.2912), "seglen": (1704.7, 9.0218, 0.3775), "marconi": (1992.97, 10.1597, 0.3835)},
    0.5: {
        "lru": (13283.69, 58.0286, 0.129),
        "seglen": (9706.63, 44.9238, 0.2249),
        "marconi": (10194.86, 46.8752, 0.2238),
    },
}


def memory(lab: Lab) -> Found:
    trace, load = _published(lab, 5.0) or (lab.trace("mini_swe_agent", sessions=100), Poisson(10.0, 5.0))
    made: list[Line] = []
    saved, rates = [], []
    for fraction, paper in PAPER_MEMORY.items():
        found = rows(lab, trace, load, fraction)
        made += lines(found, paper, f"{fraction:g}, ")
        saved.append(mean_ttft(found["lru"]) - mean_ttft(found["seglen"]))
        rates.append([row.token_hit_rate for row in found.values()])
    falls = all(less < more for more, less in zip(rates[0], rates[-1], strict=True))
    return Found(
        made,
        Shape("less memory, fewer hits, under every policy", falls),
        Shape("SegLen's mean TTFT is below LRU's at each size", min(saved) > 0),
        Shape("the less memory, the more milliseconds SegLen saves", saved == sorted(saved)),
    )
