"""Our default policy against all rivals, cell by cell, and in drawn traffic: `make cells`.

    python -m benchmarks.grid [--seeds SEEDS] [--only TEXT] [--drawn] [--jobs N] [--data FOLDER] [--small] [--out FILE]

Runs the cells of cells.toml, then the drawn ones. Goes on where a run was cut short, if neither the package nor the
cells have changed. Prints each cell's hit rates and the summary, writes results/cells.json and docs/policies.md.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.cells import FILE, Cell, Cells, Pair, Traffic, read_cells
from benchmarks.measure import package_digest
from benchmarks.policies import write_page
from benchmarks.verdict import Verdict, summary, table, verdict
from headwater.cli.common import prepare_outputs
from headwater.journal import Journal
from headwater.lab.replay import NewArrivals, replay, run_grid
from headwater.lab.row import Result
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.lab.size import Sizing
from headwater.machine import usable_cores
from headwater.traces.loads import make_arrivals
from headwater.traces.read import make_trace
from headwater.traces.request import Trace
from papers.results import commit_of, origin, refuse_dirty_tree, write_results

HERE = Path(__file__).resolve().parent
OUT = HERE / "results" / "cells.json"
SIZED_BY = "branch", "lru"  # the policies of the memory that reaches the ideal: fixed, whatever the default is
SMALL = 60  # requests of a drawn trace in the smallest run
Finished = dict[str, Any]


class Runner:
    """Runs cells, a trace at a time; what is done is in the journal."""

    def __init__(self, pairs: Sequence[Pair], data: Path, jobs: int, journal: Journal) -> None:
        self._pairs, self._data, self._jobs, self._journal = pairs, data, jobs, journal

    def run(self, cells: Sequence[Cell]) -> Iterator[Finished]:
        """Yield each cell with its hit rates when all of them are known."""
        for traffic, group in groupby(cells, key=lambda cell: cell.traffic):
            todo = list(group)
            trace = None if all(cell.name in self._journal for cell in todo) else self._trace(traffic)
            for cell in todo:
                if trace is not None and cell.name not in self._journal:
                    self._journal.add(cell.name, self.finished(cell, trace))
                yield self._journal[cell.name]

    def _trace(self, traffic: Traffic) -> Trace:
        return make_trace(traffic.trace, self._data, limit=traffic.sessions)

    def finished(self, cell: Cell, trace: Trace) -> Finished:
        """Return the hit rates of a cell under every policy."""
        memory = cell.memory or self.memory(cell, trace)
        names = [name_of(pair) for pair in self._pairs]
        setups = [cell.setup(pair, memory) for pair in self._pairs]
        results = self.results(trace, setups, self.arrivals(cell))
        first = results[0].row
        resumed = None
        if cell.request is not None:
            resumed = {name: one.outcomes[cell.request].resumed_at for name, one in zip(names, results, strict=True)}
        return {
            "cell": cell.name,
            "memory": memory,
            "requests": first.requests,
            "prompt_tokens": first.prompt_tokens,
            "ideal": first.ideal_hit_rate,
            "expected": None if cell.request is None else cell.resumed_at,
            "resumed_at": resumed,
            "rates": {name: one.row.token_hit_rate for name, one in zip(names, results, strict=True)},
            "seconds": round(sum(one.row.seconds for one in results), 1),
        }

    def memory(self, cell: Cell, trace: Trace) -> int:
        """Return the bytes of a cell's share of the memory that reaches the ideal. The whole is found once a model."""
        whole = f"ideal memory of {cell.traffic}, {cell.model}"
        setup, arrivals = cell.setup(SIZED_BY, 0), self.arrivals(cell)
        least, ideal = self._journal.part(whole, lambda: Sizing(trace, setup, arrivals(trace)).range())
        return max(least, round(cell.size * ideal))

    def arrivals(self, cell: Cell) -> NewArrivals:
        """Return a function from the trace to its arrivals in a cell."""
        return partial(make_arrivals, spelling=cell.traffic.arrival, data=self._data)

    def results(
        self, trace: Trace, setups: Sequence[Setup], arrivals: NewArrivals, engine: Engine | None = None
    ) -> list[Result]:
        """Replay a trace under each setup, in as many processes as there are jobs."""
        if self._jobs == 1:
            return [replay(trace, setup, arrivals(trace), engine) for setup in setups]
        found = dict(run_grid(trace, setups, arrivals, engine, self._jobs))
        return [found[number] for number in range(len(setups))]


def name_of(pair: Pair) -> str:
    return " / ".join(pair)


def code_digest() -> str:
    """Return a digest of the package and the file of cells: rows of other code are not mixed with these."""
    return package_digest(FILE)


def shown(cell: Finished) -> str:
    """Return a cell's name and the hit rates of all policies, the best first."""
    rates = sorted(cell["rates"].items(), key=lambda one: -one[1])
    return f"{cell['cell']}\n  " + ", ".join(f"{name} {100 * rate:.1f}" for name, rate in rates)


def judged(cells: Sequence[Finished], known: Cells) -> list[Verdict]:
    ours, *others = (name_of(pair) for pair in (*known.ours, *known.bounds))
    return [verdict(cell, ours, others) for cell in cells]


def section(title: str, cells: Sequence[Finished], known: Cells) -> list[str]:
    """Return a part of the page: the summary and a table."""
    if not cells:
        return []
    verdicts, rivals = judged(cells, known), [name_of(pair) for pair in known.rivals]
    compared = [name for name in rivals if all(name in cell["rates"] for cell in cells)]
    lines = [f"- {line}" for line in summary(verdicts, cells, compared)]
    return [f"### {title}", "", *lines, "", *table(verdicts), ""]


def page(document: Finished, known: Cells) -> list[str]:
    """Return the part of docs/policies.md on the cells."""
    of = {cell["cell"]: cell for cell in document["cells"]}
    parts = {
        "Recorded and scripted traffic": known.recorded,
        "Drawn traffic, seeds of development": [known.drawn(seed) for seed in known.development],
        "Drawn traffic, final seeds": [known.drawn(seed) for seed in known.final],
    }
    commands = ", ".join(f"`{command}`" for command in document["commands"])
    text = (HERE / "cells.md").read_text(encoding="utf-8")
    text = text.format(commands=commands, commit=commit_of(document["run"]), seconds=document["run"]["seconds"])
    lines = [text]
    for title, cells in parts.items():
        lines += section(title, [of[cell.name] for cell in cells if cell.name in of], known)
    return lines


def chosen(given: argparse.Namespace, known: Cells) -> tuple[list[Cell], list[Cell]]:
    """Return the recorded and the drawn cells that the command line asks for."""
    seeds = given.seeds if given.seeds is not None else () if given.only else known.development
    drawn = [known.drawn(seed, SMALL if given.small else None) for seed in seeds]
    recorded = [] if given.drawn else [cell for cell in known.recorded if given.only in cell.name]
    if given.small:
        recorded = [replace(cell, traffic=replace(cell.traffic, sessions=5)) for cell in recorded[:1]]
    return recorded, drawn


def seeds_of(text: str) -> range:
    """Read FIRST-LAST, one seed, or a name that the file of cells gives seeds; an empty text is none."""
    if text in ("development", "final"):
        return read_cells().development if text == "development" else read_cells().final
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1) if text else range(0)


def command_of(arguments: Sequence[str]) -> str:
    """Return the command as a shell takes it, with $DATA for the folder of recorded traffic."""
    command = shlex.join(["python", "-m", "benchmarks.grid", *arguments])
    return re.sub(r"(--data[ =])('[^']*'|\S+)", r"\1$DATA", command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE.parents[1] / "shared" / "data", help="recorded traffic")
    parser.add_argument(
        "--seeds", type=seeds_of, help="of drawn traffic: FIRST-LAST, final, or development, which is the default"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="recorded cells whose names contain this; drawn ones by --seeds alone",
    )
    parser.add_argument("--drawn", action="store_true", help="drawn traffic alone")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes")
    parser.add_argument("--small", action="store_true", help="sizes that only show that it runs; keeps no results")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    prepare_outputs(None if given.small else given.out)
    refuse_dirty_tree(None if given.small else given.out)
    known = read_cells()
    recorded, drawn = chosen(given, known)
    if not recorded and not drawn:
        parser.error(f"--only {given.only!r}, --drawn and --seeds select 0 of {len(known.recorded)} cells and 0 seeds")
    journal = Journal(None if given.small else given.out, code_digest())
    kept = {} if given.small else earlier(given.out)
    for name, cell in kept.get("cells", {}).items():
        if name not in journal:
            journal.add(name, cell)
    found = kept.get("cells", {})
    for cells, rivals in ((recorded, known.rivals), (drawn, known.rivals_of_drawn)):
        pairs = *known.ours, *known.bounds, *rivals
        for cell in Runner(pairs, given.data, given.jobs, journal).run(cells):
            found[cell["cell"]] = cell
            print(shown(cell), flush=True)
    seconds = round(sum(cell["seconds"] for cell in found.values()))
    document = {
        "run": {"code": code_digest(), "seconds": seconds, **origin()},
        "commands": list(dict.fromkeys([*kept.get("commands", ()), command_of(sys.argv[1:])])),
        "cells": list(found.values()),
    }
    print("\n".join(page(document, known)))
    if not given.small:
        write_results(given.out, document, seed=0)  # of arrivals; that of drawn traffic is in the name of its cell
        journal.end()
        if given.out == OUT:
            write_page()


def earlier(out: Path) -> Finished:
    """Return the document of earlier runs of this code, with its cells by name; {} if there is none."""
    document = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    if not document or document["run"]["code"] != code_digest():
        return {}
    return {**document, "cells": {cell["cell"]: cell for cell in document["cells"]}}


if __name__ == "__main__":
    main()
