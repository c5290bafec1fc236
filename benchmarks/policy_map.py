"""Map of the best eviction policy over kinds of agents' traffic and sizes of memory: a figure and a table.

    python -m benchmarks.policy_map [--data FOLDER] [--jobs N] [--small] [--out FILE] [--image FILE]

Varies one thing of the traffic at a time (think times, collapsed histories, sessions that end) at four sizes of memory,
and replays it one request at a time under each policy. Goes on where it was cut short. Writes results/policy_map.json,
the figure in docs/images and the section of docs/policies.md.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.measure import package_digest
from benchmarks.policies import write_page
from headwater.cli.common import prepare_outputs
from headwater.journal import Journal
from headwater.lab.replay import run_grid
from headwater.lab.setup import Setup
from headwater.lab.size import Sizing
from headwater.models.profiles import load_profile
from headwater.traces.loads import make_arrivals
from headwater.traces.read import make_trace
from headwater.traces.request import Trace
from papers.results import commit_of, refuse_dirty_tree, write_results

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "policy_map.json"
IMAGE = HERE.parent / "docs" / "images" / "policy-map.png"
MODEL, PLACEMENT, PAGE = "marconi-7b", "branch", 1
SESSIONS, TURNS, THINK = 60, 12, 10  # seconds between two requests of a session
SIZES = (0.1, 0.2, 0.4, 0.7)  # of the memory that reaches the ideal, as in cells.toml
LRU, OURS = "lru", "headwater"
PUBLISHED = {LRU: "#9a9a9a", "gdsf": "#8fc1a9", "seglen": "#e8b36b", "flop_aware(1.0)": "#8fb3dd"}  # and their colours
VARIATIONS, SEEDS, MIDDLE = (0.3, 0.6, 0.7, 0.8, 0.9, 1.0), (0, 1, 2), 0.4  # of the finer scan, and its size
EVEN, AT_ONCE = 0.3, 5.0  # coefficient of variation of think times; sessions a second, of which all overlap


@dataclass(frozen=True, slots=True)
class Traffic:
    """One row of the figure: what is varied, as it is shown, and the traffic."""

    value: str
    cv: float = EVEN
    collapsed: float = 0.0  # share of the sessions whose histories collapse
    rate: float = AT_ONCE  # sessions a second

    @property
    def trace(self) -> str:
        return f"collapsed('mini_swe_agent', last=5, turns={TURNS}, share={self.collapsed})"

    @property
    def arrival(self) -> str:
        return f"open(sessions={self.rate}, think={THINK}, cv={self.cv})"


AXES = {
    "variation of think times": [Traffic(f"{cv:g}", cv=cv) for cv in (0.0, 0.3, 0.6, 1.0)],
    "sessions whose histories collapse": [Traffic(f"{share:.0%}", collapsed=share) for share in (0.0, 0.33, 0.67, 1.0)],
    f"sessions alive at once, of {SESSIONS}": [
        Traffic(f"{min(SESSIONS, round(rate * THINK * TURNS))}", rate=rate) for rate in (AT_ONCE, 0.25, 0.12, 0.06)
    ],
}


@cache
def sessions_of(spelling: str, data: Path, sessions: int) -> Trace:
    """Read the first sessions of a trace, once."""
    return make_trace(spelling, data, limit=sessions)


def measured(
    traffic: Traffic, sizes: Sequence[float], *, data: Path, sessions: int, jobs: int, seed: int = 0
) -> dict[str, Any]:
    """Return the hit rates in percent of one row of the figure, by size and policy."""
    trace = sessions_of(traffic.trace, data, sessions)
    base = Setup(load_profile(MODEL), 0, PLACEMENT, LRU, page_size=PAGE)
    arrivals = partial(make_arrivals, spelling=traffic.arrival, seed=seed, data=data)
    least, ideal = Sizing(trace, base, arrivals(trace)).range()
    memories = [max(least, round(size * ideal)) for size in sizes]
    pairs = list(product(dict.fromkeys(memories), (*PUBLISHED, OURS)))
    setups = [Setup(load_profile(MODEL), memory, PLACEMENT, policy, page_size=PAGE) for memory, policy in pairs]
    rows = {pairs[number]: result.row for number, result in run_grid(trace, setups, arrivals, jobs=jobs)}
    return {
        **asdict(traffic),
        "trace": traffic.trace,
        "arrival": traffic.arrival,
        "requests": len(trace.requests),
        "memories": memories,
        "ideal": 100 * rows[pairs[0]].ideal_hit_rate,
        "rates": {
            name: [100 * rows[memory, name].token_hit_rate for memory in memories] for name in (*PUBLISHED, OURS)
        },
        "seconds": sum(row.seconds for row in rows.values()),
    }


def scanned(journal: Journal, measure: Callable[..., dict[str, Any]], first: int | None = None) -> list[dict[str, Any]]:
    """Return rows along the variation of think times at one size, for each seed; only the `first` ones of both."""
    rows = []
    for seed, cv in product(SEEDS[:first], VARIATIONS[:first]):
        row = journal.part(f"scan {seed} {cv}", partial(measure, Traffic(f"{cv:g}", cv=cv), (MIDDLE,), seed=seed))
        rows.append({**row, "seed": seed})
    return rows


def best(row: dict[str, Any], at: int) -> tuple[str, float, float]:
    """Return the best published policy at a size, its gain over LRU and that of the default policy, in points."""
    rates = {name: row["rates"][name][at] for name in PUBLISHED}
    name = max(rates, key=lambda one: rates[one])
    return name, rates[name] - rates[LRU], row["rates"][OURS][at] - rates[LRU]


def boundary(values: Sequence[float], gains: Sequence[float], form: str = ".0%") -> str:
    """Return the value at which a policy's gain over LRU falls to 0 for the last time, interpolated."""
    if gains[-1] > 0:
        return f"> {values[-1]:{form}}"
    falls = [at for at in range(len(gains) - 1) if gains[at] > 0 >= gains[at + 1]]
    if not falls:
        return f"< {values[0]:{form}}"
    at = falls[-1]
    value = values[at] + (values[at + 1] - values[at]) * gains[at] / (gains[at] - gains[at + 1])
    return f"{value:{form}}"


def scan(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table of boundaries along the variation of think times, by seed."""
    names = ("gdsf", "seglen", "flop_aware(1.0)", OURS)
    yield f"| seed | {' | '.join(names)} |"
    yield "| --- |" + " ---: |" * len(names)
    for seed in dict.fromkeys(row["seed"] for row in document["scan"]):
        rows = [row for row in document["scan"] if row["seed"] == seed]
        values = [row["cv"] for row in rows]
        gains = {name: [row["rates"][name][0] - row["rates"][LRU][0] for row in rows] for name in names}
        yield f"| {seed} | {' | '.join(boundary(values, of, '.2f') for of in gains.values())} |"


def table(rows: Sequence[dict[str, Any]], sizes: Sequence[float]) -> Iterator[str]:
    """Yield the lines of the table that says what the figure shows."""
    yield f"| | {' | '.join(f'{size:.0%}' for size in sizes)} | seglen | flop_aware |"
    yield "| --- |" + " --- |" * len(sizes) + " ---: | ---: |"
    for row in rows:
        cells = []
        for at in range(len(sizes)):
            name, gain, ours = best(row, at)
            cells.append(f"{name.partition('(')[0]} {gain:+.1f}, {ours:+.1f}")
        lru = row["rates"][LRU]
        for name in ("seglen", "flop_aware(1.0)"):
            gains = [rate - base for rate, base in zip(row["rates"][name], lru, strict=True)]
            cells.append(boundary(sizes, gains))
        yield f"| {row['axis']}: {row['value']} | {' | '.join(cells)} |"


def page(document: dict[str, Any]) -> list[str]:
    """Return the section of docs/policies.md."""
    seconds = round(sum(row["seconds"] for row in (*document["rows"], *document["scan"])))
    lines = "\n".join(table(document["rows"], document["sizes"]))
    cells = {
        (row["trace"], row["arrival"], memory): best(row, at)
        for row in document["rows"]
        for at, memory in enumerate(row["memories"])
    }.values()
    lost = [gain - ours for _, gain, ours in cells]
    counts: dict[str, Any] = {"cells": len(cells), "won": sum(one < 0 for one in lost), "lost": max(lost)}
    text = (HERE / "policy_map.md").read_text(encoding="utf-8")
    counts["scan"] = "\n".join(scan(document))
    return [text.format(table=lines, seconds=seconds, commit=commit_of(document["run"]), **counts)]


def draw(document: dict[str, Any], image: Path) -> None:
    """Draw one panel for each axis of the traffic: colours are the best published policies."""
    rows, sizes = document["rows"], document["sizes"]
    axes_of = list(dict.fromkeys(row["axis"] for row in rows))
    canvas = importlib.import_module("matplotlib.figure").Figure(figsize=(11, 4.6), layout="constrained")
    patch = importlib.import_module("matplotlib.patches").Patch
    panels = canvas.subplots(1, len(axes_of), squeeze=False)[0]
    for axes, name in zip(panels, axes_of, strict=True):
        of = [row for row in rows if row["axis"] == name]
        for (y, row), x in product(enumerate(of), range(len(sizes))):
            policy, gain, ours = best(row, x)
            axes.add_patch(_square(x, y, PUBLISHED[policy]))
            axes.text(x, y, f"{gain:+.1f}\n({ours:+.1f})", ha="center", va="center", fontsize=8)
        axes.set_xlim(-0.5, len(sizes) - 0.5)
        axes.set_ylim(-0.5, len(of) - 0.5)
        axes.set_xticks(range(len(sizes)), [f"{size:.0%}" for size in sizes])
        axes.set_yticks(range(len(of)), [row["value"] for row in of])
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("memory, of what reaches the ideal")
    handles = [patch(color=color, label=name) for name, color in PUBLISHED.items()]
    title = "best published policy; points over lru, and in brackets those of headwater"
    canvas.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, title=title)
    canvas.savefig(image, dpi=110)


def _square(x: float, y: float, color: str) -> Any:
    rectangle = importlib.import_module("matplotlib.patches").Rectangle
    return rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE.parents[1] / "shared" / "data", help="recorded traffic")
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0: one a core")
    parser.add_argument("--small", action="store_true", help="sizes that only show that it runs; writes no page")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--image", type=Path, default=IMAGE)
    given = parser.parse_args()
    prepare_outputs(given.out, given.image)
    refuse_dirty_tree(given.out, small=given.small)
    sizes, sessions = (SIZES[:2], 4) if given.small else (SIZES, SESSIONS)
    measure = partial(measured, data=given.data, sessions=sessions, jobs=given.jobs)
    journal = Journal(given.out, [package_digest(), given.small])
    document: dict[str, Any] = {"sizes": sizes, "rows": [], "scan": []}
    for axis, rows in AXES.items():
        for traffic in rows[:1] if given.small else rows:
            row = journal.part(f"{axis}: {traffic.value}", partial(measure, traffic, sizes))
            document["rows"].append(row := {**row, "axis": axis})
            print("\n".join(list(table([row], sizes))[2:]), flush=True)
    document["scan"] = scanned(journal, measure, 1 if given.small else None)
    print("\n".join(scan(document)))
    draw(document, given.image)
    write_results(given.out, document, seed=0, small=given.small)
    journal.end()
    if given.out == OUT and not given.small:
        write_page()


if __name__ == "__main__":
    main()
