"""How much memory to buy, in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.lab.size import Size

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)  # of what endless memory would hit
DOUBLED = 0.9  # the level whose size is doubled
STEPS = 400  # at which the curve is read, evenly spaced by ratio


@dataclass(frozen=True, slots=True)
class Step:
    memory: float  # bytes
    hit_rate: float


def curve(sizes: Sequence[Size], modelled: Callable[[float], float]) -> list[Step]:
    """The model between the sizes that were estimated, corrected as they are, and never falling."""
    first, last = sizes[0].memory, sizes[-1].memory
    steps: list[Step] = []
    best = 0.0
    for number in range(STEPS + 1):
        memory = first * (last / first) ** (number / STEPS)
        best = max(best, min(1.0, modelled(memory) + _correction(sizes, memory)))
        steps.append(Step(memory, best))
    return steps


def _correction(sizes: Sequence[Size], memory: float) -> float:
    """Between two sizes linear in the logarithm of the memory."""
    above = next((number for number, size in enumerate(sizes) if size.memory >= memory), len(sizes) - 1)
    low, high = sizes[max(0, above - 1)], sizes[above]
    corrections = low.hit_rate - low.modelled, high.hit_rate - high.modelled
    if low.memory == high.memory:
        return corrections[1]
    share = math.log(memory / low.memory) / math.log(high.memory / low.memory)
    return corrections[0] + share * (corrections[1] - corrections[0])


def advice(steps: Sequence[Step], ideal: float) -> list[str]:
    """The smallest sizes that reach each level, in steps of two digits, and what doubling one would bring."""
    if not ideal:
        return ["Nothing in this traffic begins like anything before it: no memory would help."]
    reached: dict[float, float] = {}  # memory: level
    for level in LEVELS:
        found = next((step.memory for step in steps if step.hit_rate >= level * ideal), None)
        if found is not None and round_up(found) <= round_up(steps[-1].memory):
            reached.setdefault(round_up(found), level)
    lines = []
    if reached:
        first, *rest = reached
        line = f"{spelled(first)} reach {_share(steps, first, ideal)} of what infinite memory would"
        lines.append("; ".join([line, *(f"{spelled(size)} {_share(steps, size, ideal)}" for size in rest)]) + ".")
    if not reached or max(reached.values()) < LEVELS[-1]:
        largest = steps[-1].memory
        lines.append(f"{spelled(largest)}, the most that was tried, reach {_share(steps, largest, ideal)} of it.")
    bought = next((size for size, level in reached.items() if level >= DOUBLED), None)
    if bought is not None:
        gain = hit_rate(steps, 2 * bought) - hit_rate(steps, bought)
        lines.append(f"Twice as much as {spelled(bought)} would add {100 * gain:.1f} points of hit rate.")
    return lines


def hit_rate(steps: Sequence[Step], memory: float) -> float:
    """At that size or the next smaller one that was read."""
    return max((step.hit_rate for step in steps if step.memory <= memory), default=steps[0].hit_rate)


def round_up(memory: float) -> float:
    """To two digits, upward."""
    unit = 10.0 ** (math.floor(math.log10(memory)) - 1)
    return math.ceil(memory / unit - 1e-9) * unit


def spelled(memory: float) -> str:
    return f"{memory / 1e9:,.3g} GB" if memory < 1e12 else f"{memory / 1e9:,.0f} GB"


def _share(steps: Sequence[Step], memory: float, ideal: float) -> str:
    return f"{math.floor(100 * hit_rate(steps, memory) / ideal + 1e-9)}%"
