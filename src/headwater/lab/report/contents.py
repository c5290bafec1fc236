"""Contents of the memory over a run, reuse of checkpoints, and the reasons why requests did not resume deeper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

from headwater.account import Reason
from headwater.chart import Axis, Chart, Group, Shape, area, linear, place, rect, round_steps
from headwater.lab.report.lines import Lines, count, percent, short, size
from headwater.lab.row import Result
from headwater.lab.tally import TOO_LARGE, WORKERS_LOST, Held

SAMPLES = 120  # most samples that are drawn
BANDS = 40  # most samples that have a tooltip
USES = {
    "kv": "KV",
    "checkpoints": "Checkpoints",
    "stranded": "Stranded KV",
    "segments": "Segments",
    "tails": "Tails",
    "private": "Private and running",
    "free": "Free",
}


def held_charts(results: Sequence[Result], lines: Lines) -> list[tuple[str, Chart]]:
    """Draw a small area chart for each row that held something."""
    used = [result for result in results if any(sum(_pages(one)[:-1]) for one in result.held)]
    return [(lines.title(result.row), _areas(result, lines.title(result.row))) for result in used]


def _areas(result: Result, title: str) -> Chart:
    samples = _thinned(result.held, SAMPLES)
    last = max(1, samples[-1].requests)
    ends = [max(1, sum(_pages(one))) for one in samples]
    x = Axis(lambda requests: requests / last, tuple((tick / last, short(tick)) for tick in round_steps(last, 4)))
    y = linear(max(ends) * result.page_bytes, size, steps=2)
    levels = [(0.0, *accumulate(pages / max(ends) for pages in _pages(one))) for one in samples]
    places = [x.at(one.requests) for one in samples]
    if len(samples) == 1:
        levels, places = levels * 2, [0.0, 1.0]
    areas = [
        area(
            [(at, level[i + 1]) for at, level in zip(places, levels, strict=True)],
            [(at, level[i]) for at, level in zip(places, levels, strict=True)],
            name,
        )
        for i, name in enumerate(USES)
        if name != "free" and any(getattr(one, name) for one in samples)
    ]
    now = ", ".join(f"{label} {percent(pages / ends[-1])}" for label, pages in _named(samples[-1]))
    label = f"{title}: memory by use over the run; at its end {now}"
    bands = Group(_bands(_thinned(result.held, BANDS), last, result.page_bytes), "bands")
    return Chart(label, x, y, [Group(areas, stretched=True), bands], kind="small")


def _bands(samples: Sequence[Held], last: int, page_bytes: int) -> list[Shape]:
    """Return upright bands over the chart, with what the memory held there as their tooltips."""
    bands, begin = [], 0.0
    for i, one in enumerate(samples):
        here = one.requests / last
        end = (here + samples[i + 1].requests / last) / 2 if i + 1 < len(samples) else 1.0
        told = "\n".join(f"{label} {size(pages * page_bytes)}" for label, pages in _named(one)[::-1])
        tip = f"after {count(one.requests)} requests\n{told}"
        bands.append(rect(begin, max(0.0, end - begin), tip=tip))
        begin = end
    return bands


def _pages(one: Held) -> tuple[int, ...]:
    return tuple(getattr(one, name) for name in USES)


def _named(one: Held) -> list[tuple[str, int]]:
    return list(zip(USES.values(), _pages(one), strict=True))


def _thinned(held: Sequence[Held], most: int) -> Sequence[Held]:
    """Return at most `most` samples, evenly spaced, with the first and the last."""
    return held if len(held) <= most else [held[i * (len(held) - 1) // (most - 1)] for i in range(most)]


# -- reuse of checkpoints ------------------------------------------------------


class Reuse:
    """Histograms of checkpoints by the number of requests that resumed there, on bins that double: 0, 1, 2-3, ..."""

    def __init__(self, results: Sequence[Result], lines: Lines) -> None:
        self._n = 1 + max(hits.bit_length() for result in results for hits in result.reuse)
        self._names = ["0", *(_bin_name(bits) for bits in range(1, self._n))]
        self._binned = [(lines.title(result.row), self._bins(result.reuse)) for result in results]

    def charts(self) -> list[tuple[str, Chart]]:
        return [(title, self._histogram(title, bins)) for title, bins in self._binned]

    def figures(self) -> list[list[str]]:
        """Return the head, and each row's numbers of checkpoints."""
        return [["Resumed so often", *self._names], *([title, *map(count, bins)] for title, bins in self._binned)]

    def _bins(self, counts: Mapping[int, int]) -> list[int]:
        bins = [0] * self._n
        for hits, number in counts.items():
            bins[hits.bit_length()] += number
        return bins

    def _histogram(self, title: str, bins: Sequence[int]) -> Chart:
        n, total, most = self._n, sum(bins), max(bins)
        named = list(zip(self._names, bins, strict=True))
        bars, texts = [], []
        for i, (name, number) in enumerate(named):
            share = percent(number / total)
            tip = f"{count(number)} of {count(total)} checkpoints ({share})\nwere resumed at {name} times"
            bars.append(rect((i + 0.12) / n, 0.76 / n, number / most, "again" if i else "never", tip))
            if number:
                middle, top = place((i + 0.5) / n), place(1 - number / most)
                texts.append(Shape("text", {"x": middle, "y": top, "dy": -4}, short(number)))
        x = Axis(lambda bin: (bin + 0.5) / n, tuple(((i + 0.5) / n, name) for i, name in enumerate(self._names)))
        label = f"{title}: " + ", ".join(f"{name} times: {count(number)}" for name, number in named)
        scale = Axis(lambda number: number / most, ())
        return Chart(label, x, scale, [Group(bars), Group(texts, "scale")], kind="small histogram")


def _bin_name(bits: int) -> str:
    low, high = 1 << (bits - 1), (1 << bits) - 1
    return str(low) if low == high else f"{short(low)}–{short(high)}"


# -- reasons ------------------------------------------------------------------

MEANING: dict[str, str] = {
    Reason.FULL: "all but the last page was cached: no miss",
    Reason.DIVERGED: "the prompt leaves the cached tree there",
    Reason.COLD: "nothing in its namespace begins like it",
    Reason.OTHER_NAMESPACE: "its namespace holds nothing, others do",
    Reason.NO_CHECKPOINT: "KV is cached deeper, but no state was kept there",
    Reason.EVICTED: "a deeper match was evicted",
    Reason.NO_MEMORY: "a match did not fit in memory with the request",
    Reason.TOO_SHORT: "the prompt has no full page before its last token",
    Reason.CACHE_OFF: "the cache is off",
    TOO_LARGE: "no memory could have held the request: it was refused",
    WORKERS_LOST: "several workers failed, one after the other, that the request was sent to: it got an error",
}


class Reasons:
    """Requests and prompt tokens that were not hit, by the reason why each request did not resume deeper."""

    def __init__(self, results: Sequence[Result], lines: Lines) -> None:
        self.rows = [(lines.title(one.row), Counter(one.row.misses_by_reason), _missed_tokens(one)) for one in results]
        found = {name for _, prompts, _ in self.rows for name in prompts}
        self.names = {
            name: MEANING.get(name, "") for name in (*MEANING, *sorted(found - set(MEANING))) if name in found
        }

    def figures(self) -> list[list[str]]:
        """Return the head, and each row's prompts and tokens by reason."""
        head = ["Prompts / tokens not hit", *(name.replace("_", " ") for name in self.names)]
        both = [
            [title, *(f"{count(prompts[name])} / {count(missed[name])}" for name in self.names)]
            for title, prompts, missed in self.rows
        ]
        return [head, *both]


def _missed_tokens(result: Result) -> Counter[str]:
    missed: Counter[str] = Counter()
    for one in result.outcomes:
        missed[one.reason] += one.prompt_tokens - one.hit_tokens
    return missed
