"""Contents of the memory over a run, and the reuse of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from headwater.chart import Axis, Chart, Group, Shape, area, linear, place, rect, round_steps
from headwater.lab.report.blocks import Empty, Figures, Legend, Lines, Panels, Section
from headwater.lab.report.numbers import count, percent, short, size
from headwater.lab.row import Result
from headwater.lab.tally import Held

SAMPLES = 120  # most samples that are drawn
BANDS = 40  # most samples that have a tooltip
USES = {
    "kv": "KV",
    "checkpoints": "Checkpoints",
    "stranded": "Stranded KV",
    "segments": "Segments",
    "private": "Private and running",
    "free": "Free",
}
LEGEND = Legend([("i", f"key {name}", "", label) for name, label in USES.items()])


def over_time(results: Sequence[Result], lines: Lines) -> Section:
    """Return a small area chart for each row that held something."""
    title, about = "What the memory held", "over the requests of the run, by use"
    used = [result for result in results if any(sum(_pages(one)[:-1]) for one in result.held)]
    if not used:
        return Section("held", title, about, [Empty("No row held anything.")])
    drawn = [(lines.title(result.row), _areas(result, lines.title(result.row))) for result in used]
    return Section("held", title, about, [LEGEND, Panels(drawn, "small")])


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


def _thinned(held: Sequence[Held], most: int) -> list[Held]:
    """Return at most `most` samples, evenly spaced, with the first and the last."""
    if len(held) <= most:
        return list(held)
    return [held[i * (len(held) - 1) // (most - 1)] for i in range(most)]


# -- reuse of checkpoints ------------------------------------------------------


def reuse(results: Sequence[Result], lines: Lines) -> Section:
    """Return a histogram for each row, on bins that double: 0, 1, 2-3, 4-7, ..."""
    title = "Checkpoint reuse"
    about = "checkpoints, kept and evicted, by the number of requests that resumed there"
    used = [result for result in results if sum(result.reuse.values())]
    if not used:
        return Section("reuse", title, about, [Empty("No checkpoint was taken.")])
    n_bins = 1 + max(hits.bit_length() for result in used for hits in result.reuse)
    names = ["0", *(_bin_name(bits) for bits in range(1, n_bins))]
    titled = [(lines.title(result.row), _bins(result.reuse, n_bins)) for result in used]
    drawn = [(name, _histogram(name, bins, names)) for name, bins in titled]
    figures = Figures(["Resumed so often", *names], [[name, *map(count, bins)] for name, bins in titled])
    return Section("reuse", title, about, [Panels(drawn, "small"), figures])


def _bins(counts: Mapping[int, int], n_bins: int) -> list[int]:
    bins = [0] * n_bins
    for hits, number in counts.items():
        bins[hits.bit_length()] += number
    return bins


def _bin_name(bits: int) -> str:
    low, high = 1 << (bits - 1), (1 << bits) - 1
    return str(low) if low == high else f"{short(low)}–{short(high)}"


def _histogram(title: str, bins: Sequence[int], names: Sequence[str]) -> Chart:
    n, total, most = len(bins), sum(bins), max(bins)
    bars, texts = [], []
    for i, (number, name) in enumerate(zip(bins, names, strict=True)):
        tip = f"{count(number)} of {count(total)} checkpoints ({percent(number / total)})\nwere resumed at {name} times"
        bars.append(rect((i + 0.12) / n, 0.76 / n, number / most, "never" if i == 0 else "again", tip))
        if number:
            middle, top = place((i + 0.5) / n), place(1 - number / most)
            texts.append(Shape("text", {"x": middle, "y": top, "dy": -4}, short(number)))
    x = Axis(lambda bin: (bin + 0.5) / n, tuple(((i + 0.5) / n, name) for i, name in enumerate(names)))
    told = ", ".join(f"{name} times: {count(number)}" for name, number in zip(names, bins, strict=True))
    scale = Axis(lambda number: number / most, ())
    return Chart(f"{title}: {told}", x, scale, [Group(bars), Group(texts, "scale")], kind="small histogram")
