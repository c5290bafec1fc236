"""Speed of the lab: CPU time of a replay on one core, without reading and tokenising.

    python -m benchmarks.lab [--repeats 1] [--data FOLDER] [--peers FOLDER] [--small]

`--data` holds recorded traffic; `--peers` another simulator's traces, whose own times on them stand beside ours.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import measure
from benchmarks.measure import Row
from headwater.cache.eviction import EVICTION
from headwater.cache.placement.optimal.program import solve
from headwater.lab.cost import StepCost, load_device
from headwater.lab.replay import replay
from headwater.lab.row import Row as LabRow
from headwater.lab.serving import Engine
from headwater.lab.setup import Setup
from headwater.models.profiles import load_profile
from headwater.traces.loads import make_arrivals
from headwater.traces.read import read_trace
from headwater.traces.request import Trace

SHARED = Path(__file__).resolve().parents[2] / "shared"
OPTIONS = {"path_cap": "(4)", "last_n": "(100)", "flop_aware": "(1.0)"}
TUNED = "marconi"
LIMITS = {"mini_swe_agent": 20, "mooncake/conversation": 5, "claude_code/global_v6": 15}  # seconds a row at page 64
MEMORY = {"mini_swe_agent": 20, "mooncake/conversation": 100, "claude_code/global_v6": 100}  # GB
TOKEN_BY_TOKEN = 60  # seconds, mini_swe_agent at page size 1
SERVED = 3  # times as long at most
RESIDENT = 2000  # MB
POSITIONS, CHECKPOINTS, SOLVED = 16_384, 64, 50  # ms
GRID, ALPHAS = 8, 21  # times one replay at most, on two cores
# CPU seconds of Marconi's published simulator on its agent trace at 5 GB, on another run of this kind of machine
PUBLISHED = {"lru_path": 0.70, "flop_aware(1.0)": 1.09, "marconi": 19.27}
TENFOLD = 10


def run(trace: Trace, eviction: str, gigabytes: float, seed: int, **changes: object) -> LabRow:
    engine = changes.pop("engine", None)
    workers = changes.pop("workers", 0)
    model = str(changes.pop("model", "qwen3.5-9b"))
    setup = Setup(load_profile(model), int(gigabytes * 1e9), eviction=eviction, **changes)  # type: ignore[arg-type]
    return replay(trace, setup, make_arrivals(trace, seed=seed), engine, workers).row  # type: ignore[arg-type]


def policy_rows(name: str, trace: Trace, given: object) -> Iterator[Row]:
    """Every policy, one by one; and the default under a clock."""
    gigabytes, limit, seed = MEMORY[name], LIMITS[name], given.seed  # type: ignore[attr-defined]
    slowest = 0.0
    for policy in EVICTION:
        row = run(trace, policy + OPTIONS.get(policy, ""), gigabytes, seed)
        slowest = max(slowest, row.peak_rss_mb)
        yield Row(
            f"{name}, {policy}, hit rate {row.token_hit_rate:.1%}",
            "s",
            [row.seconds],
            f"<= {limit}" * (policy != TUNED),
        )
    profile = load_profile("qwen3.5-9b")
    served = run(trace, "lru", gigabytes, seed, engine=Engine(StepCost(profile, load_device("h100"))))
    yield Row(f"{name}, lru, --serve h100", "s", [served.seconds], f"<= {SERVED * limit}")
    yield Row(f"{name}, resident at its peak", "MB", [max(slowest, served.peak_rss_mb)], f"<= {RESIDENT}")


def solver_row(repeats: int, seed: int) -> Row:
    rng = random.Random(seed)
    weights = [rng.random() for _ in range(POSITIONS)]
    solve(range(1, POSITIONS + 1), weights, CHECKPOINTS)
    times = []
    for _ in range(max(5, repeats)):
        begin = time.thread_time()  # one thread does the work
        solve(range(1, POSITIONS + 1), weights, CHECKPOINTS)
        times.append(1000 * (time.thread_time() - begin))
    return Row(f"optimal placement, {POSITIONS:,} positions, {CHECKPOINTS} checkpoints", "ms", times, f"<= {SOLVED}")


def peer_rows(peers: Path, repeats: int, seed: int) -> Iterator[Row]:
    """The published simulator's agent trace, page size 1."""
    trace = read_trace(peers / "marconi" / "traces" / "agent.jsonl.zst")
    shape = {"model": "marconi-7b", "page_size": 1, "placement": "branch"}
    seconds: dict[str, list[float]] = {}
    for _ in range(max(3, repeats)):
        for policy in PUBLISHED:
            seconds.setdefault(policy, []).append(run(trace, policy, 5, seed, **shape).seconds)
    for policy, published in PUBLISHED.items():
        faster = [published / took for took in seconds[policy]]
        yield Row(f"agent trace, 5 GB, {policy}: published time / ours", "x", faster, f">= {TENFOLD}")
    walls = []
    for _ in range(max(3, repeats)):
        alone = _wall(lambda: run(trace, "flop_aware(1.0)", 5, seed, **shape))
        tuned = _wall(lambda: run(trace, "marconi", 5, seed, workers=2, **shape))
        walls.append((tuned - alone) / alone)
    yield Row(f"Marconi's grid of {ALPHAS} on two cores / one replay of the whole trace", "x", walls, f"<= {GRID}")


def _wall(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def main() -> None:
    given = measure.options(__doc__, "lab", 1, data=SHARED / "data", peers=SHARED / "peers")
    rows = [solver_row(given.repeats, given.seed)]
    for name in LIMITS:
        trace = read_trace(Path(name), data=given.data, limit=20 if given.small else None)
        rows.append(Row(f"{name}, {len(trace.requests):,} requests, read and tokenised", "s", [trace.seconds]))
        rows += policy_rows(name, trace, given)
        if name == "mini_swe_agent":
            row = run(trace, "lru", MEMORY[name], given.seed, page_size=1)
            rows.append(Row(f"{name}, lru, page size 1", "s", [row.seconds], f"<= {TOKEN_BY_TOKEN}"))
            row = run(trace, "seglen", MEMORY[name], given.seed, page_size=1)
            rows.append(Row(f"{name}, seglen, page size 1", "s", [row.seconds], f"<= {TOKEN_BY_TOKEN}"))
    rows += peer_rows(given.peers, given.repeats, given.seed)
    measure.report(given, rows)


if __name__ == "__main__":
    main()
