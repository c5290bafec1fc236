"""Headlines of Marconi's figures 8 to 11 on agents' sessions, under a grid of conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from headwater.lab.setup import Setup
from headwater.lab.size import Sizing
from headwater.models.profiles import load_profile
from headwater.traces.arrivals import Open
from papers.figure import Found, Line, Shape, mean, quantile, ratio
from papers.lab import Lab
from papers.marconi.agents import SYSTEMS, best_static, fig10a, fig10b, fig11
from papers.marconi.setting import GB, MODEL, Cell, Workload, cells, cost, ttfts
from papers.marconi.workloads import ratios

EVEN = 0.3  # coefficient of variation: about that of Poisson counts around 10 s, as the published generator draws them
WHOLE = 1000  # observations kept: more than a session has
SHARES = (0.1, 0.2, 0.3, 0.45, 0.6)  # of the memory with which LRU nearly hits the ideal
ALPHAS = (0.1, 0.5, 1.0, 2.0)
SESSIONS = 25
RATE = 5.0  # sessions a second, so that all overlap


@dataclass(frozen=True, slots=True)
class Condition:
    """Traffic of agents: variation of their think times, most requests of a session, observations that they keep."""

    cv: float
    turns: int
    last: int

    def __str__(self) -> str:
        pace = "even" if self.cv == EVEN else "exponential"
        return f"{pace} think times, {self.turns} turns, {'whole' if self.last == WHOLE else 'collapsed'} histories"

    def workload(self, lab: Lab) -> Workload:
        """Return the workload; its sizes of memory are SHARES of what LRU needs."""
        trace = f"collapsed('mini_swe_agent', last={self.last}, turns={self.turns})"
        load = Open(sessions=RATE, think=10.0, cv=self.cv)
        sessions = lab.drawn(trace, SESSIONS)
        setup = Setup(load_profile(MODEL), 0, "branch", "lru", page_size=1, tails=False)
        _, ideal = Sizing(sessions, setup, load.over(sessions, lab.seed)).range()
        sizes = tuple(round(share * ideal / GB, 2) for share in SHARES)
        return Workload("agent", "SWE-bench", trace, sizes, (load,), SESSIONS)


PAIRS = (1.0, 12), (EVEN, 12), (EVEN, 51)  # figures 8 to 11 have exponential think times and sessions of any length
CONDITIONS = tuple(Condition(cv, turns, last) for (cv, turns), last in product(PAIRS, (WHOLE, 5)))


def headlines(lab: Lab) -> Found:
    """Return the wins and, by figure, how many shapes come out under each condition."""
    lines: list[Line] = []
    held: dict[Condition, int] = {}
    for condition in CONDITIONS:
        workload = condition.workload(lab)
        every = cells(lab, workload, SYSTEMS)
        shapes = {
            "8": _fig8(every),
            "9": _fig9(every),
            "10a": fig10a(lab, workload).shapes,
            "10b": fig10b(lab, workload).shapes,
            "11": fig11(lab, workload, ALPHAS).shapes,
        }
        wins = [100 * (one - 1) for one in ratios(every, "sglang+")]
        lines += [
            Line(f"{condition}: SGLang+, mean hit rate", None, mean([one.hit_rate("sglang+") for one in every]), "%"),
            Line(f"{condition}: win, P95", 219.7, quantile(wins, 0.95), "%"),
            Line(f"{condition}: win, P5", None, quantile(wins, 0.05), "%"),
            Line(
                f"{condition}: best static alpha in hindsight, win, P95",
                None,
                quantile(_static(lab, workload), 0.95),
                "%",
            ),
        ]
        lines += [
            Line(f"{condition}: figure {name}, shapes that came out", len(of), sum(shape.holds for shape in of))
            for name, of in shapes.items()
        ]
        held[condition] = sum(shape.holds for of in shapes.values() for shape in of)
        lines.append(Line(f"{condition}: all", sum(map(len, shapes.values())), held[condition]))
    return Found(lines, *_compared(held))


def _static(lab: Lab, workload: Workload) -> list[float]:
    """Return the wins in percent of the best static alpha over SGLang+, by memory size."""
    best = best_static(lab, workload.read(lab), workload.memories, ALPHAS, workload.loads[0])
    return [100 * (ratio(best[cell.memory][0], cell.hit_rate("sglang+")) - 1) for cell in cells(lab, workload, SYSTEMS)]


def _compared(held: dict[Condition, int]) -> list[Shape]:
    """Return a shape for each condition, compared with the others equal."""

    def more(given: dict[str, Any], than: dict[str, Any]) -> bool:
        """Return whether more shapes come out wherever the conditions differ only in this."""
        pairs = ((held.get(replace(one, **than)), count) for one, count in held.items() if one == replace(one, **given))
        return all(other < count for other, count in pairs if other is not None)

    return [
        Shape("with even think times more shapes come out, the rest being equal", more({"cv": EVEN}, {"cv": 1.0})),
        Shape("with 51 requests a session more than with 12", more({"turns": 51}, {"turns": 12})),
        Shape("with whole histories more than with collapsed ones", more({"last": WHOLE}, {"last": 5})),
    ]


def _fig8(found: Sequence[Cell]) -> tuple[Shape, ...]:
    wins = ratios(list(found), "sglang+")
    return (
        Shape("Marconi hits more than LRU in every cell", min(wins) > 1),
        Shape("the P95 win is above 0", quantile(wins, 0.95) > 1),
    )


def _fig9(found: Sequence[Cell]) -> tuple[Shape, ...]:
    model = cost()

    def p95(cell: Cell, system: str, cached: bool = True) -> float:
        return quantile(ttfts(model, cell.results[system].outcomes, cached), 0.95)

    times = [(p95(one, "marconi"), p95(one, "marconi", cached=False), p95(one, "sglang+")) for one in found]
    return (
        Shape("Marconi is never slower than no caching", all(ours <= none for ours, none, _ in times)),
        Shape("and in no cell slower than SGLang+", all(ours <= lru for ours, _, lru in times)),
    )
