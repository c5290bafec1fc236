"""The Alibaba article's figure: time to first token with prefix matching, relative to none."""

from __future__ import annotations

from headwater.lab.setup import NO_CACHE, Setup
from headwater.models.profiles import load_profile
from headwater.traces.arrivals import Poisson
from papers.figure import Found, Line, Shape
from papers.lab import Lab, mean_ttft, roofline

MODEL = "qwen3-next-80b-a3b-fp8"
MEMORY = 40 * 10**9  # of an H200's 141 GB, beside 80 GB of weights and what the engine needs
LOADS = {"mooncake/conversation": (2000, 0.5), "mini_swe_agent": (100, 0.2)}  # requests or sessions, and their rate


def ttft(lab: Lab) -> Found:
    profile = load_profile(MODEL)
    setups = {
        eviction: Setup(profile, MEMORY, "branch", eviction, pool="elastic", decode_reuse="raw", tails=False)
        for eviction in ("lru", NO_CACHE)
    }
    lines, shares = [], []
    for name, (count, rate) in LOADS.items():
        rows = lab.rows(lab.trace(name, sessions=count), setups, Poisson(rate, 5.0), roofline(MODEL, "h200"))
        shares.append(100 * mean_ttft(rows["lru"]) / mean_ttft(rows[NO_CACHE]))
        lines.append(Line(f"{name}: mean TTFT with matching, relative to none", 57.63, shares[-1], "%"))
        lines.append(Line(f"{name}: hit rate", None, rows["lru"].token_hit_rate))
    return Found(lines, Shape("matching takes less time on every trace", max(shares) < 100))
