"""Marconi's eviction against LRU."""

from __future__ import annotations

from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab
from papers.marconi.workloads import CODE, WORKLOADS, Cell, Workload, cells
from papers.quantile import BOX, quantile

PAPER = {"LMSys": 45.6, "ShareGPT": 19.0, "SWE-bench": 219.7}
SYSTEMS = ("sglang+", "marconi")


def run(lab: Lab) -> Found:
    swept = {
        **{workload: cells(lab, workload) for workload in WORKLOADS},
        CODE: cells(lab, CODE, SYSTEMS),
    }
    wins = {workload: gains(found) for workload, found in swept.items()}
    best = {workload.name: quantile(found, 0.95) for workload, found in wins.items()}
    return Found(
        tuple(line for workload, found in wins.items() for line in _lines(workload, found)),
        (
            Shape(
                "Marconi hits more than LRU in every cell", all(gain > 0 for found in wins.values() for gain in found)
            ),
            Shape("the P95 win is above 0 on every workload", min(best.values()) > 0),
            Shape("the win is largest on the agent's workload", best["agent"] == max(best.values())),
            Shape("and smallest on the dialogues", best["dialogues"] == min(best.values())),
        ),
    )


def gains(found: list[Cell]) -> list[float]:
    """Of hit rates, in percent of SGLang+'s."""
    return [
        100 * (cell.hit_rate("marconi") / cell.hit_rate("sglang+") - 1) for cell in found if cell.hit_rate("sglang+")
    ]


def _lines(workload: Workload, found: list[float]) -> list[Line]:
    label = f"{workload.name} ({workload.dataset})"
    paper = {0.95: PAPER[workload.dataset]}
    lines = [Line(f"{label}: win, P{100 * q:.0f}", paper.get(q), quantile(found, q), "%") for q in BOX]
    won = sum(gain > 0 for gain in found)
    return [*lines, Line(f"{label}: cells won, of {len(found)}", None, won)]


FIGURE = Figure(
    name="marconi-8",
    title="Token hit rate over SGLang+",
    paper="Marconi, figure 8",
    claim="FLOP-aware eviction hits 45.6%, 19.0% and 219.7% more than LRU at P95.",
    difference=(
        "Losses are nearly as frequent as wins. Our agents' sessions all grow until they end, so that a long one "
        "has fewer requests left than a short one, and FLOP-aware eviction keeps long ones that are over. Recency"
        " is 1/age: most alphas of the grid outweigh it for all but the last few requests. In marconi-11 even the"
        " best alpha in hindsight hardly beats LRU; on the simulator's own traces (marconi-tuners) the same "
        "policy does. The tuner adds losses of its own: in its window hardly any session has ended, so that a "
        "large alpha looks better than it is later."
    ),
    run=run,
)
