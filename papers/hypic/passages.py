"""The same on the passages of question answering sets: as they are, and drawn by popularity."""

from __future__ import annotations

from dataclasses import replace

from headwater.lab.row import Row
from headwater.request import Fidelity
from headwater.traces.request import Trace
from papers.figure import Figure, Found, Line, Shape
from papers.hypic.setting import Model, parts, rates, rows
from papers.lab import Lab

MODEL = Model("ring-mini-linear-2.0", (20,))
SETS = (
    "rag_hotpotqa/distractor_200",
    "rag_musique/train_100",
    "rag_nq_oracle/nq_open_oracle",
    "rag_multi_news/multi_news",
)
FIRST = 200  # questions
DRAWN = "rag(texts='{}', sessions=300, zipf=1.0, documents=500, fidelity='fast')"


def run(lab: Lab) -> Found:
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
    """Its requests with the paper's seams."""
    return replace(trace, requests=[replace(request, fidelity=Fidelity.FAST) for request in trace.requests])


FIGURE = Figure(
    name="hypic-passages",
    title="Passages of four question answering sets, 20 GB",
    paper="HYPIC, section 6.1; its sets are HotpotQA, TriviaQA, MultiNews, GovReport",
    claim="segments save what prefix caching cannot, since passages come in any order.",
    difference=(
        "In these sets a passage hardly ever comes twice, so `as asked` (200 questions at most) there is nothing to "
        "reuse by any way, and to make a segment of each passage is wasted: its seams are computed twice. The paper "
        "warms its segments first. `Zipf 1` draws 300 requests of 4 to 16 passages by popularity, out of 500 of the "
        "same set. Seams are of 8 tokens; a passage has about 500 characters, one of Multi-News 3,700."
    ),
    run=run,
)
