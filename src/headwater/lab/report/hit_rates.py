"""Hit rate over memory and by prompt length, and the reasons why requests did not resume deeper."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headwater.account import Reason
from headwater.chart import (
    Axis,
    Chart,
    Group,
    Point,
    Shape,
    linear,
    logarithmic,
    marks,
    path,
    place,
    rect,
    round_up,
)
from headwater.lab.report.blocks import (
    SHOWN,
    Empty,
    Figures,
    Keys,
    Legend,
    Line,
    Lines,
    Pairs,
    Panels,
    Piece,
    Plot,
    Section,
    Strip,
    Strips,
    by_memory,
)
from headwater.lab.report.numbers import count, percent, size, tokens
from headwater.lab.row import Result, Row
from headwater.lab.tally import TOO_LARGE, Outcome

BINS = 12  # most bins of prompt lengths
IDEAL = Legend((("swatch", "line ideal", "", "ideal: endless memory and a checkpoint at every unit"),))


def over_memory(results: Sequence[Result], lines: Lines) -> Section:
    """Return a line for each combination of policies, or a bar for each if all rows have the same memory."""
    rows = [result.row for result in results if result.row.requests]
    about = "prompt tokens that were not computed, of all"
    if not rows:
        return Section("memory", "Hit rate over memory", about, [Empty("No request was replayed.")])
    if len({row.memory for row in rows}) == 1:
        return Section("memory", "Hit rate", f"{about}; with {size(rows[0].memory)}", [IDEAL, _bars(rows, lines)])
    keys = Keys(lines.all, shown=len(lines.all))
    return Section("memory", "Hit rate over memory", about, [keys, IDEAL, Plot(_memory_chart(rows, lines))])


def _memory_chart(rows: Sequence[Row], lines: Lines) -> Chart:
    memories = sorted({row.memory for row in rows})
    ends = [memories[0] / 1.06, memories[-1] * 1.06]  # so that no mark lies on the figure's edge
    x, y = logarithmic(ends, memories, size), _scale(rows)
    points: dict[Line, list[tuple[Point, str]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.memory):
        points[lines.of(row)].append(((x.at(row.memory), y.at(row.token_hit_rate)), _memory_tip(row, lines)))
    ideal = [max(row.ideal_hit_rate for row in rows if row.memory == memory) for memory in memories]
    bound = [(x.at(memory), y.at(rate)) for memory, rate in zip(memories, ideal, strict=True)]
    drawn = [path([point for point, _ in told], line.look) for line, told in points.items()]
    over = [Group(marks(line.mark, told), line.look) for line, told in points.items()]
    label = f"Hit rate over memory from {size(memories[0])} to {size(memories[-1])}; the rows have the same figures"
    edges = [(0.0, bound[0][1]), *bound, (1.0, bound[-1][1])]
    return Chart(label, x, y, [Group([path(edges, "ideal"), *drawn], stretched=True), *over], kind="tall")


def _bars(rows: Sequence[Row], lines: Lines) -> Strips:
    y = _scale(rows)
    strips = []
    for row in rows:
        width, bound = place(y.at(row.token_hit_rate)), place(y.at(row.ideal_hit_rate))
        colour = f"{lines.of(row).colour} fill"
        shapes = (
            Shape("rect", {"width": width, "height": "100%", "rx": 3, "class": colour}),
            Shape("line", {"x1": bound, "x2": bound, "y1": -3, "y2": 19, "class": "line ideal"}),
        )
        name, value = lines.of(row).name, percent(row.token_hit_rate)
        label = f"{name}: {percent(row.token_hit_rate, 2)}"
        strips.append(Strip(name, value, shapes, label=label, tip=_memory_tip(row, lines)))
    return Strips(strips)


def _scale(rows: Sequence[Row]) -> Axis:
    def write(value: float) -> str:
        return percent(value, 0 if round(100 * value, 6).is_integer() else 1)

    return linear(round_up(max(max(row.ideal_hit_rate, row.token_hit_rate) for row in rows)), write)


def _memory_tip(row: Row, lines: Lines) -> str:
    of_ideal = f", {percent(row.token_hit_rate / row.ideal_hit_rate)} of the ideal" if row.ideal_hit_rate else ""
    saved = f"FLOPs saved {percent(row.flops_saved_share, 2)}"
    return f"{lines.title(row)}\nhit rate {percent(row.token_hit_rate, 2)}{of_ideal}\n{saved}"


# -- by prompt length ----------------------------------------------------------


@dataclass(slots=True)
class Bin:
    """Sums over prompts of similar length."""

    prompts: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    ideal_tokens: int = 0


def by_length(results: Sequence[Result], lines: Lines) -> Section:
    """Return a chart for each memory size, and its figures."""
    ran = [result for result in results if result.row.prompt_tokens]
    title = "Hit rate by prompt length"
    if not ran:
        return Section("length", title, "", [Empty("No request was replayed.")])
    edges = _edges(ran)
    binned = [_bins(result.outcomes, edges) for result in ran]
    known = {id(result): bins for result, bins in zip(ran, binned, strict=True)}
    names = [f"{tokens(low)}–{tokens(high)}" for low, high in pairwise(edges)]
    filled = [bin for bins in binned for bin in bins if bin.prompt_tokens]
    most = max(max(bin.ideal_tokens, bin.hit_tokens) / bin.prompt_tokens for bin in filled)
    y = linear(round_up(most), lambda share: percent(share, 0))
    drawn = [
        (memory, _length_chart([(result, known[id(result)]) for result in group], lines, names, edges, y))
        for memory, group in by_memory(ran)
    ]
    rows = [[lines.title(result.row), *map(_rate, bins)] for result, bins in zip(ran, binned, strict=True)]
    prompts = ["Prompts", *(count(bin.prompts) for bin in binned[0])]
    about = "each point: prompts of that length; grey: their share of all prompt tokens; dashed: the ideal"
    figures = Figures(["Prompt tokens", *names], [prompts, *rows])
    return Section("length", title, about, [Keys(lines.all, SHOWN), Panels(drawn), figures])


def _edges(results: Sequence[Result]) -> list[int]:
    """Return the ends of the bins: powers of two, or fractions of them, from the shortest prompt to the longest."""
    lengths = [one.prompt_tokens for one in results[0].outcomes if one.prompt_tokens]
    low, high = min(lengths), max(lengths) + 1
    octaves = math.log2(high / low)
    step = next((step for step in (0.25, 0.5, 1, 2) if octaves / step <= BINS - 2), 4)
    first, last = math.floor(math.log2(low) / step), math.ceil(math.log2(high) / step)
    return sorted({round(2 ** (step * i)) for i in range(first, max(first + 1, last) + 1)})


def _bins(outcomes: Sequence[Outcome], edges: Sequence[int]) -> list[Bin]:
    bins = [Bin() for _ in edges[1:]]
    for one in outcomes:
        bin = bins[min(len(bins), max(1, bisect_right(edges, one.prompt_tokens))) - 1]
        bin.prompts += 1
        bin.prompt_tokens += one.prompt_tokens
        bin.hit_tokens += one.hit_tokens
        bin.ideal_tokens += one.ideal
    return bins


def _length_chart(
    group: Sequence[tuple[Result, list[Bin]]], lines: Lines, names: Sequence[str], edges: Sequence[int], y: Axis
) -> Chart:
    n = len(names)
    x = Axis(lambda bin: (bin + 0.5) / n, tuple((i / n, tokens(edges[i])) for i in range(0, n + 1, 1 + n // 6)))
    first = group[0][1]
    all_tokens = sum(bin.prompt_tokens for bin in first)
    weights = [rect((i + 0.1) / n, 0.8 / n, bin.prompt_tokens / all_tokens) for i, bin in enumerate(first)]
    ideal = [(x.at(i), y.at(bin.ideal_tokens / bin.prompt_tokens)) for i, bin in enumerate(first) if bin.prompt_tokens]
    drawn, over = [path(ideal, "ideal")], []
    for result, bins in group:
        line = lines.of(result.row)
        points = [
            ((x.at(i), y.at(bin.hit_tokens / bin.prompt_tokens)), _length_tip(lines.title(result.row), names[i], bin))
            for i, bin in enumerate(bins)
            if bin.prompt_tokens
        ]
        drawn.append(path([point for point, _ in points], line.look))
        over.append(Group(marks(line.mark, points), line.look))
    label = f"Hit rate by prompt length with {size(group[0][0].row.memory)}"
    return Chart(label, x, y, [Group(weights, "weights"), Group(drawn, stretched=True), *over])


def _rate(bin: Bin) -> str:
    return percent(bin.hit_tokens / bin.prompt_tokens) if bin.prompt_tokens else "–"


def _length_tip(title: str, name: str, bin: Bin) -> str:
    ideal = percent(bin.ideal_tokens / bin.prompt_tokens)
    return f"{title}\n{name} tokens: hit rate {_rate(bin)}, ideal {ideal}\n{count(bin.prompts)} prompts"


# -- reasons ------------------------------------------------------------------

MEANING = {
    Reason.FULL: "all but the last page was cached: no miss",
    Reason.DIVERGED: "the prompt leaves what is cached there",
    Reason.COLD: "nothing in its namespace begins like it",
    Reason.OTHER_NAMESPACE: "its namespace holds nothing, others do",
    Reason.NO_CHECKPOINT: "KV is cached deeper, but no state was kept there",
    Reason.EVICTED: "a deeper match was evicted",
    Reason.NO_MEMORY: "a match could not be held beside the request",
    Reason.TOO_SHORT: "the prompt has no full page before its last token",
    Reason.CACHE_OFF: "there is no cache",
    TOO_LARGE: "no memory could have held the request: it was refused",
}
WHAT = "tokens not hit"


def reasons(results: Sequence[Result], lines: Lines) -> Section:
    """Return two stacked bars for each row, and their figures."""
    ran = [result for result in results if result.row.requests]
    title, about = "Why not deeper", "what kept requests from resuming further on"
    if not ran:
        return Section("reasons", title, about, [Empty("No request was replayed.")])
    names = [name for name in MEANING if any(name in result.row.misses_by_reason for result in ran)]
    names += sorted({name for result in ran for name in result.row.misses_by_reason} - set(MEANING))
    legend = Legend([("i", f"key {name}", _words(name), MEANING.get(name, "")) for name in names])
    counted = [(lines.title(one.row), one.row.misses_by_reason, _missed_tokens(one)) for one in ran]
    bars = [(row, (_bar(prompts, names, "prompts"), _bar(missed, names, WHAT))) for row, prompts, missed in counted]
    rows = [[row, *(_both(prompts, missed, name) for name in names)] for row, prompts, missed in counted]
    figures = Figures([f"Prompts / {WHAT}", *map(_words, names)], rows)
    return Section("reasons", title, about, [legend, Pairs(["Prompts", WHAT.capitalize()], bars), figures])


def _missed_tokens(result: Result) -> Counter[str]:
    missed: Counter[str] = Counter()
    for one in result.outcomes:
        missed[one.reason] += one.prompt_tokens - one.hit_tokens
    return missed


def _bar(counts: Mapping[str, int], names: Sequence[str], what: str) -> tuple[str, list[Piece]]:
    """Return the bar's label and its pieces."""
    total = sum(counts.values())
    if not total:
        return f"no {what}", []
    present = [name for name in names if counts.get(name)]
    told = ", ".join(f"{_words(name)} {percent(counts[name] / total)}" for name in present)
    return f"{what}: {told}", [_piece(name, counts[name], total, what) for name in present]


def _piece(name: str, number: int, total: int, what: str) -> Piece:
    share = number / total
    tip = f"{_words(name)} {percent(share)}\n{count(number)} of {count(total)} {what}"
    return Piece(name, _words(name), max(1, 10_000 * number // total), percent(share, 0), tip)


def _both(prompts: Mapping[str, int], tokens: Mapping[str, int], name: str) -> str:
    return f"{count(prompts.get(name, 0))} / {count(tokens.get(name, 0))}"


def _words(name: str) -> str:
    return name.replace("_", " ")
