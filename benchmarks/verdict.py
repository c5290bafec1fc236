"""Verdict on a cell: our default policy against the best rival in hindsight; and the summary of many cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

SHORT = 2_000  # requests; a cell of fewer has the wider tolerance
TOLERANCE, WIDER = 0.005, 0.01  # of the token hit rate
ROOM = 0.005  # between the best rival and the clairvoyant, and between LRU and the clairvoyant
LRU = "structural / lru"  # the base of the gap to the clairvoyant


@dataclass(frozen=True, slots=True)
class Verdict:
    """Token hit rates of one cell, as shares. Names are "placement / eviction"."""

    name: str
    requests: int
    ours: float
    rival: str  # the best one in hindsight
    best: float
    lru: float
    clairvoyant: float
    expected: int | None  # position at which a request should resume; None: no such question
    resumed_at: int | None

    @property
    def difference(self) -> float:
        return self.ours - self.best

    @property
    def closed(self) -> float | None:
        """Share of the gap between LRU and the clairvoyant that ours closes; None if there is none."""
        gap = self.clairvoyant - self.lru
        return (self.ours - self.lru) / gap if gap >= ROOM else None

    @property
    def rival_is_clairvoyant(self) -> bool:
        """True if the best rival is as good as the greedy clairvoyant, or better."""
        return self.clairvoyant - self.best < ROOM

    @property
    def missed(self) -> bool:
        """True if a request did not resume where it should."""
        return self.expected is not None and (self.resumed_at or 0) < self.expected

    @property
    def falls_short(self) -> bool:
        tolerance = TOLERANCE if self.requests >= SHORT else WIDER
        return self.missed or self.difference < -tolerance


def verdict(cell: Mapping[str, Any], ours: str, others: Sequence[str]) -> Verdict:
    """Judge a cell of `results/cells.json`. `others`: the names that are no rivals, bounds among them."""
    rates = cell["rates"]
    rivals = {name: rate for name, rate in rates.items() if name not in others and name != ours}
    rival = max(rivals, key=lambda name: rivals[name])
    resumed = cell["resumed_at"]
    return Verdict(
        name=cell["cell"],
        requests=cell["requests"],
        ours=rates[ours],
        rival=rival,
        best=rivals[rival],
        lru=rates[LRU],
        clairvoyant=max(rate for name, rate in rates.items() if name.endswith(" / clairvoyant")),
        expected=cell["expected"],
        resumed_at=None if resumed is None else resumed[ours],
    )


def summary(verdicts: Sequence[Verdict], cells: Sequence[Mapping[str, Any]], rivals: Sequence[str]) -> list[str]:
    """Return the sentences on all cells: mean, worst, the best single rival, and the number that fall short."""
    means = {name: mean(cell["rates"][name] for cell in cells) for name in rivals}
    single = max(means, key=lambda name: means[name])
    worst = min(verdicts, key=lambda one: one.difference)
    gaps = [one for one in verdicts if one.closed is not None]
    different = {(cell["cell"].rpartition("; ")[0], cell["memory"]) for cell in cells}
    short = sum(one.falls_short for one in verdicts)
    ours = mean(one.ours for one in verdicts)
    return [
        f"{len(verdicts)} cells, {len(different)} of which differ in traffic, model or bytes; {short} fall short.",
        f"Against the best rival of each cell: {_points(mean(one.difference for one in verdicts))} on average, "
        f"{_points(worst.difference)} in the worst ({worst.name}).",
        f"Against the best single rival, {single}: {_points(ours - means[single])} on average "
        f"({100 * ours:.2f} and {100 * means[single]:.2f}).",
        _closed(gaps) if gaps else "No cell has a gap between LRU and the clairvoyant.",
        f"In {sum(one.rival_is_clairvoyant for one in verdicts)} cells the best rival is within 0.5 points of the "
        "clairvoyant, or above it.",
    ]


def _closed(gaps: Sequence[Verdict]) -> str:
    shares = [one.closed for one in gaps if one.closed is not None]
    gained, whole = sum(one.ours - one.lru for one in gaps), sum(one.clairvoyant - one.lru for one in gaps)
    beyond = sum(one.ours > one.clairvoyant for one in gaps)
    return (
        f"Of the gap between LRU and the clairvoyant {median(shares):.0%} is closed in the median of {len(gaps)} "
        f"cells, {mean(shares):.0%} on average, and {gained / whole:.0%} of all gaps together; in {beyond} of them "
        "ours is above the clairvoyant."
    )


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the lines of a Markdown table, a cell a line."""
    lines = [
        "| cell | requests | best rival | its hits | ours | difference | LRU | clairvoyant | gap closed | |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for one in verdicts:
        closed = "" if one.closed is None else f"{one.closed:.0%}"
        rates = [f"{100 * rate:.1f}" for rate in (one.best, one.ours)]
        bounds = [f"{100 * rate:.1f}" for rate in (one.lru, one.clairvoyant)]
        columns = [one.name, f"{one.requests:,}", one.rival, *rates, f"{100 * one.difference:+.2f}", *bounds, closed]
        lines.append("| " + " | ".join([*columns, _remark(one)]) + " |")
    return lines


def _remark(one: Verdict) -> str:
    remarks = ["short"] if one.falls_short else []
    if one.expected is not None:
        remarks.append(f"resumed at {one.resumed_at or 0:,} of {one.expected:,}")
    return ", ".join([*remarks, *(["as the clairvoyant"] if one.rival_is_clairvoyant else [])])


def _points(share: float) -> str:
    return f"{100 * share:+.2f} points"
