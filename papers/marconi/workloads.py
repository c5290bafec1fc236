"""Marconi's figures over its workloads: reuse of blocks (3a), lengths (6), hit rates (7, 8) and TTFT (9)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from headwater.lab.cost import StepCost
from headwater.lab.setup import Setup
from headwater.lab.tally import Outcome
from headwater.models.profiles import load_profile
from headwater.traces.arrivals import Poisson, sessions_of
from headwater.traces.request import Request, Trace
from papers.figure import Found, Line, Shape, mean, quantile, quantiles, ratio
from papers.lab import Lab
from papers.marconi.setting import (
    AGENT,
    BASELINES,
    CHAT,
    CODE,
    DIALOGUES,
    WORKLOADS,
    Cell,
    Workload,
    cells,
    cost,
    ttfts,
)

LOAD = Poisson(2.0, 5.0)
MEMORY = 48 * 10**9  # bytes
PAPER_3A = {32: (25.0, 0.4), 128: (None, 3.3)}  # by block: % of KV and of states reused


@dataclass
class Reuse:
    """Counts of computed blocks, and of those whose KV or state a later request uses."""

    block: int
    computed: int = 0
    kv_used: int = 0
    states_used: int = 0
    _id: dict[tuple[int, bytes], int] = field(default_factory=dict)  # of a block, by the one before and its tokens
    _kv: set[int] = field(default_factory=set)  # blocks computed and not used since
    _states: set[int] = field(default_factory=set)

    def add(self, request: Request, resumed_at: int) -> None:
        """Add a request that resumed at `resumed_at` and computed the rest of its prompt and answer."""
        known = resumed_at // self.block
        path = self._path(request)
        for block in path[:known]:
            if block in self._kv:
                self._kv.discard(block)
                self.kv_used += 1
        if known and path[known - 1] in self._states:
            self._states.discard(path[known - 1])
            self.states_used += 1
        new = path[known:]
        self.computed += len(new)
        self._kv.update(new)
        self._states.update(new)

    def percent(self) -> tuple[float, float]:
        """Return the percentages of computed blocks whose KV, and whose state, was reused."""
        return 100 * self.kv_used / self.computed, 100 * self.states_used / self.computed

    def _path(self, request: Request) -> list[int]:
        width, before, path = 4 * self.block, 0, []
        for at in range(0, request.known_tokens // self.block * width, width):
            before = self._id.setdefault((before, request.text[at : at + width]), len(self._id) + 1)
            path.append(before)
        return path


def fig3a(lab: Lab) -> Found:
    trace, profile = AGENT.read(lab), load_profile("marconi-7b")
    setups = [Setup(profile, MEMORY, "every_block(1)", "lru_path", page_size=block, tails=False) for block in PAPER_3A]
    lines, times, states = [], [], []
    for block, result in zip(PAPER_3A, lab.run(trace, setups, LOAD), strict=True):
        kv, state = _reuse(block, trace, result.outcomes, [one.resumed_at for one in result.outcomes])
        endless = _reuse(block, trace, result.outcomes, [one.ideal for one in result.outcomes])
        times.append(ratio(kv, state))
        states.append(state)
        lines += [
            Line(f"blocks of {block}: KV reused", PAPER_3A[block][0], kv, "%"),
            Line(f"blocks of {block}: states reused", PAPER_3A[block][1], state, "%"),
            Line(f"blocks of {block}: ratio", 65.3 if block == 32 else None, times[-1], "x"),
            Line(f"blocks of {block}, unlimited memory: KV reused", None, endless[0], "%"),
            Line(f"blocks of {block}, unlimited memory: states reused", None, endless[1], "%"),
        ]
    return Found(
        lines,
        Shape("KV is reused ten times as often as states", min(times) > 10),
        Shape("states of larger blocks are reused more often", states == sorted(states)),
    )


def _reuse(block: int, trace: Trace, outcomes: Iterable[Outcome], resumed: Iterable[int]) -> tuple[float, float]:
    """Count reuse over the requests in the order of their arrival."""
    reuse = Reuse(block)
    sessions = {requests[0].session: iter(requests) for requests in sessions_of(trace.requests)}
    for outcome, at in zip(outcomes, resumed, strict=True):
        reuse.add(next(sessions[outcome.session]), at)
    return reuse.percent()


def fig6(lab: Lab) -> Found:
    lines, prompts = [], {}
    for workload in (CHAT, CODE, DIALOGUES, AGENT):
        trace = workload.read(lab)
        lab.note(trace)
        prompts[workload.name] = [request.prompt_tokens for request in trace.requests]
        answers = [request.output_tokens for request in trace.requests]
        for what, lengths in (("prompt", prompts[workload.name]), ("answer", answers)):
            lines += quantiles(f"{workload.label}: {what}", lengths, "tokens", shares=(0.05, 0.5, 0.95))
    return Found(
        lines,
        Shape("the agent's prompts reach tens of thousands of tokens", quantile(prompts["agent"], 0.95) > 10_000),
        Shape("the agent's shortest prompt has hundreds of tokens", min(prompts["agent"]) < 1_000),
        Shape("most chat prompts are below 10K tokens", quantile(prompts["chat"], 0.5) < 10_000),
        Shape("most dialogue prompts are below 2K tokens", quantile(prompts["dialogues"], 0.75) < 2_000),
        Shape(
            "the agent's prompts have the largest spread from P5 to P95",
            _spread(prompts["agent"]) == max(_spread(prompts[name]) for name in ("chat", "dialogues", "agent")),
        ),
    )


def _spread(lengths: list[int]) -> float:
    return quantile(lengths, 0.95) - quantile(lengths, 0.05)


PAPER_7 = {"LMSys": 4.5, "ShareGPT": 7.3, "SWE-bench": 34.4}


def fig7(lab: Lab) -> Found:
    swept = {workload: cells(lab, workload) for workload in WORKLOADS}
    wins = {workload.dataset: mean(ratios(found, "vllm+")) for workload, found in swept.items()}
    lines = [line for workload, found in swept.items() for line in _lines_7(workload, found)]
    every = [cell for found in swept.values() for cell in found]
    return Found(
        lines,
        Shape("Marconi hits more than vLLM+ in every cell", min(ratios(every, "vllm+")) > 1),
        Shape("the win is largest on the agent's workload", wins["SWE-bench"] == max(wins.values())),
    )


def ratios(found: list[Cell], other: str) -> list[float]:
    """Return ratios of Marconi's hit rate to another system's, without the cells in which that one hits nothing."""
    return [cell.hit_rate("marconi") / cell.hit_rate(other) for cell in found if cell.hit_rate(other)]


def _lines_7(workload: Workload, found: list[Cell]) -> list[Line]:
    lines = [
        Line(
            f"{workload.label}: Marconi over vLLM+, mean", PAPER_7[workload.dataset], mean(ratios(found, "vllm+")), "x"
        )
    ]
    for memory in workload.memories:
        there = mean(ratios([cell for cell in found if cell.memory == memory], "vllm+"))
        lines.append(Line(f"{workload.label}: with {memory:g} GB, mean", None, there, "x"))
    for system in ("vllm+", "marconi"):
        rates = [cell.hit_rate(system) for cell in found]
        lines += quantiles(f"{workload.label}: {system}", rates, "%")
    return lines


PAPER_8 = {"LMSys": 45.6, "ShareGPT": 19.0, "SWE-bench": 219.7}


def fig8(lab: Lab) -> Found:
    swept = {workload: cells(lab, workload) for workload in WORKLOADS}
    swept[CODE] = cells(lab, CODE, ("sglang+", "marconi"))
    wins = {workload: [100 * (one - 1) for one in ratios(found, "sglang+")] for workload, found in swept.items()}
    best = {workload.name: quantile(found, 0.95) for workload, found in wins.items()}
    return Found(
        [line for workload, found in wins.items() for line in _lines_8(workload, found)],
        Shape("Marconi hits more than LRU in every cell", min(map(min, wins.values())) > 0),
        Shape("the P95 win is above 0 on every workload", min(best.values()) > 0),
        Shape("the win is largest on the agent's workload", best["agent"] == max(best.values())),
        Shape("and smallest on the dialogues", best["dialogues"] == min(best.values())),
    )


def _lines_8(workload: Workload, found: list[float]) -> list[Line]:
    lines = quantiles(f"{workload.label}: win", found, "%", {0.95: PAPER_8[workload.dataset]})
    won = sum(gain > 0 for gain in found)
    return [*lines, Line(f"{workload.label}: cells won, of {len(found)}", None, won)]


# reduction of P95 at most, in % and ms: over no caching, vLLM+, SGLang+
PAPER_9 = {
    "LMSys": ((36.9, 281.4), (36.1, 275.4), (17.2, 131.1)),
    "ShareGPT": ((73.2, 106.3), (71.1, 103.3), (12.8, 18.5)),
    "SWE-bench": ((46.8, 617.0), (46.8, 617.0), (24.7, 325.7)),
}
OTHERS = ("no caching", "vllm+", "sglang+")


def fig9(lab: Lab) -> Found:
    model = cost()
    swept = {workload: [_p95(model, cell) for cell in cells(lab, workload)] for workload in WORKLOADS}
    every = [one for found in swept.values() for one in found]
    return Found(
        [line for workload, found in swept.items() for line in _lines_9(workload, found)],
        Shape("Marconi is never slower than no caching", all(one["marconi"] <= one["no caching"] for one in every)),
        Shape("and in no cell slower than vLLM+", all(one["marconi"] <= one["vllm+"] for one in every)),
        Shape("and in no cell slower than SGLang+", all(one["marconi"] <= one["sglang+"] for one in every)),
    )


def _p95(model: StepCost, cell: Cell) -> dict[str, float]:
    times = {system: ttfts(model, cell.results[system].outcomes) for system in BASELINES}
    times["no caching"] = ttfts(model, cell.results["marconi"].outcomes, cached=False)
    return {system: quantile(values, 0.95) for system, values in times.items()}


def _lines_9(workload: Workload, found: list[dict[str, float]]) -> list[Line]:
    lines = []
    for (percent, ms), other in zip(PAPER_9[workload.dataset], OTHERS, strict=True):
        relative = max(100 * (1 - one["marconi"] / one[other]) for one in found)
        saved = max(one[other] - one["marconi"] for one in found)
        lines.append(Line(f"{workload.label}: reduction against {other}, largest", percent, relative, "%"))
        lines.append(Line(f"{workload.label}: reduction against {other}, largest", ms, saved, "ms"))
    for system in BASELINES:
        median = quantile([100 * one[system] / one["no caching"] for one in found], 0.5)
        lines.append(Line(f"{workload.label}: P95 of {system} relative to no caching, median", None, median, "%"))
    return lines
