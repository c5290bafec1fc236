"""What the memory held over a run, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from headwater.lab.report.chart import Axis, area, frame, linear, paths, place, round_steps
from headwater.lab.report.line import Lines
from headwater.lab.report.markup import Markup, tag
from headwater.lab.report.numbers import count, percent, short, size
from headwater.lab.report.section import empty, panel, panels, section
from headwater.lab.row import Result
from headwater.lab.tally import Held

SAMPLES = 120  # that are drawn
BANDS = 40  # that something is told of
USES = (
    ("kv", "KV"),
    ("checkpoints", "Checkpoints"),
    ("stranded", "Stranded KV"),
    ("segments", "Segments"),
    ("private", "Private and running"),
    ("free", "Free"),
)
ABOUT = "over the requests of the run, by use"


def over_time(results: Sequence[Result], lines: Lines) -> Markup:
    """Small areas, one for each row that held something."""
    title = "What the memory held"
    drawn = [
        panel(lines.title(result.row), _figure(result, lines.title(result.row)))
        for result in results
        if any(map(_used, result.held))
    ]
    if not drawn:
        return section("held", title, ABOUT, empty("No row held anything."))
    keys = (tag("li", tag("i", class_=f"key {name}"), label) for name, label in USES)
    return section("held", title, ABOUT, tag("ul", keys, class_="legend"), _hatch(), panels(drawn, "small"))


def _figure(result: Result, title: str) -> Markup:
    samples = _thinned(result.held, SAMPLES)
    last = max(1, samples[-1].requests)
    ends = [max(1, sum(_pages(one))) for one in samples]
    x = Axis(lambda requests: requests / last, tuple((tick / last, short(tick)) for tick in round_steps(last, 4)))
    y = linear(max(ends) * result.page_bytes, size, steps=2)
    levels = [(0.0, *accumulate(pages / max(ends) for pages in _pages(one))) for one in samples]
    if len(samples) == 1:
        samples, levels = [samples[0]] * 2, levels * 2
        places = [0.0, 1.0]
    else:
        places = [x.at(one.requests) for one in samples]
    areas = [
        area(
            [(at, level[i + 1]) for at, level in zip(places, levels, strict=True)],
            [(at, level[i]) for at, level in zip(places, levels, strict=True)],
            name,
        )
        for i, (name, _) in enumerate(USES[:-1])
        if any(getattr(one, name) for one in samples)
    ]
    now = ", ".join(f"{label} {percent(pages / ends[-1])}" for (_, label), pages in _named(samples[-1]))
    bands = _bands(_thinned(result.held, BANDS), last, result.page_bytes)
    return frame(f"{title}: memory by use over the run; at its end {now}", x, y, paths(*areas), bands, kind="small")


def _bands(samples: Sequence[Held], last: int, page_bytes: int) -> Markup:
    """Upright bands over the figure, which tell what was held there."""
    bands, begin = [], 0.0
    for i, one in enumerate(samples):
        here = one.requests / last
        end = (here + samples[i + 1].requests / last) / 2 if i + 1 < len(samples) else 1.0
        told = "\n".join(f"{label} {size(pages * page_bytes)}" for (_, label), pages in _named(one)[::-1])
        tip = f"after {count(one.requests)} requests\n{told}"
        bands.append(tag("rect", x=place(begin), width=place(max(0.0, end - begin)), height="100%", data_tip=tip))
        begin = end
    return tag("g", bands, class_="bands")


def _hatch() -> Markup:
    """Stripes, so that stranded KV is told by more than its colour. They stretch with the path that they fill."""
    ground, stripe = (
        tag("rect", width=18, height=48),
        tag("path", d="M0 48L18 0M-3 8L3-8M15 56L21 40", class_="stripes"),
    )
    pattern = tag("pattern", ground, stripe, id="hatch", width=18, height=48, patternUnits="userSpaceOnUse")
    return tag("svg", tag("defs", pattern), width=0, height=0, class_="defs", aria_hidden="true")


def _pages(one: Held) -> tuple[int, ...]:
    return tuple(getattr(one, name) for name, _ in USES)


def _used(one: Held) -> int:
    return sum(_pages(one)[:-1])


def _named(one: Held) -> list[tuple[tuple[str, str], int]]:
    return list(zip(USES, _pages(one), strict=True))


def _thinned(held: Sequence[Held], most: int) -> list[Held]:
    """At most so many, evenly, with the first and the last."""
    if len(held) <= most:
        return list(held)
    return [held[i * (len(held) - 1) // (most - 1)] for i in range(most)]
