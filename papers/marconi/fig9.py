"""P95 of the time to the first token, relative to no caching."""

from __future__ import annotations

from headwater.lab.cost import StepCost
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab
from papers.marconi.ttft import cost, ttfts, without_cache
from papers.marconi.workloads import BASELINES, WORKLOADS, Cell, Workload, cells
from papers.quantile import quantile

# reduction of P95 at most, in % and ms: over no caching, vLLM+, SGLang+
PAPER = {
    "LMSys": ((36.9, 281.4), (36.1, 275.4), (17.2, 131.1)),
    "ShareGPT": ((73.2, 106.3), (71.1, 103.3), (12.8, 18.5)),
    "SWE-bench": ((46.8, 617.0), (46.8, 617.0), (24.7, 325.7)),
}
OTHERS = ("no caching", "vllm+", "sglang+")


def run(lab: Lab) -> Found:
    model = cost()
    swept = {workload: [_p95(model, cell) for cell in cells(lab, workload)] for workload in WORKLOADS}
    every = [one for found in swept.values() for one in found]
    return Found(
        tuple(line for workload, found in swept.items() for line in _lines(workload, found)),
        (
            Shape("Marconi is never slower than no caching", all(one["marconi"] <= one["no caching"] for one in every)),
            Shape("and in no cell slower than vLLM+", all(one["marconi"] <= one["vllm+"] for one in every)),
            Shape("and in no cell slower than SGLang+", all(one["marconi"] <= one["sglang+"] for one in every)),
        ),
    )


def _p95(model: StepCost, cell: Cell) -> dict[str, float]:
    times = {system: ttfts(model, cell.results[system].outcomes) for system in BASELINES}
    times["no caching"] = without_cache(model, cell.results["marconi"].outcomes)
    return {system: quantile(values, 0.95) for system, values in times.items()}


def _lines(workload: Workload, found: list[dict[str, float]]) -> list[Line]:
    label = f"{workload.name} ({workload.dataset})"
    lines = []
    for (percent, ms), other in zip(PAPER[workload.dataset], OTHERS, strict=True):
        saved = [100 * (1 - one["marconi"] / one[other]) for one in found]
        lines.append(Line(f"{label}: less than {other}, at most", percent, max(saved), "%"))
        lines.append(
            Line(f"{label}: less than {other}, at most", ms, max(one[other] - one["marconi"] for one in found), "ms")
        )
    for system in BASELINES:
        relative = quantile([100 * one[system] / one["no caching"] for one in found], 0.5)
        lines.append(Line(f"{label}: P95 of {system}, of no caching's, median", None, relative, "%"))
    return lines


FIGURE = Figure(
    name="marconi-9",
    title="P95 TTFT relative to no caching",
    paper="Marconi, figure 9 and section 5.2",
    claim="P95 falls by up to 73.2% and 617 ms against no caching, and by up to 24.7% against SGLang+.",
    difference=(
        "TTFT is the cost model's, not a measurement, with the hits of the 7B model's cache. The agent's largest "
        "memory holds nearly everything, hence reductions beyond the paper's. The dialogues' prompts are so short"
        " that reading the weights is all they cost, so no cache can shorten them; ShareGPT's are longer. "
        "Mooncake's chats share too little for more. Where a hit saves few tokens, reading its state costs as "
        "much: the cells that are slower are slower by that, or by the hits lost at marconi-8."
    ),
    run=run,
)
