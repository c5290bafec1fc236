"""HYPIC's figures in the lab: prefixes, segments or both, by popularity, by data set and by load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from headwater.lab.cost import StepCost, load_device
from headwater.lab.row import Row
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.request import Fidelity, SegmentEviction
from headwater.traces.arrivals import Load, Poisson
from headwater.traces.request import Trace
from papers.figure import Figure, Found, Line, Shape, ratio
from papers.lab import Lab

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
        base = Setup(load_profile(self.name), int(memory * GB))
        return {way: replace(base, **WAYS[way]) for way in ways}


def rows(
    lab: Lab, trace: Trace, setups: Mapping[str, Setup], load: Load | None = None, engine: Engine | None = None
) -> dict[str, Row]:
    """Return rows by kind of reuse."""
    results = lab.run(trace, list(setups.values()), load, engine)
    return {way: result.row for way, result in zip(setups, results, strict=True)}


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
        "computed to make segments": of.made_tokens,
    }
    return [Line(f"{label}: {name}", None, 100 * count / row.prompt_tokens, "%") for name, count in tokens.items()]


MODELS = (Model("qwen3.5-9b", (5, 20, 80)), Model("ring-mini-linear-2.0", (2, 8, 32)))
EXPONENTS = (0.6, 1.0, 1.4)
TURNS = "rag(sessions=300, turns=2, documents=500, zipf={}, fidelity='fast')"


def zipf(lab: Lab) -> Found:
    found: dict[tuple[str, float, float], dict[str, Row]] = {}
    told: list[Line] = []
    for model, exponent in product(MODELS, EXPONENTS):
        trace = lab.drawn(TURNS.format(exponent))
        for memory in model.memories:
            found[model.name, exponent, memory] = here = rows(lab, trace, model.setups(memory))
            told += rates(f"{model.name}, Zipf {exponent:g}, {memory:g} GB", here)
    hits = {key: {way: row.token_hit_rate for way, row in here.items()} for key, here in found.items()}
    ample = [hits[model.name, exponent, model.memories[-1]] for model, exponent in product(MODELS, EXPONENTS)]
    scarce = [hits[model.name, exponent, model.memories[0]] for model, exponent in product(MODELS, EXPONENTS)]
    steeper = [
        [hits[model.name, exponent, memory]["both"] for exponent in EXPONENTS]
        for model in MODELS
        for memory in model.memories
    ]
    return Found(
        tuple(told),
        (
            Shape("with most memory, both beat prefixes alone", all(one["both"] > one["prefix"] for one in ample)),
            Shape("with least memory, too", all(one["both"] > one["prefix"] for one in scarce)),
            Shape("both are nowhere behind segments alone", all(r["both"] >= r["segments"] for r in hits.values())),
            Shape("the steeper the popularity, the more both save", all(s == sorted(s) for s in steeper)),
        ),
    )


ZIPF = Figure(
    name="hypic-zipf",
    title="Prefixes, segments and both on RAG traffic",
    paper="HYPIC, sections 1 and 6; it has no such figure",
    claim="prefix caching finds next to nothing where documents come in any order, and segments do.",
    difference=(
        "300 sessions ask two questions each of 4 to 16 documents out of 500, whose popularity is Zipf's. Prefixes are "
        "the system prompt and a session's first question with its documents; `segments` reuses the leading part "
        "and segments, and nothing else. Tokens that are computed so that a segment is stored count as computed, and "
        "so do seams of 8 tokens. Segments take memory from prefixes: one of Qwen3.5-9B holds 102 MB of states and "
        "transitions in addition to its KV, one of Ring-mini 17 MB. With both, segments have half of the memory and "
        "prefixes of sessions the rest, most of which are never reused: if memory is short, more segments are "
        "recomputed than with segments alone (decision 028)."
    ),
    run=zipf,
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
    asked: dict[str, dict[str, Row]] = {}
    drawn: dict[str, dict[str, Row]] = {}
    told: list[Line] = []
    setups = MODEL.setups(MODEL.memories[0])
    for name in SETS:
        asked[name] = rows(lab, _fast(lab.trace(name, first=FIRST)), setups)
        drawn[name] = rows(lab, lab.drawn(DRAWN.format(name)), setups)
        for label, found in ((f"{name}, as asked", asked[name]), (f"{name}, Zipf 1", drawn[name])):
            told += rates(label, found) + parts(f"{label}, both", found["both"])
    return Found(
        tuple(told),
        (
            Shape(
                "as asked, making segments costs more than they save",
                all(here["both"].token_hit_rate < here["prefix"].token_hit_rate for here in asked.values()),
            ),
            Shape(
                "by popularity, segments save more than prefixes",
                all(here["both"].token_hit_rate > here["prefix"].token_hit_rate for here in drawn.values()),
            ),
        ),
    )


def _fast(trace: Trace) -> Trace:
    """Return the trace with the paper's seams in all of its requests."""
    return replace(trace, requests=[replace(request, fidelity=Fidelity.FAST) for request in trace.requests])


PASSAGES = Figure(
    name="hypic-passages",
    title="Passages of four question answering sets, 20 GB",
    paper="HYPIC, section 6.1; its sets are HotpotQA, TriviaQA, MultiNews, GovReport",
    claim="segments save what prefix caching cannot, since passages come in any order.",
    difference=(
        "In these sets a passage is rarely repeated, so the rows `as asked` (at most 200 questions) have nothing to "
        "reuse in any mode, and to store a segment for each passage is wasted: its seams are computed twice. The paper "
        "stores its segments in advance. `Zipf 1` draws 300 requests of 4 to 16 passages by popularity, out of 500 of "
        "the same set. Seams have 8 tokens; a passage has about 500 characters, in Multi-News 3,700."
    ),
    run=passages,
)


TRAFFIC = "rag(sessions=400, documents=500, fewest=12, most=32, zipf=1.0, fidelity='fast')"  # 13k tokens on average
RATES = (1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0)  # requests a second
TARGET = 1000.0  # ms at the median
PAPER_LOAD = {"ring-mini-linear-2.0": 1.28, "qwen3.5-35b-a3b": 2.83}
MEMORY = 40  # GB


def requests_at_1s(lab: Lab) -> Found:
    told, gains = list[Line](), list[float]()
    for name, paper in PAPER_LOAD.items():
        prefix, both = (_sweep(lab, name, way) for way in ("prefix", "both"))
        for way, swept in (("prefix", prefix), ("both", both)):
            told += [Line(f"{name}, {rate:g} a second: {way}, p50", None, ms, "ms") for rate, ms in swept.items()]
            told.append(Line(f"{name}: {way}, most within 1 s at p50", None, _most(swept), "requests/s"))
        gains.append(ratio(_most(both), _most(prefix)))
        told.append(Line(f"{name}: both over prefix caching", paper, gains[-1], "x the requests"))
    return Found(tuple(told), (Shape("segments bear more requests at 1 s", all(gain > 1 for gain in gains)),))


def _sweep(lab: Lab, name: str, way: str) -> dict[float, float]:
    """Return median ms to the first token by rate, up to the first rate above the target."""
    engine = Engine(StepCost(load_profile(name), load_device("h100")))
    setups = Model(name, (MEMORY,)).setups(MEMORY, (way,))
    found: dict[float, float] = {}
    for rate in RATES:
        found[rate] = _p50(rows(lab, lab.drawn(TRAFFIC), setups, Poisson(rate), engine)[way])
        if found[rate] > TARGET:
            break
    return found


def _most(swept: dict[float, float]) -> float:
    """Return the highest rate within the target; 0 if there is none."""
    return max((rate for rate, ms in swept.items() if ms <= TARGET), default=0.0)


def _p50(row: Row) -> float:
    assert row.ttft_ms is not None, "it ran under a clock"
    return row.ttft_ms.p50


LOAD = Figure(
    name="hypic-11-lab",
    title="RAG at a rate, by the roofline of an H100",
    paper="HYPIC, figure 11 and section 6.2",
    claim="at 1 s to the first token, segments bear 1.28 (Ring-mini) and 2.83 (Qwen3.5-35B) times the requests.",
    difference=(
        "In the lab, with the models' profiles. The paper's trace cannot be had: 13,000 tokens a request on average "
        "are drawn here, of 500 documents by Zipf 1.0, and come by Poisson. The device is the roofline of one H100, "
        "in which making a segment costs what its tokens do in a plain prefill; 40 GB are for the cache. Rates are "
        "those listed, so ratios are coarse."
    ),
    run=requests_at_1s,
)
