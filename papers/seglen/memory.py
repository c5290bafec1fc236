"""SegLen's table over memory: 0.77, 0.7 and 0.5 of the device for weights and pools together."""

from __future__ import annotations

from headwater.traces.arrivals import Poisson
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab
from papers.seglen.setting import Paper, lines, rows, ttft
from papers.seglen.swebench import DIFFERENCE, SESSIONS

PAPER: dict[float, Paper] = {
    0.77: {
        "lru": (1697.04, 8.4729, 0.3317),
        "seglen": (934.93, 4.6355, 0.4226),
        "marconi": (1110.74, 5.4124, 0.4088),
    },
    0.7: {
        "lru": (2809.16, 14.3618, 0.2912),
        "seglen": (1704.70, 9.0218, 0.3775),
        "marconi": (1992.97, 10.1597, 0.3835),
    },
    0.5: {
        "lru": (13283.69, 58.0286, 0.1290),
        "seglen": (9706.63, 44.9238, 0.2249),
        "marconi": (10194.86, 46.8752, 0.2238),
    },
}


def run(lab: Lab) -> Found:
    trace = lab.trace("mini_swe_agent", sessions=SESSIONS)
    made: list[Line] = []
    saved, rates = [], []
    for fraction, paper in PAPER.items():
        found = rows(lab, trace, Poisson(10.0, 5.0), fraction)
        made += lines(found, paper, f"{fraction:g}, ")
        saved.append(ttft(found["lru"]) - ttft(found["seglen"]))
        rates.append([row.token_hit_rate for row in found.values()])
    falls = all(less < more for more, less in zip(rates[0], rates[-1], strict=True))
    return Found(
        tuple(made),
        (
            Shape("less memory, fewer hits, under every policy", falls),
            Shape("SegLen's mean TTFT is below LRU's at each size", all(one > 0 for one in saved)),
            Shape("it saves the more milliseconds the less memory there is", saved == sorted(saved)),
        ),
    )


FIGURE = Figure(
    name="seglen-memory",
    title="Memory for weights and pools",
    paper="SegLen, memory fractions",
    claim="The tighter the memory, the more SegLen gains over LRU.",
    difference=DIFFERENCE,
    run=run,
)
