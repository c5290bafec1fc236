"""Prefixes, segments and both on drawn RAG traffic: by popularity of documents, memory and family."""

from __future__ import annotations

from itertools import product

from headwater.lab.row import Row
from papers.figure import Figure, Found, Line, Shape
from papers.hypic.setting import Model, rates, rows
from papers.lab import Lab

MODELS = (Model("qwen3.5-9b", (5, 20, 80)), Model("ring-mini-linear-2.0", (2, 8, 32)))
EXPONENTS = (0.6, 1.0, 1.4)
TRAFFIC = "rag(sessions=300, turns=2, documents=500, zipf={}, fidelity='fast')"


def run(lab: Lab) -> Found:
    found: dict[tuple[str, float, float], dict[str, Row]] = {}
    told: list[Line] = []
    for model, exponent in product(MODELS, EXPONENTS):
        trace = lab.drawn(TRAFFIC.format(exponent))
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


FIGURE = Figure(
    name="hypic-zipf",
    title="Prefixes, segments and both on RAG traffic",
    paper="HYPIC, sections 1 and 6; it has no such figure",
    claim="prefix caching finds next to nothing where documents come in any order, and segments do.",
    difference=(
        "300 sessions ask two questions each of 4 to 16 documents out of 500, whose popularity is Zipf's. Prefixes are "
        "the system prompt and a session's first question with its documents; `segments` reuses the leading part "
        "and segments, and nothing else. Tokens that are computed so that a segment is stored count as computed, and "
        "so do seams of 8 tokens. Segments take memory from prefixes: one of Qwen3.5-9B holds 102 MB of states and "
        "transitions beside its KV, one of Ring-mini 17 MB. With both, segments have half of the memory and sessions' "
        "own prefixes the rest, most of which nobody asks for again: where memory is short more segments are made "
        "again than with segments alone (decision 028)."
    ),
    run=run,
)
