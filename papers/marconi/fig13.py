"""How fast sessions and requests come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headwater.traces.arrivals import Load, Poisson
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab
from papers.marconi.workloads import AGENTS, Cell, cells
from papers.quantile import ratio

SYSTEMS = ("sglang+", "marconi")
RATES = {0.5: 48.7, 1.0: None, 2.0: 43.0}  # sessions a second, and Marconi's hit rate in the paper
PAUSES = {5.0: 25.9, 7.5: None, 10.0: 24.1}  # seconds between an answer and the next request
RATE_MEMORY, PAUSE_MEMORY = 32, 16  # GB
WINS = (1.4, 1.6)  # over SGLang+ in the paper, at the first and at the last


def sessions(lab: Lab) -> Found:
    found = _cells(lab, RATE_MEMORY, [Poisson(rate, 5.0) for rate in RATES])
    return _found(found, [f"{rate:g} sessions/s" for rate in RATES], list(RATES.values()))


def pauses(lab: Lab) -> Found:
    found = _cells(lab, PAUSE_MEMORY, [Poisson(1.0, pause) for pause in PAUSES])
    return _found(found, [f"{pause:g} s" for pause in PAUSES], list(PAUSES.values()))


def _cells(lab: Lab, memory: float, loads: Sequence[Load]) -> list[Cell]:
    return cells(lab, replace(AGENTS, memories=(memory,), loads=tuple(loads)), SYSTEMS)


def _found(found: list[Cell], labels: list[str], paper: list[float | None]) -> Found:
    rates = [cell.hit_rate("marconi") for cell in found]
    wins = [ratio(cell.hit_rate("marconi"), cell.hit_rate("sglang+")) for cell in found]
    lines = []
    for cell, label, rate, win in zip(found, labels, paper, wins, strict=True):
        there = {labels[0]: WINS[0], labels[-1]: WINS[1]}.get(label)
        lines += [
            Line(f"{label}: Marconi", rate, cell.hit_rate("marconi"), "%"),
            Line(f"{label}: SGLang+", None, cell.hit_rate("sglang+"), "%"),
            Line(f"{label}: Marconi over SGLang+", there, win, "x"),
        ]
    return Found(
        tuple(lines),
        (
            Shape("the hit rate falls", rates == sorted(rates, reverse=True)),
            Shape("the win over SGLang+ grows", wins == sorted(wins)),
            Shape("and is above 1 at the end", wins[-1] > 1),
        ),
    )


RATE = Figure(
    name="marconi-13a",
    title="Hit rate over the rate of sessions",
    paper="Marconi, figure 13a",
    claim="from 0.5 to 2 sessions a second the hit rate falls, and the win over SGLang+ grows from 1.4 to 1.6 times.",
    difference=(
        "More sessions at once lower the hit rate as in the paper. The win does not grow, as there is none to "
        "grow: the tuner's alpha costs hits when sessions come fast (marconi-8)."
    ),
    run=sessions,
)
PAUSE = Figure(
    name="marconi-13b",
    title="Hit rate over the time between requests",
    paper="Marconi, figure 13b",
    claim="with 10 s instead of 5 between an answer and the next request the hit rate falls, and the win grows.",
    difference=(
        "A session's pause matters little here, since all sessions' pauses grow alike and requests run one by "
        "one: the order of requests hardly changes. Which alpha the tuner happens to choose matters more than the"
        " pause."
    ),
    run=pauses,
)
