"""Cold segments of one request, computed by several workers: figure 14 of HYPIC, simulated with the paper's costs.

    python -m benchmarks.parallel_segments [--seeds N] [--out FILE]
    python -m benchmarks.parallel_segments --processes 1,2,4 [--compute emulated|real] [--segments N] [--tokens N]

Without `--processes` everything is simulated, by the dispatch of the router (`headwater.cluster.segment_dispatch`) and
costs that were fitted to the paper's times at 2 and 4 workers. With it, workers are processes of this machine behind a
real router, and segments are pulled over loopback: `emulated` workers compute nothing and sleep as long as one alone
took for so many tokens, `real` ones compute, and their answers are compared with one worker's.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.measure import console, machine
from benchmarks.segment_processes import COMPUTE, over_processes
from headwater.cli.common import prepare_outputs
from headwater.cluster.cost import Candidate, Prompt
from headwater.cluster.segment_dispatch import Lane, Segment, dispatch, longest_first, soonest
from headwater.schedule.limits import MAX_BUILD_TOKENS
from headwater.schedule.prefill_seconds import PrefillSpeed
from headwater.schedule.tier_load import ReadSpeed
from headwater.table import Table
from papers.results import refuse_dirty_tree, write_results

OUT = Path(__file__).resolve().parent / "results" / "parallel_segments.json"
MS = 1000

# HYPIC, section 6.5: 11 segments of 2.4k tokens, all cold; milliseconds. `dispatch forward` at 2 and 4 workers, all
# together at 2, 4 and 8, and the whole prompt on one.
TOKENS, FULL = 2400, 2321.0
FORWARD = {2: 1061.0, 4: 530.0, 8: 249.0}
PAPER = {2: 1173.0, 4: 646.0, 8: 378.0}
COMM, COMBINE = 27.0, 85.0  # the least of 27-41 and 85-88, which are its figures at 2 workers: 1,061 + 27 + 85 = 1,173
MORE_SEGMENTS = 2.3  # of combining, for each further segment (section 6.3)


def smallest_count(tokens: Sequence[int], lanes: Sequence[Lane]) -> list[int]:
    """Assign segments as HYPIC prints it (section 4.4, equation 9): LPT by token counts.

    "Traverse C in descending order of |C_i| and assign each segment to the worker with the smallest accumulated token
    count": the first one of several. Queues, speeds and transfers do not count.
    """
    counts, found = [0] * len(lanes), [0] * len(tokens)
    for i in longest_first(tokens):
        found[i] = min(range(len(lanes)), key=counts.__getitem__)
        counts[found[i]] += tokens[i]
    return found


def in_turns(tokens: Sequence[int], lanes: Sequence[Lane]) -> list[int]:
    """Assign segments round robin, in the order of the prompt: the baseline of LPT."""
    return [i % len(lanes) for i in range(len(tokens))]


# (tokens of each segment, lanes) -> lane of each segment
DISPATCH: dict[str, Callable[[Sequence[int], Sequence[Lane]], list[int]]] = {
    "soonest": soonest,
    "smallest_count": smallest_count,
    "in_turns": in_turns,
}


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of the paper's machine, in milliseconds."""

    linear: float  # of a token in a segment, or in a prompt
    square: float  # of a token, for each token before it: attention
    control: float  # of all transfers together, beside their bytes
    pull: float  # of one segment
    combine: float  # with 11 segments

    @classmethod
    def fitted(cls) -> Costs:
        """Fit to the times at 2 and 4 workers, and to the whole prompt on one.

        A worker of 2 has six segments, one of 4 three: 176.8 and 176.7 ms for each. After the last ones one and three
        are pulled, one after the other; what 4 workers take beyond that, and beyond what 2 take, is two pulls.
        """
        segment = statistics.fmean((FORWARD[2] / 6, FORWARD[4] / 3))
        pull = ((PAPER[4] - FORWARD[4]) - (PAPER[2] - FORWARD[2])) / 2
        whole = 11 * TOKENS
        square = (FULL / whole - segment / TOKENS) / (whole - TOKENS)
        return cls(segment / TOKENS - square * TOKENS, square, COMM - pull, pull, COMBINE)

    def compute(self, tokens: int) -> float:
        """Return the milliseconds to compute a segment, or a prompt, of so many tokens."""
        return self.linear * tokens + self.square * tokens * tokens

    def transfer(self, tokens: int) -> float:
        return self.pull * tokens / TOKENS

    def combining(self, segments: int) -> float:
        return self.combine + MORE_SEGMENTS * (segments - 11)

    @property
    def pull_speed(self) -> ReadSpeed:
        """As a worker reports it, in seconds: a quarter of a segment is a state, another one its transition."""
        return ReadSpeed(self.pull / 4 / MS, self.pull / 2 / TOKENS / MS)


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds to the first token, apart as in figure 14."""

    dispatch: float  # until the last segment is computed
    communication: float  # until the combining worker has it
    combine: float

    @property
    def total(self) -> float:
        return self.dispatch + self.communication + self.combine


def groups(order: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
    """Return the segments of one worker as it computes them: long ones one by one, short ones together."""
    found: list[list[int]] = []
    for i in order:
        if found and sum(tokens[j] for j in (*found[-1], i)) <= MAX_BUILD_TOKENS:
            found[-1].append(i)
        else:
            found.append([i])
    return found


def run(
    costs: Costs,
    tokens: Sequence[int],
    assigned: Sequence[int],
    combiner: int,
    queues: Sequence[float] = (),
    burst: bool = False,
) -> Times:
    """Simulate one request. `assigned`: worker of each segment. `combiner`: -1 for one that computes none of them.

    `burst`: a worker sends its segments once it has computed all of them.
    """
    workers = range(max((*assigned, len(queues) - 1)) + 1)
    computed, sent = 0.0, []
    for worker in workers:
        now = queues[worker] if queues else 0.0
        own = [i for i in longest_first(tokens) if assigned[i] == worker]
        first = len(sent)
        for group in groups(own, tokens):
            now += sum(costs.compute(tokens[i]) for i in group)
            sent += [(now, costs.transfer(tokens[i])) for i in group if worker != combiner]
        if burst:
            sent[first:] = [(now, seconds) for _, seconds in sent[first:]]
        computed = max(computed, now if own else 0.0)
    there = 0.0
    for ready, seconds in sorted(sent):
        there = max(there, ready) + seconds
    communication = max(0.0, there - computed) + (costs.control if sent else 0.0)
    return Times(computed, communication, costs.combining(len(tokens)))


def lanes(costs: Costs, workers: int, queues: Sequence[float] = ()) -> list[Lane]:
    """Return workers that compute segments for one that computes none."""
    a_token = costs.compute(TOKENS) / TOKENS / MS
    waits = [queue / MS for queue in queues] or [0.0] * workers
    return [Lane(wait, a_token, costs.pull_speed) for wait in waits]


def as_the_paper(costs: Costs, segments: int, workers: int, rule: str = "soonest", burst: bool = False) -> Times:
    """Simulate equal segments that workers compute for a combining one of its own."""
    tokens = [TOKENS] * segments
    return run(costs, tokens, DISPATCH[rule](tokens, lanes(costs, workers)), -1, burst=burst)


def as_ours(costs: Costs, tokens: Sequence[int], workers: int) -> tuple[Times, int]:
    """Simulate the router's choice, in which the combining worker computes, too; return how many workers compute."""
    pull = costs.pull_speed
    speed = PrefillSpeed(0.0, costs.compute(TOKENS) / TOKENS / MS)
    idle = Candidate(0, 0, 0, speed, 1.0, 8, 0, pool="one", pull=pull)
    found = [Segment(n, one, one, ()) for n, one in enumerate(tokens)]
    candidates = [replace(idle, name=str(n)) for n in range(workers)]
    chosen = dispatch(Prompt(sum(tokens)), found, candidates, range(workers))
    assigned = [chosen.builders[i] for i in range(len(tokens))]
    return run(costs, tokens, assigned, chosen.combiner), len(set(assigned))


def uneven(seed: int, count: int = 16) -> list[int]:
    """Return lengths of segments, log-normal as those of found texts: 256 to 16,384 tokens, 2,400 on average."""
    draw = random.Random(seed)
    return [min(16_384, max(256, round(draw.lognormvariate(7.4, 0.85)))) for _ in range(count)]


# -- tables


def of_figure(costs: Costs) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for segments in (11, 16):
        full = costs.compute(segments * TOKENS)
        for workers in (1, 2, 4, 8):
            paper = as_the_paper(costs, segments, workers)
            alone = Times(costs.compute(TOKENS) * segments, 0.0, costs.combining(segments))
            one = alone if workers == 1 else paper
            ours = as_ours(costs, [TOKENS] * segments, workers)[0]
            rows.append(
                {
                    "segments": segments,
                    "workers": workers,
                    "whole_prompt_ms": full,
                    **asdict(one),
                    "total_ms": one.total,
                    "speedup": full / one.total,
                    "paper_ms": PAPER.get(workers) if segments == 11 else None,
                    "combining_computes_ms": ours.total,
                    "burst_ms": as_the_paper(costs, segments, workers, burst=True).total if workers > 1 else None,
                }
            )
    return rows


def of_rules(costs: Costs, seeds: int) -> list[dict[str, object]]:
    """Return dispatch forward of uneven segments under each rule, over what even parts of them would take."""
    rows: list[dict[str, object]] = []
    for workers in (2, 4, 8):
        for busy in (False, True):
            ratios: dict[str, list[float]] = {rule: [] for rule in DISPATCH}
            for seed in range(seeds):
                tokens = uneven(seed)
                work = [costs.compute(one) for one in tokens]
                queues = [0.5 * sum(work) / workers if busy and n == 0 else 0.0 for n in range(workers)]
                least = max((sum(work) + sum(queues)) / workers, *work)
                for rule, ratio in ratios.items():
                    assigned = DISPATCH[rule](tokens, lanes(costs, workers, queues))
                    ratio.append(run(costs, tokens, assigned, -1, queues).dispatch / least)
            means = {rule: statistics.fmean(ratio) for rule, ratio in ratios.items()}
            halves = {
                f"{rule}_half": 1.96 * statistics.stdev(ratio) / math.sqrt(seeds) if seeds > 1 else 0.0
                for rule, ratio in ratios.items()
            }
            rows.append({"workers": workers, "first_is_busy": busy, **means, **halves})
    return rows


def of_networks(costs: Costs) -> list[dict[str, object]]:
    """Return what other speeds of transfers make of 11 segments and 4 workers."""
    rows: list[dict[str, object]] = []
    for times in (1, 8, 32, 128, 512):
        slow = replace(costs, pull=costs.pull * times)
        ours, computing = as_ours(slow, [TOKENS] * 11, 4)
        apart, burst = as_the_paper(slow, 11, 4), as_the_paper(slow, 11, 4, burst=True)
        rows.append(
            {
                "pull_ms": slow.pull,
                "pipelined_ms": apart.total,
                "burst_ms": burst.total,
                "router_ms": ours.total,
                "computing": computing,
            }
        )
    return rows


def shown(value: object) -> str:
    return "-" if value is None else f"{value:,.2f}" if isinstance(value, float) and value < 20 else f"{value:,.0f}"


def print_figure(rows: list[dict[str, object]]) -> None:
    names = "whole prompt", "dispatch", "communication", "combine", "sum", "speed-up", "paper"
    table = Table(
        "simulated: segments of 2,400 tokens, all cold, milliseconds to the first token (HYPIC, figure 14)",
        ("segments", "workers"),
        (*names, "the combining one computes", "sent in a burst"),
    )
    for row in rows:
        table.add_row(*map(shown, row.values()))
    console().print(table)


def simulated(given: argparse.Namespace) -> dict[str, object]:
    """Print all simulated tables, and return their rows."""
    costs = Costs.fitted()
    found = {"figure_14": of_figure(costs), "rules": of_rules(costs, given.seeds), "networks": of_networks(costs)}
    print_figure(found["figure_14"])
    table = Table(
        f"simulated: 16 uneven segments, {given.seeds} seeds; until all are computed, over the least that is possible",
        ("workers", "one is busy"),
        tuple(DISPATCH),
    )
    for row in found["rules"]:
        cells = [f"{row[rule]:.3f} ± {row[f'{rule}_half']:.3f}" for rule in DISPATCH]
        table.add_row(str(row["workers"]), "yes" if row["first_is_busy"] else "no", *cells)
    console().print(table)
    table = Table(
        "simulated: 11 segments, 4 workers, slower transfers; milliseconds",
        ("a pull",),
        ("pipelined", "burst", "the router's choice", "workers that compute"),
    )
    for row in found["networks"]:
        table.add_row(*map(shown, row.values()))
    console().print(table)
    return {"costs": asdict(costs), **found}


def _out(compute: str | None) -> Path:
    """Return where the figures go: of the simulation, or of processes that compute in this way."""
    return OUT if compute is None else OUT.with_name(f"parallel_segments_{compute}.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=100, help="of uneven segments")
    numbers = {"type": lambda text: [int(one) for one in text.split(",")], "metavar": "N,N"}
    parser.add_argument("--processes", **numbers, help="numbers of workers, each a process of this machine")
    parser.add_argument("--compute", choices=COMPUTE, default="emulated")
    parser.add_argument("--segments", type=int, default=11, help="of the prompt, with --processes")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each segment, with --processes")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    prepare_outputs(out := given.out or _out(given.compute if given.processes else None))
    refuse_dirty_tree(out)
    if given.processes is None:
        found = {"kind": "simulated", **simulated(given)}
    else:
        rows = over_processes(given.processes, given.compute, given.segments, given.tokens)
        found = {"kind": f"processes, compute {given.compute}", "rows": rows}
    seeds = list(range(given.seeds)) if given.processes is None else None
    write_results(out, {"run": machine(), **found}, seed=seeds)


if __name__ == "__main__":
    main()
