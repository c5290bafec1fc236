"""SegLen's table on chats that reuse little: a check that nothing is lost."""

from __future__ import annotations

from headwater.traces.arrivals import Poisson
from papers.figure import Figure, Found
from papers.lab import Lab
from papers.seglen.setting import table

PAPER = {"lru": (72.48, 0.0004, 0.0022), "seglen": (72.39, 0.0, 0.0049), "marconi": (75.29, 0.0004, 0.0049)}


def run(lab: Lab) -> Found:
    return table(lab, lab.trace("mtbench101"), Poisson(10.0, 5.0), PAPER)


FIGURE = Figure(
    name="seglen-chat",
    title="Chats with little reuse",
    paper="SegLen, ShareGPT",
    claim="Where little is reused, the three policies are alike.",
    difference=(
        "mtbench101's dialogues stand for ShareGPT's first turns: they are short, and later turns hit their own "
        "history, which the article's run did not send. So something is reused after all, the pool of states does not "
        "hold all dialogues, and weighing by length keeps the long ones rather than those that go on."
    ),
    run=run,
)
