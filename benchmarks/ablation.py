"""Ablation of the default policy: hit rates without each of its parts, in the cells of cells.toml.

    python -m benchmarks.ablation [--seeds SEEDS] [--data FOLDER] [--jobs N] [--small] [--out FILE]

Memory is that of `results/cells.json`, so `make cells` comes first: cells that it lacks are left out. Goes on where a
run was cut short, if neither the package nor the cells have changed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import measure
from benchmarks.cells import Cell, Pair, read_cells
from benchmarks.grid import HERE, SMALL, code_digest, earlier, seeds_of
from headwater.cache.eviction.base.rows import Column
from headwater.cache.eviction.headwater import rates
from headwater.cache.eviction.headwater.ghosts import Ghosts
from headwater.cache.eviction.headwater.rates import ReuseRates
from headwater.cache.history import History
from headwater.cache.placement.headwater import Departures
from headwater.cache.placement.optimal import Optimal
from headwater.cli.common import prepare_outputs
from headwater.journal import Journal
from headwater.lab.replay import replay
from headwater.machine import usable_cores
from headwater.traces.loads import make_arrivals
from headwater.traces.read import make_trace
from papers.results import refuse_dirty_tree, write_results

OURS = "headwater", "headwater"
SMALL_MEMORY = 20 * 10**9
Patches = Callable[[], AbstractContextManager[Any]]


def _prior(rates: ReuseRates) -> tuple[Column, Column]:
    return rates._prior, np.repeat(rates._prior, rates._group, axis=0)


def _nothing(*_: object) -> list[Any]:
    return []


def _no_uses(ghosts: Ghosts, prefix: int, now: int, take: Callable[[Ghosts, int, int], int] = Ghosts.take) -> int:
    take(ghosts, prefix, now)
    return 0


ALL = "all parts"
# by what is left out: placement and eviction, and what is put in place of the part
PARTS: dict[str, tuple[Pair, Patches]] = {
    ALL: (OURS, nullcontext),
    "learned rates: worth × prior alone": (OURS, partial(patch.object, ReuseRates, "rates", _prior)),
    "ghost entries": (OURS, partial(patch.object, Ghosts, "put", _nothing)),
    "uses of a checkpoint that is taken anew": (OURS, partial(patch.object, Ghosts, "take", _no_uses)),
    "uses as classes": (OURS, partial(patch.object, rates, "CLASS_OF_USES", [0] * len(rates.CLASS_OF_USES))),
    "history of evicted prefixes": (OURS, partial(patch.multiple, History, depth=lambda *_: 0, shared=lambda *_: 0)),
    "learned and optimal positions: `structural`": (("structural", "headwater"), nullcontext),
    "learned positions": (OURS, partial(patch.object, Departures, "of", _nothing)),
    "optimal positions": (OURS, partial(patch.object, Optimal, "knows", lambda *_: False)),
    "learned eviction: `lru`": (("headwater", "lru"), nullcontext),
}


def rates_of(part: str, cells: Sequence[Cell], memory: Mapping[str, int], data: Path) -> dict[str, float]:
    """Return the hit rate of each of the cells, which have the same traffic, without a part."""
    pair, patches = PARTS[part]
    traffic = cells[0].traffic
    trace = make_trace(traffic.trace, data, limit=traffic.sessions)
    arrivals = partial(make_arrivals, trace, spelling=traffic.arrival, data=data)
    with patches():
        return {
            cell.name: replay(trace, cell.setup(pair, memory[cell.name]), arrivals()).row.token_hit_rate
            for cell in cells
        }


def table(rates: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield the lines of a Markdown table: means, and differences from all parts in points."""
    kinds = {"recorded": [], "drawn": []}
    for name in rates[ALL]:
        kinds["drawn" if name.startswith("generated(") else "recorded"].append(name)
    yield "| without | " + " | ".join(f"{kind} cells ({len(names)})" for kind, names in kinds.items()) + " |"
    yield "| --- | ---: | ---: |"
    for part, found in rates.items():
        columns = [_column(found, rates[ALL], names, part == ALL) for names in kinds.values()]
        yield f"| {'nothing' if part == ALL else part} | " + " | ".join(columns) + " |"


def _column(found: Mapping[str, float], whole: Mapping[str, float], names: Sequence[str], is_whole: bool) -> str:
    if not names:
        return ""
    differences = [100 * (found[name] - whole[name]) for name in names]
    middle = f"{100 * mean(found[name] for name in names):.2f}"
    least, most = min(differences), max(differences)
    return middle if is_whole else f"{middle} ({mean(differences):+.2f}; {least:+.1f} to {most:+.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE.parents[1] / "shared" / "data", help="recorded traffic")
    parser.add_argument("--seeds", type=seeds_of, default="development", help="of drawn traffic, as for `make cells`")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes")
    parser.add_argument("--small", action="store_true", help="sizes that only show that it runs; replaces no results")
    parser.add_argument("--out", type=Path, default=measure.RESULTS / "ablation.json")
    given = parser.parse_args()
    prepare_outputs(given.out)
    refuse_dirty_tree(given.out, small=given.small)
    known, kept = read_cells(), earlier(measure.RESULTS / "cells.json").get("cells", {})
    if given.small:
        drawn = known.drawn(given.seeds[0], SMALL)
        first = known.recorded[0]
        cells = [replace(first, traffic=replace(first.traffic, sessions=3)), drawn]
        memory = {cell.name: SMALL_MEMORY for cell in cells}
    else:
        memory = {name: cell["memory"] for name, cell in kept.items()}
        cells = [cell for cell in (*known.recorded, *map(known.drawn, given.seeds)) if cell.name in memory]
    if not cells:
        parser.error("results/cells.json has none of these cells as this code computes them: run `make cells` first")
    journal = Journal(None if given.small else given.out, code_digest())
    groups = [list(group) for _, group in groupby(cells, key=lambda cell: cell.traffic)]
    todo = [(part, group) for group in groups for part in PARTS if f"{part}; {group[-1].name}" not in journal]
    with ProcessPoolExecutor(given.jobs) as pool:
        runs = [pool.submit(rates_of, part, group, memory, given.data) for part, group in todo]
        for (part, _), run in zip(todo, runs, strict=True):
            for name, rate in run.result().items():
                journal.add(f"{part}; {name}", rate)
    rates = {part: {cell.name: journal[f"{part}; {cell.name}"] for cell in cells} for part in PARTS}
    print("\n".join(table(rates)))
    document = {"run": measure.machine(), "rates": rates}
    write_results(given.out, document, seed=list(given.seeds), small=given.small)
    journal.end()


if __name__ == "__main__":
    main()
