"""HYPIC's figures in the lab: prefixes, segments or both, by popularity, by data set and by load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from headwater.lab.row import Row
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.request import Fidelity, SegmentEviction
from headwater.traces.arrivals import Poisson
from headwater.traces.request import Trace
from papers.figure import Found, Line, Shape, ratio
from papers.lab import Lab, roofline

GB = 10**9
WAYS: dict[str, dict[str, Any]] = {
    "prefix": {"reuse": "prefix"},
    "segments": {"reuse": "segments"},
    "both": {"reuse": "both"},
    "both, segments by age": {"reuse": "both", "segment_eviction": SegmentEviction.LRU},
}


@dataclass(frozen=True, slots=True)
class Model:
    """A profile, with memory sizes in GB from a few requests to nearly all documents."""

    name: str
    memories: tuple[float, ...]

    def setups(self, memory: float, ways: Sequence[str] = tuple(WAYS)) -> dict[str, Setup]:
        """Return the setups by kind of reuse."""
        base = Setup(load_profile(self.name), int(memory * GB), tails=False)
        return {way: replace(base, **WAYS[way]) for way in ways}


def rates(label: str, found: dict[str, Row]) -> list[Line]:
    """Return a line for each mode of reuse: the share of tokens that was not computed."""
    return [Line(f"{label}: {way}", None, 100 * row.token_hit_rate, "% not computed") for way, row in found.items()]


def parts(label: str, row: Row) -> list[Line]:
    """Return the parts of the hit rate if prefixes and segments are reused."""
    of = row.segments
    assert of is not None, "its requests are made of segments"
    tokens = {
        "found as prefixes": of.prefix_tokens,
        "composed": of.composed_tokens,
        "in seams": of.seam_tokens,
        "computed to build segments": of.made_tokens,
    }
    return [Line(f"{label}: {name}", None, 100 * count / row.prompt_tokens, "%") for name, count in tokens.items()]


MODELS = (Model("qwen3.5-9b", (5, 20, 80)), Model("ring-mini-linear-2.0", (2, 8, 32)))
EXPONENTS = (0.6, 1.0, 1.4)
TURNS = "rag(sessions=300, turns=2, documents=500, zipf={}, fidelity='fast')"


def zipf(lab: Lab) -> Found:
    rows: dict[tuple[str, float, float], dict[str, Row]] = {}
    lines: list[Line] = []
    for model, exponent in product(MODELS, EXPONENTS):
        trace = lab.drawn(TURNS.format(exponent))
        for memory in model.memories:
            rows[model.name, exponent, memory] = found = lab.rows(trace, model.setups(memory))
            lines += rates(f"{model.name}, Zipf {exponent:g}, {memory:g} GB", found)
    hits = {key: {way: row.token_hit_rate for way, row in found.items()} for key, found in rows.items()}
    scarce, ample = (
        [hits[model.name, exponent, model.memories[at]] for model, exponent in product(MODELS, EXPONENTS)]
        for at in (0, -1)
    )
    steeper = [
        [hits[model.name, exponent, memory]["both"] for exponent in EXPONENTS]
        for model in MODELS
        for memory in model.memories
    ]
    return Found(
        lines,
        Shape("with most memory, both beat only prefixes", all(one["both"] > one["prefix"] for one in ample)),
        Shape("with least memory, both beat only prefixes", all(one["both"] > one["prefix"] for one in scarce)),
        Shape("both never save less than only segments", all(r["both"] >= r["segments"] for r in hits.values())),
        Shape("the steeper the popularity, the more both save", all(s == sorted(s) for s in steeper)),
    )


MODEL = Model("ring-mini-linear-2.0", (20,))
SETS = (
    "rag_hotpotqa/distractor_200",
    "rag_musique/train_100",
    "rag_nq_oracle/nq_open_oracle",
    "rag_multi_news/multi_news",
)
FIRST = 200  # questions
DRAWN = "rag(texts='{}', sessions=300, zipf=1.0, documents=500, fidelity='fast')"


def passages(lab: Lab) -> Found:
    lines: list[Line] = []
    gains: dict[str, list[float]] = {"as asked": [], "Zipf 1": []}  # of both over prefixes, by set
    setups = MODEL.setups(MODEL.memories[0])
    for name in SETS:
        traces = {"as asked": _fast(lab.trace(name, first=FIRST)), "Zipf 1": lab.drawn(DRAWN.format(name))}
        for traffic, trace in traces.items():
            rows = lab.rows(trace, setups)
            lines += rates(f"{name}, {traffic}", rows) + parts(f"{name}, {traffic}, both", rows["both"])
            gains[traffic].append(rows["both"].token_hit_rate - rows["prefix"].token_hit_rate)
    return Found(
        lines,
        Shape("as asked, building segments costs more than they save", max(gains["as asked"]) < 0),
        Shape("by popularity, segments save more than prefixes", min(gains["Zipf 1"]) > 0),
    )


def _fast(trace: Trace) -> Trace:
    """Return the trace with the paper's seams in all of its requests."""
    return replace(trace, requests=[replace(request, fidelity=Fidelity.FAST) for request in trace.requests])


TRAFFIC = "rag(sessions=400, documents=500, fewest=12, most=32, zipf=1.0, fidelity='fast')"  # 13k tokens on average
RATES = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0)  # requests a second
TARGET = 1000.0  # ms at the median
PAPER_LOAD = {"ring-mini-linear-2.0": 1.28, "qwen3.5-35b-a3b": 2.83}
MEMORY = 40  # GB


def requests_at_1s(lab: Lab) -> Found:
    lines: list[Line] = []
    gains = []
    for name, paper in PAPER_LOAD.items():
        most = {}
        for way in ("prefix", "both"):
            swept = _sweep(lab, name, way)
            most[way] = max((rate for rate, ms in swept.items() if ms <= TARGET), default=0.0)
            lines += [Line(f"{name}, {rate:g} a second: {way}, p50", None, ms, "ms") for rate, ms in swept.items()]
            lines.append(Line(f"{name}: {way}, most within 1 s at p50", None, most[way], "requests/s"))
        gains.append(ratio(most["both"], most["prefix"]))
        lines.append(Line(f"{name}: both over prefix caching", paper, gains[-1], "x the requests"))
    return Found(lines, Shape("segments serve more requests at 1 s", min(gains) > 1))


def _sweep(lab: Lab, name: str, way: str) -> dict[float, float]:
    """Return median ms to the first token by rate, up to the first rate above the target."""
    setups = Model(name, (MEMORY,)).setups(MEMORY, (way,))
    found: dict[float, float] = {}
    for rate in RATES:
        row = lab.rows(lab.drawn(TRAFFIC), setups, Poisson(rate), roofline(name, "h100"))[way]
        assert row.ttft_ms is not None, "it ran under a clock"
        found[rate] = row.ttft_ms.p50
        if found[rate] > TARGET:
            break
    return found
