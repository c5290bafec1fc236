"""How often requests resumed at a checkpoint: how many were taken for nothing, and how many served again and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headwater.lab.report.chart import place
from headwater.lab.report.line import Lines
from headwater.lab.report.markup import Markup, tag
from headwater.lab.report.numbers import count, percent, short
from headwater.lab.report.section import empty, figures, panel, panels, section
from headwater.lab.row import Result

ABOUT = "checkpoints, kept and evicted, by the number of requests that resumed there"


def reuse(results: Sequence[Result], lines: Lines) -> Markup:
    """A histogram for each row, on bins that double: 0, 1, 2-3, 4-7, ..."""
    title = "Checkpoint reuse"
    used = [result for result in results if sum(result.reuse.values())]
    if not used:
        return section("reuse", title, ABOUT, empty("No checkpoint was taken."))
    n_bins = 1 + max(hits.bit_length() for result in used for hits in result.reuse)
    names = ["0", *(_name(bits) for bits in range(1, n_bins))]
    binned = [_bins(result.reuse, n_bins) for result in used]
    drawn = [
        panel(lines.title(result.row), _figure(lines.title(result.row), bins, names))
        for result, bins in zip(used, binned, strict=True)
    ]
    rows = [[lines.title(result.row), *map(count, bins)] for result, bins in zip(used, binned, strict=True)]
    return section("reuse", title, ABOUT, panels(drawn, "small"), figures(["Resumed so often", *names], rows))


def _bins(counts: Mapping[int, int], n_bins: int) -> list[int]:
    bins = [0] * n_bins
    for hits, number in counts.items():
        bins[hits.bit_length()] += number
    return bins


def _name(bits: int) -> str:
    low, high = 1 << (bits - 1), (1 << bits) - 1
    return str(low) if low == high else f"{short(low)}–{short(high)}"


def _figure(title: str, bins: Sequence[int], names: Sequence[str]) -> Markup:
    n, total, most = len(bins), sum(bins), max(bins)
    bars, texts = [], []
    for i, (number, name) in enumerate(zip(bins, names, strict=True)):
        height, middle = number / most, place((i + 0.5) / n)
        tip = f"{count(number)} of {count(total)} checkpoints ({percent(number / total)})\nwere resumed at {name} times"
        bars.append(
            tag(
                "rect",
                x=place((i + 0.12) / n),
                width=place(0.76 / n),
                y=place(1 - height),
                height=place(height),
                class_="never" if i == 0 else "again",
                data_tip=tip,
            )
        )
        if number:
            texts.append(tag("text", short(number), x=middle, y=place(1 - height), dy=-4))
        texts.append(tag("text", name, x=middle, y="100%", dy=15))
    told = ", ".join(f"{name} times: {count(number)}" for name, number in zip(names, bins, strict=True))
    return tag(
        "svg",
        bars,
        tag("g", texts, class_="scale"),
        class_="plot small histogram",
        role="img",
        aria_label=f"{title}: {told}",
    )
