"""Hits of a guard, and the most that it could hit if changing policy were free, in drawn traffic.

    python -m benchmarks.shadows [--seeds 0-39] [--windows 50,100,200,500] [--data FOLDER] [--small] [--out FILE]

For each seed's cell of cells.toml: hit rates of the default policy, of the best of the guard's policies in hindsight
and of the guard, all under `structural`; and of following, at each request, the policy whose replay has the most hit
tokens, of which a request's count 1/e after a window of further requests ("free"). Figures are points over the
default's.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from benchmarks import measure
from benchmarks.cells import Cell, read_cells
from benchmarks.grid import SIZED_BY, SMALL, seeds_of
from headwater.cache.eviction.guard import EXPERTS
from headwater.cache.spelling import split
from headwater.cli.common import prepare_outputs
from headwater.lab.replay import replay
from headwater.lab.size import Sizing
from headwater.traces.loads import make_arrivals
from headwater.traces.read import make_trace

DATA = measure.HERE.parents[1] / "shared" / "data"
Rates = dict[str, float]


def followed(resumed: Sequence[Sequence[int]], window: float) -> int:
    """Return the hit tokens of following the policy that was best before each request. resumed: by policy."""
    decay, counts, best, total = math.exp(-1 / window), [0.0] * len(resumed), 0, 0
    for hits in zip(*resumed, strict=True):
        if (most := max(counts)) > counts[best]:
            best = counts.index(most)
        total += hits[best]
        counts = [decay * count + one for count, one in zip(counts, hits, strict=True)]
    return total


def rates(cell: Cell, windows: Sequence[int], data: Path) -> Rates:
    """Return points over the default policy, and its hit rate in percent."""
    trace = make_trace(cell.traffic.trace, data)
    least, ideal = Sizing(trace, cell.setup(SIZED_BY, 0), make_arrivals(trace, data=data)).range()
    memory = max(least, round(cell.size * ideal))

    def run(policy: str) -> list[int]:
        result = replay(trace, cell.setup(("structural", policy), memory), make_arrivals(trace, data=data))
        return [outcome.resumed_at for outcome in result.outcomes]

    percent = 100 / sum(request.prompt_tokens for request in trace.requests)
    policies = [run(policy) for policy in split(EXPERTS)]
    ours = percent * sum(policies[0])
    found = {"headwater": ours, "best in hindsight": percent * max(map(sum, policies)) - ours}
    found["guard"] = percent * sum(run("guard")) - ours
    return found | {f"free, {window}": percent * followed(policies, window) - ours for window in windows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=seeds_of, default=range(40), help="of drawn traffic, FIRST-LAST")
    parser.add_argument("--windows", type=measure.numbers, default=(50, 100, 200, 500), help="requests")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--small", action="store_true", help="sizes that only show that it runs; replaces no results")
    parser.add_argument("--out", type=Path, default=measure.RESULTS / "shadows.json")
    given = parser.parse_args()
    prepare_outputs(given.out)
    known = read_cells()
    seeds = given.seeds[:1] if given.small else given.seeds
    found: dict[str, Rates] = {}
    for seed in seeds:
        cell = known.drawn(seed, SMALL if given.small else None)
        found[cell.name] = rates(cell, given.windows, given.data)
        print(cell.name, *(f"{name} {rate:+.2f}" for name, rate in found[cell.name].items()), sep="; ", flush=True)
    names = next(iter(found.values()))
    for of, label in ((mean, "mean"), (min, "least"), (max, "greatest")):
        print(label, *(f"{name} {of([row[name] for row in found.values()]):+.2f}" for name in names), sep="; ")
    measure.write_results(given.out, {"run": measure.machine(), "cells": found}, small=given.small)


if __name__ == "__main__":
    main()
