"""Hit rates with and without tails at equal bytes, cell by cell: what resuming in mid-page gains or loses.

    python -m benchmarks.tails [--only TEXT] [--seeds SEEDS] [--requests N] [--jobs N] [--data FOLDER]

Runs our default policy in the cells of cells.toml whose traffic has token ids, and in drawn ones. Prints the hit rates
in percent of each cell, the mean gain and the worst loss in points. Cells that cannot have tails are listed as off.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.cells import Cell, read_cells
from benchmarks.grid import HERE, Runner, seeds_of
from headwater.journal import Journal
from headwater.lab.row import Row
from headwater.machine import usable_cores
from headwater.traces.read import make_trace


def compared(runner: Runner, cell: Cell, data: Path) -> tuple[Row, Row]:
    """Return the rows of our default policy in a cell, without tails and with them."""
    trace = make_trace(cell.traffic.trace, data, limit=cell.traffic.sessions)
    memory = cell.memory or runner.memory(cell, trace)
    setup = cell.setup(read_cells().ours[0], memory)
    without, with_tails = runner.results(trace, [replace(setup, tails=False), setup], runner.arrivals(cell))
    return without.row, with_tails.row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE.parents[1] / "shared" / "data", help="recorded traffic")
    parser.add_argument("--only", default="", metavar="TEXT", help="recorded cells whose names contain this")
    parser.add_argument("--seeds", type=seeds_of, default=range(0), help="of drawn traffic: FIRST-LAST")
    parser.add_argument("--requests", type=int, help="of a drawn trace")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes")
    given = parser.parse_args()
    known = read_cells()
    cells = [cell for cell in known.recorded if given.only and given.only in cell.name]
    cells += [known.drawn(seed, given.requests) for seed in given.seeds]
    runner, gains = Runner(known.ours, given.data, given.jobs, Journal(None, "")), list[float]()
    for cell in cells:
        without, with_tails = compared(runner, cell, given.data)
        if not with_tails.tails:
            print(f"{cell.name}: tails off", flush=True)
            continue
        rates = 100 * without.token_hit_rate, 100 * with_tails.token_hit_rate
        gains.append(rates[1] - rates[0])
        print(f"{cell.name}: {rates[0]:.2f} without, {rates[1]:.2f} with tails, {gains[-1]:+.2f}", flush=True)
    if gains:
        print(f"{len(gains)} cells: mean gain {sum(gains) / len(gains):+.2f}, worst {min(gains):+.2f} points")


if __name__ == "__main__":
    main()
