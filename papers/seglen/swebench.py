"""SegLen's two tables on agents' sessions: 100 sessions, 10 a second, 5 and 10 seconds between turns."""

from __future__ import annotations

from headwater.traces.arrivals import Poisson
from papers.figure import Figure, Found
from papers.lab import Lab
from papers.seglen.setting import Paper, table

SESSIONS = 100
DIFFERENCE = (
    "mini_swe_agent's sessions stand for SWE-bench's: 40 requests each on average, while the article tells of prefixes "
    "that are used 5 or 10 times. So more tokens come a second than the device computes, requests wait for it, and "
    "times are several times theirs; hit rates under LRU are alike. A session's states are all about as long, and it "
    "comes back every few seconds: recency tells nearly all there is to know, and weighing by length adds little. "
    "SGLang's own policy is played by `lru_path`, Marconi in SGLang by a static alpha of 1; times are the roofline's."
)


def _figure(name: str, think: float, paper: Paper) -> Figure:
    def run(lab: Lab) -> Found:
        return table(lab, lab.trace("mini_swe_agent", sessions=SESSIONS), Poisson(10.0, think), paper)

    return Figure(
        name=name,
        title=f"Agents' sessions, {think:g} s between turns",
        paper=f"SegLen, swebench_sps=10_art={think:g}_nums=100",
        claim="SegLen halves LRU's mean time to the first token and hits more; Marconi lies between.",
        difference=DIFFERENCE,
        run=run,
    )


FIVE = _figure(
    "seglen-swe5",
    5.0,
    {
        "lru": (2107.68, 10.3686, 0.3261),
        "seglen": (1027.35, 4.8386, 0.4179),
        "marconi": (1178.64, 5.6679, 0.4065),
    },
)
TEN = _figure(
    "seglen-swe10",
    10.0,
    {
        "lru": (2273.05, 11.2514, 0.2994),
        "seglen": (1101.67, 5.9165, 0.4353),
        "marconi": (1335.84, 7.2620, 0.4242),
    },
)
