"""Marconi's figures on agents' sessions: prompt length (10), memory (11), the model's shape (12), arrivals (13).

Figure 11's best static alpha is also compared on the traces of Marconi's published simulator.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.traces.arrivals import Load, Poisson, Recorded
from headwater.traces.read import read_trace
from headwater.traces.request import Trace
from papers.figure import Found, Line, Shape, mean, quantile, ratio
from papers.lab import Lab
from papers.marconi.setting import AGENT, AGENTS, BASELINES, GB, MODEL, Cell, Workload, cells, cost, setup_of, ttfts

SYSTEMS = ("sglang+", "marconi")
PAPER_RATE = 16.4  # SGLang+'s hit rate, in percent, on the paper's trace
EDGES = (0, 3_500, 7_000, 10_500, 14_000, 21_000, 28_000, 1_000_000)
SHORT = 7_000
PAPER_TTFT = {0.05: -6.3, 0.5: 13.4, 0.95: 22.0}


def trace_cell(lab: Lab, workload: Workload) -> Cell:
    """Return the memory size whose hit rate under SGLang+ is nearest to the paper's."""
    return min(cells(lab, workload, SYSTEMS), key=lambda one: abs(one.hit_rate("sglang+") - PAPER_RATE))


def fig10a(lab: Lab, workload: Workload = AGENTS) -> Found:
    found = trace_cell(lab, workload)
    bins = {pair: gain for pair in pairwise(EDGES) if (gain := _gain(found, *pair)) is not None}
    flops = {system: found.results[system].row.flops_saved for system in SYSTEMS}
    short = [gain for (_, end), gain in bins.items() if end <= SHORT]
    long = [gain for (_, end), gain in bins.items() if end > SHORT]
    lines = [
        Line(f"token hit rate, SGLang+, {found.memory:g} GB", PAPER_RATE, found.hit_rate("sglang+"), "%"),
        Line(f"token hit rate, Marconi, {found.memory:g} GB", 32.7, found.hit_rate("marconi"), "%"),
        Line("FLOPs saved, over SGLang+", 90.3, 100 * (ratio(flops["marconi"], flops["sglang+"]) - 1), "%"),
        Line("below 7K tokens, the worst bin", -3.0, quantile(short, 0), "points"),
        Line("from 7K tokens on, the best bin", 25.5, quantile(long, 1), "points"),
    ]
    lines += [Line(f"{begin:,} to {end:,} tokens", None, gain, "points") for (begin, end), gain in bins.items()]
    return Found(
        lines,
        Shape("Marconi hits less of the short requests", mean(short) < 0),
        Shape("Marconi hits more of the requests from 7K tokens on", mean(long) > 0),
        Shape("Marconi saves more FLOPs", flops["marconi"] > flops["sglang+"]),
    )


def _gain(found: Cell, begin: int, end: int) -> float | None:
    """Return the mean gain in points of hit rate over requests of such lengths; None if there are none."""
    rates = []
    for system in SYSTEMS:
        requests = [one for one in found.results[system].outcomes if begin <= one.prompt_tokens < end]
        if not requests:
            return None
        rates.append(mean([100 * one.resumed_at / one.prompt_tokens for one in requests]))
    return rates[1] - rates[0]


def fig10b(lab: Lab, workload: Workload = AGENTS) -> Found:
    found, model = trace_cell(lab, workload), cost()
    lines, less = [], {}
    for share, percent in PAPER_TTFT.items():
        lru, marconi = (quantile(ttfts(model, found.results[system].outcomes), share) for system in SYSTEMS)
        less[share] = 100 * (1 - marconi / lru)
        name = f"P{100 * share:.0f}"
        lines += [
            Line(f"{name}, SGLang+", None, lru, "ms"),
            Line(f"{name}, Marconi", None, marconi, "ms"),
            Line(f"{name}, reduction against SGLang+", percent, less[share], "%"),
        ]
    return Found(
        lines,
        Shape("Marconi is not faster at P5", less[0.05] <= 0),
        Shape("Marconi is faster at P50", less[0.5] > 0),
        Shape("Marconi is faster at P95", less[0.95] > 0),
    )


PAPER_11 = {  # by the paper's memory in GB: SGLang+, Marconi, the win in percent
    60: (7.72, 9.59, 24.3),
    80: (15.01, 22.74, 51.5),
    100: (25.57, 43.03, 68.3),
    120: (36.90, 47.92, 30.0),
    140: (43.89, 48.21, 10.0),
}
ALPHAS = (0.0, 0.02, 0.1, 0.5, 1.0, 2.0)


def fig11(lab: Lab, workload: Workload = AGENTS, alphas: Sequence[float] = ALPHAS) -> Found:
    found = cells(lab, workload, SYSTEMS)
    trace, load = workload.under(lab, workload.loads[0])
    statics = best_static(lab, trace, workload.memories, alphas, load)
    wins = [_win(cell, cell.hit_rate("marconi")) for cell in found]
    bests = [_win(cell, statics[cell.memory][0]) for cell in found]
    lines = []
    for cell, (there, (lru, marconi, gain)), win in zip(found, PAPER_11.items(), wins, strict=True):
        size = f"{cell.memory:g} GB (paper: {there} GB)"
        rate, alpha = statics[cell.memory]
        lines += [
            Line(f"{size}: SGLang+", lru, cell.hit_rate("sglang+"), "%"),
            Line(f"{size}: Marconi", marconi, cell.hit_rate("marconi"), "%"),
            Line(f"{size}: Marconi over SGLang+", gain, win, "%"),
            Line(f"{size}: the alpha that Marconi's tuner chose", None, cell.results["marconi"].row.alpha),
            Line(f"{size}: the best static alpha in hindsight", None, alpha),
            Line(f"{size}: with it", None, rate, "%"),
        ]
    return Found(
        lines,
        Shape("Marconi wins at every size", min(wins) > 0),
        Shape("its win peaks between the smallest and the largest size", _peaks_inside(wins)),
        Shape("the best static alpha in hindsight wins at every size", min(bests) > 0),
        Shape("and its win peaks between the smallest and the largest size", _peaks_inside(bests)),
    )


def best_static(
    lab: Lab, trace: Trace, memories: Sequence[float], alphas: Sequence[float], load: Load
) -> dict[float, tuple[float, float]]:
    """Return the best hit rate in percent, and the first alpha that has it, by memory size in GB."""
    profile = load_profile(MODEL)
    rows = lab.rows(
        trace,
        {
            (memory, alpha): Setup(
                profile, int(memory * GB), "branch", f"flop_aware({alpha})", page_size=1, tails=False
            )
            for memory, alpha in product(memories, alphas)
        },
        load,
    )
    best = {memory: max(alphas, key=lambda alpha: rows[memory, alpha].token_hit_rate) for memory in memories}
    return {memory: (100 * rows[memory, alpha].token_hit_rate, alpha) for memory, alpha in best.items()}


def _win(cell: Cell, rate: float) -> float:
    return 100 * (ratio(rate, cell.hit_rate("sglang+")) - 1)


def _peaks_inside(wins: list[float]) -> bool:
    return max(wins) > max(wins[0], wins[-1], 0)


TRACES = {"chat": (0.5, 1, 2, 3.5, 6), "agent": (2, 3, 5, 8), "fewshot": (0.5, 1, 2, 4)}  # memory sizes, GB
LOSSES = 5  # of the simulator's tuned policy against its LRU, in 13 cells


def tuners(lab: Lab) -> Found:
    """Compare the published simulator's results with this policy on the simulator's traces."""
    lines, there, here = [], [], []
    for name, memories in TRACES.items():
        trace = replace(read_trace(lab.peer("marconi", "traces", f"{name}.jsonl.zst")), name=f"simulator's {name}")
        setups = {(system, memory): setup_of(system, memory, 1) for memory, system in product(memories, SYSTEMS)}
        rows = lab.rows(trace, setups, Recorded())
        statics = best_static(lab, trace, memories, (0.0, 0.1, 0.5, 1.0, 2.0), Recorded())
        for memory in memories:
            lru, marconi = (100 * rows[system, memory].token_hit_rate for system in SYSTEMS)
            published_lru, published_tuned = (_published(lab, name, policy, memory) for policy in ("v1", "v2"))
            there.append(published_tuned - published_lru)
            here.append(marconi - lru)
            label = f"{name}, {memory:g} GB"
            static, alpha = statics[memory]
            lines += [
                Line(f"{label}: LRU", round(published_lru, 2), lru, "%"),
                Line(f"{label}: Marconi, tuned", round(published_tuned, 2), marconi, "%"),
                Line(f"{label}: best static alpha in hindsight, {alpha:g}", None, static, "%"),
            ]
    theirs, ours = (sum(gain < 0 for gain in gains) for gains in (there, here))
    lines.append(Line(f"cells in which Marconi loses to LRU, of {len(there)}", theirs, ours))
    return Found(
        lines,
        Shape("the published tuner loses to LRU in 5 of 13 cells", theirs == LOSSES),
        Shape("the shipped policy loses in no more cells", ours <= theirs),
    )


def _published(lab: Lab, name: str, policy: str, memory: float) -> float:
    """Return the token hit rate in percent from the simulator's result."""
    path = lab.peer("marconi", "results", f"{name}_{policy}_{int(memory * GB)}.json")
    return 100 * float(json.loads(path.read_text())["token_hit_rate"])


RATIOS = {  # by profile: its layers, and the paper's hit rates of vLLM+, SGLang+ and Marconi
    "marconi-7b-1to8": ("32 SSM, 4 attention", (5.01, 11.31, 18.06)),
    "marconi-7b-1to6": ("30 SSM, 5 attention", (5.01, 8.51, 12.30)),
    "marconi-7b-1to4": ("28 SSM, 7 attention", (5.01, 6.62, 8.35)),
    "marconi-7b-1to2": ("24 SSM, 12 attention", (5.02, 5.38, 5.69)),
    "marconi-7b-attention": ("36 attention", (5.04, 5.04, 5.05)),
}
STATES = {
    "marconi-7b": ("N = 128", (0.89, 16.39, 31.55)),
    "marconi-7b-n64": ("N = 64", (1.50, 17.39, 29.88)),
    "marconi-7b-n32": ("N = 32", (3.14, 18.00, 30.19)),
    "marconi-7b-n16": ("N = 16", (5.17, 18.37, 29.36)),
}
SHAPE_MEMORY = 16  # GB


@dataclass(frozen=True, slots=True)
class ModelRates:
    """Hit rates in percent by model, each a list in the order of BASELINES, beside the paper's."""

    lines: list[Line]
    rates: list[list[float]]

    @classmethod
    def of(cls, lab: Lab, models: Mapping[str, tuple[str, Sequence[float]]]) -> ModelRates:
        setups = {
            (name, system): setup_of(system, SHAPE_MEMORY, AGENT.page_size, load_profile(name))
            for name, system in product(models, BASELINES)
        }
        trace, load = AGENT.under(lab, Poisson(2.0, 5.0))
        rows = lab.rows(trace, setups, load)
        rates = [[100 * rows[name, system].token_hit_rate for system in BASELINES] for name in models]
        lines = [
            Line(f"{label}: {system}", paper, rate, "%")
            for (label, papers), of_model in zip(models.values(), rates, strict=True)
            for system, paper, rate in zip(BASELINES, papers, of_model, strict=True)
        ]
        return cls(lines, rates)

    def over(self, system: str) -> list[float]:
        """Return Marconi's hit rate over another system's, by model."""
        return [ratio(of_model[-1], of_model[BASELINES.index(system)]) for of_model in self.rates]


def fig12a(lab: Lab) -> Found:
    found = ModelRates.of(lab, RATIOS)
    over_vllm, over_lru, transformer = found.over("vllm+"), found.over("sglang+"), found.rates[-1]
    return Found(
        found.lines,
        Shape("the more SSM layers, the larger the win over vLLM+", over_vllm == sorted(over_vllm, reverse=True)),
        Shape("and over SGLang+", over_lru == sorted(over_lru, reverse=True)),
        Shape("on a Transformer all three are within a point", max(transformer) - min(transformer) < 1),
    )


def fig12b(lab: Lab) -> Found:
    found = ModelRates.of(lab, STATES)
    over_vllm, vllm = found.over("vllm+"), [of_model[0] for of_model in found.rates]
    return Found(
        found.lines,
        Shape("the larger the state, the larger the win over vLLM+", over_vllm == sorted(over_vllm, reverse=True)),
        Shape("Marconi wins over SGLang+ at each size", min(found.over("sglang+")) > 1),
        Shape("vLLM+ hits more the smaller the state", vllm == sorted(vllm)),
    )


RATES = {0.5: 48.7, 1.0: None, 2.0: 43.0}  # sessions a second, and Marconi's hit rate in the paper
PAUSES = {5.0: 25.9, 7.5: None, 10.0: 24.1}  # seconds between an answer and the next request
RATE_MEMORY, PAUSE_MEMORY = 32, 16  # GB
WINS = (1.4, None, 1.6)  # over SGLang+ in the paper


def fig13a(lab: Lab) -> Found:
    return _by_load(lab, RATE_MEMORY, {f"{rate:g} sessions/s": Poisson(rate, 5.0) for rate in RATES}, RATES.values())


def fig13b(lab: Lab) -> Found:
    return _by_load(lab, PAUSE_MEMORY, {f"{pause:g} s": Poisson(1.0, pause) for pause in PAUSES}, PAUSES.values())


def _by_load(lab: Lab, memory: float, loads: Mapping[str, Load], paper: Iterable[float | None]) -> Found:
    found = cells(lab, replace(AGENTS, memories=(memory,), loads=tuple(loads.values())), SYSTEMS)
    rates = [cell.hit_rate("marconi") for cell in found]
    lru = [cell.hit_rate("sglang+") for cell in found]
    wins = list(map(ratio, rates, lru))
    lines = []
    for at, (label, paper_rate, paper_win) in enumerate(zip(loads, paper, WINS, strict=True)):
        lines += [
            Line(f"{label}: Marconi", paper_rate, rates[at], "%"),
            Line(f"{label}: SGLang+", None, lru[at], "%"),
            Line(f"{label}: Marconi over SGLang+", paper_win, wins[at], "x"),
        ]
    return Found(
        lines,
        Shape("the hit rate falls", rates == sorted(rates, reverse=True)),
        Shape("the win over SGLang+ grows", wins == sorted(wins)),
        Shape("and is above 1 in the last row", wins[-1] > 1),
    )
