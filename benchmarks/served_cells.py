"""Times to the first token of our default policy and of rivals, cell by cell, under a clock: `make served-cells`.

    python -m benchmarks.served_cells [--only TEXT] [--jobs N] [--data FOLDER] [--small] [--out FILE]

Replays the recorded and scripted cells of results/cells.json with the server's scheduler on a simulated H20, under the
default policy, four published ones and the three rivals that hit the most in that cell. Arrivals are those of the cell;
if the load is above a quarter, all times are stretched until it is a quarter. Goes on where a run was cut short, if
neither the package nor the cells have changed. Writes results/served_cells.json and docs/policies.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from statistics import geometric_mean

from benchmarks.cells import Cell, Cells, Pair, read_cells
from benchmarks.grid import OUT as CELLS
from benchmarks.grid import Finished, Runner, code_digest, name_of
from benchmarks.measure import console
from benchmarks.policies import write_page
from headwater.cli.common import prepare_outputs
from headwater.journal import Journal
from headwater.lab.cost import Load, StepCost, load_device
from headwater.lab.replay import replay
from headwater.lab.row import Result
from headwater.lab.serving import Engine
from headwater.lab.tally import Outcome
from headwater.table import Table
from headwater.traces.arrivals import Arrivals
from headwater.traces.request import Request, Trace
from papers.results import commit_of, refuse_dirty_tree, write_results

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "served_cells.json"
DEVICE = "h20"
LOAD = 0.25  # by the hits of LOADED_BY one by one; with much more, a memory of two requests is short of running ones
LOADED_BY: Pair = ("structural", "lru")
PUBLISHED: tuple[Pair, ...] = tuple(("branch", name) for name in ("lru", "gdsf", "marconi", "seglen"))
BEST = 3  # rivals with the most hits of a cell, beside the published ones
MOST = 1.02  # times the best rival's
STATISTICS = "mean", "p95"
SMALL = 5  # sessions of the smallest run


class Stretched:
    """Arrivals of which all times, also those between an answer and the next request, are `factor` times as long."""

    def __init__(self, arrivals: Arrivals, factor: float) -> None:
        self._arrivals, self._factor = arrivals, factor

    def __len__(self) -> int:
        return len(self._arrivals)

    def due(self) -> float | None:
        due = self._arrivals.due()
        return None if due is None else due * self._factor

    def take(self) -> Request:
        return self._arrivals.take()

    def answered(self, request: Request, now: float) -> None:
        self._arrivals.answered(request, now / self._factor)


def stretch(outcomes: Sequence[Outcome], cost: StepCost) -> float:
    """Return the factor of all times at which the load is LOAD; 1 if it is no more without.

    The load is the share of the time that these requests, in order of arrival, would keep the device busy if it served
    one after another. It is that of the time until half of their work has come: later, the last sessions run alone.
    """
    work = [seconds(one, cost) for one in outcomes]
    half = sum(work) / 2
    came = next(one.at for one, done in zip(outcomes, accumulate(work), strict=True) if done >= half)
    return max(1.0, half / (LOAD * came))


def seconds(one: Outcome, cost: StepCost) -> float:
    """Return the time of a request alone on the device: its prompt from where it resumed, and its answer."""
    end, start = one.prompt_tokens, one.resumed_at
    prompt = Load(end - start, end**2 - start**2, prefix_tokens=start, legs=1, states=2, logits=1)
    row = Load(rows=1, kv_tokens=end, states=1, logits=1)
    return cost.seconds(prompt) + cost.seconds(row, max(0, one.output_tokens - 1))


def pairs_of(rates: Mapping[str, float], ours: Pair, rivals: Sequence[Pair]) -> list[Pair]:
    """Return our policy, the published ones and the rivals that hit the most of a cell, each once."""
    best = sorted(rivals, key=lambda pair: -rates[name_of(pair)])[:BEST]
    return list(dict.fromkeys([ours, *PUBLISHED, *best]))


class ServedRunner(Runner):
    """Runs cells under a clock, likewise. compared: cells of results/cells.json, by name."""

    def __init__(self, known: Cells, compared: Mapping[str, Finished], data: Path, jobs: int, journal: Journal) -> None:
        super().__init__(known.rivals, data, jobs, journal)
        self._ours, self._rivals, self._compared = known.ours[0], known.rivals, compared

    def finished(self, cell: Cell, trace: Trace) -> Finished:
        """Return the times of a cell under our policy and some of the rivals."""
        compared = self._compared[cell.name]
        memory, pairs = compared["memory"], pairs_of(compared["rates"], self._ours, self._rivals)
        setups, arrivals = [cell.setup(pair, memory) for pair in pairs], self.arrivals(cell)
        cost = StepCost(setups[0].profile, load_device(DEVICE))
        alone = replay(trace, cell.setup(LOADED_BY, memory), arrivals(trace))
        factor = stretch(alone.outcomes, cost)
        results = self.results(trace, setups, lambda trace: Stretched(arrivals(trace), factor), Engine(cost))
        return {
            "cell": cell.name,
            "memory": memory,
            "requests": alone.row.requests,
            "stretch": factor,
            "policies": {name_of(pair): figures(result) for pair, result in zip(pairs, results, strict=True)},
            "seconds": round(sum(one.row.seconds for one in (alone, *results)), 1),
        }


def figures(result: Result) -> dict[str, float]:
    """Return the hit rate, mean and p95 of the times to the first token in milliseconds, and waiting requests."""
    row = result.row
    assert row.ttft_ms is not None, "a run under a clock has times"
    queue = row.queue_depth or 0.0
    return {"hits": row.token_hit_rate, "mean": row.ttft_ms.mean, "p95": row.ttft_ms.p95, "queue": queue}


# -- verdict


@dataclass(frozen=True, slots=True)
class Times:
    """One statistic of the times to the first token of a cell: ours and that of the rival that is best in it, in ms."""

    cell: str
    ours: float
    best: float
    rival: str

    @property
    def ratio(self) -> float:
        return self.ours / self.best

    @property
    def missed(self) -> bool:
        return self.ratio > MOST

    @classmethod
    def of(cls, cell: Finished, statistic: str) -> Times:
        ours, *rivals = cell["policies"]  # ours is the first
        of = {name: cell["policies"][name][statistic] for name in (ours, *rivals)}
        rival = min(rivals, key=lambda name: of[name])
        return cls(cell["cell"], of[ours], of[rival], rival)

    def __str__(self) -> str:
        return f"{self.ours:,.0f} ms, {self.ratio:.3f} x {self.rival}"


def shown(cell: Finished) -> str:
    """Return a cell's name and its times beside those of the best rivals."""
    lines = (f"  {statistic} {Times.of(cell, statistic)}" for statistic in STATISTICS)
    return "\n".join([cell["cell"], *lines])


def summary(cells: Sequence[Finished]) -> list[str]:
    """Return the sentences on all cells, and a line for each that misses."""
    lines, missed = [], dict[str, list[str]]()
    for statistic in STATISTICS:
        times = [Times.of(cell, statistic) for cell in cells]
        for one in times:
            if one.missed:
                missed.setdefault(one.cell, []).append(f"{statistic} {one}")
        worst, met = max(times, key=lambda one: one.ratio), sum(not one.missed for one in times)
        lines.append(
            f"TTFT {statistic}: at most {MOST} x the best rival's in {met} of {len(times)} cells; geometric mean of "
            f"the ratios {geometric_mean(one.ratio for one in times):.3f}, worst {worst.ratio:.3f} ({worst.cell})."
        )
    lines.append(f"{len(cells) - len(missed)} of {len(cells)} cells are within it in both; {len(missed)} are not.")
    return lines + [f"Missed: {name}: {'; '.join(of)}." for name, of in missed.items()]


def table(cells: Sequence[Finished]) -> Table:
    """Return the table for a terminal."""
    shown = Table(None, ("cell",), ("mean, ms", "of best", "p95, ms", "of best"), ("",))
    for cell in cells:
        mean, p95 = (Times.of(cell, statistic) for statistic in STATISTICS)
        mark = "MISS" if mean.missed or p95.missed else ""
        ratios = (f"{mean.ours:,.0f}", f"{mean.ratio:.3f}", f"{p95.ours:,.0f}", f"{p95.ratio:.3f}")
        shown.add_row(cell["cell"], *ratios, mark)
    return shown


def page(document: Finished) -> list[str]:
    """Return the part of docs/policies.md on times."""
    cells, published = document["cells"], ", ".join(f"`{name_of(pair)}`" for pair in PUBLISHED)
    lines = [
        "## Times to the first token of the default, cell by cell",
        "",
        "Generated by `make served-cells` from `benchmarks/results/served_cells.json`: the same traffic, models and "
        f"memory with the server's scheduler under a clock, on an {DEVICE.upper()} by its roofline. Arrivals are those "
        f"of the cell. If requests with the hits of `{name_of(LOADED_BY)}`, served one after another, would keep the "
        f"device busy for more than {LOAD:.0%} of the time until half of their work has come, all times between "
        f"requests are stretched by one factor until they do not. Rivals are {published}, and the {BEST} that hit the "
        "most in that cell of the table above. The best is chosen in hindsight, for mean and p95 each. A cell is "
        f"*missed* if one of the two is more than {MOST} x the best rival's. {len(cells)} of "
        f"{len(read_cells().recorded)} cells have been run. Commit {commit_of(document['run'])}; "
        f"{document['run']['seconds']:,} seconds of a processor.",
        "",
        *[f"- {line}" for line in summary(cells) if not line.startswith("Missed: ")],
        "",
        "| cell | stretched by | mean, ms | best rival | ratio | p95, ms | best rival | ratio | |",
        "| --- | ---: | ---: | --- | ---: | ---: | --- | ---: | --- |",
    ]
    for cell in cells:
        both = [Times.of(cell, statistic) for statistic in STATISTICS]
        columns = [part for one in both for part in (f"{one.ours:,.0f}", one.rival, f"{one.ratio:.3f}")]
        mark = "missed" if any(one.missed for one in both) else ""
        lines.append("| " + " | ".join([cell["cell"], f"{cell['stretch']:.3g}", *columns, mark]) + " |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE.parents[1] / "shared" / "data", help="recorded traffic")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose names contain this; keeps no results")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--small", action="store_true", help="sizes that only show that it runs; keeps no results")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    prepare_outputs(kept := None if given.small or given.only else given.out)
    refuse_dirty_tree(kept)
    known, text = read_cells(), CELLS.read_text(encoding="utf-8")
    compared = {cell["cell"]: cell for cell in json.loads(text)["cells"]}
    cells = [cell for cell in known.recorded if cell.name in compared and given.only in cell.name]
    if not cells:
        parser.error(f"--only {given.only!r} selects 0 of {len(known.recorded)} cells that {CELLS.name} has")
    if given.small:
        first = replace(cells[0], traffic=replace(cells[0].traffic, sessions=SMALL))
        cells, compared = [first], {first.name: compared[cells[0].name]}
    journal = Journal(kept, [code_digest(), sha256(text.encode()).hexdigest(), DEVICE, LOAD, BEST])
    found = []
    for cell in ServedRunner(known, compared, given.data, given.jobs, journal).run(cells):
        found.append(cell)
        print(shown(cell), flush=True)
    console().print(table(found))
    console().print("\n".join(summary(found)), markup=False)
    if kept is not None:
        run = {"code": code_digest(), "seconds": round(sum(cell["seconds"] for cell in found))}
        write_results(kept, {"run": run, "cells": found}, seed=0)
        journal.end()
        if kept == OUT:
            write_page()


if __name__ == "__main__":
    main()
