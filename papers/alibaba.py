"""The Alibaba article's figure: time to the first token with prefix matching, relative to none."""

from __future__ import annotations

from dataclasses import replace

from headwater.lab.cost import StepCost, load_device
from headwater.lab.serving import Engine
from headwater.lab.setup import OFF, Setup
from headwater.models.profiles import load_profile
from headwater.traces.arrivals import Poisson
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab

MEMORY = 40 * 10**9  # of an H200's 141 GB, beside 80 GB of weights and what the engine needs
LOADS = {"mooncake/conversation": (2000, 0.5), "mini_swe_agent": (100, 0.2)}  # requests or sessions, and their rate


def run(lab: Lab) -> Found:
    profile = load_profile("qwen3-next-80b-a3b-fp8")
    engine = Engine(StepCost(profile, load_device("h200")))
    base = Setup(profile, MEMORY, placement="branch", eviction="lru", pool="elastic", decode_reuse="raw")
    made, shares = [], []
    for name, (count, rate) in LOADS.items():
        trace = lab.trace(name, sessions=count)
        rows = [
            result.row for result in lab.run(trace, [base, replace(base, eviction=OFF)], Poisson(rate, 5.0), engine)
        ]
        means = [row.ttft_ms.mean for row in rows if row.ttft_ms is not None]
        shares.append(100 * means[0] / means[1])
        made.append(Line(f"{name}: mean TTFT with matching, of that without", 57.63, shares[-1], "%"))
        made.append(Line(f"{name}: hit rate", None, rows[0].token_hit_rate))
    return Found(tuple(made), (Shape("matching takes less time on every trace", all(share < 100 for share in shares)),))


FIGURE = Figure(
    name="alibaba-ttft",
    title="Prefix matching on Qwen3-Next-80B-A3B, FP8, one H200",
    paper="Alibaba, benchmarks of SGLang 0.5.5",
    claim="Prefix matching brings the time to the first token down to 57.63%.",
    difference=(
        "The article does not describe its traffic, so its number is compared with two of our traces: chats with few "
        "common prefixes, and agents' sessions that repeat nearly everything. Dual LRU queues over two elastic pools, "
        "as in the article."
    ),
    run=run,
)
